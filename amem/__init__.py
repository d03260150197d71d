"""amem: long-term memory of assistants that explains itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from amem.notes import Link, Note, Scope, Turn

if TYPE_CHECKING:
    from amem.memory import Memory

__version__ = "0.1.0"
__all__ = ["Link", "Memory", "Note", "Scope", "Turn", "__version__"]


def __getattr__(name: str) -> Any:
    # `import amem` stays under 0.5 s: numpy, sqlite and the embedder load with the first Memory.
    if name == "Memory":
        from amem.memory import Memory

        return Memory
    raise AttributeError(f"module 'amem' has no attribute {name!r}")
