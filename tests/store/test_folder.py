"""A folder appears whole or not at all, and nothing that is not a run is ever replaced."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from tables import table

from meshscope.api.options import request_of
from meshscope.api.request import CompileRequest, run_folder
from meshscope.errors import RunError
from meshscope.store.folder import (
    MANIFEST,
    MAX_NAME,
    TOOL,
    default_folder,
    new_folder,
    safe_name,
    scratch_folder,
)
from meshscope.store.folder import MARK as MARK_OF_PARTIAL

MARK = json.dumps({"tool": TOOL, "schema": 1})


def make_run(path: Path, content: str = "old") -> Path:
    path.mkdir(parents=True)
    (path / MANIFEST).write_text(MARK)
    (path / "content").write_text(content)
    return path


def write(path: Path, *, force: bool = False, content: str = "new") -> None:
    with new_folder(path, force=force) as partial:
        (partial / MANIFEST).write_text(MARK)
        (partial / "content").write_text(content)


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_the_folder_is_there_only_when_the_block_is_done(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "one"
    with new_folder(path, force=False) as partial:
        (partial / "content").write_text("new")
        assert not path.exists()
        assert partial.parent == path.parent
    assert ((path / "content").read_text(), names(path.parent)) == ("new", ["one"])


@pytest.mark.parametrize("fault", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_fault_leaves_nothing(tmp_path: Path, fault: type[BaseException]) -> None:
    with pytest.raises(fault), new_folder(tmp_path / "one", force=False):
        raise fault
    assert names(tmp_path) == []


def test_a_signal_as_the_folder_is_made_leaves_nothing(tmp_path: Path, monkeypatch) -> None:
    make = Path.mkdir

    def interrupted(path: Path, *options: Any, **named: Any) -> None:
        make(path, *options, **named)
        if "partial" in path.name:
            raise KeyboardInterrupt

    monkeypatch.setattr(Path, "mkdir", interrupted)
    with pytest.raises(KeyboardInterrupt), new_folder(tmp_path / "run", force=False):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_fault_leaves_the_run_that_was_to_be_replaced(tmp_path: Path) -> None:
    path = make_run(tmp_path / "one")
    with pytest.raises(ValueError, match="x"), new_folder(path, force=True):
        raise ValueError("x")
    assert ((path / "content").read_text(), names(tmp_path)) == ("old", ["one"])


def test_an_empty_folder_needs_force(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    with pytest.raises(RunError, match="Use --force"):
        write(tmp_path / "one")
    write(tmp_path / "one", force=True)
    assert names(tmp_path) == ["one"]


@pytest.mark.parametrize(
    "manifest", [None, "{}", "[]", "no json", '{"tool": "other", "schema": 1}']
)
def test_a_folder_that_is_no_run_is_never_replaced(tmp_path: Path, manifest: str | None) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.txt").write_text("years")
    if manifest is not None:
        (home / MANIFEST).write_text(manifest)
    before = names(home)
    with pytest.raises(RunError, match="not a meshscope run; it is never replaced"):
        write(home, force=True)
    assert names(home) == before


@pytest.mark.parametrize("kind", ["file", "link to a run", "broken link"])
def test_what_is_no_folder_is_never_replaced(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "one"
    if kind == "file":
        path.write_text("x")
    else:
        path.symlink_to(make_run(tmp_path / "other") if kind == "link to a run" else "nowhere")
    before = names(tmp_path)
    with pytest.raises(RunError, match="is not a folder"):
        write(path, force=True)
    assert names(tmp_path) == before


def test_a_run_that_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "one"
    with pytest.raises(RunError, match="exists"), new_folder(path, force=False):
        make_run(path, "of another process")
    assert ((path / "content").read_text(), names(tmp_path)) == ("of another process", ["one"])


@pytest.mark.parametrize("name", ["/proc/nowhere/run", "{tmp}/file/run", "{tmp}/" + "x" * 300])
def test_a_place_that_cannot_be_written_is_told(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="Choose another --out"):
        write(Path(name.format(tmp=tmp_path)))


def test_messages_name_the_path_as_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "one")
    with pytest.raises(RunError, match=r"^'x/\.\./one' exists"):
        write(Path("x/../one"))


def test_leftovers_of_dead_processes_are_removed(tmp_path: Path) -> None:
    make_run(tmp_path / ".two.partial-999999")
    (tmp_path / ".three.partial-999998").mkdir()
    write(tmp_path / "one")
    assert names(tmp_path) == ["one"]


@pytest.mark.parametrize("n_characters", [0, 1, len(MARK_OF_PARTIAL)])
def test_a_leftover_that_was_barely_begun_is_removed(tmp_path: Path, n_characters: int) -> None:
    """A kill between making the file of the mark and filling it."""
    leftover = tmp_path / ".two.partial-999999"
    leftover.mkdir()
    (leftover / MANIFEST).write_text(MARK_OF_PARTIAL[:n_characters])
    write(tmp_path / "one")
    assert names(tmp_path) == ["one"]


def test_a_run_whose_replacement_was_interrupted_returns(tmp_path: Path) -> None:
    make_run(tmp_path / ".two.replaced-999999", "old")
    make_run(tmp_path / ".three.replaced-999999", "old")
    make_run(tmp_path / "three", "new")
    write(tmp_path / "one")
    assert names(tmp_path) == ["one", "three", "two"]
    contents = [(tmp_path / name / "content").read_text() for name in ("two", "three")]
    assert contents == ["old", "new"]


def test_what_only_looks_like_a_leftover_stays(tmp_path: Path) -> None:
    mine = tmp_path / ".notes.partial-1"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years")
    (tmp_path / ".file.partial-2").write_text("x")
    write(tmp_path / "one")
    assert names(tmp_path) == [".file.partial-2", ".notes.partial-1", "one"]


HOLD = """
import sys
from pathlib import Path
from meshscope.store.folder import new_folder
with new_folder(Path(sys.argv[1]), force=False) as partial:
    print(partial.name, flush=True)
    sys.stdin.read()
