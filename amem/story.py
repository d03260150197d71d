"""Stories: dialogues as turns. Bundled ones and those of other programs.

A format is recognised by content, never by file name. Text is kept as it stands in the source; whatever is left out
is named in `Story.skipped`.
"""

from __future__ import annotations

import codecs
import json
import os
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeVar

import regex
from pydantic import AliasChoices, AliasPath, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from amem.notes import Text, Turn
from amem.text import language_of

KNOWN = "amem-story/1 JSON, LoCoMo JSON, OpenAI messages JSON or JSONL, ChatGPT export, 'name: text' transcript"
DATA = Path(__file__).parents[1] / "data"  # of a checkout; an installed package has no stories
_ROLES = dict.fromkeys("user 用户 我 human me".split(), "user") | dict.fromkeys(
    "assistant 助手 ai chatgpt bot".split(), "assistant"
)
_SPOKEN = ("text", "multimodal_text", "code")  # ChatGPT's other content is thoughts, settings and tool traffic
_TIME = TypeAdapter(datetime)
_LINE = regex.compile(
    r"(?:(\[)?(?P<time>\d{4}-\d\d-\d\d[ T]\d\d:\d\d(?::\d\d)?(?:Z|[+-]\d\d:\d\d)?)(?(1)\])\s+)?"
    r"(?=[^:：]*\p{L})(?P<name>[^\s:：'\"“”{}\[\]<>/=][^:：\"“”{}\[\]<>/=，。！？；,!?;\r\n]{0,29}?)[ \t]*"
    r"(?:(?<!\d)[:：](?!//)|[:：](?!//|\d))[ \t]?(?P<text>.*)",  # neither "http://" nor "at 10:30" names a speaker
    regex.DOTALL,
)


class StoryError(ValueError):
    """A story cannot be had. One sentence: what is wrong, in which file and turn, and what to do."""


class Event(BaseModel):
    """A matter that turns belong to."""

    model_config = ConfigDict(frozen=True, json_schema_extra={"additionalProperties": False})
    id: Text
    title: str


class Story(BaseModel):
    """A dialogue in the order in which it was said. `skipped` holds one sentence for each thing left out."""

    model_config = ConfigDict(frozen=True)
    format: Literal["amem-story/1"] = "amem-story/1"
    title: str = ""
    language: Literal["zh", "en", "und"] = "und"
    note: str = ""
    user: dict[str, Any] | None = None
    events: list[Event] = []
    turns: list[Turn]
    skipped: list[str] = []


class _LocomoTurn(BaseModel):
    dia_id: str
    speaker: str
    text: str | None = None
    blip_caption: str | None = None


class _Message(BaseModel):  # of OpenAI and of ChatGPT
    role: str = Field(validation_alias=AliasChoices("role", AliasPath("author", "role")))
    content: Any = None
    name: str | None = None
    recipient: str | None = None
    hidden: bool | None = Field(None, validation_alias=AliasPath("metadata", "is_visually_hidden_from_conversation"))
    time: Any = Field(
        None, validation_alias=AliasChoices("timestamp", "created_at", "created", "time", "date", "create_time")
    )


class _Node(BaseModel):
    message: dict[str, Any] | None = None
    parent: str | None = None
    time: float | None = Field(None, validation_alias=AliasPath("message", "create_time"))


class _Chat(BaseModel):
    title: str | None = None
    create_time: float | None = None
    current_node: str | None = None
    mapping: dict[str, _Node]


_Model = TypeVar("_Model", bound=BaseModel)


