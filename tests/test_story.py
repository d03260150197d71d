"""Stories from real files of every kind, broken ones too, and from a real endpoint."""

from __future__ import annotations

import codecs
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from amem import generate, llm, story
from amem.story import StoryError, load

LOCOMO = Path(__file__).parents[2] / "shared/data/locomo/data/locomo10.json"
needs_locomo = pytest.mark.skipif(
    not LOCOMO.exists(), reason=f"LoCoMo is not at {LOCOMO}; see the README's data section"
)


def turn(number: int, text: Any = "hello", **more: Any) -> dict[str, Any]:
    time = f"2026-03-02T09:{number:02}:00+08:00"
    return {
        "id": f"t{number:03}",
        "session": "s01",
        "speaker": "Ann",
        "role": "user",
        "time": time,
        "text": text,
    } | more


def write(folder: Path, value: Any, name: str = "story.json") -> Path:
    path = folder / name
    path.write_text(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), "utf-8", newline="")
    return path


def ours(*turns: dict[str, Any], **head: Any) -> dict[str, Any]:
    return {"format": "amem-story/1", "turns": list(turns)} | head


# amem-story/1


def test_our_own_format_is_read_whole(tmp_path: Path) -> None:
    events = [{"id": "e1", "title": "laptop"}]
    path = write(
        tmp_path, ours(turn(1, event="e1"), turn(2), title="T", language="en", user={"name": "A"}, events=events)
    )
    read = load(path)
    assert (read.title, read.language, read.user, read.events[0].title) == ("T", "en", {"name": "A"}, "laptop")
    assert [(t.id, t.event) for t in read.turns] == [("t001", "e1"), ("t002", None)]
    assert read.skipped == []


def test_a_story_that_was_written_reads_the_same_again(tmp_path: Path) -> None:
    first = load(write(tmp_path, ours(turn(1), turn(2, " "))))
    assert first.skipped
    assert load(write(tmp_path, first.model_dump_json(), "again.json")) == first


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.characters(exclude_categories=["Cs"])).filter(lambda text: bool(text.strip())))
def test_any_text_comes_through_a_file_unchanged(tmp_path: Path, text: str) -> None:
    assert load(write(tmp_path, ours(turn(1, text)))).turns[0].text == text


@pytest.mark.parametrize(
    "text", ["字" * 60_000, "👩‍👩‍👧‍👦 mixed 混合 текст ไทย\u2028\r\n\tend ", "a\x00b", "e\u0301", "Ann: hi\nBen: hi"]
)
def test_long_mixed_and_odd_text_is_kept(tmp_path: Path, text: str) -> None:
    assert load(write(tmp_path, json.dumps(ours(turn(1, text))))).turns[0].text == text


def test_half_a_surrogate_pair_becomes_the_replacement_character(tmp_path: Path) -> None:
    path = write(
        tmp_path, '{"format": "amem-story/1", "title": "\\udc00", "turns": [' + json.dumps(turn(1, "a\ud83d 😀")) + "]}"
    )
    read = load(path)
    assert read.turns[0].text == "a\ufffd 😀"
    assert read.title == "\ufffd"


