"""Notes by rules: facts give notes, small talk gives none, each note knows where it stands and why."""

from __future__ import annotations

import itertools
import time
from datetime import datetime, timedelta

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from amem import evaluate, story
from amem.embed import Embedder
from amem.extract import Known, dates, extract, keywords, notes_of
from amem.notes import Scope, Turn

WHEN = datetime.fromisoformat("2026-03-04T20:00:00+08:00")  # a Wednesday


def turn(text: str, name: str = "t001", **more: object) -> Turn:
    fields = {"session": "s01", "speaker": "u", "role": "user", "time": WHEN, **more}
    return Turn(id=name, text=text, **fields)  # type: ignore[arg-type]


def fresh(embedder: Embedder) -> Known:
    return Known([], embedder.encode_document([]))


@pytest.mark.parametrize(
    "text",
    ["好的，谢谢你！", "哈哈哈哈", "早，在吗？", "嗯嗯，明白了。", "👌", "辛苦啦，晚安～", "怎么办呢？", "ok cool",
     "Haha yes!",
     "Thanks, that's great!", "Hi, how are you?", "Can they do that?", "Good night, talk soon."],
)  # fmt: skip
def test_small_talk_gives_no_note(text: str) -> None:
    assert notes_of(turn(text)) == []


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("早！我3月1日在数码城花6299元买了电脑。谢谢", "6299元"),
        ("房东说墙上有污渍，要扣两千块押金", "两千块"),
        ("先固定事实，再补证据，最后匹配法条。", "固定事实"),
        ("《民法典》第七百一十条说正常损耗不用赔。", "第七百一十条"),
        ("I bought the laptop on 3 March for £899.", "£899"),
        ("The landlord refused to return my deposit.", "refused"),
        ("Oh, and please text me instead, I can't take calls at work.", "text me"),
        ("Just like with the deposit, the dated photos decided it.", "Just like"),
    ],
)
def test_a_fact_gives_a_note_with_its_words_and_its_reasons(text: str, part: str) -> None:
    [found] = [n for n in notes_of(turn(text)) if part in n.content]
    assert found.why and found.tags
    assert text[slice(*found.span)] in text and text[slice(*found.span)] in found.content
    assert found.context.startswith("2026-03-04")


def test_several_facts_of_a_turn_become_notes_of_their_own() -> None:
    found = notes_of(turn("房租每月1800元，押一付三。合同3月20日到期。房东姓刘，电话打不通。"))
    assert len(found) >= 2
    spans = [n.span for n in found]
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))


def test_a_question_leaves_the_fact_it_states() -> None:
    [found] = notes_of(turn("我3月1日买的电脑屏幕一直闪，能退吗？"))
    assert found.content.startswith("我3月1日买的电脑屏幕一直闪") and "能退吗" not in found.content


def test_a_long_run_of_clauses_is_cut_and_nothing_of_it_lost() -> None:
    text = "，".join(f"第{i}件事是花了{i}00元" for i in range(1, 30))
    found = notes_of(turn(text))
    assert len(found) > 3 and max(len(n.content) for n in found) <= 160
    assert all(f"{i}00元" in "".join(n.content for n in found) for i in range(1, 30))


def test_day_words_get_their_dates() -> None:
    assert dates("昨天付的，周三晚上打球，下周五去店里", turn("x")) == ["昨天 = 2026-03-03", "下周五 = 2026-03-13"]
    assert dates("yesterday, next Monday, last Monday", turn("x")) == [
        "yesterday = 2026-03-03", "next Monday = 2026-03-09", "last Monday = 2026-03-02",
    ]  # fmt: skip
    assert dates("on Friday, 周五, next Friday", turn("x")) == [], "the words alone don't say which Friday"
    assert dates("昨天", turn("x", time=None)) == []


def test_keywords_are_short_and_come_from_the_text() -> None:
    words = keywords("《劳动合同法》第三十一条：安排加班要付加班费，打卡记录留好")
    assert "《劳动合同法》" in words and all(len(w) <= 30 for w in words) and len(words) <= 6


@settings(max_examples=300, deadline=None)
@given(text=st.text(min_size=1, max_size=400).filter(str.strip))
def test_any_text_gives_notes_that_stand_in_it(text: str) -> None:
    said = turn(text)
    for found in notes_of(said):
        assert found.content.startswith(said.text[slice(*found.span)])
        assert 0 <= found.span[0] < found.span[1] <= len(said.text)


@pytest.mark.parametrize(
    "text", ["长" * 60_000, "我花了300元。" * 7_500, "a" * 60_000, "word " * 12_000, "，" * 60_000]
)
def test_sixty_thousand_characters_are_read_in_seconds(text: str) -> None:
    begun = time.process_time()
    found = notes_of(turn(text))
    assert time.process_time() - begun < 20
    assert all(len(n.content) <= 600 for n in found)


