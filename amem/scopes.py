"""Scope tagging: which of the five kinds of memory a sentence is, and by what it was told (seed 000, section 2).

A linear model that explains itself: named cues (`cues/scopes.toml`, the same in both languages) and the nearness to
example sentences, each with a weight a scope (`cues/scope_weights.json`, fitted by `python -m amem eval scopes --fit`).
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from functools import lru_cache
from importlib.resources import files

import numpy as np
import numpy.typing as npt
import regex

from amem import cues as cues_
from amem.embed import Embedder, Floats
from amem.notes import Scope
from amem.text import language_of

NEAREST = 3  # examples a scope is judged by
SPREAD = 20.0  # brings differences of cosines, some 0.05, to the size of a cue
SCOPES = tuple(Scope)


@lru_cache(maxsize=2)
def _cues(language: str) -> dict[str, regex.Pattern[str]]:
    data = tomllib.loads(files("amem.cues").joinpath("scopes.toml").read_text("utf-8"))
    return {name: regex.compile(entry[language], regex.IGNORECASE) for name, entry in data["cues"].items()}


@lru_cache(maxsize=4)
def _examples(embedder: Embedder) -> list[Floats]:
    data = tomllib.loads(files("amem.cues").joinpath("scopes.toml").read_text("utf-8"))["examples"]
    return [embedder.encode_document(data[scope]["zh"] + data[scope]["en"]) for scope in SCOPES]


@lru_cache(maxsize=1)
def _weights() -> npt.NDArray[np.float64]:
    """(1 + 5 + number of cues, 5): the bias, the nearness to each scope's examples, then the cues."""
    data = json.loads(files("amem.cues").joinpath("scope_weights.json").read_text("utf-8"))
    names = ["bias", *(f"near {scope}" for scope in SCOPES), *_cues("zh")]
    return np.array([data[name] for name in names])


def features(text: str, vector: Floats, embedder: Embedder) -> tuple[npt.NDArray[np.float64], list[str]]:
    """The features of a sentence, (1 + 5 + number of cues,), and for each the words it was seen by ("" if not seen)."""
    wide = vector.astype(np.float64)
    near = np.array([np.sort(rows.astype(np.float64) @ wide)[-NEAREST:].mean() for rows in _examples(embedder)])
    found = [m.group() if (m := p.search(text)) else "" for p in _cues(cues_.language(language_of(text))).values()]
    seen = np.array([float(bool(word)) for word in found])
    return np.concatenate([[1.0], SPREAD * (near - near.mean()), seen]), ["", *[""] * len(SCOPES), *found]


def tag(text: str, vector: Floats, embedder: Embedder) -> tuple[Scope, list[str]]:
    """The scope of a note's text and the reasons in words. `vector` is the text's document embedding (dim,)."""
    values, words = features(text, vector, embedder)
    shares = values[:, None] * _weights()
    totals = shares.sum(axis=0)
    best, second = np.argsort(-totals, kind="stable")[:2].tolist()
    names = [*[""] * (1 + len(SCOPES)), *_cues("zh")]
    gain = shares[:, best] - shares.mean(axis=1)
    cues = [i for i in np.argsort(-gain, kind="stable").tolist() if words[i] and gain[i] > 0][:3]
    reasons = [f'{names[i]} "{words[i]}" +{gain[i]:.1f}' for i in cues]
    nearness = float(gain[1 : 1 + len(SCOPES)].sum())
    reasons.append(
        f"like the examples {nearness:+.1f}; ahead of {SCOPES[second]} by {totals[best] - totals[second]:.1f}"
    )
    return SCOPES[best], reasons


def training() -> tuple[list[str], list[Scope]]:
    """The sentences of `scopes.toml` that the weights are fitted to, beside labelled texts."""
    data = tomllib.loads(files("amem.cues").joinpath("scopes.toml").read_text("utf-8"))["training"]
    pairs = [(text, scope) for scope in SCOPES for language in ("zh", "en") for text in data[scope][language]]
    return [text for text, _ in pairs], [scope for _, scope in pairs]


def fit(rows: Sequence[npt.NDArray[np.float64]], scopes: Sequence[Scope], weights: Sequence[float]) -> str:
    """The text of `scope_weights.json` fitted to features with known scopes: softmax regression with an L2 penalty."""
    from sklearn.linear_model import LogisticRegression

    target = [SCOPES.index(scope) for scope in scopes]
    model = LogisticRegression(C=0.5, max_iter=5000).fit(np.array(rows)[:, 1:], target, sample_weight=list(weights))
    table = np.vstack([model.intercept_, model.coef_.T])
    names = ["bias", *(f"near {scope}" for scope in SCOPES), *_cues("zh")]
    lines = [f" {json.dumps(n)}: {json.dumps(row.round(3).tolist())}" for n, row in zip(names, table, strict=True)]
    return "{\n" + ",\n".join(lines) + "\n}\n"