@pytest.mark.parametrize("blank", ["", "   \n", None])
def test_a_turn_without_text_is_skipped_and_said(tmp_path: Path, blank: str | None) -> None:
    read = load(write(tmp_path, ours(turn(4), turn(5, blank), turn(6))))
    assert [t.id for t in read.turns] == ["t004", "t006"]
    assert read.skipped == ["turn t005 of story.json has no text"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (ours(), "story.json holds no turns"),
        ({"format": "amem-story/1"}, "story.json holds no turns"),
        (ours(turn(1, ""), turn(2, None)), "holds no turns with text, 2 without"),
        (
            ours(turn(1), turn(2), turn(3, id="t001")),
            "turns 1 and 3 of story.json share the id 't001'; make ids unique",
        ),
        (
            ours(turn(1, role="boss")),
            "turn t001 of story.json has the role 'boss'; it must be 'user', 'assistant' or 'other'",
        ),
        (
            ours(turn(1, time="2026-03-02 09:00")),
            "turn t001 of story.json has the time '2026-03-02 09:00'; write it with a zone",
        ),
        (ours(turn(1, time="soon")), "turn t001 of story.json has the time 'soon'; write it with a zone"),
        (ours(turn(1, mood="sad")), "turn t001 of story.json has the unknown field 'mood'; remove it"),
        (ours({"id": "t001", "session": "s", "text": "x"}), "turn t001 of story.json has no 'speaker'; add it"),
        (ours({"id": "t7", "session": "s", "speaker": "x"}), "turn t7 of story.json has no 'text'; add it"),
        (ours(turn(1, 5)), "turn t001 of story.json has the text 5: input should be a valid string"),
        (ours(turn(1, speaker=" ")), "turn t001 of story.json has the speaker ' '"),
        ({"format": "amem-story/1", "turns": [turn(1), "hi"]}, "turn t002 of story.json is 'hi'; it must be an object"),
        (ours(turn(1), language="fr"), "story.json has the language 'fr'; it must be 'zh', 'en' or 'und'"),
        (ours(turn(1), events=[{"id": "e1"}]), "story.json has no 'events.0.title'; add it"),
        (ours(turn(1), format="amem-story/2"), "story.json has the format 'amem-story/2'; it must be 'amem-story/1'"),
    ],
)
def test_a_fault_in_a_story_is_named_with_file_turn_and_remedy(tmp_path: Path, value: Any, message: str) -> None:
    with pytest.raises(StoryError) as caught:
        load(write(tmp_path, value))
    assert message in str(caught.value)


def test_keys_of_a_file_cannot_clash_with_our_own_arguments(tmp_path: Path) -> None:
    assert load(write(tmp_path, ours(turn(1), name="x", raw=1, head={}, skipped=["earlier"]))).skipped == ["earlier"]


# files


def test_a_missing_file_a_folder_and_an_empty_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(StoryError, match=r"there is no file '.*gone\.json'; give the path"):
        load(tmp_path / "gone.json")
    with pytest.raises(StoryError, match="is a folder; give the path of a file in it"):
        load(tmp_path)
    for text in ("", " \n\n"):
        with pytest.raises(StoryError, match=r"story\.json is empty"):
            load(write(tmp_path, text))
    with pytest.raises(StoryError, match="cannot be read"):
        load("a\0b")
    with pytest.raises(StoryError, match="cannot be read"):
        load("x" * 5000)


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="file rights as tested here are those of POSIX")
def test_a_file_without_permission_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, ours(turn(1)))
    path.chmod(0)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)  # root may read everything
    try:
        with pytest.raises(StoryError, match=r"no permission to read '.*story\.json'"):
            load(path)
    finally:
        if root:
            os.seteuid(0)