def test_same_input_gives_the_same_notes_links_and_vectors(embedder: Embedder) -> None:
    told = story.load("zh").turns[:12]
    runs = []
    for _ in range(2):
        known = fresh(embedder)
        runs.append([extract(t, known, embedder) for t in told])
    for one, two in zip(*runs, strict=True):
        assert one.notes == two.notes and one.links == two.links
        assert np.array_equal(one.vectors, two.vectors)  # type: ignore[arg-type]


def test_links_go_both_ways_and_only_to_notes_that_exist(embedder: Embedder) -> None:
    known = fresh(embedder)
    links = [link for t in story.load("zh").turns[:60] for link in extract(t, known, embedder).links]
    ids = {n.id for n in known.notes}
    similar = {(link.source, link.target) for link in links if link.kind == "similar"}
    assert similar and all((b, a) in similar for a, b in similar)
    assert all(link.source in ids and link.target in ids and link.source != link.target for link in links)


def test_the_same_fact_said_twice_is_linked_as_a_duplicate(embedder: Embedder) -> None:
    known = fresh(embedder)
    extract(turn("押金一共是3600元，房东还没退。", "t1"), known, embedder)
    second = extract(turn("押金一共是3600元，房东还没退。", "t2"), known, embedder)
    assert [link.kind for link in second.links if link.kind != "similar"] == ["duplicate_of"]


def test_a_correction_supersedes_the_fact_it_corrects_and_no_other(embedder: Embedder) -> None:
    known = fresh(embedder)
    extract(turn("押金是3500元，去年2月转给房东的。", "t1", event="deposit"), known, embedder)
    extract(turn("电脑是6299元买的，屏幕一直闪。", "t2", event="laptop"), known, embedder)
    fixed = extract(turn("我记错了，押金不是3500元，是3600元。", "t3", event="deposit"), known, embedder)
    assert [old for old, _, _ in fixed.superseded] == [known.notes[0].id]
    assert known.notes[0].valid_to == WHEN and known.notes[1].valid_to is None


@pytest.mark.parametrize(
    ("text", "scope"),
    [
        ("我一般习惯先看结论再看清单。", Scope.USER_PROFILE),
        ("I prefer short answers, conclusion first.", Scope.USER_PROFILE),
        ("不管什么纠纷，都先固定事实，再补证据，最后匹配法条。", Scope.GLOBAL_PROCEDURE),
        ("Whatever the dispute, first fix the facts, then collect evidence.", Scope.GLOBAL_PROCEDURE),
        ("这次跟押金那件事一样，关键还是当时的照片。", Scope.CROSS_CASE),
        ("The lesson from both cases is to get it in writing.", Scope.CROSS_CASE),
        ("《消费者权益保护法》规定经营者有欺诈行为的应当三倍赔偿。", Scope.GENERAL_LAW),
        ("Under the Consumer Rights Act 2015 goods must be of satisfactory quality.", Scope.GENERAL_LAW),
        ("房东3月5日说要扣我800元清洁费。", Scope.CASE_HISTORY),
        ("The garage charged me £320 on 5 March and gave no invoice.", Scope.CASE_HISTORY),
    ],
)
def test_clear_sentences_get_their_scope_with_reasons(embedder: Embedder, text: str, scope: Scope) -> None:
    [found] = extract(turn(text), fresh(embedder), embedder).notes
    assert found.scope == scope
    assert found.scope_why


def test_gold_measure_counts_a_carried_fact_and_refuses_a_copy_of_the_turn(embedder: Embedder) -> None:
    fact = {"fact": "电脑6299元", "keys": [["6299", "6,299"], ["电脑", "笔记本"]], "scope": "case_history"}
    [good] = notes_of(turn("电脑花了６２９９元。"))
    assert evaluate.carries(good, fact, "zh")
    assert not evaluate.carries(good.model_copy(update={"content": "电脑6299元" + "，还有别的事" * 20}), fact, "zh")
    assert not evaluate.carries(good.model_copy(update={"content": "电脑坏了"}), fact, "zh")


@pytest.mark.parametrize("language", ["zh", "en"])
def test_bundled_stories_reach_the_promised_figures_on_even_turns(language: str, embedder: Embedder) -> None:
    told = story.load(language)
    gold = evaluate.load_gold(story.DATA / f"story_{language}.gold.json", told)
    figures = evaluate.score(told, gold, embedder)["even"].figures()
    assert figures["note_recall"] >= 0.80
    assert figures["note_precision"] >= 0.70
    assert figures["scope_accuracy"] >= 0.80


