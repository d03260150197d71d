"""Shared parts of the tests: real stories, real embedder, real files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from amem import embed
from amem.embed import Embedder

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared" / "data"


@pytest.fixture(scope="session")
def embedder() -> Embedder:
    return embed.load()


@pytest.fixture(scope="session")
def locomo() -> Path:
    """The LoCoMo file, which is public but not ours to ship (CC BY-NC 4.0): see the README for where to get it."""
    path = Path(os.environ.get("AMEM_DATA", SHARED)) / "locomo" / "data" / "locomo10.json"
    if not path.exists():
        pytest.skip(f"LoCoMo is not there ({path}); set AMEM_DATA to the folder that holds locomo/data/locomo10.json")
    return path
