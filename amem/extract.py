"""Turn -> notes by rules: sentences that carry a fact, each standing alone; `amem.evolve` connects them.

No model is asked. Cues (`amem.cues`) give points; one point makes a note, and the note keeps the names of its cues.
Same input, same output.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import regex

from amem import cues as cues_
from amem import scopes
from amem.embed import Embedder, Floats
from amem.evolve import Known, connect
from amem.notes import Note, Turn
from amem.store import TurnResult
from amem.text import Span, fold, language_of, sentences, terms, trim

POINTS = 1.0  # what a sentence must gather to be a note
LONG = {"zh": 70, "en": 260}  # characters above which a sentence is cut at its clauses
SHORT = {"zh": 7, "en": 18}  # characters below which a sentence leans on the one before

_CLAUSE = {"zh": regex.compile(r"[，,；;]\s*"), "en": regex.compile(r"[,;:]\s+|\s[–—-]\s")}
_WEIGHT = {  # what a kind of fact adds to importance, above 0.3
    "law": 0.2, "procedure": 0.25, "lesson": 0.3, "preference": 0.25, "correction": 0.2, "amount": 0.15,
    "evidence": 0.1, "saying": 0.1, "plan": 0.1, "date": 0.05, "act": 0.05, "state": 0.05,
}  # fmt: skip
_DAY = regex.compile(
    r"大前天|前天|昨[天晚]|今[天晚早]|明[天晚早]|后天|[上下这本]?(?:周|星期|礼拜)[一二三四五六日末天]"
    r"|\b(?:yesterday|today|tonight|tomorrow|last night"
    r"|(?:last |next |this )?(?:mon|tues|wednes|thurs|fri|satur|sun)day)\b",
    regex.IGNORECASE,
)
_OFFSET = {"大前天": -3, "前天": -2, "昨": -1, "yesterday": -1, "last night": -1, "今": 0, "today": 0, "tonight": 0,
           "明": 1, "tomorrow": 1, "后天": 2}  # fmt: skip
_WEEKDAYS = ("mon", "tues", "wednes", "thurs", "fri", "satur", "sun")


class Judged(NamedTuple):
    """A piece of a turn with the cues found in it and the points they give."""

    span: Span
    points: float
    kinds: list[str]


class Drafts(NamedTuple):
    """The notes of one turn, not yet linked, the record of how they were made, and their vectors if they are known."""

    notes: list[Note]
    record: dict[str, Any]
    vectors: Floats | None = None


def pieces(text: str, language: str) -> Iterator[Span]:
    """Places of the candidate notes of `text`: sentences, with short ones joined to the one before, questions cut
    down to what they state, and long ones cut at clauses."""
    cue = cues_.load(language)
    merged: list[Span] = []
    for span in sentences(text):
        fits = merged and span[1] - merged[-1][0] <= LONG[language] and "\n" not in text[merged[-1][1] : span[0]]
        if fits and span[1] - span[0] <= SHORT[language] and not cue.question.search(text[slice(*merged[-1])]):
            merged[-1] = (merged[-1][0], span[1])
        else:
            merged.append(span)
    for span in merged:
        piece = text[slice(*span)]
        if cue.question.search(piece):
            ends = [m.start() for m in _CLAUSE[language].finditer(piece)]
            if ends:
                yield trim(text, (span[0], span[0] + ends[-1]))
        elif len(piece) <= LONG[language]:
            yield span
        else:
            yield from _clauses(text, span, language)


def _clauses(text: str, span: Span, language: str) -> Iterator[Span]:
    """A long sentence as the fewest runs of clauses that fit; without clauses, as windows."""
    limit, start = LONG[language], span[0]
    cuts = [span[0] + m.end() for m in _CLAUSE[language].finditer(text[slice(*span)])] + [span[1]]
    for i, cut in enumerate(cuts):
        following = cuts[i + 1] if i + 1 < len(cuts) else cut
        if following - start > limit or cut == span[1]:
            for left in range(start, cut, limit * 2):
                yield trim(text, (left, min(left + limit * 2, cut)))
            start = cut


def judge(text: str, span: Span, language: str) -> Judged:
    """The cues in one piece and its points."""
    cue, piece = cues_.load(language), text[slice(*span)]
    enough = len(piece) >= SHORT[language] if language == "zh" else len(piece.split()) >= 3
    if not enough or cue.chat.search(piece) or cue.question.search(piece):
        return Judged(span, 0.0, [])
    kinds = [kind for kind, (_, pattern) in cue.facts.items() if pattern.search(piece)]
    points = sum(cue.facts[kind][0] for kind in kinds) - (2.0 if cue.offer.search(piece) else 0.0)
    return Judged(span, points, kinds)


def dates(text: str, turn: Turn) -> list[str]:
    """Day words of `text` with the day they mean, as "yesterday = 2026-03-01"; none without the turn's time."""
    if turn.time is None:
        return []
    found: dict[str, str] = {}
    for match in _DAY.finditer(text):
        word = match.group().casefold()
        offset = next((days for key, days in _OFFSET.items() if word.startswith(key)), None)
        if offset is None:
            today = turn.time.weekday()
            chinese = "一二三四五六日".find(word[-1].translate(str.maketrans("末天", "六日")))
            day = chinese if chinese >= 0 else next(i for i, name in enumerate(_WEEKDAYS) if f"{name}day" in word)
            week = -1 if word[0] == "上" else 1 if word[0] == "下" else 0
            if word.startswith("last ") or (word.startswith("next ") and day <= today):
                week = -1 if word.startswith("last ") and day >= today else 0 if word.startswith("last ") else 1
            elif chinese < 0 or word[0] not in "上下这本":
                continue  # a bare weekday may lie before or after: the words alone don't say
            offset = day - today + 7 * week
        found.setdefault(match.group(), (turn.time + timedelta(days=offset)).date().isoformat())
    return [f"{word} = {day}" for word, day in found.items()]


