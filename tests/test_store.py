"""The store: one transaction a turn, versions, deletion that reaches everything, queries of any characters."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from amem.notes import Change, Link, Note, Turn
from amem.store import Store, StoreError, TurnResult

WHEN = datetime(2026, 3, 2, tzinfo=UTC)


def turn(name: str = "t001", text: str = "我花了6299元买电脑") -> Turn:
    return Turn(id=name, session="s01", speaker="我", role="user", text=text, time=WHEN)


def note(name: str = "n1", content: str = "我花了6299元买电脑", turn_id: str = "t001") -> Note:
    return Note(id=name, content=content, turn_id=turn_id, session="s01", speaker="我", span=(0, len(content)))


def result(name: str, *notes: Note, **more: object) -> TurnResult:
    rows = np.eye(4, dtype=np.float32)[: len(notes)]
    return TurnResult(turn(name), list(notes), rows, **more)  # type: ignore[arg-type]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "m.sqlite")


def test_what_is_stored_comes_back_unchanged(store: Store, tmp_path: Path) -> None:
    links = [Link(source="n1", target="n2", kind="similar", weight=0.9, reason="cosine 0.90")]
    store.add(result("t001", note("n1"), note("n2", "emoji 👨‍👩‍👧 and a NUL \0 inside"), links=links), 0)
    store.close()
    again = Store.open(tmp_path / "m.sqlite")
    assert again.turns() == [turn()]
    assert [n.content for n in again.notes()] == ["我花了6299元买电脑", "emoji 👨‍👩‍👧 and a NUL \0 inside"]
    assert again.links() == links
    assert np.array_equal(again.vectors(["n2", "n1"]), np.eye(4, dtype=np.float32)[[1, 0]])
    assert again.result("t001").links == links


def test_a_turn_is_stored_whole_or_not_at_all(store: Store) -> None:
    broken = result("t001", note("n1"), note("n1"))
    with pytest.raises(StoreError, match="nothing of this step was stored"):
        store.add(broken, 0)
    assert store.turns() == [] and store.notes() == [] and store.text_search("电脑") == []
    store.add(result("t001", note("n1")), 0)


def test_a_link_to_a_note_that_does_not_exist_is_refused(store: Store) -> None:
    invented = [Link(source="n1", target="nowhere", kind="similar", weight=0.5, reason="r")]
    with pytest.raises(StoreError):
        store.add(result("t001", note("n1"), links=invented), 0)


def test_superseding_writes_a_version_and_forgetting_its_cause_takes_it_back(store: Store) -> None:
    store.add(result("t001", note("n1")), 0)
    link = Link(source="n2", target="n1", kind="supersedes", weight=0.9, reason="corrected")
    store.add(result("t002", note("n2", turn_id="t002"), links=[link], superseded=[("n1", WHEN, "corrected")]), 1)
    assert store.note("n1").valid_to == WHEN
    assert [v["reason"] for v in store.versions("n1")] == ["extracted", "corrected"]
    assert store.versions("n1")[0]["note"].valid_to is None
    assert store.result("t002").superseded == [("n1", WHEN, "corrected")]
    store.forget("t002")
    assert store.note("n1").valid_to is None and len(store.versions("n1")) == 1


def evolved(store: Store) -> None:
    """n1 of t001, ended by t002, then given a pointer by t003."""
    store.add(result("t001", note("n1")), 0)
    link = Link(source="n2", target="n1", kind="supersedes", weight=0.9, reason="corrected")
    store.add(result("t002", note("n2", turn_id="t002"), links=[link], superseded=[("n1", WHEN, "corrected")]), 1)
    change = Change(note_id="n1", keywords=["电脑"], context="; later: t003", reason="near n3")
    store.add(result("t003", note("n3", turn_id="t003"), evolved=[change]), 2)


def test_evolution_writes_a_version_with_its_reason_and_its_turn(store: Store) -> None:
    evolved(store)
    assert [(v["reason"], v["turn_id"]) for v in store.versions("n1")] == [
        ("extracted", "t001"), ("corrected", "t002"), ("near n3", "t003"),
    ]  # fmt: skip
    now = store.note("n1")
    assert (now.keywords, now.context, now.valid_to) == (["电脑"], "; later: t003", WHEN)
    assert store.versions("n1")[0]["note"] == note("n1"), "the first version stays as it was"
    assert store.result("t003").evolved[0].keywords == ["电脑"]


def test_undo_takes_back_one_version_and_leaves_what_came_on_top(store: Store) -> None:
    evolved(store)
    now = store.undo("n1", 2)
    assert now == store.note("n1") and now.valid_to is None and now.context == "; later: t003"
    last = store.versions("n1")[-1]
    assert (last["version"], last["reason"], last["turn_id"], last["undoes"]) == (4, "undo of 2", "t002", 2)
    assert [link.kind for link in store.links()] == [], "the link that ended it is gone"
    assert store.undo("n1", 3) == note("n1")


def test_an_undo_can_be_undone(store: Store) -> None:
    evolved(store)
    before, links = store.note("n1"), store.links()
    store.undo("n1", 2)
    assert store.undo("n1", 4) == before and store.links() == links


def test_what_cannot_be_undone_says_why(store: Store) -> None:
    evolved(store)
    with pytest.raises(StoreError, match="forget its turn t001"):
        store.undo("n1", 1)
    with pytest.raises(KeyError, match="it has 1, 2, 3"):
        store.undo("n1", 9)
    with pytest.raises(KeyError, match="no such note"):
        store.undo("nowhere", 2)
    store.undo("n1", 2)
    with pytest.raises(StoreError, match="taken back already"):
        store.undo("n1", 2)


def test_forgetting_takes_back_what_the_turn_caused_under_later_versions(store: Store) -> None:
    evolved(store)
    store.forget("t002")
    now = store.note("n1")
    assert now.valid_to is None and now.context == "; later: t003" and now.keywords == ["电脑"]
    assert [v["version"] for v in store.versions("n1")] == [1, 3]
    assert all(v["note"].valid_to is None for v in store.versions("n1"))
    store.forget("t003")
    assert store.note("n1") == note("n1") and len(store.versions("n1")) == 1


def test_forgetting_the_cause_of_an_undone_version_takes_the_undo_along(store: Store) -> None:
    evolved(store)
    store.undo("n1", 2)
    store.forget("t002")
    assert [v["version"] for v in store.versions("n1")] == [1, 3]


def test_forgetting_cleans_the_links_in_the_records_of_other_turns(store: Store) -> None:
    evolved(store)
    store.forget("t001")
    assert store.result("t002").links == [] == store.result("t002").superseded
    assert store.result("t003").evolved == []


def test_a_database_of_the_schema_before_opens_with_its_history(store: Store, tmp_path: Path) -> None:
    store.add(result("t001", note("n1")), 0)
    store.add(result("t002", note("n2", turn_id="t002"), superseded=[("n1", WHEN, "corrected")]), 1)
    for column in ("change", "undoes"):
        store._db.execute(f"ALTER TABLE versions DROP COLUMN {column}")
    store._db.execute("UPDATE meta SET value = '1' WHERE key = 'schema'")
    store.close()
    again = Store.open(tmp_path / "m.sqlite")
    assert again.result("t002").superseded == [("n1", WHEN, "corrected")]
    assert again.undo("n1", 2).valid_to is None


def check(store: Store) -> None:
    """No dangling links, no orphan rows, every note equal to its last version, every record readable."""
    ids = {n.id for n in store.notes()}
    assert all({link.source, link.target} <= ids for link in store.links())
    for table in ("versions", "vectors"):
        assert {i for (i,) in store._db.execute(f"SELECT note_id FROM {table}")} == ids
    rows = {seq for (seq,) in store._db.execute("SELECT rowid FROM fulltext")}
    assert rows == {seq for (seq,) in store._db.execute("SELECT seq FROM notes")}
    turns = {t.id for t in store.turns()}
    for n in store.notes():
        history = store.versions(n.id)
        assert history[-1]["note"] == n and {v["turn_id"] for v in history} <= turns
    for name in turns:
        made = store.result(name)
        assert all({link.source, link.target} <= ids for link in made.links)
        assert {i for i, _, _ in made.superseded} | {c.note_id for c in made.evolved} <= ids


STEP = st.tuples(st.sampled_from(["add", "add", "add", "undo", "forget"]), st.integers(0, 99), st.integers(0, 99))


@settings(max_examples=60, deadline=None)
@given(steps=st.lists(STEP, max_size=25))
def test_any_sequence_of_add_undo_and_forget_leaves_a_whole_store(
    steps: list[tuple[str, int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    with Store.open(tmp_path_factory.mktemp("any") / "m.sqlite") as store:
        for at, (what, a, b) in enumerate(steps):
            notes, turns = store.notes(), store.turns()
            if what == "forget" and turns:
                store.forget(turns[a % len(turns)].id)
            elif what == "undo" and notes:
                chosen = notes[a % len(notes)].id
                history = store.versions(chosen)
                version = history[b % len(history)]["version"]
                try:
                    store.undo(chosen, version)
                except StoreError as error:
                    assert version == 1 or "already" in str(error)
            elif what == "add":
                new = note(f"n{at}", f"第{at}条", f"t{at}")
                olds = list(dict.fromkeys(notes[i % len(notes)].id for i in (a, b))) if notes else []
                links = [Link(source=new.id, target=old, kind="supersedes", weight=1, reason="r") for old in olds[:1]]
                gains = [
                    Change(note_id=old, keywords=[f"k{at}"], context=f"; later: t{at}", reason="e") for old in olds
                ]
                ends = [(old, WHEN, "r") for old in olds[:1]]
                store.add(result(f"t{at}", new, links=links, superseded=ends, evolved=gains), store.next_seq())
            check(store)
        for n in store.notes():
            first, *later = store.versions(n.id)
            for version in [v["version"] for v in later if v["undoes"] is None]:
                with suppress(StoreError):  # taken back already
                    store.undo(n.id, version)
            assert store.note(n.id) == first["note"]
        assert store.links() == []
        check(store)


def test_forgetting_a_turn_leaves_nothing_of_it(store: Store, tmp_path: Path) -> None:
    link = Link(source="n2", target="n1", kind="similar", weight=0.9, reason="r")
    store.add(result("t001", note("n1", "secret 31415")), 0)
    store.add(result("t002", note("n2", "other", turn_id="t002"), links=[link]), 1)
    store.forget("t001")
    assert [n.id for n in store.notes()] == ["n2"]
    assert store.links() == [] and store.text_search("31415") == []
    with sqlite3.connect(tmp_path / "m.sqlite") as db:
        for table in ("turns", "notes", "versions", "links", "vectors"):
            assert not [r for r in db.execute(f"SELECT * FROM {table}") if "n1" in map(str, r) or "31415" in str(r)]
    with pytest.raises(StoreError, match="no turn t001"):
        store.forget("t001")


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(query=st.text())
def test_any_string_is_a_valid_query(store: Store, query: str) -> None:
    if not store.turns():
        store.add(result("t001", note("n1"), note("n2", 'AND OR NOT NEAR( "x" * ^ : -')), 0)
    store.text_search(query)


@pytest.mark.parametrize("query", ["脑", "电脑", "６２９９", "6299", '"电脑" AND (', "電腦电脑", "NEAR(电脑"])
def test_chinese_words_of_one_and_two_characters_and_full_width_are_found(store: Store, query: str) -> None:
    store.add(result("t001", note("n1"), note("n2", "天气不错")), 0)
    assert store.text_search(query)[0][0] == "n1"


def test_limit_gives_the_newest_notes_in_story_order(store: Store) -> None:
    for i in range(4):
        store.add(result(f"t{i}", note(f"n{i}", turn_id=f"t{i}")), i)
    assert [n.id for n in store.notes(limit=2)] == ["n2", "n3"]
    assert store.notes(session_id="other") == []


def test_another_models_vectors_are_refused_with_the_command_that_mends_it(store: Store) -> None:
    class Other:
        name, dim = "other", 8

    class First(Other):
        name, dim = "first", 4

    store.bind(First())  # type: ignore[arg-type]
    store.add(result("t001", note("n1")), 0)
    with pytest.raises(StoreError, match="python -m amem reembed"):
        store.bind(Other())  # type: ignore[arg-type]


def test_files_that_are_no_memory_are_named(tmp_path: Path) -> None:
    (tmp_path / "junk").write_bytes(b"not a database, but long enough to look at" * 50)
    with pytest.raises(StoreError, match="junk"):
        Store.open(tmp_path / "junk")
    with pytest.raises(StoreError, match="folder exists"):
        Store.open(tmp_path / "no" / "such" / "folder.sqlite")


def test_a_full_disk_is_an_error_and_what_was_stored_stays(store: Store) -> None:
    store.add(result("t001", note("n1")), 0)
    pages = store._db.execute("PRAGMA page_count").fetchone()[0]
    store._db.execute(f"PRAGMA max_page_count = {pages}")  # SQLite then answers as on a full disk
    with pytest.raises(StoreError, match="full"):
        store.add(result("t002", note("n2", "x" * 100_000, "t002")), 1)
    store._db.execute("PRAGMA max_page_count = 1000000")
    assert [t.id for t in store.turns()] == ["t001"]
    store.add(result("t002", note("n2", "x", "t002")), 1)


def test_two_writers_wait_for_each_other(tmp_path: Path) -> None:
    path = tmp_path / "m.sqlite"
    Store.open(path).close()
    code = (
        "import sys\nfrom amem.store import Store, TurnResult\nfrom amem.notes import Turn\n"
        "path, who, first = sys.argv[1], sys.argv[2], int(sys.argv[3])\nstore = Store.open(path)\n"
        "for i in range(40):\n"
        "    t = Turn(id=f'{who}{i}', session='s', speaker='a', text='x')\n"
        "    store.add(TurnResult(t), first + i)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    jobs = [
        subprocess.Popen([sys.executable, "-c", code, str(path), w, f], env=env) for w, f in (("a", "0"), ("b", "100"))
    ]
    assert [job.wait(60) for job in jobs] == [0, 0]
    assert len(Store.open(path).turns()) == 80
