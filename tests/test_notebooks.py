"""The notebooks: each runs in sequence and alone, opens with what one learns, ends with what it wrote."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from amem import runs

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))


def execute(path: Path, place: Path, run: Path) -> None:
    """Run a notebook in `place`, whose sibling folder runs/ takes what it writes; `run` is what it reads."""
    place.mkdir(parents=True, exist_ok=True)
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(place)}})
    client.execute(env={**os.environ, "AMEM_RUN": str(run), "PYTHONPATH": str(ROOT)})


def test_in_sequence_they_pass_a_run_on(tmp_path: Path) -> None:
    latest = tmp_path / "runs" / "latest"
    for path in NOTEBOOKS:
        execute(path, tmp_path / "notebooks", latest)
    assert json.loads((latest / runs.MANIFEST).read_text("utf-8"))["state"] == "complete"
    committed = ROOT / "runs" / "showcase_zh"
    for name in (runs.NOTES, runs.GRAPH, runs.TRACES):
        assert (latest / name).read_bytes() == (committed / name).read_bytes()


@pytest.mark.parametrize("path", NOTEBOOKS[1:], ids=lambda p: p.stem)
def test_each_runs_alone_from_the_committed_run(path: Path, tmp_path: Path) -> None:
    committed = tmp_path / "committed"
    kept_out = shutil.ignore_patterns(f"{runs.DATABASE}*")  # as in a fresh checkout
    shutil.copytree(ROOT / "runs" / "showcase_zh", committed, ignore=kept_out)
    execute(path, tmp_path / "notebooks", committed)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebooks_read_as_promised(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    first, last = notebook.cells[0].source, notebook.cells[-1].source
    assert first.startswith(f"# {path.stem[:2]} ") and "**What you will learn.**" in first and "**Inputs.**" in first
    assert last.startswith("**Wrote**")
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert "parameters" in code[0].metadata.get("tags", [])
    assert all(len(cell.source.splitlines()) <= 15 for cell in code)
    assert not any(line.startswith(("def ", "class ")) for cell in code for line in cell.source.splitlines())
    assert all(cell.execution_count is None for cell in code), "run make commit-notebooks"
    outputs = [output for cell in code for output in cell.outputs]
    assert outputs and not [output for output in outputs if output.output_type == "error"]
    assert path.stat().st_size < 2_000_000
