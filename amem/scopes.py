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
from typing import Literal

import numpy as np
import numpy.typing as npt
import regex

from amem import cues as cues_
from amem.embed import Embedder, Floats
from amem.notes import Scope
from amem.text import language_of

NEAREST = 3  # examples a scope is judged by
ITSELF = 0.9999  # cosine from which an example is the sentence itself
SPREAD = 20.0  # brings differences of cosines, some 0.05, to the size of a cue
SCOPES = tuple(Scope)
Role = Literal["user", "assistant", "other"]


@lru_cache(maxsize=2)
def _cues(language: str) -> dict[str, regex.Pattern[str]]:
    data = tomllib.loads(files("amem.cues").joinpath("scopes.toml").read_text("utf-8"))
    return {name: regex.compile(entry[language], regex.IGNORECASE) for name, entry in data["cues"].items()}


def examples() -> list[tuple[str, Scope]]:
    """The example sentences of `scopes.toml` with their scopes."""
    data = tomllib.loads(files("amem.cues").joinpath("scopes.toml").read_text("utf-8"))["examples"]
    return [(text, scope) for scope in SCOPES for language in ("zh", "en") for text in data[scope][language]]


@lru_cache(maxsize=4)
def _examples(embedder: Embedder) -> list[npt.NDArray[np.float64]]:
    texts = examples()
    rows = embedder.encode_document([text for text, _ in texts]).astype(np.float64)
    return [rows[[i for i, (_, scope) in enumerate(texts) if scope == wanted]] for wanted in SCOPES]


@lru_cache(maxsize=1)
def _weights() -> npt.NDArray[np.float64]:
    """A row of five weights for each name of `_names`; a cue that is newer than the fit weighs nothing."""
    data = json.loads(files("amem.cues").joinpath("scope_weights.json").read_text("utf-8"))
    return np.array([data.get(name, [0.0] * len(SCOPES)) for name in _names()])


def _names() -> list[str]:
    """The features: bias, nearness to each scope's examples, who said it, then the cues."""
    return ["bias", *(f"near {scope}" for scope in SCOPES), "said by the user", "said by the assistant", *_cues("zh")]


def features(
    text: str, vector: Floats, embedder: Embedder, role: Role = "other"
) -> tuple[npt.NDArray[np.float64], list[str]]:
    """The features of a sentence, in the order of `_names`, and for each cue the words it was seen by (else "")."""
    cosines = [rows @ vector.astype(np.float64) for rows in _examples(embedder)]
    # An example says nothing about itself: left in, the fit would trust nearness too much.
    near = np.array([np.sort(row[row < ITSELF])[-NEAREST:].mean() for row in cosines])
    found = [m.group() if (m := p.search(text)) else "" for p in _cues(cues_.language(language_of(text))).values()]
    head = [1.0, *(SPREAD * (near - near.mean())), float(role == "user"), float(role == "assistant")]
    return np.array([*head, *(float(bool(word)) for word in found)]), ["" for _ in head] + found


def tag(text: str, vector: Floats, embedder: Embedder, role: Role = "other") -> tuple[Scope, list[str]]:
    """The scope of a note's text and the reasons in words. `vector` is the text's document embedding (dim,)."""
    values, words = features(text, vector, embedder, role)
    shares = values[:, None] * _weights()
    totals = shares.sum(axis=0)
    best, second = np.argsort(-totals, kind="stable")[:2].tolist()
    gain = shares[:, best] - shares.mean(axis=1)
    cues = [i for i in np.argsort(-gain, kind="stable").tolist() if words[i] and gain[i] > 0][:3]
    reasons = [f'{_names()[i]} "{words[i]}" +{gain[i]:.1f}' for i in cues]
    nearness = float(gain[1 : 1 + len(SCOPES)].sum())
    reasons.append(
        f"like the examples {nearness:+.1f}; ahead of {SCOPES[second]} by {totals[best] - totals[second]:.1f}"
    )
    return SCOPES[best], reasons


def fit(rows: Sequence[npt.NDArray[np.float64]], scopes: Sequence[Scope], weights: Sequence[float]) -> str:
    """The text of `scope_weights.json` fitted to features with known scopes: softmax regression with an L2 penalty."""
    from sklearn.linear_model import LogisticRegression

    target = [SCOPES.index(scope) for scope in scopes]
    model = LogisticRegression(C=0.5, max_iter=5000).fit(np.array(rows)[:, 1:], target, sample_weight=list(weights))
    table = np.vstack([model.intercept_, model.coef_.T])
    lines = [f" {json.dumps(n)}: {json.dumps(row.round(3).tolist())}" for n, row in zip(_names(), table, strict=True)]
    return "{\n" + ",\n".join(lines) + "\n}\n"
