"""What a new note does to earlier ones, by rules: links, an end to what it contradicts, a pointer on its neighbour.

Nothing is overwritten: the store writes every change as a version with its reason and the turn that caused it. A note
is ended only for words that clash within one matter: a denied value, a figure looked up or moved, a newer offer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import regex

from amem import cues as cues_
from amem.embed import Floats
from amem.notes import Change, Link, Note, Scope
from amem.store import TurnResult
from amem.text import fold, language_of, term_set

LINKS = 3  # similar notes a new note is linked to
SIMILAR = {"zh": 0.92, "en": 0.87}  # cosine from which notes are linked; the encoder puts Chinese texts nearer together
EVOLVES = {"zh": 0.94, "en": 0.90}  # cosine from which the nearest earlier note gets a pointer to the new one
SAME = 0.80  # share of common terms (of the smaller set) from which two notes say the same
CLOSE = 0.6  # share of the larger figure that a miscounted one reaches when few words say that both mean one thing
NEAR = 2.0  # a miscounted figure is at most so many times off; further off it is a figure of something else
NAMES_NONE = {"zh": 6, "en": 2}  # terms up to which a note names no matter of its own
MATTER = 2  # terms that two notes of one event share when the later one carries on the earlier
GAINED = 3  # keywords a neighbour may gain at a time

_ZH = {char: n for n, char in enumerate("零一二三四五六七八九")} | {"两": 2}
_ZH_UNITS = {"十": 10, "百": 100, "千": 1000, "万": 10_000}
_EN = {
    **{word: n for n, word in enumerate("one two three four five six seven eight nine ten eleven twelve".split(), 1)},
    "fifteen": 15, "twenty": 20, "thirty": 30, "forty": 40, "fifty": 50,
}  # fmt: skip
_WHEN = ("time", "day", "weekday", "month")
_OF_PERSONS = {Scope.CASE_HISTORY, Scope.USER_PROFILE}
_LEAD = regex.compile(r"(?<=(?:^|；)上文：|(?:^|; )after: ).*")
# Kinds that say nothing of the thing; others, as "lesson", name what is counted.
_LOOSE = {"amount", "share", "bare", *_WHEN, *"小时 天 星期 周 月 年 次 回 分钟 期".split()} | {
    "hour", "day", "week", "month", "year", "minute", "min", "time",
}  # fmt: skip
_INFLECTED = regex.compile(r"(?<=[a-z]{3})(?:['’]?s|ed|ing)$")
_DATED = regex.compile(r"\s\[[^\[\]]* = \d{4}-\d\d-\d\d\]$")


class Known:
    """The notes stored so far with their vectors, for links; grows by one turn at a time."""

    def __init__(self, notes: list[Note], vectors: Floats) -> None:
        self.notes = list(notes)
        # In double precision from the start: casting all of them for every new note cost most of a long run.
        self._rows = np.array(vectors, dtype=np.float64) if len(notes) else np.zeros((0, 0))

    @property
    def vectors(self) -> npt.NDArray[np.float64]:
        """(n, dim), the vectors of `notes`."""
        return self._rows[: len(self.notes)]

    def append(self, note: Note, vector: Floats) -> None:
        if len(self.notes) == len(self._rows):
            grown = np.zeros((max(64, 2 * len(self._rows)), len(vector)))
            grown[: len(self.notes)] = self.vectors if len(self.notes) else 0
            self._rows = grown
        self._rows[len(self.notes)] = vector
        self.notes.append(note)


@dataclass(frozen=True)
class Said:
    """A note as the rules read it. values: kind or unit -> figure -> its words."""

    text: str
    language: str
    values: dict[str, dict[float, str]]
    about: frozenset[str]  # terms that say what it is about: no figures, no common words
    parties: frozenset[str]
    lead: str  # the sentence before it in its turn

    @property
    def cue(self) -> cues_.Change:
        return cues_.load(self.language).change

    @cached_property
    def offers(self) -> bool:
        """Whether another party offers, keeps or pays something."""
        told = self.parties or self.yields
        figure = self.values.keys() & {"amount", "share"} or self.yields or self.cue.remedy.search(self.text)
        own = self.cue.own.search(self.text)
        return bool(told and figure and not own and self.cue.offer.search(self.text))

    @cached_property
    def changes(self) -> list[str]:
        """The words by which a figure is looked up, moved or conceded, here or in the sentence before."""
        cues = (self.cue.recount, self.cue.moved, self.cue.concede)
        return [m.group() for cue in cues for t in (self.text, self.lead) if (m := cue.search(t))]

    @cached_property
    def yields(self) -> str:
        """The words by which a party gives way or settles, here or in the sentence before; "" without."""
        found = (cue.search(t) for t in (self.text, self.lead) for cue in (self.cue.concede, self.cue.settled))
        return next((match.group() for match in found if match), "")


class Clash(NamedTuple):
    """Why an old note no longer holds: the rule, the words that clashed, and how well the two notes fit."""

    rule: str
    old: str
    new: str
    fit: float


@lru_cache(maxsize=4096)
def read(content: str, speaker: str, lead: str = "") -> Said:
    """What the rules see in the content of a note; `lead` is the sentence before it."""
    text = _DATED.sub("", content.removeprefix(f"{speaker}: "))
    language = cues_.language(language_of(text))
    cue = cues_.load(language).change
    values: dict[str, dict[float, str]] = {}
    for match in cue.values.finditer(text):
        kind = next(name for name, found in match.groupdict().items() if found and name != "unit")
        words = match[kind]
        unit = fold(match["unit"]).rstrip("s").replace("hr", "hour") if kind == "count" else kind
        values.setdefault(unit, {})[_figure(kind, words)] = match.group().strip(" ,")
    parties = frozenset(fold(m.group()) for m in cue.party.finditer(text))
    return Said(text, language, values, about(cue.values.sub(" ", text), language), parties, lead)


def about(text: str, language: str) -> frozenset[str]:
    """Terms of `text` that say what it is about: no figures, no common words, English ones without their ending."""
    common = cues_.load(language).change.common
    words = (t for t in term_set(text) if not regex.search(r"\d", t) and not common.search(t))
    return frozenset(_INFLECTED.sub("", word) for word in words)


def _figure(kind: str, words: str) -> float:
    """A figure as a number: minutes within half a day, the day of the month, 1.. for Monday.., or the number itself."""
    words = fold(words)
    digits = [float(d.replace(",", "")) for d in regex.findall(r"\d[\d,]*(?:\.\d+)?", words)]
    if kind == "time":
        if found := regex.match(r"(\d{1,2})[:.](\d\d)", words):
            return (int(found[1]) * 60 + int(found[2])) % 720
        hour = digits[0] if digits else _spelled(words.split("点")[0])
        half = 30 if "点半" in words else 15 if "一刻" in words else _spelled(words.split("点")[-1].rstrip("分"))
        return (hour * 60 + half * ("点" in words)) % 720
    if kind in ("day", "month"):
        return digits[-1]
    if kind == "weekday":
        names = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
        return next((i for i, name in enumerate(names, 1) if name in words), "一二三四五六日天末".find(words[-1]) + 1.0)
    if words == "一半":
        return 50.0
    if digits:
        scale = next((n for char, n in _ZH_UNITS.items() if char in words), 1)
        return digits[0] * (10 if words[-1] in "成折" else scale)
    return _spelled(words) * (10 if words[-1] in "成折" else 1)


def _spelled(words: str) -> float:
    """A number in words, as far as the patterns let through: 两千, 七千五, 三十一, twelve."""
    if english := regex.match(r"[a-z]+", words):
        return _EN.get(english.group(), 0)
    total, digit, unit = 0.0, 0.0, 1.0
    for char in words:
        if char in _ZH:
            digit = _ZH[char]
        elif char in _ZH_UNITS:
            unit = _ZH_UNITS[char]
            total = (total + digit) * unit if unit == 10_000 else total + (digit or 1) * unit
            digit = 0
    return total + digit * (unit / 10 if unit > 10 and "零" not in words else 1)  # 七千五 is 7,500


def connect(note: Note, vector: Floats, known: Known, result: TurnResult) -> None:
    """Links of a new note to the nearest known ones, both ways; then what it ends, and the neighbour it marks."""
    if not known.notes:
        return
    cosine = np.einsum("ij,j->i", known.vectors, vector.astype(np.float64))
    language = cues_.language(language_of(note.content))
    ended = _end(note, cosine, known, result)
    nearest: list[int] = []
    for i in np.argsort(-cosine, kind="stable")[:LINKS]:
        other, weight = known.notes[i], _weight(cosine[i])
        if weight < SIMILAR[language]:
            continue
        mine, theirs = term_set(note.content), term_set(other.content)
        common = mine & theirs
        reason = f"cosine {weight:.2f}; common: {', '.join(sorted(common)[:5])}" if common else f"cosine {weight:.2f}"
        for a, b in ((note.id, other.id), (other.id, note.id)):
            result.links.append(Link(source=a, target=b, kind="similar", weight=weight, reason=reason))
        share = len(common) / max(1, min(len(mine), len(theirs)))
        if i not in ended and share >= SAME and _numbers(note.content) == _numbers(other.content):
            result.links.append(
                Link(
                    source=note.id, target=other.id, kind="duplicate_of", weight=weight, reason=f"{share:.0%} of terms"
                )
            )
            return
        nearest.append(int(i))
    if nearest and cosine[nearest[0]] >= EVOLVES[language] and nearest[0] not in ended:
        _mark(note, nearest[0], float(cosine[nearest[0]]), known, result)


def _end(note: Note, cosine: npt.NDArray[np.float64], known: Known, result: TurnResult) -> set[int]:
    """End the known notes that `note` contradicts; their places."""
    found: dict[int, Clash] = {}
    for i, other in enumerate(known.notes):
        if other.valid_to is None and other.turn_id != note.turn_id:
            for clash in clashes(note, other, result.turn.role == "assistant"):
                found.setdefault(i, clash)
    if any(clash.rule == "denied" for clash in found.values()):
        found = {i: clash for i, clash in found.items() if clash.rule == "denied"}
    # A figure replaces one figure: of several notes it could end the one that fits best, none when that is unclear.
    single = [i for i, clash in found.items() if clash.rule == "figure"]
    dropped: set[int] = set()
    for unit in {found[i].new for i in single}:
        rivals = sorted((i for i in single if found[i].new == unit), key=lambda i: (-found[i].fit, -cosine[i], -i))
        unclear = len(rivals) > 1 and found[rivals[0]].fit == found[rivals[1]].fit < 1
        for i in rivals[0 if unclear else 1 :]:
            dropped.add(i)
    found = {i: clash for i, clash in found.items() if i not in dropped}
    for i, clash in found.items():
        old, weight = known.notes[i], _weight(cosine[i])
        reason = f"{clash.rule}: {clash.old!r} against {clash.new!r}, by {note.id} in {note.turn_id}"
        result.links.append(Link(source=note.id, target=old.id, kind="supersedes", weight=weight, reason=reason))
        result.superseded.append((old.id, note.valid_from, reason))
        known.notes[i] = old.model_copy(update={"valid_to": note.valid_from})
    return set(found)


def clashes(note: Note, other: Note, advice: bool = False) -> Iterator[Clash]:
    """Why `note` ends `other`, if it does: each rule that says so, the surest first. advice: the assistant says it."""
    event = (other.event or other.session) == (note.event or note.session)
    taste = Scope.USER_PROFILE in (note.scope, other.scope)
    if not (event or taste):
        return  # before anything is read: most notes are of other matters
    lead = _LEAD.search(note.context)
    new = read(note.content, note.speaker, lead.group() if lead else "")
    old = read(other.content, other.speaker)
    if new.language != old.language:
        return
    if event:
        yield from _denied(new, old)
    if note.speaker != other.speaker or note.scope == Scope.GENERAL_LAW or other.scope not in _OF_PERSONS:
        return  # what one party said is not ended by the say of another
    if event and not advice:
        yield from _offer(new, old)
    yield from _replaced(new, old, event)


def _denied(new: Said, old: Said) -> Iterator[Clash]:
    """ "Not X but Y" ends what says X about the same thing."""
    for match in new.cue.denied.finditer(new.text):
        words = match["x"].strip()
        gone = read(words, "")
        figures = [
            (said, kept)
            for kind, theirs in old.values.items()
            for value, said in theirs.items()
            for kept in [_others({**new.values.get("bare", {}), **new.values.get(kind, {})}, value)]
            if value in {**gone.values.get("bare", {}), **gone.values.get(kind, {})} and kept
        ]
        shared = (new.about & old.about) - gone.about
        if figures and _one_thing(new, old):
            yield Clash("denied", *figures[0], 2.0)
        elif not gone.values and gone.about and gone.about <= old.about and shared and _one_thing(new, old):
            yield Clash("denied", words, new.text[: match.start()] or new.text[match.end() :], 2.0)


def _others(values: dict[float, str], value: float) -> str:
    return next((words for figure, words in values.items() if figure != value), "")


def _offer(new: Said, old: Said) -> Iterator[Clash]:
    """A newer offer of a party ends its earlier one: it gave way or paid, or names another figure for the same."""
    if not (new.offers and old.offers) or (new.parties and old.parties and not new.parties & old.parties):
        return
    yields = new.yields
    shared = new.about & old.about
    for kind in ("amount", "share"):
        mine, theirs = new.values.get(kind, {}), old.values.get(kind, {})
        if not yields and mine and theirs and not mine.keys() & theirs.keys():
            beyond = {t for t in shared if not any(t in party for party in new.parties)}
            if new.parties & old.parties and beyond and _one_thing(new, old):
                yield Clash("newer offer", next(iter(theirs.values())), next(iter(mine.values())), 1.0)
    if yields and (not shared or _one_thing(new, old)):
        yield Clash("newer offer", old.text, yields, 1.0)


def _replaced(new: Said, old: Said, event: bool) -> Iterator[Clash]:
    """A figure that was looked up or moved ends the one it replaces: same kind or unit, same thing, other value."""
    cue, told = new.cue, [new.text, new.lead]
    if not new.changes:
        return
    spoken = about(" ".join(new.changes), new.language)  # "moved" is no matter that two notes share
    shared = (new.about & old.about) - spoken
    # A note that names no matter of its own ("it was really £90") speaks of the one before it.
    bare = event and len(new.about - spoken) <= NAMES_NONE[new.language]
    moves = any(cue.moved.search(t) for t in told)
    only_yields = not any(cues.search(t) for cues in (cue.recount, cue.moved) for t in told)
    strangers = bool(new.parties and old.parties and not new.parties & old.parties)
    if only_yields and (strangers or new.offers or cue.own.search(old.text)):
        return
    for kind, theirs in old.values.items():
        mine = new.values.get(kind) or (new.values.get("bare", {}) if shared and kind not in _WHEN else {})
        fresh, gone = mine.keys() - theirs.keys(), theirs.keys() - mine.keys()
        repeated = bool(theirs.keys() & mine.keys())
        if not fresh or not (event or kind in _WHEN or kind == "amount"):
            continue
        value, was = min(((a, b) for a in fresh for b in gone or theirs), key=lambda pair: abs(pair[0] - pair[1]))
        ratio = min(value, was) / max(value, was, 1)
        if kind in _WHEN:  # days and hours stand everywhere: what was moved must be named, or the old hour
            fits = repeated or len(shared) >= (1 if moves else 2) or (moves and event and not new.about - spoken)
        else:
            fits = ratio >= (CLOSE if len(shared) < 2 else 1 / NEAR) and bool(
                shared or bare or (event and kind not in _LOOSE)
            )
        if fits and (not shared or _one_thing(new, old)):
            yield Clash("figure", theirs[was], mine[value], len(shared) + repeated + ratio / 2)


def _one_thing(new: Said, old: Said) -> bool:
    """Whether the words shared stand behind the same words in both: "garage deposit" is not "flat deposit"."""
    differ = False
    for i, j, size in SequenceMatcher(None, new.text, old.text, autojunk=False).get_matching_blocks():
        if new.language == "zh" and size >= 2 and about(new.text[i : i + size], new.language) & new.about:
            before = [regex.search(r"\p{Han}{2}(?=的?$)", said.text[:at]) for said, at in ((new, i), (old, j))]
        elif new.language == "en" and about(new.text[i : i + size], new.language) & new.about:
            before = [regex.search(r"[\p{L}’'-]+(?=\s*$)", said.text[:at]) for said, at in ((new, i), (old, j))]
            before = [m if m and about(m.group(), "en") else None for m in before]
        else:
            continue
        mine, theirs = (m and m.group() for m in before)
        if not mine or not theirs or mine == theirs or (new.language == "zh" and set(mine) & set(theirs)):
            return True
        differ = True
    return not differ


def _mark(note: Note, i: int, cosine: float, known: Known, result: TurnResult) -> None:
    """The nearest earlier note gains the keywords that stand in both, and a pointer to the later turn."""
    old = known.notes[i]
    matter = read(note.content, note.speaker).about & read(old.content, old.speaker).about
    same = (old.event or old.session) == (note.event or note.session) and len(matter) >= MATTER
    if old.turn_id == note.turn_id or not same or any(change.note_id == old.id for change in result.evolved):
        return
    have, said = {fold(word) for word in old.keywords}, fold(old.content)
    gained = [word for word in note.keywords if fold(word) not in have and fold(word) in said][:GAINED]
    chinese = language_of(old.content) == "zh"
    change = Change(
        note_id=old.id, keywords=gained, context=f"{'；后文：' if chinese else '; later: '}{note.turn_id}",
        reason=f"near {note.id} in {note.turn_id} (cosine {cosine:.2f}; both: {', '.join(sorted(matter)[:5])})",
    )  # fmt: skip
    result.evolved.append(change)
    known.notes[i] = change.applied(old)


def _weight(cosine: float) -> float:
    return round(min(1.0, float(cosine)), 4)


def _numbers(text: str) -> set[str]:
    return set(regex.findall(r"\d[\d.,]*", fold(text)))