def test_a_file_that_is_not_utf8_is_named_with_the_byte(tmp_path: Path) -> None:
    path = tmp_path / "gbk.txt"
    path.write_bytes(b"abc" + "小李：你好".encode("gbk"))  # the first two bytes of GBK happen to be UTF-8
    with pytest.raises(StoryError, match=r"gbk\.txt is not UTF-8 at byte 5 \(.*save it as UTF-8"):
        load(path)
    path.write_bytes(codecs.BOM_UTF8 + b"abc\xff")
    with pytest.raises(StoryError, match="not UTF-8 at byte 6"):
        load(path)
    path.write_bytes(codecs.BOM_UTF16_LE + "ab".encode("utf-16-le") + b"\x00")
    with pytest.raises(StoryError, match="not UTF-16 at byte 6"):
        load(path)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_byte_order_marks_are_understood(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "marked"
    for text in (json.dumps(ours(turn(1, "押金")), ensure_ascii=False), "小李：押金\n助手：好\n"):
        path.write_bytes(text.encode(encoding))
        assert load(path).turns[0].text == "押金"


def test_truncated_json_is_half_a_file_with_line_and_column(tmp_path: Path) -> None:
    whole = json.dumps(ours(turn(1), turn(2)), indent=1)
    for cut in (whole[:-1], whole[: whole.index('"speaker"') + 4], whole[: whole.index("hello") + 2]):
        with pytest.raises(StoryError, match=r"story\.json is half a JSON file and breaks off at line \d+, column \d+"):
            load(write(tmp_path, cut))
    last = whole[:-1].count("\n") + 1
    with pytest.raises(StoryError, match=f"line {last}, column 1 "):
        load(write(tmp_path, whole[:-1]))


def test_wrong_json_is_named_with_line_and_column(tmp_path: Path) -> None:
    with pytest.raises(StoryError, match=r"is not valid JSON at line 2, column 3 .*copy or export it again"):
        load(write(tmp_path, '{"a": 1,\n  b: 2}'))
    with pytest.raises(StoryError, match="JSON"):
        load(write(tmp_path, "[" * 100_000))
    with pytest.raises(StoryError, match="JSON"):
        load(write(tmp_path, '{"a": ' + "1" * 5000 + "}"))


@pytest.mark.parametrize(
    "text", ["just some prose\nwith lines", '{"a": 1}', "[1, 2]", "[[]]", '"text"', "a,b\n1,2\n", "{}"]
)
def test_an_unknown_format_is_told_the_known_ones(tmp_path: Path, text: str) -> None:
    known = "amem-story/1 JSON, LoCoMo JSON, OpenAI messages JSON or JSONL, ChatGPT export, 'name: text' transcript"
    with pytest.raises(StoryError) as caught:
        load(write(tmp_path, text))
    assert "story.json" in str(caught.value) and known in str(caught.value)


@pytest.mark.parametrize("language", ["zh", "en"])
def test_a_bundled_story_is_loaded_or_its_absence_explained(language: str) -> None:
    if (Path(__file__).parents[1] / f"data/story_{language}.json").exists():
        assert load(language).language == language
    else:
        with pytest.raises(StoryError, match=f"bundled story data/story_{language}.json needs a checkout"):
            load(language)


def test_a_path_called_zh_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StoryError, match="no file 'zh'"):
        load(Path("zh"))


# LoCoMo


@needs_locomo
def test_locomo_conversations_are_picked_by_id_or_index() -> None:
    read = load(f"{LOCOMO}#conv-26")
    assert read == load(f"{LOCOMO}#0")
    assert (len(read.turns), read.title, read.language) == (419, "conv-26", "en")
    first = read.turns[0]
    assert (first.id, first.session, first.speaker, first.role) == ("D1:1", "session_1", "Caroline", "other")
    assert first.time == datetime(2023, 5, 8, 13, 56, tzinfo=UTC)
    assert first.text == "Hey Mel! Good to see you! How have you been?"


@needs_locomo
def test_locomo_is_whole_in_order_and_with_its_photos() -> None:
    talks = json.loads(LOCOMO.read_text("utf-8"))
    total = 0
    for number, talk in enumerate(talks):
        read = load(f"{LOCOMO}#{number}")
        said = {t["dia_id"]: t for key, v in talk["conversation"].items() if isinstance(v, list) for t in v}
        assert {t.id for t in read.turns} == set(said) and not read.skipped
        sessions = [int(t.session.removeprefix("session_")) for t in read.turns]
        assert sessions == sorted(sessions)
        for t in read.turns:
            photo = said[t.id].get("blip_caption")
            assert t.text == said[t.id]["text"] + (f" [shares a photo: {photo}]" if photo else "")
            assert t.time is not None
        total += len(read.turns)
    assert total == 5882


@needs_locomo
@pytest.mark.parametrize(("choice", "said"), [("#conv-1", "none of them 'conv-1'"), ("#10", "none"), ("#-1", "none")])
def test_a_choice_that_is_not_there_names_the_ones_that_are(choice: str, said: str) -> None:
    with pytest.raises(StoryError) as caught:
        load(f"{LOCOMO}{choice}")
    message = str(caught.value)
    assert said in message and "locomo10.json#conv-26" in message and "conv-30, conv-41" in message