def ended(embedder: Embedder, olds: list[str], new: str, speaker: str = "u") -> list[str]:
    """The texts of the notes of `olds` (a turn each) that a later turn `new` of their event ends."""
    known = fresh(embedder)
    for i, old in enumerate(olds):
        extract(turn(old, f"t{i}", event="e"), known, embedder)
    later = turn(new, "t9", event="e", speaker=speaker, time=WHEN + timedelta(days=3))
    gone = {note_id: reason for note_id, _, reason in extract(later, known, embedder).superseded}
    assert all("against" in reason and "in t9" in reason for reason in gone.values()), "words that clashed, cause"
    return [note.content for note in known.notes if note.id in gone]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("健身卡一共上了15次课。", "核对了签到表，上了18次课。"),
        ("签合同定在3月25日下午2点。", "签合同推迟到3月28日。"),
        ("快递是圆通发的，2月3号到的。", "快递其实是中通发的，不是圆通。"),
        ("房子月租2600元，押一付三。", "房东发消息说月租涨到2800元了。"),
        ("中介愿意退一半押金。", "中介松口了，愿意退七成押金。"),
        ("房东答应退3000元押金。", "房东反悔了，押金只退2500元。"),
        ("I've had 9 lessons so far.", "Counted the sign-in sheet and it's 11 lessons, I forgot two make-ups."),
        ("The hearing is on Tuesday 14 April at 10am.", "The hearing has been pushed back to Friday 17 April."),
        ("I paid the garage by debit card.", "Turns out I paid the garage by credit card, not debit card."),
        ("The landlord offered me £1,500 back.", "The landlord upped his offer to £2,000 if I sign."),
        ("The shop says they can only repair it.", "The shop budged, they'd swap it for the same model."),
        ("I worked 27 hours of overtime in February.", "My February overtime was 31 hours, not 27."),
    ],
)
def test_figures_looked_up_dates_moved_words_denied_and_newer_offers_end_a_note(
    embedder: Embedder, old: str, new: str
) -> None:
    assert ended(embedder, [old], new) == [old]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("车位押金500元。", "更正一下，房屋押金是600元。"),
        ("The garage deposit is £500.", "Actually the flat deposit is £600."),
        ("热水器维修收了380元。", "看了账单，空调维修实收420元。"),
        ("The brake repair cost £320.", "I checked, the exhaust repair cost £280."),
        ("房东说墙面要扣800元。", "中介说服务费可以退300元。"),
        ("房东说墙面要扣800元。", "房东说沙发要扣300元。"),
        ("The landlord wants £800 for repainting.", "The letting agent offered £400 for the boiler."),
        ("I asked for £950 back.", "The landlord now offers £700."),
        ("健身卡花了3800元，48次课。", "查了记录，已经上了18次课。"),
    ],
)
def test_two_facts_of_one_pattern_do_not_drag_each_other_along(embedder: Embedder, old: str, new: str) -> None:
    assert ended(embedder, [old], new) == []


def test_of_two_deposits_the_one_that_is_named_is_ended(embedder: Embedder) -> None:
    two = ["The flat deposit was £950.", "The garage deposit was £900."]
    assert ended(embedder, two, "I misremembered, the flat deposit wasn't £950, it was £975.") == two[:1]


def test_nothing_of_another_event_or_another_party_is_ended(embedder: Embedder) -> None:
    old, new = "健身卡一共上了15次课。", "核对了签到表，上了18次课。"
    assert ended(embedder, [old], new, speaker="someone else") == []
    known = fresh(embedder)
    extract(turn(old, "t1", event="gym"), known, embedder)
    assert extract(turn(new, "t2", event="swimming"), known, embedder).superseded == []


def test_a_settlement_ends_all_open_offers_of_the_party(embedder: Embedder) -> None:
    offers = ["房东说最多退1000元押金。", "房东说墙面要扣800元。"]
    assert ended(embedder, offers, "谈妥了，房东下午转来3200元，扣400元。") == offers


def test_the_nearest_earlier_note_gets_a_pointer_and_nothing_invented(embedder: Embedder) -> None:
    known = fresh(embedder)
    [before] = extract(turn("房东把押金3600元退给我了，走的银行转账。", "t1", event="e"), known, embedder).notes
    [change] = extract(turn("房东把押金退给我了，银行转账的截图我存好了。", "t2", event="e"), known, embedder).evolved
    assert change.note_id == before.id == known.notes[0].id and "t2" in change.reason
    now = known.notes[0]
    assert now.context == before.context + "；后文：t2" and now.content == before.content
    assert all(word in now.content for word in now.keywords)
