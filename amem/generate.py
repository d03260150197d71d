"""Story generation: the request for a month of talk, and its reply checked by a schema."""

from __future__ import annotations

import json
from importlib import resources
from itertools import pairwise
from string import Template
from typing import Any, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict

from amem import llm, story
from amem.story import Event, Story, StoryError


class _AskedTurn(BaseModel):
    # Strict endpoints demand closed schemas; what other models add all the same does no harm.
    model_config = ConfigDict(json_schema_extra={"additionalProperties": False})
    session: str
    event: str | None
    speaker: str
    role: Literal["user", "assistant"]
    time: AwareDatetime
    text: str


class _AskedStory(BaseModel):
    model_config = ConfigDict(json_schema_extra={"additionalProperties": False})
    title: str
    user: str
    events: list[Event]
    turns: list[_AskedTurn]


def generation_request(
    language: str, events: list[str] | None = None, days: int = 31, turns: int = 60, model: str = llm.DEFAULT_MODEL
) -> dict[str, Any]:
    """The complete chat-completions body that asks for a story in "zh" or "en". Raises StoryError for other languages.

    `events` are titles of matters; the default six stand at the head of the prompt file.
    """
    if language not in ("zh", "en"):
        raise StoryError(f'there is no prompt for a story in {language!r}; ask for "zh" or "en"')
    text = resources.files("amem").joinpath(f"prompts/story_{language}.md").read_text("utf-8")
    usual, _, prompt = text.partition("\n---\n")
    wanted = events or usual.splitlines()
    listed = "\n".join(f"  - e{number}: {title}" for number, title in enumerate(wanted, 1))
    prompt = Template(prompt).substitute(events=listed, count=len(wanted), days=days, turns=turns)
    schema = {"name": "story", "strict": True, "schema": _AskedStory.model_json_schema()}
    return {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 1.0,  # the one value that every model takes
        "seed": 0,
        "response_format": {"type": "json_schema", "json_schema": schema},
    }


def parse_generation(reply: str, language: str, events: int = 6, turns: int = 60) -> Story:
    """The story in a model's reply. Raises StoryError naming what is missing.

    Refuses fewer than `events` matters that are talked about or `turns` turns with text, turns without a date or out
    of order, roles other than user and assistant, and events that are not listed.
    """
    name = "the model's reply"
    try:
        value = story.loads(json.dumps(llm.json_of(reply)))
    except llm.ModelError as error:
        raise StoryError(f"{name} holds no story: {error}") from None
    asked = story.check(_AskedStory, value, name)
    for number, (before, after) in enumerate(pairwise(asked.turns), 2):
        if after.time < before.time:
            raise StoryError(f"turn {number} of {name} ({after.time}) is dated before the turn above it; ask again")
    head = {"title": asked.title, "language": language, "user": {"name": asked.user}, "events": asked.events}
    written = story.assemble([turn.model_dump() for turn in asked.turns], [], name, head)
    known, told = {event.id for event in asked.events}, {turn.event for turn in written.turns if turn.event}
    if told - known:
        raise StoryError(f"{name} has turns of the event {min(told - known)!r}, which it does not list; ask again")
    if len(told) < events:
        raise StoryError(f"{name} tells {len(told)} of {events} events; ask again, or for fewer")
    if len(written.turns) < turns:
        raise StoryError(f"{name} has {len(written.turns)} of {turns} turns; ask again, or for fewer")
    if missing := {"user", "assistant"} - {turn.role for turn in written.turns}:
        raise StoryError(f"{name} has no turn of the {min(missing)}; ask again")
    return written
