"""Notes asked of a model: the request for one turn, the reading of its reply, and what of it stands in the turn.

Nothing is sent or written here. Exchanges ({"request", "raw_reply", and "error" where no reply came}) go in, the next
request or the notes come out; the same exchanges always give the same notes.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Mapping
from importlib import resources
from typing import Any, NamedTuple

import regex
from pydantic import BaseModel, ConfigDict

from amem import cues as cues_
from amem import extract, llm
from amem.extract import Drafts
from amem.ground import Told, numbers_of, words_of
from amem.notes import SCOPE_NAMES, Note, Scope, Turn
from amem.text import fold, language_of

MOST = 24  # notes a turn, whatever its length
SHOWN = 300  # characters of a dropped item that the record shows

Exchange = dict[str, Any]


class _AskedNote(BaseModel):
    # Strict endpoints demand closed schemas; replies are read more kindly than that.
    model_config = ConfigDict(json_schema_extra={"additionalProperties": False})
    content: str
    keywords: list[str]
    tags: list[str]
    scope: Scope
    importance: float
    confidence: float


class _AskedNotes(BaseModel):
    model_config = ConfigDict(json_schema_extra={"additionalProperties": False})
    notes: list[_AskedNote]


class Reading(NamedTuple):
    """What a reply holds. error: why not all of it could be read, else empty; repaired: what was put right."""

    items: list[Any]
    error: str
    repaired: list[str]


def request(turn: Turn, model: str) -> dict[str, Any]:
    """The chat-completions body that asks for the notes of `turn`, in its language."""
    language = cues_.language(language_of(turn.text))
    prompt = resources.files("amem").joinpath(f"prompts/extract_{language}.md").read_text("utf-8")
    # Without its date: day words are resolved here (`extract.dates`), not guessed there.
    said = f"{turn.speaker} ({turn.role}):\n{turn.text}"
    schema = {"name": "notes", "strict": True, "schema": _AskedNotes.model_json_schema()}
    return {
        "model": model,
        "messages": [{"role": "system", "content": prompt}, {"role": "user", "content": said}],
        "response_format": {"type": "json_schema", "json_schema": schema},
    }


def next_request(turn: Turn, asked: list[Exchange], model: str) -> dict[str, Any] | None:
    """What to send after these exchanges: the first request, or once more with the error; None when it is settled."""
    if not asked:
        return request(turn, model)
    last = asked[-1]
    if last.get("error") or is_repeat(last["request"]) or not (error := read(last["raw_reply"]).error):
        return None
    try:
        said = llm.text_of(last["raw_reply"], cut=True)
    except llm.ModelError:
        said = "(nothing)"
    more = [
        {"role": "assistant", "content": said[:2000]},
        {"role": "user", "content": f"This cannot be read: {error}. Send the whole JSON once more, and nothing else."},
    ]
    return {**last["request"], "messages": [*last["request"]["messages"], *more]}


def is_repeat(body: dict[str, Any]) -> bool:
    """Whether a request is the second one of its turn, which quotes the reply that could not be read."""
    return any(message["role"] == "assistant" for message in body["messages"])


def read(response: dict[str, Any]) -> Reading:
    """The items of a raw response, repaired where that loses nothing; of a broken one, the items that are whole."""
    repaired: list[str] = []
    try:
        text = llm.text_of(response, cut=True)
    except llm.ModelError as error:
        return Reading([], str(error), [])
    try:
        value = llm.json_of(text)
    except llm.ModelError as error:
        text, broken = _mended(text), error
        try:
            value = llm.json_of(text)
            repaired.append("bad escapes or commas in the JSON")
        except llm.ModelError:
            whole = _whole_items(text)
            return Reading(whole, f"{broken} ({len(whole)} whole items in it)", [])
    if text.strip()[:1] not in ("{", "["):
        repaired.append("JSON inside other text")
    items = _items(value)
    if items is None:
        return Reading([], f"the reply's JSON holds no list of notes but {_short(value)}", [])
    if not (isinstance(value, dict) and isinstance(value.get("notes"), list)):
        repaired.append('no object with a list under "notes"')
    return Reading(items, "", repaired)


def _mended(text: str) -> str:
    def escape(match: regex.Match[str]) -> str:
        if match.group(1):
            return match.group()
        return "\\\\" if text[match.end() : match.end() + 1].isalnum() else ""

    text = regex.sub(r'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})|\\', escape, text)
    return regex.sub(r",(\s*[}\]])", r"\1", text)


def _items(value: Any) -> list[Any] | None:
    if isinstance(value, dict) and "notes" in value:
        value = [] if value["notes"] is None else value["notes"]
    if isinstance(value, list):
        return value
    if not isinstance(value, dict):
        return None
    if "content" in value:
        return [value]
    lists = [inner for inner in value.values() if isinstance(inner, list)]
    return lists[0] if len(lists) == 1 else None


def _whole_items(text: str) -> list[Any]:
    decoder, found = json.JSONDecoder(strict=False), []
    start = text.find("{")
    for _ in range(1000):  # a hostile reply may hold any number of brackets
        if start < 0:
            break
        try:
            value, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            end = start + 1
        else:
            found += (_items(value) or []) if "content" in value or "notes" in value else []
        start = text.find("{", end)
    return found


def drafts(turn: Turn, asked: list[Exchange], events: Mapping[str, str] | None = None) -> Drafts:
    """The notes in the exchanges of one turn, and the record: what was repaired or dropped, and why.

    A turn fails when no reply came or none could be read whole; items that are whole are kept all the same.
    """
    begun = max(i for i, exchange in enumerate(asked) if not is_repeat(exchange["request"]))
    last = asked[-1]
    readings = [
        read(e["raw_reply"]) if e["raw_reply"] is not None else Reading([], e["error"], []) for e in asked[begun:]
    ]
    errors = [reading.error for reading in readings if reading.error]
    failed = bool(readings[-1].error)
    used = max(readings, key=lambda r: len(r.items)) if failed else readings[-1]
    repaired, dropped = list(used.repaired), []
    notes: dict[str, Note] = {}
    told = Told(turn)
    limit = min(MOST, 2 * len(told.said) + 2)
    for item in used.items:
        if len(notes) >= limit:
            dropped.append({"item": _short(item), "reason": f"more than {limit} notes for one turn"})
            continue
        made = _note(told, item, last["request"]["model"], events or {}, repaired)
        if isinstance(made, Note) and fold(made.content) in notes:
            made = "said twice in the reply"
        if isinstance(made, Note):
            notes[fold(made.content)] = made
        else:
            dropped.append({"item": _short(item), "reason": made})
    record = {
        "engine": f"model {last['request']['model']}", "request": last["request"], "raw_reply": last["raw_reply"],
        "earlier": asked[:-1], "errors": errors, "repaired": repaired, "dropped": dropped, "failed": failed,
    }  # fmt: skip
    return Drafts(list(notes.values()), record)


def _note(told: Told, item: Any, model: str, events: Mapping[str, str], repaired: list[str]) -> Note | str:
    """The note of one item of a reply, or why it is none."""
    if isinstance(item, str):
        item = {"content": item}
        repaired.append("a string where a note is due")
    if not isinstance(item, dict) or not isinstance(item.get("content"), str):
        return "it is no note: it has no content in words"
    content = " ".join(item["content"].replace("\0", " ").split())
    if not content:
        return "its content is blank"
    turn = told.turn
    if len(content) > 2 * extract.LONG[told.language]:
        return f"{len(content)} characters are too long for one fact"
    span = told.place(content)
    if isinstance(span, str):
        return span
    words = _texts(item.get("keywords"))
    known = [word for word in words if (parts := words_of(word)) and told.words.issuperset(parts)]
    if len(known) < len(words):
        repaired.append(f"keywords not in the turn left out: {', '.join(w for w in words if w not in known)[:SHOWN]}")
    scope = _scope(item.get("scope"))
    if scope is None:
        repaired.append(f"scope {_short(item.get('scope'))} is none of the five; told by the words instead")
    at = bisect_left(told.said, (span[0], 0)) - 1
    # The rules' kinds as well: a correction must be known as one, whatever label the model gave it.
    tags = [*extract.judge(turn.text, span, told.language).kinds, *_texts(item.get("tags"))]
    return extract.note_at(
        turn, span, content, turn.text[slice(*told.said[at])][-60:] if at >= 0 else "", told.language, events,
        keywords=known[:8] or extract.keywords(content),
        tags=[tag for tag in dict.fromkeys(tags) if set(numbers_of(tag)) <= set(told.numbers)][:6],
        importance=_unit(item, "importance", repaired), confidence=_unit(item, "confidence", repaired),
        why=[f"model {model}"], scope=scope or Scope.CASE_HISTORY, scope_why=[f"model {model}"] if scope else [],
    )  # fmt: skip


def _texts(value: Any) -> list[str]:
    """A list of short strings out of whatever stands where one is due."""
    parts = regex.split(r"[,，、;；\n]", value) if isinstance(value, str) else value if isinstance(value, list) else []
    texts = [" ".join(str(part).split()) for part in parts if isinstance(part, str | int | float)]
    return list(dict.fromkeys(text for text in texts if 0 < len(text) <= 40))


def _scope(value: Any) -> Scope | None:
    said = regex.sub(r"[\s-]+", "_", fold(str(value)).strip())
    names = {name: scope for names in SCOPE_NAMES.values() for scope, name in names.items()}
    names |= {name.replace(" ", "_").replace("-", "_"): scope for name, scope in names.items()}
    return names.get(said) or next((scope for scope in Scope if scope.value == said), None)


def _unit(item: dict[str, Any], name: str, repaired: list[str]) -> float:
    try:
        number = float(item.get(name, ""))
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if math.isnan(number):
        repaired.append(f"{name} {_short(item.get(name))} is no number; 0.5")
        return 0.5
    if not 0 <= number <= 1:
        repaired.append(f"{name} {number:g} is not between 0 and 1")
    return round(min(1.0, max(0.0, number)), 2)


def _short(value: Any) -> str:
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    except RecursionError:
        text = "something nested too deeply to show"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}… ({len(text)} characters)"
