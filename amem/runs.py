"""Run folders: every request, reply, turn, note, graph and trace of a run as files. Reading and writing only."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from amem.embed import Floats
from amem.notes import Link, Note, Turn
from amem.store import Store, StoreError, TurnResult

FORMAT = "amem-run/1"
MANIFEST = "manifest.json"
RESEARCH = "00_api_research.md"
REQUEST = "01_story_generation_request.json"
RESPONSE = "02_story_generation_response.json"
STORY = "03_story_exchanges.json"
NOTES = "90_stored_notes.json"
GRAPH = "91_graph_summary.json"
TRACES = "92_traces.json"
VECTORS = "93_vectors.npy"
PAGE = "explorer.html"
DATABASE = "memory.sqlite"
TURNS = "turns"


class RunError(RuntimeError):
    """A run folder that cannot be read or written; the message names the folder and the remedy."""


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file whole or not at all: to a hidden neighbour first, then renamed over the old one."""
    draft = path.with_name(f".{path.name}.part")
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


def turn_body(result: TurnResult) -> dict[str, Any]:
    """What a turn file says: the turn, how its notes were made, the notes, links and superseded notes, errors."""
    return {
        "turn": result.turn.model_dump(mode="json"),
        **result.record,
        "notes": [note.model_dump(mode="json") for note in result.notes],
        "links": [link.model_dump(mode="json") for link in result.links],
        "superseded": [
            {"note": note_id, "valid_to": None if at is None else at.isoformat(), "reason": reason}
            for note_id, at, reason in result.superseded
        ],
    }


def write_vectors(path: Path, vectors: Floats) -> None:
    """(n, dim) float32 in numpy's own format, which holds no code."""
    buffer = io.BytesIO()
    np.save(buffer, vectors.astype("<f4"), allow_pickle=False)
    write_bytes(path, buffer.getvalue())


def checksums(folder: Path) -> dict[str, str]:
    """SHA-256 of every file of a run but the manifest and the database, by relative name."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    kept = [p for p in files if not p.name.startswith((MANIFEST, DATABASE, "."))]
    return {p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in kept}


def open_store(folder: Path) -> Store:
    """The store of a run folder; read back from the run's files where the database is not there (as in a checkout)."""
    database = folder / DATABASE
    if database.exists() or not (folder / MANIFEST).exists():
        return Store.open(database)
    manifest = read_json(folder / MANIFEST)
    if manifest.get("format") != FORMAT or manifest.get("state") != "complete":
        raise RunError(f"{folder} holds an unfinished run; finish it: python -m amem run --resume {folder}")
    draft = folder / f".{DATABASE}.part"
    for leftover in folder.glob(f"{draft.name}*"):
        leftover.unlink()
    try:
        store = Store.open(draft)
    except StoreError as error:
        raise RunError(f"{folder} has no {DATABASE} and is read-only, so none can be made; copy it first") from error
    with store:
        _restore(folder, store, f"{manifest['embedder']['name']} ({manifest['embedder']['dim']} dims)")
    draft.replace(database)
    return Store.open(database)


def _restore(folder: Path, store: Store, embedder: str) -> None:
    stored = read_json(folder / NOTES)
    order = {note["id"]: i for i, note in enumerate(stored["notes"])}
    try:
        vectors = np.load(folder / VECTORS, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise RunError(f"{folder / VECTORS} cannot be read ({error}); restore it from the repository") from error
    if len(vectors) != len(order):
        raise RunError(f"{folder / VECTORS} has {len(vectors)} rows for {len(order)} notes; restore both files")
    store.set_meta("embedder", embedder)
    for seq, path in enumerate(sorted((folder / TURNS).glob("*.json"))):
        body = read_json(path)
        notes = [Note.model_validate(note) for note in body.pop("notes")]
        result = TurnResult(
            Turn.model_validate(body.pop("turn")),
            notes,
            vectors[[order[note.id] for note in notes]] if notes else None,
            [Link.model_validate(link) for link in body.pop("links")],
            [
                (old["note"], datetime.fromisoformat(old["valid_to"]) if old["valid_to"] else None, old["reason"])
                for old in body.pop("superseded")
            ],
            body,
        )
        store.add(result, seq)