def load(source: str | Path) -> Story:
    """The story in a file, or the bundled one for "zh" or "en"; `file#choice` picks one LoCoMo conversation of several
    (without a choice they come in together, each an event).

    Reads the formats in KNOWN, in UTF-8, or UTF-16 with a BOM; of a ChatGPT export the current branches, oldest first.
    Times without a zone are taken as UTC, except in amem-story/1, which must say. Raises StoryError.
    """
    path, choice, text = _read(source)
    name = path.name
    # JSON never looks like a transcript (its lines begin with quotes or brackets), but "[2026-03-02 09:12] Ann: hi"
    # begins like JSON.
    spoken = _transcript(text, name)
    if spoken and not choice:
        return spoken
    value = _json(text, name) if text.lstrip()[:1] in ("{", "[") and not spoken else None
    items: list[Any] = value if isinstance(value, list) else [value]
    keys = {key for item in items if isinstance(item, dict) for key in item}
    spoken_keys = {"mapping", "messages", "role"}
    if not keys & spoken_keys and any(regex.fullmatch(r"conversation|session_[0-9]+", key) for key in keys):
        return _locomo(items, choice, name)
    if choice:
        raise StoryError(f"{name} holds no LoCoMo conversations to choose {choice!r} from; leave '#{choice}' out")
    if isinstance(value, dict) and str(value.get("format")).startswith("amem-story/"):
        return assemble(_list(value.get("turns")), list(map(str, _list(value.get("skipped")))), name, value)
    if "mapping" in keys:
        return _dialogue(_chats(items, name), name)
    if "messages" in keys:
        talks = [_list(item.get("messages") if isinstance(item, dict) else item) for item in items]
        return _dialogue([(None, talk) for talk in talks], name)
    if "role" in keys or value == []:
        return _dialogue([(None, items)], name)
    raise StoryError(f"{name} is in no format known here; give it as one of these: {KNOWN}")


def _read(source: str | Path) -> tuple[Path, str, str]:
    path, choice, bundled = Path(source), "", isinstance(source, str) and source in ("zh", "en")
    if bundled:
        path = DATA / f"story_{source}.json"
    elif "#" in path.name and not os.path.lexists(path):
        path, choice = Path(str(path).rpartition("#")[0]), path.name.rpartition("#")[2]
    try:
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        problem = f"{str(path)[:200]!r} cannot be read ({error}); give the path of a file"
        if isinstance(error, FileNotFoundError):
            problem = f'there is no file {str(path)!r}; give the path of a story, or "zh" or "en"'
            if bundled:
                problem = f"the bundled story data/{path.name} needs a checkout of the project; get one, or give a path"
        elif os.path.isdir(path):
            problem = f"{str(path)!r} is a folder; give the path of a file in it"
        elif isinstance(error, PermissionError):
            problem = f"there is no permission to read {str(path)!r}; change its rights, or copy it"
        raise StoryError(problem) from None
    kind = "UTF-16" if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "UTF-8"
    body = data.removeprefix(codecs.BOM_UTF8)
    try:
        text = body.decode(kind)
    except UnicodeDecodeError as error:
        at = error.start + len(data) - len(body)
        raise StoryError(f"{path.name} is not {kind} at byte {at} ({error.reason}); save it as UTF-8") from None
    if not text.strip():
        raise StoryError(f"{path.name} is empty; export the dialogue again")
    return path, choice, text


def _json(text: str, name: str) -> Any:
    rows, values = [text], []
    try:
        return loads(text)
    except (ValueError, RecursionError) as error:
        if isinstance(error, json.JSONDecodeError) and error.msg == "Extra data":
            rows = text.split("\n")  # JSONL; not splitlines(), which also cuts at U+2028 within strings
    for number, row in enumerate(rows):
        try:
            values += [loads(row)] if row.strip() else []
        except (ValueError, RecursionError) as error:
            bad = error if isinstance(error, json.JSONDecodeError) else json.JSONDecodeError(str(error), row, 0)
            half = bad.pos >= len(row.rstrip()) or bad.msg.startswith("Unterminated")
            what = "is half a JSON file and breaks off" if half else "is not valid JSON"
            where = f"at line {number + bad.lineno}, column {bad.colno} ({bad.msg})"
            raise StoryError(f"{name} {what} {where}; copy or export it again") from None
    return values


