"""Deterministic levels of a navigation graph: the same id always stands on the same level (seed 000, section 4.1)."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def stable_unit(text: str) -> float:
    """SHA-1 of `text` as a number in [0, 1)."""
    return (int.from_bytes(hashlib.sha1(text.encode()).digest()[:8]) >> 11) / 2**53


def top_level(n: int, m: int) -> int:
    """The level on which about one of `n` points is left when one in `m` is promoted: floor(ln n / ln m)."""
    return int(math.log(n) / math.log(m) + 1e-9) if n > 1 else 0


def climb(name: str, m: int, highest: int) -> int:
    """Level of one id: promoted while SHA-1 of "id:level" is below 1/m."""
    level = 0
    while level < highest and stable_unit(f"{name}:{level}") < 1 / m:
        level += 1
    return level


def assign(ids: Sequence[str], m: int, importance: Sequence[float] | None = None) -> npt.NDArray[np.int64]:
    """Level of every id: promoted while SHA-1 of "id:level" is below 1/m; returns shape (n,).

    An empty level gets the most important note below it (ties: the smaller id), so that no level is missing.
    Source: seed 000, `_assign_hnsw_levels`.
    """
    highest = top_level(len(ids), m)
    levels = np.array([climb(name, m, highest) for name in ids], dtype=np.int64)
    weight = [1.0] * len(ids) if importance is None else list(importance)
    for level in range(highest, 0, -1):
        missing = levels.max() < level if level == highest else not np.any(levels == level)
        below = np.flatnonzero(levels < level)
        if missing and len(below):
            levels[min(below.tolist(), key=lambda i: (-weight[i], ids[i]))] = level
    return levels