@needs_locomo
def test_all_conversations_come_in_together_and_apart() -> None:
    read = load(LOCOMO)
    assert len(read.turns) == 5882 and len(read.events) == 10
    one = [turn for turn in read.turns if turn.event == "conv-30"]
    alone = load(f"{LOCOMO}#conv-30").turns
    assert [t.text for t in one] == [t.text for t in alone]
    assert [t.id for t in one] == [f"conv-30:{t.id}" for t in alone]
    assert {t.session.split(":")[0] for t in one} == {"conv-30"}


@needs_locomo
def test_one_conversation_or_its_inside_needs_no_choice(tmp_path: Path) -> None:
    talk = json.loads(LOCOMO.read_text("utf-8"))[1]
    for value in (talk, talk["conversation"], [talk]):
        assert len(load(write(tmp_path, value)).turns) == 369


def test_a_locomo_session_with_odd_parts_keeps_what_there_is(tmp_path: Path) -> None:
    said = {"speaker": "A", "dia_id": "D1:1", "text": "hi"}
    photo = {"speaker": "A", "dia_id": "D2:1", "text": None, "blip_caption": "a cat"}
    value = {"session_10": [said], "session_2": [photo], "session_2_date_time": "one fine day", "session_3": None}
    read = load(write(tmp_path, value))
    assert [(t.session, t.time) for t in read.turns] == [("session_2", None), ("session_10", None)]
    assert read.turns[0].text.strip() == "[shares a photo: a cat]"
    assert len(read.skipped) == 1 and "'one fine day' of session_2 of story.json" in read.skipped[0]
    with pytest.raises(StoryError, match=r"turn 1 in session_1 of story\.json has no 'dia_id'"):
        load(write(tmp_path, {"session_1": [{"speaker": "A", "text": "x"}]}))


def test_a_choice_where_there_is_none_is_an_error(tmp_path: Path) -> None:
    for text in (json.dumps(ours(turn(1))), "Ann: hi\nBen: ho\n"):
        write(tmp_path, text)
        with pytest.raises(StoryError, match="holds no LoCoMo conversations to choose 'x' from; leave '#x' out"):
            load(f"{tmp_path / 'story.json'}#x")


def test_a_number_sign_in_a_real_name_is_part_of_the_name(tmp_path: Path) -> None:
    assert load(write(tmp_path, ours(turn(1)), "a#1.json")).turns


# OpenAI messages

SAID = [
    {"role": "system", "content": "You are kind."},
    {"role": "user", "content": " hi\n", "name": "Ann", "timestamp": "2026-03-02T09:00:00"},
    {
        "role": "assistant",
        "content": [{"type": "text", "text": "Look:"}, {"type": "image_url", "image_url": {"url": "x"}}],
    },
    {"role": "tool", "content": "42", "tool_call_id": "c"},
    {"role": "assistant", "content": None, "tool_calls": []},
    {
        "role": "user",
        "content": [{"type": "input_text", "text": "bye"}, {"type": "input_file"}],
        "created_at": 1772442000,
    },
]
SPOKEN = [("user", "Ann", " hi\n"), ("assistant", "assistant", "Look:\n[image]"), ("user", "user", "bye\n[file]")]


@pytest.mark.parametrize(
    "text",
    [json.dumps(SAID, indent=1), json.dumps({"messages": SAID}), "\n".join(map(json.dumps, SAID)) + "\n\n"],
    ids=["list", "object", "jsonl"],
)
def test_openai_messages_are_read_in_every_shape(tmp_path: Path, text: str) -> None:
    read = load(write(tmp_path, text, "chat.anything"))
    assert [(t.role, t.speaker, t.text) for t in read.turns] == SPOKEN
    assert [(t.id, t.session, t.event) for t in read.turns] == [(f"t00{n}", "s01", None) for n in (1, 2, 4)]
    assert [t.time for t in read.turns] == [
        datetime(2026, 3, 2, 9, tzinfo=UTC),
        None,
        datetime(2026, 3, 2, 9, tzinfo=UTC),
    ]
    assert read.skipped == [
        "messages of chat.anything that are no utterances were left out: 1 system, 1 tool",
        "turn t003 of chat.anything has no text",
    ]


