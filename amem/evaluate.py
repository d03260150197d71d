"""Extraction against gold: which facts of a story the notes carry, which notes carry none, which scopes are right."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import networkx as nx
import regex

from amem import scopes
from amem.embed import Embedder, Floats
from amem.extract import Known, extract
from amem.notes import Note, Scope
from amem.story import Story
from amem.text import fold

HOW = (
    "A note carries a fact when of each of the fact's key groups one alternative stands in the note's content (NFKC, "
    "case folded, white space removed)\nand the note is no longer than three times the fact (or 60 Chinese, 180 other "
    "characters). paired_recall lets a note count for one fact only; supersession counts notes ended by a correction.\n"
    "Rules and weights were tuned on the odd turns of the Chinese story. The odd turns of the English story were "
    "looked at to see what was missing;\nthe even turns and the story blind_en were kept apart, but their misses were "
    "seen once, and their totals often, while the rules that end corrected notes were written."
)
LONGEST = {"zh": 60, "en": 180}  # a note may be this long, or three times the fact: a copy of the turn is no note


@dataclass
class Score:
    """Counts of one language and one half of its turns, with the misses."""

    facts: int = 0
    found: int = 0
    paired: int = 0
    notes: int = 0
    right: int = 0
    scoped: int = 0
    corrections: int = 0  # gold: facts that supersede another
    ended: int = 0  # notes the extractor superseded
    ended_rightly: int = 0
    missed: list[str] = field(default_factory=list)
    spurious: list[str] = field(default_factory=list)
    wrong_scope: list[str] = field(default_factory=list)
    pairs: list[tuple[str, Scope, scopes.Role]] = field(default_factory=list)  # note, scope of its fact, who said it

    def figures(self) -> dict[str, float]:
        """note_recall: facts carried by a note; note_precision: notes that carry a fact; scope_accuracy: over the
        facts carried; paired_recall: facts carried when a note may count for one fact only; supersession_*: notes
        ended by a correction, against the gold's."""
        return {
            "note_recall": round(self.found / max(1, self.facts), 4),
            "note_precision": round(self.right / max(1, self.notes), 4),
            "scope_accuracy": round(self.scoped / max(1, self.found), 4),
            "paired_recall": round(self.paired / max(1, self.facts), 4),
            "supersession_recall": round(self.ended_rightly / max(1, self.corrections), 4),
            "supersession_precision": round(self.ended_rightly / max(1, self.ended), 4),
        }


def _plain(text: str) -> str:
    return regex.sub(r"\s+", "", fold(text))


def carries(note: Note, fact: dict[str, Any], language: str) -> bool:
    """Whether `note` carries a gold fact: of each of the fact's key groups one alternative stands in the note's
    content (NFKC, case folded, white space removed), and the note is no longer than max(3 x fact, 60 or 180)."""
    text = _plain(note.content)
    short = len(note.content) <= max(3 * len(fact["fact"]), LONGEST[language])
    return short and all(any(_plain(key) in text for key in group) for group in fact["keys"])


def load_gold(path: Path, story: Story) -> dict[str, list[dict[str, Any]]]:
    """Gold facts by turn id. Raises ValueError when a turn of the story has no entry."""
    facts = json.loads(path.read_text("utf-8"))["facts"]
    if missing := [turn.id for turn in story.turns if turn.id not in facts]:
        raise ValueError(f"{path}: no entry for turn {missing[0]}; give it an empty list if it holds no fact")
    return facts


def score(story: Story, gold: dict[str, list[dict[str, Any]]], embedder: Embedder) -> dict[str, Score]:
    """Scores of the "odd" and the "even" turns by their place in the story, counted from 1."""
    language = "zh" if story.language == "zh" else "en"
    halves = {"odd": Score(), "even": Score()}
    known = Known([], embedder.encode_document([]))
    events = {event.id: event.title for event in story.events}
    carriers: dict[str, set[str]] = {}  # gold fact -> notes that carry it
    for i, turn in enumerate(story.turns):
        result = extract(turn, known, embedder, events)
        notes = result.notes
        half, facts = halves["even" if i % 2 else "odd"], gold[turn.id]
        carried = {
            (f, n): carries(note, fact, language) for f, fact in enumerate(facts) for n, note in enumerate(notes)
        }
        half.facts += len(facts)
        half.notes += len(notes)
        pairs = nx.Graph([(("fact", f), ("note", n)) for (f, n), yes in carried.items() if yes])
        half.paired += len(nx.max_weight_matching(pairs))
        for f, fact in enumerate(facts):
            by = [note for n, note in enumerate(notes) if carried[f, n]]
            carriers[fact["id"]] = {note.id for note in by}
            if not by:
                half.missed.append(f"{turn.id} [{fact['scope']}] {fact['fact']}")
                continue
            half.found += 1
            note = min(by, key=lambda n: len(n.content))
            half.pairs.append((note.content, Scope(fact["scope"]), turn.role))
            half.scoped += note.scope == fact["scope"]
            if note.scope != fact["scope"]:
                half.wrong_scope.append(f"{turn.id} {note.scope}, gold {fact['scope']}: {note.content}")
        outdated = [old for fact in facts for old in fact["supersedes"]]
        half.corrections += len(outdated)
        half.ended += len(result.superseded)
        known_old = set().union(*(carriers.get(old, set()) for old in outdated))
        half.ended_rightly += sum(old in known_old for old, _, _ in result.superseded)
        for n, note in enumerate(notes):
            if any(carried[f, n] for f in range(len(facts))):
                half.right += 1
            else:
                half.spurious.append(f"{turn.id} [{note.scope}] {note.content}")
    return halves


def labelled(path: Path) -> dict[int, list[tuple[str, Scope]]]:
    """Texts with their scope from a JSONL file ({"text", "scope"} a line), halved by the SHA-1 of the text: 0 and 1."""
    halves: dict[int, list[tuple[str, Scope]]] = {0: [], 1: []}
    for line in path.read_text("utf-8").splitlines():
        row = json.loads(line)
        scope = Scope(row["scope"].replace(" ", "_").replace("-", "_"))
        halves[int(hashlib.sha1(row["text"].encode()).hexdigest(), 16) % 2].append((row["text"], scope))
    return halves


def macro_f1(rows: list[tuple[str, Scope]], vectors: Floats, embedder: Embedder) -> tuple[float, dict[str, float]]:
    """Mean F1 of the scopes that occur in `rows` as tagged by `scopes.tag`, and the F1 of each. vectors: (n, dim)."""
    told = [scopes.tag(text, vector, embedder)[0] for (text, _), vector in zip(rows, vectors, strict=True)]
    gold = [scope for _, scope in rows]
    each = {
        scope.value: 2 * sum(a == b == scope for a, b in zip(told, gold, strict=True))
        / (told.count(scope) + gold.count(scope))
        for scope in Scope if scope in gold
    }  # fmt: skip
    return sum(each.values()) / len(each), each