def keywords(content: str, limit: int = 6) -> list[str]:
    """Up to `limit` words that say what `content` is about, in order: law names, numbers with units, then words."""
    language = cues_.language(language_of(content))
    cue = cues_.load(language)
    strong = [m.group().strip() for kind in ("law", "amount", "evidence") for m in cue.facts[kind][1].finditer(content)]
    if language == "zh":
        # Function characters and common verbs cut a Chinese clause into words well enough for labels.
        chunks = regex.split(
            r"[\P{Han}的了是在我你他她它们这那就也都和跟与及把被给让很不没有要会能可以个着过到说去来吗呢吧啊得地还又再已经从对为]+",
            content,
        )
        weak = [c for c in chunks if 2 <= len(c) <= 4]
    else:
        weak = [w for w in regex.findall(r"[\p{L}][\p{L}'’-]{3,}", content) if terms(w)]
    unique = {fold(word): word for word in reversed(strong + weak) if len(word) > 1}
    return list(unique.values())[::-1][:limit]


def notes_of(turn: Turn, events: Mapping[str, str] | None = None) -> list[Note]:
    """The notes of one turn, without scope by embedding. `events` maps event ids to titles for the context line."""
    language = cues_.language(language_of(turn.text))
    said = sentences(turn.text)
    out: list[Note] = []
    for judged in (judge(turn.text, span, language) for span in pieces(turn.text, language)):
        if judged.points >= POINTS:
            at = bisect_left(said, judged.span) - 1
            # Of this turn only: a note that quotes another turn would outlive its deletion.
            earlier = turn.text[slice(*said[at])] if at >= 0 else ""
            out.append(_note(turn, judged, earlier[-60:], language, events or {}))
    return out


def _note(turn: Turn, judged: Judged, earlier: str, language: str, events: Mapping[str, str]) -> Note:
    piece = turn.text[slice(*judged.span)]
    hedged = bool(cues_.load(language).hedge.search(piece))
    importance = min(1.0, 0.3 + sum(sorted((_WEIGHT[k] for k in judged.kinds), reverse=True)[:3]))
    return note_at(
        turn, judged.span, piece if turn.role != "other" else f"{turn.speaker}: {piece}", earlier,
        language, events,
        keywords=keywords(piece), tags=judged.kinds, importance=round(importance, 2),
        confidence=round(min(0.95, 0.55 + 0.08 * judged.points) - 0.2 * hedged, 2),
        why=[f"{kind} +{cues_.load(language).facts[kind][0]:g}" for kind in judged.kinds],
    )  # fmt: skip


def note_at(
    turn: Turn, span: Span, content: str, earlier: str, language: str, events: Mapping[str, str], **marks: Any
) -> Note:
    """The note of `turn` that says `content`, found at `span`: day words resolved, context and id set.

    earlier: what was said just before it in the turn. language: of the turn, "zh" or "en". marks: the fields that
    hang on how the note was made.
    """
    if days := dates(content, turn):
        content += f" [{', '.join(days)}]"
    topic = events.get(turn.event or "", turn.event or "")
    when = turn.time.date().isoformat() if turn.time else ""
    if language == "zh":
        parts = [when, f"{turn.speaker}" + (f"谈“{topic}”" if topic else ""), f"上文：{earlier}" if earlier else ""]
    else:
        parts = [when, turn.speaker + (f" on {topic}" if topic else ""), f"after: {earlier}" if earlier else ""]
    digest = hashlib.sha1(f"{turn.id}\n{span}\n{content}".encode()).hexdigest()[:12]
    return Note(
        id=f"n{digest}", content=content, context=("；" if language == "zh" else "; ").join(p for p in parts if p),
        turn_id=turn.id, session=turn.session, event=turn.event, speaker=turn.speaker, span=span, valid_from=turn.time,
        **marks,
    )  # fmt: skip


def extract(
    turn: Turn,
    known: Known,
    embedder: Embedder,
    events: Mapping[str, str] | None = None,
    drafts: Drafts | None = None,
) -> TurnResult:
    """All that `turn` adds to the store: notes with scope and vectors, links, superseded notes. `known` grows.

    drafts: notes made elsewhere (`amem.ask`) in place of the rules'; a scope that they bring with a reason is kept.
    """
    made = drafts or Drafts(notes_of(turn, events), {"engine": "rules", "raw_reply": None, "errors": []})
    vectors = made.vectors
    if vectors is None:
        vectors = embedder.encode_document([note.content for note in made.notes])
    result = TurnResult(turn, vectors=vectors, record=made.record)
    for draft, vector in zip(made.notes, vectors, strict=True):
        note = draft
        if not draft.scope_why:
            scope, reasons = scopes.tag(draft.content, vector, embedder, turn.role)
            note = draft.model_copy(update={"scope": scope, "scope_why": reasons})
        result.notes.append(note)
        connect(note, vector, known, result)
        known.append(note, vector)
    return result
