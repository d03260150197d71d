"""Run folders: every request, reply, turn, note, graph and trace of a run as files. Reading and writing only."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from amem.notes import Change, Link, Note, Turn
from amem.store import TurnResult

FORMAT = "amem-run/1"
MANIFEST = "manifest.json"
RESEARCH = "00_api_research.md"
REQUEST = "01_story_generation_request.json"
RESPONSE = "02_story_generation_response.json"
STORY = "03_story_exchanges.json"
NOTES = "90_stored_notes.json"
GRAPH = "91_graph_summary.json"
TRACES = "92_traces.json"
PAGE = "explorer.html"
DATABASE = "memory.sqlite"
TURNS = "turns"
NOTEBOOKS = "notebooks"  # executed ones that `make notebooks` puts beside the run


class RunError(RuntimeError):
    """A run folder that cannot be read or written; the message names the folder and the remedy."""


def draft_of(path: Path) -> Path:
    """The hidden neighbour under whose name a file is written before it takes its place."""
    return path.with_name(f".{path.name}.part")


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file whole or not at all: to a hidden neighbour first, then renamed over the old one."""
    draft = draft_of(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with draft.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise RunError(
            f"{path} could not be written ({error.strerror}); free the disk or make the folder writable, then run "
            "the same command again: it goes on where it stopped"
        ) from error


def write_json(path: Path, value: Any, rows: str | None = None) -> None:
    """JSON in UTF-8 with one-space indent; with `rows`, the items under that key one a line (for long tables)."""
    if rows is None:
        text = json.dumps(value, ensure_ascii=False, indent=1)
    else:
        body = value[rows]
        dumped: Iterable[str] = (
            (f" {json.dumps(k, ensure_ascii=False)}: {_line(v)}" for k, v in body.items())
            if isinstance(body, dict)
            else (f" {_line(v)}" for v in body)
        )
        head = json.dumps({k: v for k, v in value.items() if k != rows}, ensure_ascii=False, indent=1)[:-2]
        left, right = "{}" if isinstance(body, dict) else "[]"
        comma = "," if len(value) > 1 else ""
        text = f'{head}{comma}\n "{rows}": {left}\n' + ",\n".join(dumped) + f"\n{right}\n}}"
    write_bytes(path, text.encode() + b"\n")


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def read_json(path: Path) -> Any:
    """The JSON of a run file. Raises `RunError` that names the file and what is wrong."""
    try:
        return json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise RunError(f"{path} is missing; the run did not get that far, run it again") from error
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read ({error}); restore the file or run again into a new folder") from error


def turn_file(folder: Path, number: int, total: int) -> Path:
    """turns/001.json ... for the turn with this number, counted from 1; as wide as the last number needs."""
    return folder / TURNS / f"{number:0{max(3, len(str(total)))}d}.json"


def turn_files(folder: Path) -> list[Path]:
    """The turn files of a run, in order."""
    return sorted(path for path in (folder / TURNS).glob("*.json") if path.stem.isdigit())


def turn_bodies(folder: Path) -> Iterator[dict[str, Any]]:
    """What the turn files of a run say, in order."""
    return (read_json(path) for path in turn_files(folder))


def turn_body(result: TurnResult) -> dict[str, Any]:
    """What a turn file says: the turn, how its notes were made, notes, links, superseded and evolved notes, errors."""
    return {
        "turn": result.turn.model_dump(mode="json"),
        **result.record,
        "notes": [note.model_dump(mode="json") for note in result.notes],
        "links": [link.model_dump(mode="json") for link in result.links],
        "superseded": [
            {"note": note_id, "valid_to": None if at is None else at.isoformat(), "reason": reason}
            for note_id, at, reason in result.superseded
        ],
        "evolved": [change.model_dump(mode="json") for change in result.evolved],
    }


def checksums(folder: Path) -> dict[str, str]:
    """SHA-256 of every file of a run but manifest, database and notebooks, by relative name."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    kept = [p for p in files if p.parent.name != NOTEBOOKS and not p.name.startswith((MANIFEST, DATABASE, "."))]
    return {p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in kept}


def check_folder(folder: Path) -> None:
    """Raise `RunError` if `folder` holds a run that was stopped: its memory would be half a story."""
    path = folder / MANIFEST
    if path.exists() and read_json(path).get("state") != "complete":
        raise RunError(f"{folder} holds an unfinished run; finish it: python -m amem run --resume {folder}")


def read_turns(folder: Path) -> Iterator[TurnResult]:
    """What each turn of a finished run added to the store, in order, without vectors."""
    for body in turn_bodies(folder):
        yield TurnResult(
            Turn.model_validate(body.pop("turn")),
            [Note.model_validate(note) for note in body.pop("notes")],
            links=[Link.model_validate(link) for link in body.pop("links")],
            superseded=[
                (old["note"], datetime.fromisoformat(old["valid_to"]) if old["valid_to"] else None, old["reason"])
                for old in body.pop("superseded")
            ],
            evolved=[Change.model_validate(change) for change in body.pop("evolved", [])],
            record=body,
        )


def find(folder: str | Path | None = None, language: str = "zh") -> Path:
    """The run a notebook reads: `folder`, else $AMEM_RUN, else runs/latest, else the committed showcase.

    The last three only when they hold a finished run. Raises `RunError` when there is none.
    """
    root = Path(__file__).parents[1] / "runs"
    named = [Path(folder)] if folder else [Path(p) for p in [os.environ.get("AMEM_RUN")] if p]
    for place in named or [root / "latest", root / f"showcase_{language}"]:
        if (place / MANIFEST).exists() and read_json(place / MANIFEST).get("state") == "complete":
            return place
    tried = ", ".join(str(place) for place in named) or "runs/latest, runs/showcase_*"
    raise RunError(f"there is no finished run in {tried}; make one: python -m amem run --story zh --out runs/latest")
