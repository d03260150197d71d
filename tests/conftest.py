"""Shared parts of the tests: real stories, real embedder, real files."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from endpoint import Endpoint

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


@pytest.fixture(autouse=True)
def no_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test asks the endpoint of whoever runs it."""
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "AMEM_MODEL", "AMEM_PRICE_IN", "AMEM_PRICE_OUT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    server = Endpoint()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield server
    server.released.set()
    server.shutdown()
    server.server_close()
    thread.join(5)
    assert not thread.is_alive()
