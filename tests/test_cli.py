"""The command line: what cannot be done ends with one sentence on stderr and a status that is not 0."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from amem import pipeline

ROOT = Path(__file__).parents[1]


def amem(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "amem", *args], capture_output=True, text=True, cwd=ROOT, env={**os.environ, **env}
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "there is no file"),
        (b"", "is empty"),
        (b'{"format": "amem-story/1", "turns": [{"id": "t1", "te', "half a JSON file"),
        (b"\xff\xfe\xfa" * 7, "not UTF-"),
        (b"just some prose without any speaker", "LoCoMo JSON"),
        (b'{"format": "amem-story/1", "turns": []}', "no turns"),
        (b'[{"role": "user", "content": null}]', "no turns"),
        (b'[{"role": "wizard", "content": "hi"}]', "unknown role"),
    ],
)
def test_bad_stories_end_with_one_sentence(content: bytes | None, said: str, tmp_path: Path) -> None:
    source = tmp_path / "story.json"
    if content is not None:
        source.write_bytes(content)
    done = amem("run", "--story", str(source), "--out", str(tmp_path / "run"))
    assert done.returncode == 1
    assert said in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists(), "a story that cannot be read leaves no half run behind"


def test_a_folder_that_cannot_be_written_ends_with_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "run", Path("/proc/run")):
        done = amem("run", "--story", "zh", "--out", str(out))
        assert done.returncode == 1 and len(done.stderr.strip().splitlines()) == 1, done.stderr
        assert str(out) in done.stderr


def test_a_read_only_folder_ends_with_one_sentence() -> None:
    """Root may write anywhere, so where the tests run as root the command becomes nobody first."""
    with TemporaryDirectory(dir="/tmp") as place:
        locked = Path(place) / "locked"
        locked.mkdir()
        Path(place).chmod(0o755)
        locked.chmod(0o555)
        code = (
            "import os, sys\nfrom amem import cli, memory, pipeline\n"
            "if os.getuid() == 0: os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
            "sys.argv = ['amem', 'run', '--story', 'zh', '--out', sys.argv[1]]\ncli.main()"
        )
        args = [sys.executable, "-c", code, str(locked / "run")]
        done = subprocess.run(args, capture_output=True, text=True, cwd=ROOT)
        locked.chmod(0o755)
    assert done.returncode == 1 and len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert "locked" in done.stderr and "writable" in done.stderr


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["run"], "say which story"),
        (["run", "--story", "zh"], "say which story"),
        (["run", "--resume", "nowhere"], "holds no run"),
        (["run", "--resume", "x", "--story", "zh"], "leave --story"),
        (["search", "nowhere", "x"], "does not exist"),
        (["run", "--no-such-option"], "No such option"),
        (["no-such-command"], "No such command"),
        (["bench", "recall", "--data", "nowhere.hdf5"], "nowhere.hdf5"),
        (["bench", "recall", "--data", "nowhere.npy"], "nowhere.npy"),
        (["run", "--story", "zh", "--out", "OUT", "--model", "no/such-model"], "cannot be loaded"),
        (["run", "--story", "zh", "--out", "OUT", "--generate"], "no endpoint is set"),
    ],
)
def test_wrong_calls_say_what_to_do(args: list[str], said: str, tmp_path: Path) -> None:
    args = [str(tmp_path / "run") if arg == "OUT" else arg for arg in args]
    done = amem(*args, OPENAI_API_KEY="", OPENAI_BASE_URL="", HF_HUB_OFFLINE="1")
    assert done.returncode != 0 and said in done.stderr and "Traceback" not in done.stderr


def test_search_prints_notes_with_their_parts(tmp_path: Path) -> None:
    source = tmp_path / "talk.txt"
    source.write_text("我: 押金是3600元，2月21号转给房东的。\n助手: 好的。\n我: 电脑花了6299元。\n", "utf-8")
    pipeline.run(source, tmp_path / "run", progress=False)
    done = amem("search", str(tmp_path / "run"), "押金多少", "-k", "1")
    assert done.returncode == 0 and "3600" in done.stdout and "semantic" in done.stdout
    assert amem("search", str(tmp_path / "run"), "   ").returncode == 1


def test_eval_extract_writes_the_figures_of_the_even_turns(tmp_path: Path) -> None:
    done = amem("eval", "extract", "--json", str(tmp_path / "figures.json"))
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert set(figures) == {"zh", "en"}
    for language in figures:
        assert {"note_recall", "note_precision", "scope_accuracy"} <= set(figures[language])
        assert f"story_{language} even" in done.stdout and f"story_{language} odd" in done.stdout
    assert "missed:" in done.stdout and "alternative" in done.stdout


def test_bench_recall_writes_one_row_a_point_with_the_named_columns(tmp_path: Path) -> None:
    where = [f"--{kind}={tmp_path / f'rows.{kind}'}" for kind in ("json", "csv", "html")]
    done = amem("bench", "recall", "-n", "300", "--queries", "40", "--repeats", "1", "-k", "1", "-k", "10", *where)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    named = "dataset n dim system degree_cap setting recall evaluations qps build_cpu_s link_bytes".split()
    assert all(set(named) <= set(row) for row in rows)
    assert {row["k"] for row in rows} == {1, 10} and {row["n"] for row in rows} == {300}
    assert {"article", "navigator", "hnswlib M=4", "hnswlib M=16"} <= {row["system"] for row in rows}
    assert all(0 <= row["recall"] <= 1 and row["evaluations"] > 0 for row in rows)
    assert len((tmp_path / "rows.csv").read_text().splitlines()) == len(rows) + 1
    assert "plotly" in (tmp_path / "rows.html").read_text()[:10_000_000]


def test_lines_are_embedded_for_a_benchmark(tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("".join(f"fact number {i}\n\n" for i in range(70)), "utf-8")
    done = amem("embed", str(tmp_path / "texts.txt"), "--out", str(tmp_path / "v.npy"))
    assert done.returncode == 0 and "70 texts, 384 dims" in done.stdout, done.stderr
    args = ["--data", str(tmp_path / "v.npy"), "--systems", "navigator", "-k", "1", "--repeats", "1"]
    done = amem("bench", "recall", *args, "--json", str(tmp_path / "rows.json"))
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert {(row["dataset"], row["n"], row["dim"]) for row in rows} == {("v", 53, 384)}