"""


def test_the_partial_folder_of_a_living_process_stays_until_it_is_killed(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "theirs")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        partial = child.stdout.readline().strip()
        assert partial == f".theirs.partial-{child.pid}"
        write(tmp_path / "one")
        assert names(tmp_path) == [partial, "one"]
    finally:
        child.kill()
        child.communicate()
    assert names(tmp_path) == [partial, "one"]
    write(tmp_path / "two")
    assert names(tmp_path) == ["one", "two"]


def test_one_process_writes_a_name_once_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "one"
    with new_folder(path, force=False), pytest.raises(RunError, match="File exists"):
        write(path)
    assert names(tmp_path) == ["one"]
    assert names(path) == [MANIFEST]


@pytest.mark.slow
@pytest.mark.parametrize("n_bytes", [0, 40, 2000, 8000])
def test_a_full_disk_is_one_message_and_leaves_nothing(tmp_path: Path, n_bytes: int) -> None:
    """Wherever the writing ends: at the mark, in the table, in the manifest."""
    words = ("Qwen3-4B", "--topology", "v6e-8", "--plan", "tp=8", "--out", "runs/one")
    limited = (
        "import resource\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({n_bytes}, {n_bytes}))\n"
        "from meshscope.cli import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", limited, "predict", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    message = "meshscope: cannot write the run 'runs/one': File too large. Choose another --out.\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", message)
    assert names(tmp_path / "runs") == []


SCRATCH = """
import time
from meshscope.store.folder import scratch_folder
with scratch_folder() as folder:
    (folder / "file").write_text("x")
    print(folder, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_a_folder_is_removed_at_the_end(temporary: Path) -> None:
    with scratch_folder() as folder:
        assert folder.parent == temporary
        assert folder.name.endswith(f".partial-{os.getpid()}")
    assert list(temporary.iterdir()) == []


def test_the_folder_of_a_killed_process_is_removed_by_the_next(temporary: Path) -> None:
    (temporary / "meshscope-notes").mkdir()  # not one of ours
    with subprocess.Popen(
        [sys.executable, "-c", SCRATCH], stdout=subprocess.PIPE, text=True
    ) as child:
        left = Path(child.stdout.readline().strip())
        with scratch_folder():
            assert left.exists()  # its process lives
        child.send_signal(signal.SIGKILL)
    assert (left / "file").exists()
    with scratch_folder():
        assert not left.exists()
    assert [path.name for path in temporary.iterdir()] == ["meshscope-notes"]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Qwen3-32B", "Qwen3-32B"),
        ("2xv6e:4x4", "2xv6e-4x4"),
        ("../../etc/passwd", "etc-passwd"),
        ("..", "run"),
        (".hidden", "hidden"),
        ("/", "run"),
        ("", "run"),
        ("a\x1b[31m\nb\0c", "a-31m-b-c"),
        ("modèle/名", "mod-le"),
        ("-rf", "rf"),
        ("\udcff", "run"),
        ("con. ", "con"),
        ("x" * 1000, "x" * MAX_NAME),
    ],
)
def test_a_name_is_one_harmless_component(text: str, name: str) -> None:
    assert safe_name(text) == name
    assert Path(name).parts == (name,)


def test_a_default_folder_leaves_out_what_is_empty() -> None:
    folder = default_folder("Qwen3-32B", "v6e:2x4", "dp2,tp4", "", "scan")
    assert folder == Path("runs/Qwen3-32B-v6e-2x4-dp2-tp4-scan")


DENSE = {"model": "Qwen/Qwen3-4B", "topology": "v6e-8", "plan": "tp=8"}


@table
def test_a_default_name_has_the_options_that_are_not_defaults(options, end) -> None:
    request = request_of(CompileRequest, DENSE | options)
    folder = run_folder(request, request.experiment())
    assert folder == Path(f"runs/Qwen3-4B-v6e-2x4-tp8{end}")
