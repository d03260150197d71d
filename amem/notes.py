"""The data models: `Turn`, `Note`, `Scope`, `Link`, `Change`. Little behaviour beyond validation.

A *turn* is one utterance of a dialogue; a *note* is one fact taken from it (A-Mem: content, keywords,
tags, context, links) in one of the five scopes of seed 000.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field


class Scope(StrEnum):
    """What kind of memory a note is (seed 000, section 2)."""

    USER_PROFILE = "user_profile"
    GLOBAL_PROCEDURE = "global_procedure"
    CROSS_CASE = "cross_case_experience"
    GENERAL_LAW = "general_law"
    CASE_HISTORY = "case_history"


SCOPE_NAMES: dict[str, dict[Scope, str]] = {
    "en": {
        Scope.USER_PROFILE: "user profile",
        Scope.GLOBAL_PROCEDURE: "global procedure",
        Scope.CROSS_CASE: "cross-case experience",
        Scope.GENERAL_LAW: "general law",
        Scope.CASE_HISTORY: "case history",
    },
    "zh": {
        Scope.USER_PROFILE: "用户画像",
        Scope.GLOBAL_PROCEDURE: "全局记忆",
        Scope.CROSS_CASE: "跨案经验",
        Scope.GENERAL_LAW: "通用法律",
        Scope.CASE_HISTORY: "历史案件",
    },
}


def _not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError("is blank")
    return text


def _well_formed(text: str) -> str:
    # Half of a surrogate pair is not text: neither UTF-8 nor SQLite can hold it.
    return re.sub("[\ud800-\udfff]", "\ufffd", text)


Text = Annotated[str, AfterValidator(_well_formed), AfterValidator(_not_blank)]
Unit = Annotated[float, Field(ge=0.0, le=1.0)]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Turn(_Model):
    """One utterance. `text` is kept as it was said; `event` groups turns by matter, where the source says so."""

    id: Text
    session: Text
    speaker: Text
    role: Literal["user", "assistant", "other"] = "other"
    text: Text
    time: AwareDatetime | None = None
    event: str | None = None


class Link(_Model):
    """A directed statement about two notes, with its reason. `similar` links are stored both ways."""

    source: Text
    target: Text
    kind: Literal["similar", "supersedes", "duplicate_of"]
    weight: Unit
    reason: Text


class Note(_Model):
    """One fact that stands alone.

    `content` carries the words of its turn; `span` is where they stand there (start, end, in characters).
    `importance` and `confidence` lie in [0, 1]. `valid_from`/`valid_to` bound the time in which the note held;
    a superseded note keeps its place with `valid_to` set.
    """

    id: Text
    content: Text
    keywords: list[str] = []
    tags: list[str] = []
    context: str = ""
    scope: Scope = Scope.CASE_HISTORY
    importance: Unit = 0.5
    confidence: Unit = 0.5
    turn_id: Text
    session: Text
    event: str | None = None
    speaker: Text
    span: tuple[int, int]
    valid_from: AwareDatetime | None = None
    valid_to: AwareDatetime | None = None
    why: list[str] = []
    scope_why: list[str] = []

    def __str__(self) -> str:
        return f"[{self.scope}] {self.content} ({self.turn_id})"


class Change(_Model):
    """What a turn does to an earlier note, other than ending it: words gained. Never to its content."""

    note_id: Text
    tags: list[str] = []
    keywords: list[str] = []
    context: str = ""
    reason: Text

    def applied(self, note: Note) -> Note:
        """`note` with what it gains."""
        gains = {"tags": self.tags, "keywords": self.keywords}
        lists = {name: [*getattr(note, name), *(w for w in words if w not in getattr(note, name))]
                 for name, words in gains.items()}  # fmt: skip
        return note.model_copy(update={**lists, "context": note.context + self.context})
