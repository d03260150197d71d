"""SQLite store: turns, notes with their versions, links, vectors, full text. One transaction a turn."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from amem import text as text_
from amem.embed import Embedder, Floats
from amem.notes import Link, Note, Scope, Turn

SCHEMA_VERSION = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS turns (
    id TEXT PRIMARY KEY, seq INTEGER NOT NULL UNIQUE, body TEXT NOT NULL, record TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS notes (
    seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, turn_id TEXT NOT NULL REFERENCES turns(id) ON DELETE CASCADE,
    session TEXT NOT NULL, scope TEXT NOT NULL, body TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS notes_by_session ON notes(session, scope);
CREATE TABLE IF NOT EXISTS versions (
    note_id TEXT NOT NULL REFERENCES notes(id) ON DELETE CASCADE, version INTEGER NOT NULL, body TEXT NOT NULL,
    reason TEXT NOT NULL, turn_id TEXT NOT NULL, PRIMARY KEY (note_id, version));
CREATE TABLE IF NOT EXISTS links (
    source TEXT NOT NULL REFERENCES notes(id) ON DELETE CASCADE,
    target TEXT NOT NULL REFERENCES notes(id) ON DELETE CASCADE,
    kind TEXT NOT NULL, weight REAL NOT NULL, reason TEXT NOT NULL, PRIMARY KEY (source, target, kind));
CREATE INDEX IF NOT EXISTS links_by_target ON links(target);
CREATE TABLE IF NOT EXISTS vectors (
    note_id TEXT PRIMARY KEY REFERENCES notes(id) ON DELETE CASCADE, vector BLOB NOT NULL);
CREATE VIRTUAL TABLE IF NOT EXISTS fulltext USING fts5(terms, tokenize='unicode61 remove_diacritics 0');
"""


class StoreError(RuntimeError):
    """A store that cannot be opened, read or written; the message names the file and the remedy."""


@dataclass
class TurnResult:
    """What one turn adds to the store: its notes, their vectors (len(notes), dim), links, and notes it supersedes."""

    turn: Turn
    notes: list[Note] = field(default_factory=list)
    vectors: Floats | None = None
    links: list[Link] = field(default_factory=list)
    superseded: list[tuple[str, datetime | None, str]] = field(default_factory=list)  # (note id, valid_to, reason)
    record: dict[str, Any] = field(default_factory=dict)


