"""Scope tagging: which of the five kinds of memory a sentence is, and by what it was told (seed 000, section 2)."""

from __future__ import annotations

import tomllib
from functools import lru_cache
from importlib.resources import files

import numpy as np
import regex

from amem import cues as cues_
from amem.embed import Embedder, Floats
from amem.notes import Scope
from amem.text import language_of

CUE = 0.012  # a cue is worth so much similarity
MOST = 2  # cues of one scope that count
NEAREST = 3  # examples a scope is judged by


@lru_cache(maxsize=1)
def _data() -> dict[Scope, dict[str, list[str]]]:
    data = tomllib.loads(files("amem.cues").joinpath("scopes.toml").read_text("utf-8"))
    return {Scope(name): entry for name, entry in data.items()}


@lru_cache(maxsize=2)
def _cues(language: str) -> dict[Scope, list[regex.Pattern[str]]]:
    found = {scope: entry[f"cues_{language}"] for scope, entry in _data().items()}
    return {scope: [regex.compile(p, regex.IGNORECASE) for p in patterns] for scope, patterns in found.items()}


@lru_cache(maxsize=4)
def _examples(embedder: Embedder) -> dict[Scope, Floats]:
    return {scope: embedder.encode_document(entry["zh"] + entry["en"]) for scope, entry in _data().items()}


def scores(text: str, vector: Floats, embedder: Embedder) -> dict[Scope, tuple[float, list[str]]]:
    """For each scope its score and the words of `text` that spoke for it.

    score = mean cosine to the three nearest examples + 0.012 for each cue found, two at most.
    """
    cues, out = _cues(cues_.language(language_of(text))), {}
    for scope, examples in _examples(embedder).items():
        near = np.sort(examples.astype(np.float64) @ vector.astype(np.float64))[-NEAREST:].mean()
        words = [m.group() for pattern in cues[scope] if (m := pattern.search(text))]
        out[scope] = (float(near) + CUE * min(len(words), MOST), words)
    return out


def tag(text: str, vector: Floats, embedder: Embedder) -> tuple[Scope, list[str]]:
    """The scope of a note's text and the reasons in words. `vector` is the text's document embedding (dim,)."""
    ranked = sorted(scores(text, vector, embedder).items(), key=lambda item: -item[1][0])
    (scope, (best, words)), (second, (next_best, _)) = ranked[:2]
    reasons = [f'cue "{word}"' for word in words[:4]]
    reasons.append(f"score {best:.3f}, ahead of {second} by {best - next_best:.3f}")
    return scope, reasons
