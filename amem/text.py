"""Reading text: sentences with their places, search terms, language. Nothing here changes stored text."""

from __future__ import annotations

import unicodedata

import regex

Span = tuple[int, int]

_HAN = r"\p{Script=Han}"
_IS_HAN = regex.compile(_HAN)  # compiled once: it is asked of every term
_ABBREVIATION = regex.compile(
    r"(?:\b(?:mr|mrs|ms|dr|prof|st|no|vs|etc|approx|ref|tel|inc|ltd|co|dept|e\.g|i\.e|a\.m|p\.m|jan|feb|mar|apr|jun|jul|aug"
    r"|sep|sept|oct|nov|dec|s|art|reg|para)|\b[A-Z])\.$",
    regex.IGNORECASE,
)
# A sentence ends at CJK or Latin end marks (with the closing quotes behind them) or at a line break.
_END = regex.compile(
    r"[。！？；!?…]+[”’」』）)\"']*|\.(?=[\s”’\"')]|$)[”’\"')]*|;(?=\s)|\n+|[\p{Extended_Pictographic}]+(?=\s|$)"
)
_WORD = rf"(?:(?!{_HAN})[\p{{L}}\p{{M}}\p{{N}}])+"
_TERM = regex.compile(rf"{_HAN}+|{_WORD}(?:['’.,_-]{_WORD})*")
_STOP_EN = frozenset(
    "a an and are as at be been but by can could did do does for from had has have he her him his i if in is it its "
    "just me my of on or our she so that the their them then there they this to too was we were what when which who "
    "will with would you your i'm it's i've i'll you're that's don't not no yes".split()
)


def fold(text: str) -> str:
    """The copy that searches see: NFKC (full width to half width), case folded."""
    return unicodedata.normalize("NFKC", text).casefold()


def language_of(text: str) -> str:
    """ "zh" when more than 0.3 of the letters are Han characters, else "en" if there are Latin letters, else "und"."""
    han = len(regex.findall(_HAN, text))
    letters = len(regex.findall(r"\p{L}", text))
    if letters and han / letters > 0.3:
        return "zh"
    return "en" if regex.search(r"\p{Script=Latin}", text) else "und"


def sentences(text: str) -> list[Span]:
    """Places (start, end) of the sentences, outer white space left out; nothing else is."""
    spans: list[Span] = []
    start = 0
    for end in _END.finditer(text):
        if end.group().startswith(".") and _ABBREVIATION.search(text[start : end.start() + 1]):
            continue
        spans.append((start, end.end()))
        start = end.end()
    spans.append((start, len(text)))
    return [trimmed for s in spans if (trimmed := trim(text, s))[0] < trimmed[1]]


def trim(text: str, span: Span) -> Span:
    """`span` without white space at its ends."""
    piece = text[span[0] : span[1]]
    left = len(piece) - len(piece.lstrip())
    return span[0] + left, span[0] + max(left, len(piece.rstrip()))


def terms(text: str) -> list[str]:
    """Search terms in order: Latin words without the commonest, Han characters one by one and in pairs.

    Pairs of characters beat a word cutter on Chinese recall here, and single ones make one-character queries work.
    """
    out: list[str] = []
    for word in _TERM.findall(fold(text)):
        if _IS_HAN.match(word):
            out += [*word, *(word[i : i + 2] for i in range(len(word) - 1))]
        elif word not in _STOP_EN:
            out.append(word.replace(",", "").rstrip("'’"))
    return out


def term_set(text: str) -> frozenset[str]:
    """Distinct terms that say what a text is about: single Han characters say little and are left out."""
    return frozenset(t for t in terms(text) if len(t) > 1 or not _IS_HAN.match(t))