def loads(text: str) -> Any:
    """JSON with halves of surrogate pairs replaced by U+FFFD."""
    value = json.loads(text)
    if regex.search(r"\\u[dD][89a-fA-F]", text):
        # Half of a surrogate pair is no character; nothing downstream could write it.
        value = json.loads(regex.sub(r"[\ud800-\udfff]", "\ufffd", json.dumps(value, ensure_ascii=False)))
    return value


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def check(model: type[_Model], value: Any, label: str) -> _Model:
    """`value` as `model`, or a StoryError that says which field of `label` is wrong and how to mend it."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        problem = error.errors()[0]
    field, got, kind = ".".join(map(str, problem["loc"])), repr(problem["input"])[:60], problem["type"]
    said = f"has the {field} {got}: {problem['msg'][:1].lower()}{problem['msg'][1:]}; correct it"
    if kind == "missing":
        said = f"has no {field!r}; add it"
    elif kind == "extra_forbidden":
        said = f"has the unknown field {field!r}; remove it"
    elif kind == "literal_error":
        said = f"has the {field} {got}; it must be {problem['ctx']['expected']}"
    elif "datetime" in kind or "timezone" in kind:
        said = f"has the {field} {got}; write it with a zone, like 2026-03-02T09:00:00+08:00"
    elif not field:
        said = f"is {got}; it must be an object"
    raise StoryError(f"{label} {said}")


def _time(value: Any, label: str, skipped: list[str]) -> datetime | None:
    if value is None or value == "":
        return None
    for read in (_TIME.validate_python, lambda text: datetime.strptime(text, "%I:%M %p on %d %B, %Y")):  # LoCoMo's
        try:
            time = read(value)
            return time if time.tzinfo else time.replace(tzinfo=UTC)
        except (ValueError, TypeError):
            continue
    skipped.append(f"the time {str(value)[:60]!r} of {label} cannot be read; it is kept without a time")
    return None


def assemble(raw: list[Any], skipped: list[str], name: str, head: dict[str, Any]) -> Story:
    """A story of these raw turns; those without text are named in `skipped`. `head` holds its other fields."""
    turns: list[Turn] = []
    seen: dict[str, int] = {}
    for number, item in enumerate(raw, 1):
        fields = {"id": f"t{number:0{max(3, len(str(len(raw))))}}", **(item if isinstance(item, dict) else {})}
        label = f"turn {fields['id']} of {name}"
        text = fields.get("text", ...)
        if text is None or (isinstance(text, str) and not text.strip()):
            skipped.append(f"{label} has no text")
            continue
        turn = check(Turn, fields if isinstance(item, dict) else item, label)
        if turn.id in seen:
            raise StoryError(f"turns {seen[turn.id]} and {number} of {name} share the id {turn.id!r}; make ids unique")
        seen[turn.id] = number
        turns.append(turn)
    if not turns:
        raise StoryError(f"{name} holds no turns with text, {len(raw)} without; export the dialogue again")
    language = head.get("language") or language_of("\n".join(turn.text for turn in turns))
    return check(Story, {**head, "language": language, "turns": turns, "skipped": skipped}, name)


def _locomo(items: list[Any], choice: str, name: str) -> Story:
    ids = [str(item.get("sample_id", number)) if isinstance(item, dict) else "" for number, item in enumerate(items)]
    if not choice:
        return _conversations(items, ids, name)
    at = ids.index(choice) if choice in ids else int(choice) if regex.fullmatch("[0-9]{1,9}", choice) else len(ids)
    if at >= len(ids):
        how = f"pick one by id or index, like {name}#{ids[0]}"
        raise StoryError(
            f"{name} holds {len(ids)} conversations, none of them {choice!r}; {how}; ids are {', '.join(ids)}"
        )
    return _conversations(items[at : at + 1], ids[at : at + 1], name)


def _conversations(items: list[Any], ids: list[str], name: str) -> Story:
    """LoCoMo conversations as one story. Of several, each is an event, and its id stands before its turns' ids."""
    raw: list[dict[str, Any]] = []
    skipped: list[str] = []
    for at, (item, chosen) in enumerate(zip(items, ids, strict=True)):
        talk = item.get("conversation", item) if isinstance(item, dict) else None
        if not isinstance(talk, dict):
            raise StoryError(f"conversation {at} of {name} is no object with sessions; export the dialogue again")
        head, event = (f"{chosen}:", chosen) if len(items) > 1 else ("", None)
        sessions = (key for key in talk if regex.fullmatch(r"session_[0-9]+", key))
        for key in sorted(sessions, key=lambda key: int(key[8:])):
            time = _time(talk.get(f"{key}_date_time"), f"{key} of {name}", skipped)
            for number, turn in enumerate(_list(talk[key]), 1):
                said = check(_LocomoTurn, turn, f"turn {number} in {key} of {name}")
                photo = f" [shares a photo: {said.blip_caption}]" if said.blip_caption else ""
                fields = {"id": head + said.dia_id, "session": head + key, "event": event, "speaker": said.speaker}
                raw.append({**fields, "time": time, "text": (said.text or "") + photo})
    events = [Event(id=chosen, title=chosen) for chosen in ids] if len(items) > 1 else []
    return assemble(raw, skipped, name, {"title": ids[0] if len(ids) == 1 else "", "events": events})