class Store:
    """An open database file. Use `Store.open`; close it, or use it in a `with` block."""

    def __init__(self, path: Path, db: sqlite3.Connection) -> None:
        self.path, self._db = path, db

    @classmethod
    def open(cls, path: str | Path) -> Store:
        """Open the SQLite file at `path`, made if missing. Raises `StoreError` with file and remedy."""
        file = Path(path)
        try:
            db = sqlite3.connect(file, timeout=30, isolation_level=None)
            db.execute("PRAGMA foreign_keys = ON")
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")
            db.executescript(_SCHEMA)
            db.execute("INSERT OR IGNORE INTO meta VALUES ('schema', ?)", (str(SCHEMA_VERSION),))
        except sqlite3.Error as error:
            raise StoreError(
                f"{file} cannot be opened as a memory ({error}); check that the folder exists and is writable, "
                "that the disk has room, and that the file is an amem database"
            ) from error
        store = cls(file, db)
        if store.meta("schema") != str(SCHEMA_VERSION):
            raise StoreError(f"{file} has schema {store.meta('schema')}, this amem reads {SCHEMA_VERSION}; rerun it")
        return store

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All or nothing; a failed write says which file and what to do, and leaves the store as it was."""
        try:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
            except BaseException:
                self._db.rollback()
                raise
            self._db.commit()
        except sqlite3.Error as error:
            raise StoreError(
                f"{self.path} could not be written ({error}); nothing of this step was stored, free the disk or the "
                "lock and run again"
            ) from error

    def meta(self, key: str) -> str | None:
        row = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else row[0]

    def set_meta(self, key: str, value: str) -> None:
        with self.transaction() as db:
            db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    def bind(self, embedder: Embedder) -> None:
        """Write the embedder's name and dims into an empty store; raise if a full one has another's vectors."""
        mine, theirs = f"{embedder.name} ({embedder.dim} dims)", self.meta("embedder")
        if theirs == mine:
            return
        if theirs is not None and self._db.execute("SELECT 1 FROM vectors LIMIT 1").fetchone():
            raise StoreError(
                f"{self.path} holds vectors of {theirs}, not of {mine}; open it with that model, or re-embed it: "
                f"python -m amem reembed {self.path} --model {embedder.name}"
            )
        self.set_meta("embedder", mine)

    def add(self, result: TurnResult, seq: int) -> None:
        """Store a turn with everything it adds, in one transaction. `seq` is its place in the story, from 0."""
        vectors = result.vectors if result.vectors is not None else np.zeros((0, 0), np.float32)
        if len(vectors) != len(result.notes):
            raise ValueError(f"turn {result.turn.id}: {len(result.notes)} notes but {len(vectors)} vectors")
        with self.transaction() as db:
            # The links as they were made: a later turn's may replace them in the table.
            links = [link.model_dump(mode="json") for link in result.links]
            record = json.dumps({**result.record, "links": links}, ensure_ascii=False)
            body = result.turn.model_dump_json()
            db.execute("INSERT INTO turns VALUES (?, ?, ?, ?)", (result.turn.id, seq, body, record))
            for note, vector in zip(result.notes, vectors, strict=True):
                columns = (note.id, note.turn_id, note.session, note.scope.value, note.model_dump_json())
                db.execute("INSERT INTO notes (id, turn_id, session, scope, body) VALUES (?, ?, ?, ?, ?)", columns)
                db.execute("INSERT INTO vectors VALUES (?, ?)", (note.id, vector.astype("<f4").tobytes()))
                self._version(note, "extracted", result.turn.id)
                db.execute(
                    "INSERT INTO fulltext (rowid, terms) VALUES ((SELECT seq FROM notes WHERE id = ?), ?)",
                    (note.id, " ".join(text_.terms(note.content))),
                )
            for link in result.links:
                db.execute(
                    "INSERT OR REPLACE INTO links VALUES (?, ?, ?, ?, ?)",
                    (link.source, link.target, link.kind, link.weight, link.reason),
                )
            for note_id, valid_to, reason in result.superseded:
                old = self.note(note_id)
                new = old.model_copy(update={"valid_to": valid_to})
                db.execute("UPDATE notes SET body = ? WHERE id = ?", (new.model_dump_json(), note_id))
                self._version(new, reason, result.turn.id)

    def _version(self, note: Note, reason: str, turn_id: str) -> None:
        number = self._db.execute("SELECT count(*) FROM versions WHERE note_id = ?", (note.id,)).fetchone()[0] + 1
        columns = (note.id, number, note.model_dump_json(), reason, turn_id)
        self._db.execute("INSERT INTO versions VALUES (?, ?, ?, ?, ?)", columns)

    def forget(self, turn_id: str) -> None:
        """A person's delete: the turn and all that came from it (notes, versions, links, vectors, full text).

        What the turn had superseded holds again.
        """
        with self.transaction() as db:
            caused = db.execute(
                "SELECT note_id, version FROM versions WHERE turn_id = ? AND version > 1 ORDER BY version DESC",
                (turn_id,),
            ).fetchall()
            for note_id, version in caused:
                db.execute("DELETE FROM versions WHERE note_id = ? AND version = ?", (note_id, version))
                last = "SELECT body FROM versions WHERE note_id = ? ORDER BY version DESC LIMIT 1"
                db.execute(f"UPDATE notes SET body = ({last}) WHERE id = ?", (note_id, note_id))
            db.execute("DELETE FROM fulltext WHERE rowid IN (SELECT seq FROM notes WHERE turn_id = ?)", (turn_id,))
            if db.execute("DELETE FROM turns WHERE id = ?", (turn_id,)).rowcount == 0:
                raise StoreError(f"{self.path} has no turn {turn_id}; nothing was deleted")

    def replace_vectors(self, embedder: Embedder, ids: Sequence[str], vectors: Floats) -> None:
        """Swap all vectors for another model's, in one transaction."""
        with self.transaction() as db:
            db.execute("DELETE FROM vectors")
            rows = zip(ids, vectors, strict=True)
            db.executemany("INSERT INTO vectors VALUES (?, ?)", [(i, v.astype("<f4").tobytes()) for i, v in rows])
            value = f"{embedder.name} ({embedder.dim} dims)"
            db.execute("INSERT OR REPLACE INTO meta VALUES ('embedder', ?)", (value,))

    def next_seq(self) -> int:
        """The place of the next turn, counted from 0."""
        return self._db.execute("SELECT coalesce(max(seq) + 1, 0) FROM turns").fetchone()[0]

    def turns(self) -> list[Turn]:
        """All turns in the order of the story."""
        rows = self._db.execute("SELECT body FROM turns ORDER BY seq")
        return [Turn.model_validate_json(body) for (body,) in rows]

    def turn(self, turn_id: str) -> Turn:
        row = self._db.execute("SELECT body FROM turns WHERE id = ?", (turn_id,)).fetchone()
        if row is None:
            raise KeyError(f"no turn {turn_id!r} in {self.path}")
        return Turn.model_validate_json(row[0])

    def result(self, turn_id: str) -> TurnResult:
        """What a stored turn added when it came in: its notes as first extracted, without their vectors."""
        row = self._db.execute("SELECT record FROM turns WHERE id = ?", (turn_id,)).fetchone()
        if row is None:
            raise KeyError(f"no turn {turn_id!r} in {self.path}")
        record = json.loads(row[0])
        first = "SELECT v.body FROM versions v JOIN notes n ON n.id = v.note_id WHERE n.turn_id = ? AND v.version = 1"
        notes = self._db.execute(f"{first} ORDER BY n.seq", (turn_id,))
        changed = self._db.execute(
            "SELECT note_id, body, reason FROM versions WHERE turn_id = ? AND version > 1 ORDER BY note_id", (turn_id,)
        )
        return TurnResult(
            self.turn(turn_id),
            [Note.model_validate_json(body) for (body,) in notes],
            links=[Link.model_validate(link) for link in record.pop("links")],
            superseded=[(i, Note.model_validate_json(body).valid_to, reason) for i, body, reason in changed],
            record=record,
        )

    def notes(
        self, session_id: str | None = None, memory_scope: Scope | str | None = None, limit: int | None = None
    ) -> list[Note]:
        """Notes in the order they were stored; with `limit`, the newest that many."""
        rows = self._db.execute(
            "SELECT body FROM (SELECT seq, body FROM notes WHERE (:session IS NULL OR session = :session) AND "
            "(:scope IS NULL OR scope = :scope) ORDER BY seq DESC LIMIT :limit) ORDER BY seq",
            {
                "session": session_id,
                "scope": None if memory_scope is None else Scope(memory_scope).value,
                "limit": -1 if limit is None else limit,
            },
        )
        return [Note.model_validate_json(body) for (body,) in rows]

    def note(self, note_id: str) -> Note:
        row = self._db.execute("SELECT body FROM notes WHERE id = ?", (note_id,)).fetchone()
        if row is None:
            raise KeyError(f"no note {note_id!r} in {self.path}")
        return Note.model_validate_json(row[0])

    def versions(self, note_id: str) -> list[dict[str, Any]]:
        """All versions of a note, oldest first: version, reason, turn_id, note."""
        rows = self._db.execute(
            "SELECT version, reason, turn_id, body FROM versions WHERE note_id = ? ORDER BY version", (note_id,)
        )
        return [
            {"version": v, "reason": reason, "turn_id": turn, "note": Note.model_validate_json(body)}
            for v, reason, turn, body in rows
        ]

    def links(self) -> list[Link]:
        rows = self._db.execute("SELECT source, target, kind, weight, reason FROM links ORDER BY source, target, kind")
        return [Link(source=s, target=t, kind=k, weight=w, reason=r) for s, t, k, w, r in rows]

    def vectors(self, ids: Sequence[str]) -> Floats:
        """Vectors of the notes with these ids, in that order: (len(ids), dim) float32."""
        found = dict(self._db.execute("SELECT note_id, vector FROM vectors"))
        if missing := [i for i in ids if i not in found]:
            raise StoreError(f"{self.path} has no vector of note {missing[0]}; run: python -m amem reembed {self.path}")
        rows = [np.frombuffer(found[i], dtype="<f4") for i in ids]
        return np.stack(rows) if rows else np.zeros((0, 0), np.float32)

    def text_search(self, query: str, limit: int = 50) -> list[tuple[str, float]]:
        """(note id, BM25 score; higher is better) of notes that share a term with `query`. Any string is a query."""
        wanted = list(dict.fromkeys(text_.terms(query)))
        if not wanted:
            return []
        # Quoted, so that no character of the query is syntax to FTS5.
        match = " OR ".join('"' + term.replace('"', '""') + '"' for term in wanted)
        rows = self._db.execute(
            "SELECT notes.id, -bm25(fulltext) FROM fulltext JOIN notes ON notes.seq = fulltext.rowid "
            "WHERE fulltext MATCH ? ORDER BY bm25(fulltext), notes.seq LIMIT ?",
            (match, limit),
        )
        return [(i, float(score)) for i, score in rows]