def test_each_line_or_item_of_messages_is_a_session(tmp_path: Path) -> None:
    talks = [{"messages": [{"role": "user", "content": f"line\u2028 {n}"}]} for n in range(3)]
    for text in ("\n".join(json.dumps(talk, ensure_ascii=False) for talk in talks), json.dumps(talks)):
        read = load(write(tmp_path, text))
        assert [(t.session, t.text) for t in read.turns] == [(f"s0{n + 1}", f"line\u2028 {n}") for n in range(3)]


def test_one_message_alone_is_a_dialogue(tmp_path: Path) -> None:
    assert load(write(tmp_path, '{"role": "user", "content": "hi"}')).turns[0].text == "hi"


def test_a_time_with_a_zone_keeps_its_instant(tmp_path: Path) -> None:
    read = load(write(tmp_path, [{"role": "user", "content": "hi", "time": "2026-03-02T09:00:00+08:00"}]))
    assert read.turns[0].time == datetime(2026, 3, 2, 1, tzinfo=UTC)


@pytest.mark.parametrize("time", ["yesterday", True, "2026-13-40", 1e300])
def test_a_time_that_cannot_be_read_is_said_and_the_turn_kept(tmp_path: Path, time: Any) -> None:
    read = load(write(tmp_path, [{"role": "user", "content": "hi", "time": time}]))
    assert read.turns[0].time is None
    assert len(read.skipped) == 1 and "of message 1 of story.json cannot be read" in read.skipped[0]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            [{"role": "user", "content": "a"}, {"role": "boss", "content": "b"}],
            "message 2 of story.json has the unknown role 'boss'",
        ),
        ([{"role": "user", "content": "a"}, "hi"], "message 2 of story.json is 'hi'; it must be an object"),
        ([{"role": "user", "content": "a"}, {"content": "b"}], "message 2 of story.json has no 'role'; add it"),
        ([{"role": "user", "content": 5}], "turn t001 of story.json has the text 5"),
        ([{"messages": []}, {"messages": ["x"]}], "message 1 of s02 in story.json is 'x'"),
        ({"messages": []}, "story.json holds no turns"),
        ([], "story.json holds no turns"),
        ([{"role": "system", "content": "x"}], "story.json holds no turns"),
    ],
)
def test_a_fault_in_messages_is_named(tmp_path: Path, value: Any, message: str) -> None:
    with pytest.raises(StoryError) as caught:
        load(write(tmp_path, value))
    assert message in str(caught.value)


def test_a_broken_line_of_jsonl_is_named(tmp_path: Path) -> None:
    good = '{"role": "user", "content": "hi"}\n'
    with pytest.raises(StoryError, match="half a JSON file and breaks off at line 3, column 29"):
        load(write(tmp_path, good + good + good[:28]))
    with pytest.raises(StoryError, match="not valid JSON at line 2, column 1"):
        load(write(tmp_path, good + "oops\n" + good))


# ChatGPT exports


def node(key: str, parent: str | None, role: str = "", text: Any = "", **message: Any) -> dict[str, Any]:
    said = {"author": {"role": role}, "content": {"content_type": "text", "parts": [text]}, **message} if role else None
    return {"id": key, "parent": parent, "children": [], "message": said}


def export(title: str, *nodes: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"title": title, "mapping": {n["id"]: n for n in nodes}, **more}


