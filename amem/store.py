"""SQLite store: turns, notes with their versions, links, vectors, full text. One transaction a turn.

A version keeps the change that made it, so that one can be taken back under later ones: a note's state is its first
version with all changes applied that stand, in order.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from amem import text as text_
from amem.embed import Embedder, Floats
from amem.notes import Change, Link, Note, Scope, Turn

SCHEMA_VERSION = 2
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
    reason TEXT NOT NULL, turn_id TEXT NOT NULL, change TEXT NOT NULL DEFAULT '', undoes INTEGER,
    PRIMARY KEY (note_id, version));
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
    evolved: list[Change] = field(default_factory=list)
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
            _upgrade(db)
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
                first = (note.id, 1, note.model_dump_json(), "extracted", result.turn.id, "", None)
                db.execute("INSERT INTO versions VALUES (?, ?, ?, ?, ?, ?, ?)", first)
                db.execute(
                    "INSERT INTO fulltext (rowid, terms) VALUES ((SELECT seq FROM notes WHERE id = ?), ?)",
                    (note.id, " ".join(text_.terms(note.content))),
                )
            self._link(result.links)
            for note_id, valid_to, reason in result.superseded:
                ended = {"valid_to": None if valid_to is None else valid_to.isoformat()}
                self._version(note_id, reason, result.turn.id, json.dumps(ended))
            for change in result.evolved:
                gained = change.model_dump_json(include={"tags", "keywords", "context"})
                self._version(change.note_id, change.reason, result.turn.id, gained)

    def _version(self, note_id: str, reason: str, turn_id: str, change: str, undoes: int | None = None) -> None:
        """Write the next version of a note; its body follows."""
        last = "SELECT max(version) + 1, body FROM versions WHERE note_id = ?"
        number, body = self._db.execute(last, (note_id,)).fetchone()
        if number is None:
            raise StoreError(f"{self.path} has no note {note_id} that turn {turn_id} could change")
        columns = (note_id, number, body, reason, turn_id, change, undoes)
        self._db.execute("INSERT INTO versions VALUES (?, ?, ?, ?, ?, ?, ?)", columns)
        self._replay(note_id)

    def _replay(self, note_id: str) -> None:
        """Write the bodies of all versions of a note anew from its first one and the changes that stand."""
        select = "SELECT version, turn_id, change, undoes, body FROM versions WHERE note_id = ? ORDER BY version"
        rows = self._db.execute(select, (note_id,)).fetchall()
        first = note = Note.model_validate_json(rows[0][-1])
        for i in range(1, len(rows)):
            note, back = first, _taken_back(rows[: i + 1])
            for version, _, change, undoes, _ in rows[1 : i + 1]:
                if undoes is None and version not in back:
                    note = _changed(note, json.loads(change))
            where = (note.model_dump_json(), note_id, rows[i][0])
            self._db.execute("UPDATE versions SET body = ? WHERE note_id = ? AND version = ?", where)
        self._db.execute("UPDATE notes SET body = ? WHERE id = ?", (note.model_dump_json(), note_id))

    def undo(self, note_id: str, version: int) -> Note:
        """Take back what one version changed, as a new version "undo of N"; what others changed stays.

        An ended note holds again and loses the link that ended it; an undo can be undone. Returns the note as it is
        now. Raises KeyError for an unknown note or version, StoreError when there is nothing to take back.
        """
        select = "SELECT version, turn_id, change, undoes FROM versions WHERE note_id = ? ORDER BY version"
        with self.transaction() as db:
            rows = db.execute(select, (note_id,)).fetchall()
            chosen = next((row for row in rows if row[0] == version), None)
            if chosen is None:
                known = f"it has {', '.join(str(row[0]) for row in rows)}" if rows else "no such note"
                raise KeyError(f"no version {version} of note {note_id!r} in {self.path}: {known}")
            if version == rows[0][0]:
                raise StoreError(
                    f"version {version} of note {note_id} is the note itself, it cannot be undone; to delete it, "
                    f"forget its turn {chosen[1]}"
                )
            if version in _taken_back(rows):
                raise StoreError(f"version {version} of note {note_id} is taken back already; see its history")
            self._version(note_id, f"undo of {version}", chosen[1], "", version)
            self._relink(note_id)
        return self.note(note_id)

    def _relink(self, note_id: str) -> None:
        """Have `supersedes` links to a note where the version that ended it stands, and none where it is undone."""
        select = "SELECT version, turn_id, change, undoes FROM versions WHERE note_id = ? ORDER BY version"
        rows = self._db.execute(select, (note_id,)).fetchall()
        back = _taken_back(rows)
        self._db.execute("DELETE FROM links WHERE target = ? AND kind = 'supersedes'", (note_id,))
        for version, turn_id, change, undoes in rows[1:]:
            if undoes is None and version not in back and "valid_to" in json.loads(change):
                self._link(link for link in self.result(turn_id).links if link.target == note_id)

    def _link(self, links: Iterable[Link]) -> None:
        rows = [(link.source, link.target, link.kind, link.weight, link.reason) for link in links]
        self._db.executemany("INSERT OR REPLACE INTO links VALUES (?, ?, ?, ?, ?)", rows)

    def forget(self, turn_id: str) -> None:
        """A person's delete: the turn and all that came from it (notes, versions, links, vectors, full text).

        What the turn had changed in other notes is taken back, also under later versions.
        """
        with self.transaction() as db:
            gone = [i for (i,) in db.execute("SELECT id FROM notes WHERE turn_id = ?", (turn_id,))]
            touched = "SELECT DISTINCT note_id FROM versions WHERE turn_id = ? AND version > 1"
            changed = [i for (i,) in db.execute(touched, (turn_id,)) if i not in gone]
            db.execute("DELETE FROM versions WHERE turn_id = ? AND version > 1", (turn_id,))
            for note_id in changed:
                self._replay(note_id)
            self._scrub(set(gone))
            db.execute("DELETE FROM fulltext WHERE rowid IN (SELECT seq FROM notes WHERE turn_id = ?)", (turn_id,))
            if db.execute("DELETE FROM turns WHERE id = ?", (turn_id,)).rowcount == 0:
                raise StoreError(f"{self.path} has no turn {turn_id}; nothing was deleted")

    def _scrub(self, gone: set[str]) -> None:
        """Take links to notes that go out of the records of the turns that made them."""
        for turn_id, text in self._db.execute("SELECT id, record FROM turns").fetchall():
            record = json.loads(text)
            kept = [link for link in record["links"] if not gone & {link["source"], link["target"]}]
            if len(kept) < len(record["links"]):
                row = (json.dumps({**record, "links": kept}, ensure_ascii=False), turn_id)
                self._db.execute("UPDATE turns SET record = ? WHERE id = ?", row)

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
        select = "SELECT note_id, change, reason FROM versions WHERE turn_id = ? AND version > 1 AND undoes IS NULL"
        changed = [
            (note_id, json.loads(change), reason)
            for note_id, change, reason in self._db.execute(f"{select} ORDER BY note_id, version", (turn_id,))
        ]
        return TurnResult(
            self.turn(turn_id),
            [Note.model_validate_json(body) for (body,) in notes],
            links=[Link.model_validate(link) for link in record.pop("links")],
            superseded=[(i, _time(c["valid_to"]), reason) for i, c, reason in changed if "valid_to" in c],
            evolved=[Change(note_id=i, reason=reason, **c) for i, c, reason in changed if "valid_to" not in c],
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

    def note_count(self) -> int:
        return self._db.execute("SELECT count(*) FROM notes").fetchone()[0]

    def note(self, note_id: str) -> Note:
        row = self._db.execute("SELECT body FROM notes WHERE id = ?", (note_id,)).fetchone()
        if row is None:
            raise KeyError(f"no note {note_id!r} in {self.path}")
        return Note.model_validate_json(row[0])

    def versions(self, note_id: str) -> list[dict[str, Any]]:
        """All versions of a note, oldest first: version, reason, turn_id, note, undoes (a version taken back)."""
        select = "SELECT version, reason, turn_id, body, undoes FROM versions WHERE note_id = ? ORDER BY version"
        return [
            {"version": v, "reason": reason, "turn_id": turn, "note": Note.model_validate_json(body), "undoes": undoes}
            for v, reason, turn, body, undoes in self._db.execute(select, (note_id,))
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


def _upgrade(db: sqlite3.Connection) -> None:
    """Give a database of schema 1 the columns of schema 2: its later versions all ended a note."""

    def old() -> bool:
        return "change" not in [row[1] for row in db.execute("PRAGMA table_info(versions)")]

    if old():
        db.execute("BEGIN IMMEDIATE")
        if old():  # nobody else did it meanwhile
            db.execute("ALTER TABLE versions ADD COLUMN change TEXT NOT NULL DEFAULT ''")
            db.execute("ALTER TABLE versions ADD COLUMN undoes INTEGER")
            ended = "json_object('valid_to', json_extract(body, '$.valid_to'))"
            db.execute(f"UPDATE versions SET change = {ended} WHERE version > 1")
            db.execute("UPDATE meta SET value = '2' WHERE key = 'schema'")
        db.execute("COMMIT")


def _taken_back(rows: Sequence[Sequence[Any]]) -> set[int]:
    """Versions undone by one that is not undone itself. rows: version first, what it undoes fourth, oldest first."""
    back: set[int] = set()
    for row in reversed(rows):
        if row[3] is not None and row[0] not in back:
            back.add(row[3])
    return back


def _changed(note: Note, change: dict[str, Any]) -> Note:
    if "valid_to" in change:
        return note.model_copy(update={"valid_to": _time(change["valid_to"])})
    return Change(note_id=note.id, reason="replayed", **change).applied(note)


def _time(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)