def _branch(nodes: dict[str, _Node], leaf: str | None) -> list[_Node]:
    path: dict[str, _Node] = {}  # keyed, so that a ring of parents ends
    while leaf in nodes and leaf not in path:
        path[leaf] = nodes[leaf]
        leaf = nodes[leaf].parent
    return list(path.values())[::-1]


def _chats(items: list[Any], name: str) -> list[tuple[str | None, list[Any]]]:
    chats = [check(_Chat, item, f"conversation {number} of {name}") for number, item in enumerate(items, 1)]
    talks: list[tuple[str | None, list[Any]]] = []
    for chat in sorted(chats, key=lambda chat: chat.create_time or 0.0):
        leaves = set(chat.mapping) - {node.parent for node in chat.mapping.values()}
        path = _branch(chat.mapping, chat.current_node)
        if not path and leaves:
            path = max(
                (_branch(chat.mapping, leaf) for leaf in leaves), key=lambda path: (len(path), path[-1].time or 0.0)
            )
        talks.append((chat.title or "", [node.message for node in path if node.message]))
    return talks


def _dialogue(talks: list[tuple[str | None, list[Any]]], name: str) -> Story:
    raw: list[dict[str, Any]] = []
    skipped: list[str] = []
    left_out: Counter[str] = Counter()
    events: list[Event] = []
    for number, (title, messages) in enumerate(talks, 1):
        digits = f"{number:0{max(2, len(str(len(talks))))}}"
        if title is not None:
            events.append(Event(id=f"e{digits}", title=title))
        for position, item in enumerate(messages, 1):
            label = f"message {position} of {f's{digits} in ' if len(talks) > 1 else ''}{name}"
            message = check(_Message, item, label)
            role, content = message.role.casefold(), message.content
            kind = content.get("content_type", "text") if isinstance(content, dict) else "text"
            if role in ("system", "developer", "tool", "function"):
                left_out[role] += 1
            elif message.hidden or message.recipient not in (None, "all") or kind not in _SPOKEN:
                left_out["hidden"] += 1
            elif role not in _ROLES:
                raise StoryError(f"{label} has the unknown role {message.role!r}; make it user or assistant")
            else:
                turn = {"session": f"s{digits}", "event": None if title is None else f"e{digits}"}
                turn |= {"speaker": message.name or message.role, "role": _ROLES[role]}
                raw.append({**turn, "time": _time(message.time, label, skipped), "text": _words(message.content)})
    if left_out:
        counts = ", ".join(f"{count} {kind}" for kind, count in left_out.items())
        skipped.append(f"messages of {name} that are no utterances were left out: {counts}")
    return assemble(raw, skipped, name, {"title": events[0].title if len(events) == 1 else "", "events": events})


def _words(content: Any) -> Any:
    if isinstance(content, dict):
        content = content.get("parts") or content.get("text")
    if not isinstance(content, list):
        return content
    words = []
    for part in content:
        if isinstance(part, dict):
            kind = str(part.get("type") or part.get("content_type") or "part")
            named = regex.sub(r"^input_|_url$|_asset_pointer$", "", kind)
            part = part["text"] if isinstance(part.get("text"), str) else f"[{named}]"
        words += [] if part is None else [str(part)]
    return "\n".join(words)


def _transcript(text: str, name: str) -> Story | None:
    raw: list[dict[str, Any]] = []
    skipped: list[str] = []
    blank, filled = 0, 0
    for number, line in enumerate(text.split("\n"), 1):
        line = line.removesuffix("\r")
        if not line.strip():
            blank += 1
            continue
        filled += 1
        if named := _LINE.fullmatch(line):
            speaker = named["name"]
            time = _time(named["time"], f"line {number} of {name}", skipped)
            role = _ROLES.get(speaker.casefold(), "other")
            raw.append({"session": "s01", "speaker": speaker, "role": role, "time": time, "text": named["text"]})
        elif raw:
            raw[-1]["text"] += "\n" * (blank + 1) * bool(raw[-1]["text"]) + line
        else:
            skipped.append(f"line {number} of {name} stands before the first name")
        blank = 0
    return assemble(raw, skipped, name, {}) if len(raw) >= 2 and 2 * len(raw) >= filled else None