TREE = [
    node("root", None),
    node("sys", "root", "system", ""),
    node("q", "sys", "user", "How are you?", create_time=1772442000.5),
    node("old", "q", "assistant", "Bad.", create_time=1772442001.0),
    node("new", "q", "assistant", "Fine.", create_time=1772442002.0),
    node("hid", "new", "user", "profile", metadata={"is_visually_hidden_from_conversation": True}),
    node("call", "hid", "assistant", "search()", recipient="browser"),
    node("tool", "call", "tool", "found"),
    node("end", "tool", "assistant", "Found it."),
]


def test_the_current_branch_of_a_chatgpt_export_is_read(tmp_path: Path) -> None:
    read = load(write(tmp_path, [export("Moods", *TREE, current_node="end")], "conversations.json"))
    assert [(t.role, t.text) for t in read.turns] == [
        ("user", "How are you?"),
        ("assistant", "Fine."),
        ("assistant", "Found it."),
    ]
    assert read.turns[0].time == datetime.fromtimestamp(1772442000.5, UTC)
    assert read.title == "Moods" and read.turns[0].event == read.events[0].id
    left_out = "1 system, 2 hidden, 1 tool"
    assert read.skipped == [f"messages of conversations.json that are no utterances were left out: {left_out}"]
    other = load(write(tmp_path, export("Moods", *TREE, current_node="old")))
    assert [t.text for t in other.turns] == ["How are you?", "Bad."]


def test_without_a_current_node_the_deepest_newest_branch_is_taken(tmp_path: Path) -> None:
    assert [t.text for t in load(write(tmp_path, export("x", *TREE[:5]))).turns] == ["How are you?", "Fine."]
    assert load(write(tmp_path, export("x", *TREE, current_node="gone"))).turns[-1].text == "Found it."


def test_conversations_are_sessions_and_events_oldest_first(tmp_path: Path) -> None:
    late = export("late", node("a", None, "user", "second"), create_time=20.0, current_node="a")
    early = export("early", node("a", None, "user", "first"), create_time=10.0, current_node="a")
    read = load(write(tmp_path, [late, early]))
    assert [(t.session, t.event, t.text) for t in read.turns] == [("s01", "e01", "first"), ("s02", "e02", "second")]
    assert [event.title for event in read.events] == ["early", "late"]


def test_images_and_rings_in_an_export_do_no_harm(tmp_path: Path) -> None:
    picture = node("a", "b", "user")
    picture["message"]["content"] = {
        "content_type": "multimodal_text",
        "parts": [{"content_type": "image_asset_pointer"}, "See?"],
    }
    thought = node("b", "a", "assistant")
    thought["message"]["content"] = {"content_type": "thoughts", "thoughts": []}
    read = load(write(tmp_path, export("ring", picture, thought, current_node="a")))
    assert [t.text for t in read.turns] == ["[image]\nSee?"]
    assert read.skipped == ["messages of story.json that are no utterances were left out: 1 hidden"]


def test_a_broken_export_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoryError, match=r"conversation 1 of story\.json has the mapping"):
        load(write(tmp_path, {"title": "x", "mapping": []}))
    with pytest.raises(StoryError, match=r"story\.json holds no turns"):
        load(write(tmp_path, {"title": "x", "mapping": {}}))


# transcripts


def test_a_transcript_is_read_with_times_roles_and_following_lines(tmp_path: Path) -> None:
    text = (
        "[2026-03-02 09:12] 小李：房东不退押金\r\n"
        "  一共 3200\r\n"
        "\r\n"
        "就这些 \r\n"
        "\r\n"
        "2026-03-02 09:13:30 助手: 看 http://example.org 第 10:30 条\r\n"
        "User: ok\r\n"
    )
    read = load(write(tmp_path, text, "chat.txt"))
    assert [(t.speaker, t.role, t.text) for t in read.turns] == [
        ("小李", "other", "房东不退押金\n  一共 3200\n\n就这些 "),
        ("助手", "assistant", "看 http://example.org 第 10:30 条"),
        ("User", "user", "ok"),
    ]
    assert [t.time for t in read.turns[:2]] == [
        datetime(2026, 3, 2, 9, 12, tzinfo=UTC),
        datetime(2026, 3, 2, 9, 13, 30, tzinfo=UTC),
    ]
    assert (read.turns[2].time, read.turns[2].id, read.turns[2].session) == (None, "t003", "s01")
    assert read.skipped == []


