"""The project itself: environments agree, imports stay light, the map is true, rooms stay small."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = sorted(p.stem for p in (ROOT / "amem").glob("*.py") if not p.stem.startswith("__"))

# Who may import whom: a room may use those before it (DESIGN: data moves down, nobody imports upwards).
ORDER = ["notes", "text", "cues", "embed", "llm", "levels", "store", "story", "generate", "scopes", "evolve",
         "extract", "ground", "ask", "arith", "sketch", "kernel", "edges", "graph", "hnsw", "navigator", "trace",
         "evaluate", "view", "runs", "replies", "memory", "pipeline", "datasets", "bench", "cli"]  # fmt: skip


def test_environment_yml_lists_what_pyproject_lists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["dev"], *extras["bench"]]
    lines = (ROOT / "environment.yml").read_text().splitlines()
    listed = [line.strip()[2:].strip('"') for line in lines if line.startswith("      - ")]
    assert sorted(listed) == sorted([*wanted, "-e ."])
    assert "  - python" + project["requires-python"] in lines


def test_import_is_quick_and_brings_no_torch() -> None:
    code = (
        "import time; t = time.perf_counter(); import amem; d = time.perf_counter() - t\n"
        "import sys; print(d, 'torch' in sys.modules)"
    )
    tries = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split() for _ in range(3)
    ]
    assert min(float(seconds) for seconds, _ in tries) < 0.5
    assert {torch for _, torch in tries} == {"False"}


def test_a_whole_run_never_imports_torch_or_numba(tmp_path: Path) -> None:
    (tmp_path / "talk.txt").write_text("我: 押金3600元。\n助手: 好的。\n", "utf-8")
    code = (
        "import sys; from amem import pipeline; from amem.memory import Memory\n"
        f"folder = pipeline.run({str(tmp_path / 'talk.txt')!r}, {str(tmp_path / 'run')!r}, progress=False)\n"
        "Memory.open(folder).search('押金')\nprint('torch' in sys.modules or 'numba' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "False", done.stderr


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_downwards_only(room: str) -> None:
    assert room in ORDER, f"{room} has no place in the order of rooms"
    used: set[str] = set()
    # At the top of the module: graph.py names its other builders lazily, for `graph.navigator(...)` to work.
    for node in ast.parse((ROOT / "amem" / f"{room}.py").read_text("utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.module == "amem":
            used |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("amem."):
            used.add(str(node.module).split(".")[1])
    used &= set(ORDER)
    assert all(ORDER.index(other) < ORDER.index(room) for other in used), used


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_stay_under_four_hundred_lines(room: str) -> None:
    assert len((ROOT / "amem" / f"{room}.py").read_text("utf-8").splitlines()) <= 400


@pytest.mark.parametrize("readme", ["README.md", "README.zh.md"])
def test_the_map_in_the_readme_names_every_room_notebook_and_target(readme: str) -> None:
    text = (ROOT / readme).read_text("utf-8")
    for room in ROOMS:
        assert f"`amem/{room}.py`" in text, room
    for notebook in sorted((ROOT / "notebooks").glob("*.ipynb")):
        assert notebook.name in text
    for link in re.findall(r"\]\((?!https?:|#)([^)]+)\)", text):
        assert (ROOT / link.split("#")[0]).exists(), link
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for named in re.findall(r"`make ([a-z-]+)", text):
        assert named in targets, named


def test_no_file_is_over_two_megabytes() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], capture_output=True, text=True, cwd=ROOT)
    if listed.returncode:
        pytest.skip("not a git checkout")
    assert [
        n for n in listed.stdout.split("\0") if n and (ROOT / n).exists() and (ROOT / n).stat().st_size > 2_000_000
    ] == []
