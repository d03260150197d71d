"""Cues: the words by which the rules see that a sentence carries a fact, and of which kind.

The words themselves are data, `zh.toml` and `en.toml`; a third language is a third file.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

import regex

Pattern = regex.Pattern[str]


@dataclass(frozen=True)
class Change:
    """Compiled cues of one language for a note that ends an earlier one; the words are explained in the files."""

    values: Pattern
    recount: Pattern
    moved: Pattern
    concede: Pattern
    offer: Pattern
    remedy: Pattern
    settled: Pattern
    own: Pattern
    party: Pattern
    denied: Pattern
    common: Pattern


@dataclass(frozen=True)
class Cues:
    """Compiled cues of one language. facts: kind -> (points, pattern); chat to question speak against a note."""

    facts: dict[str, tuple[float, Pattern]]
    chat: Pattern
    offer: Pattern
    hedge: Pattern
    question: Pattern
    change: Change


def language(text_language: str) -> str:
    """The cue list for a language: Chinese has its own, everything else is read with the English one."""
    return "zh" if text_language == "zh" else "en"


@lru_cache(maxsize=2)
def load(name: str) -> Cues:
    """The cues of "zh" or "en"."""
    data = tomllib.loads(files("amem.cues").joinpath(f"{name}.toml").read_text("utf-8"))

    def compiled(*alternatives: str) -> Pattern:
        joined = "|".join(alternatives)
        for key, value in data["macros"].items():
            joined = joined.replace("{" + key + "}", value)
        return regex.compile(joined, regex.IGNORECASE)

    def of(kind: dict[str, object]) -> Pattern:
        words = [regex.escape(word) for word in str(kind.get("words", "")).split()]
        if name == "en":
            words = [rf"\b(?:{'|'.join(words)})(?:s|d|ed|ing)?\b"] if words else []
        return compiled(*words, *kind.get("patterns", []))  # type: ignore[misc]

    against = data["against"]
    joint = r"[，,、。\s]*" if name == "zh" else r"\b[\s,!.…'’-]*"
    return Cues(
        facts={kind: (float(entry["points"]), of(entry)) for kind, entry in data["facts"].items()},
        chat=compiled(rf"^(?:(?:{'|'.join(against['chat'])}){joint}){{1,6}}{against['tail']}$"),
        offer=compiled(*against["offer"]),
        hedge=compiled(against["hedge"]),
        question=compiled(against["question"]),
        change=Change(**{k: compiled(*([v] if isinstance(v, str) else v)) for k, v in data["change"].items()}),
    )