def test_addresses_and_clock_times_name_no_speaker(tmp_path: Path) -> None:
    text = "Ann: see\nhttp://example.org/a\n10:30 would do\nat 10:45 too\nBen: fine\nAnn: ok\nUser 2: me too"
    read = load(write(tmp_path, text))
    assert [t.speaker for t in read.turns] == ["Ann", "Ben", "Ann", "User 2"]
    assert read.turns[0].text == "see\nhttp://example.org/a\n10:30 would do\nat 10:45 too"


def test_a_name_on_a_line_of_its_own_and_a_preface_are_understood(tmp_path: Path) -> None:
    read = load(write(tmp_path, "Our chat\nAnn:\nhi there\nBen:  two spaces\nAnn:\n"))
    assert [t.text for t in read.turns] == ["hi there", " two spaces"]
    assert read.skipped == ["line 1 of story.json stands before the first name", "turn t003 of story.json has no text"]


@pytest.mark.parametrize(
    "text",
    [
        "Ann: alone",
        "Ann: hi\nand so\non it\ngoes\nBen: ho",
        f"{'n' * 31}: x\n{'m' * 31}: y",
        "http://a.org\nhttp://b.org",
        "10:30\n11:30",
        "09：30\n10：30",
    ],
)
def test_text_with_too_few_names_is_no_transcript(tmp_path: Path, text: str) -> None:
    with pytest.raises(StoryError, match="in no format known here"):
        load(write(tmp_path, text))


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("我", "user"),
        ("HUMAN", "user"),
        ("用户", "user"),
        ("ChatGPT", "assistant"),
        ("bot", "assistant"),
        ("Ann", "other"),
    ],
)
def test_names_give_roles(tmp_path: Path, name: str, role: str) -> None:
    assert load(write(tmp_path, f"{name}: hi\nBen: ho")).turns[0].role == role


# language


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("房东不退押金", "zh"),
        ("the MacBook 屏幕碎了一条线不知道怎么办", "zh"),
        ("hello 世界", "en"),
        ("été", "en"),
        ("привет", "und"),
        ("123 👍", "und"),
        ("", "und"),
    ],
)
def test_the_language_is_guessed_from_the_letters(text: str, language: str) -> None:
    assert story.language_of(text) == language


def test_a_format_without_language_gets_the_guess(tmp_path: Path) -> None:
    assert load(write(tmp_path, "小李：房东不退押金\n助手：请看合同")).language == "zh"
    assert load(write(tmp_path, ours(turn(1, "hello")))).language == "en"


# generation


def written(turns: int = 60, events: int = 6) -> dict[str, Any]:
    begin = datetime(2026, 3, 2, 9, tzinfo=UTC)
    return {
        "title": "A month",
        "user": "Ann",
        "events": [{"id": f"e{n + 1}", "title": f"matter {n + 1}"} for n in range(events)],
        "turns": [
            {
                "session": f"s{n // 4 + 1:02}",
                "event": None if n % 7 == 6 else f"e{n % events + 1}",
                "speaker": ("Ann", "assistant")[n % 2],
                "role": ("user", "assistant")[n % 2],
                "time": (begin + timedelta(hours=12 * n)).isoformat(),
                "text": f"line {n}",
            }
            for n in range(turns)
        ],
    }


@pytest.mark.parametrize("language", ["zh", "en"])
def test_a_request_is_a_whole_chat_completion_body(language: str) -> None:
    request = generate.generation_request(language, days=28, turns=80, model="tiny")
    json.dumps(request)
    prompt = request["messages"][0]["content"]
    assert "28" in prompt and "80" in prompt and "$" not in prompt and prompt.count("  - e") == 6
    assert {"model", "messages", "temperature", "seed", "response_format"} == set(request)
    assert story.language_of(prompt) == language
    own = generate.generation_request(language, events=["a leaking $roof"])
    assert "  - e1: a leaking $roof\n" in own["messages"][0]["content"]


