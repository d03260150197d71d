"""Sentences, terms and languages."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amem import text


def cut(s: str) -> list[str]:
    return [s[a:b] for a, b in text.sentences(s)]


@pytest.mark.parametrize(
    ("whole", "parts"),
    [
        ("你好。我买了电脑！真的？", ["你好。", "我买了电脑！", "真的？"]),
        ("Mr. Smith paid £1,200.50 on 3 Mar. 2026. OK?", ["Mr. Smith paid £1,200.50 on 3 Mar. 2026.", "OK?"]),
        ("他说：“不退。”我走了", ["他说：“不退。”", "我走了"]),
        ("one\ntwo\n\nthree", ["one", "two", "three"]),
        ("e.g. this stays whole", ["e.g. this stays whole"]),
        ("", []),
        ("   \n ", []),
    ],
)
def test_sentences(whole: str, parts: list[str]) -> None:
    assert cut(whole) == parts


@given(st.text())
def test_sentences_lose_nothing_but_white_space_and_never_overlap(s: str) -> None:
    spans = text.sentences(s)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    assert "".join("".join(cut(s)).split()) == "".join(s.split())


@given(st.text())
def test_any_text_has_terms_without_an_error(s: str) -> None:
    assert all(term and not term.isspace() for term in text.terms(s))


def test_full_width_and_case_are_the_same_to_a_search() -> None:
    assert text.terms("ＡＢＣ１２３") == text.terms("abc123")


def test_chinese_terms_hold_single_characters_and_pairs() -> None:
    assert text.terms("押金3600元") == ["押", "金", "押金", "3600", "元"]
    assert text.term_set("押金3600元") == {"押金", "3600"}


@pytest.mark.parametrize(("s", "language"), [("你好 OK", "zh"), ("hello 你", "en"), ("123", "und"), ("", "und")])
def test_language(s: str, language: str) -> None:
    assert text.language_of(s) == language
