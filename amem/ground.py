"""Grounding: whether a note that a model made of a turn stands in that turn, and where.

Words are compared without their endings, Han characters one by one; numbers and names must be there exactly.
"""

from __future__ import annotations

import regex

from amem import cues as cues_
from amem.notes import Turn
from amem.text import Span, fold, language_of, sentences, terms

GROUNDED = 0.5  # share of a note's words that must stand in its place in the turn
ADDED = 1 / 3  # share below which a clause is an addition of the model's
RUN = 4  # sentences that one note may be drawn from

_FUNCTION = frozenset(
    "的了是在我你他她它们这那就也都和跟与及把被给让很要会能可以个着过到说去来吗呢吧啊得地还又再从对为将其该"
)
_HAN = regex.compile(r"\p{Script=Han}")
_ROLES = regex.compile(r"用户|助手|助理|\b(?:the )?(?:user|assistant)(?:['’]s)?\b", regex.IGNORECASE)
_ENDING = regex.compile(r"(?:['’]s|ing|ed|es|ly|s|e|d)$")
_NAME = regex.compile(r"(?<=[^\s.!?:;\"“‘(]\s)\p{Lu}[\p{L}\p{N}'’-]+")
_CLAUSE = regex.compile(r"[，、；。！？]|[,;:.!?](?=\s)|\s[–—-]\s|\b(?:and|but|because|which|who)\b")
_TITLE = frozenset("mr mrs ms miss dr prof".split())
_MONTH = regex.compile(
    r"jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?|nov(?:ember)?"
    r"|dec(?:ember)?"
)
_COUNT = {
    "zh": regex.compile(r"[〇零一二两三四五六七八九十百千万亿]{2,}|[二三四五六七八九十百]"),
    "en": regex.compile(
        r"\b(?:two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|\w+teen|twenty|thirty|forty|fifty|sixty|seventy"
        r"|eighty|ninety|hundred|thousand|million|half|twice|double)\b"
    ),
}
_DENIES = regex.compile(r"[不没未]|\b(?:not|no|never|none|nobody|nothing|cannot|without)\b|n['’]t\b")
_DENIED = regex.compile(rf"{_DENIES.pattern}|[无别非]|\b(?:refus|den[yi]|reject|fail)")


class Told:
    """A turn as notes are checked against it: its words, its numbers, and the words of each run of sentences."""

    def __init__(self, turn: Turn) -> None:
        self.turn, self.said = turn, sentences(turn.text)
        self.language = cues_.language(language_of(turn.text))
        self.numbers, self.folded = numbers_of(turn.text), fold(turn.text)
        words = [frozenset(words_of(turn.text[slice(*span)])) for span in self.said]
        self.words = frozenset().union(*words)
        self.places: list[tuple[Span, frozenset[str]]] = [
            ((self.said[i][0], self.said[i + n - 1][1]), frozenset().union(*words[i : i + n]))
            for n in range(1, RUN + 1) for i in range(len(words) - n + 1)
        ]  # fmt: skip

    def place(self, content: str) -> Span | str:
        """Where `content` stands in the turn, or why it does not."""
        at = self.turn.text.find(content)
        if at >= 0:
            return at, at + len(content)
        bare = _ROLES.sub(" ", content).replace(self.turn.speaker, " ")
        wanted = words_of(bare)
        if not wanted or not self.places:
            return "it has no words of its own"
        if strange := [n for n in numbers_of(bare) if n not in self.numbers]:
            return f"the number {strange[0]} does not stand in the turn"
        if strange := [m for m in _COUNT[self.language].findall(fold(bare)) if m not in self.folded]:
            return f"the number {strange[0]} does not stand in the turn"
        if strange := [n for n in _NAME.findall(bare) if not self.words.issuperset(set(words_of(n)) - _TITLE)]:
            return f"the name {strange[0]} does not stand in the turn"
        span, found = max(self.places, key=lambda place: sum(word in place[1] for word in wanted))
        missing = [word for word in wanted if word not in found]
        if 1 - len(missing) / len(wanted) < GROUNDED:
            kept = len(wanted) - len(missing)
            return f"{kept} of its {len(wanted)} words stand in the turn (not: {', '.join(missing[:6])})"
        for clause in _CLAUSE.split(bare):
            parts = words_of(clause)
            if len(parts) > 2 and sum(word in self.words for word in parts) < ADDED * len(parts):
                return f"its words {clause.strip()!r} do not stand in the turn"
        if _DENIES.search(fold(bare)) and not _DENIED.search(self.folded):
            return "it denies what the turn does not deny"
        return span


def words_of(text: str) -> list[str]:
    """Words that carry meaning: Latin ones without their endings, Han characters one by one."""
    out: list[str] = []
    for term in terms(text):
        if _HAN.match(term):
            out += [term] if len(term) == 1 and term not in _FUNCTION else []
        elif _MONTH.fullmatch(term):
            out.append(term[:3])
        elif len(term) > 4 and not term[-1].isdigit():
            stem = _ENDING.sub("", term)
            out.append(stem[:-1] if stem[-2:-1] == stem[-1:] else stem)
        else:
            out.append(term)
    return out


def numbers_of(text: str) -> list[str]:
    """Numbers in order, without signs, thousands marks and leading zeros."""
    found = regex.findall(r"\d+(?:[.,:]\d+)*", fold(text))
    return [number.replace(",", "").lstrip("0") or "0" for number in found]