def test_every_object_of_the_schema_is_closed_and_complete_as_strict_endpoints_demand() -> None:
    schema = generate.generation_request("en")["response_format"]["json_schema"]["schema"]
    for part in [schema, *schema["$defs"].values()]:
        assert part["additionalProperties"] is False
        assert part["required"] == list(part["properties"])


def test_a_request_in_another_language_is_refused() -> None:
    with pytest.raises(StoryError, match="no prompt for a story in 'fr'"):
        generate.generation_request("fr")


def test_a_good_reply_becomes_a_story() -> None:
    read = generate.parse_generation(f"Here:\n```json\n{json.dumps(written())}\n```", "en")
    assert (len(read.turns), len(read.events), read.user, read.language) == (60, 6, {"name": "Ann"}, "en")
    assert read.turns[0].id == "t001" and read.turns[0].text == "line 0"


def change(path: str, value: Any) -> str:
    reply = written()
    at: Any = reply
    *way, last = path.split(".")
    for key in way:
        at = at[int(key)] if key.isdigit() else at[key]
    if value is ...:
        del at[last]
    else:
        at[last] = value
    return json.dumps(reply)


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (json.dumps(written(turns=59)), "59 of 60 turns"),
        (change("turns.3.text", " "), "59 of 60 turns"),
        (json.dumps(written(events=5)), "5 of 6 events"),
        (change("turns", ...), "has no 'turns'"),
        (change("turns.4.time", ...), "has no 'turns.4.time'"),
        (change("turns.4.time", None), "has the turns.4.time None; write it with a zone"),
        (change("turns.4.time", "2026-03-04T09:00:00"), "turns.4.time '2026-03-04T09:00:00'; write it with a zone"),
        (
            change("turns.4.time", "2026-03-01T09:00:00Z"),
            "turn 5 of the model's reply (2026-03-01 09:00:00+00:00) is dated before",
        ),
        (change("turns.4.role", "narrator"), "has the turns.4.role 'narrator'; it must be 'user' or 'assistant'"),
        (change("turns.4.event", "e9"), "turns of the event 'e9', which it does not list"),
        (change("events", [{"id": "e1"}]), "has no 'events.0.title'"),
        (json.dumps(written()["turns"]), "it must be an object"),
        (json.dumps(written())[:-200], "holds no story: the reply's JSON"),
        ("I cannot.", "holds no story: the reply holds no JSON"),
    ],
)
def test_what_a_reply_lacks_is_named(reply: str, message: str) -> None:
    with pytest.raises(StoryError) as caught:
        generate.parse_generation(reply, "en")
    assert message in str(caught.value) and "the model's reply" in str(caught.value)


def test_a_reply_of_one_role_only_is_refused() -> None:
    reply = written()
    for said in reply["turns"]:
        said["role"] = "user"
    with pytest.raises(StoryError, match="no turn of the assistant"):
        generate.parse_generation(json.dumps(reply), "en")


@contextmanager
def endpoint(content: str) -> Iterator[tuple[str, list[Any]]]:
    asked: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            choice = {"message": {"role": "assistant", "content": content}, "finish_reason": "stop"}
            data = json.dumps({"choices": [choice]}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


def test_a_story_is_generated_over_a_real_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with endpoint(json.dumps(written(turns=8, events=2))) as (url, asked):
        client = llm.Client(url, model="tiny", timeout=5, retries=0)
        request = generate.generation_request("en", events=["one", "two"], turns=8, model=client.model)
        response = client.complete(request)
    read = generate.parse_generation(llm.text_of(response), "en", events=2, turns=8)
    with pytest.raises(StoryError, match="2 of 6 events"):
        generate.parse_generation(llm.text_of(response), "en", turns=8)
    assert asked[0] == request and request["model"] == "tiny"
    assert llm.text_of(response) == json.dumps(written(turns=8, events=2))
    assert len(read.turns) == 8
