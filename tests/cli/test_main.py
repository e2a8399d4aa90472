"""The command as a program: exit codes, one message and no traceback, and a quick start."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tables import table

import meshscope
from meshscope import __version__
from meshscope.cli import COMMANDS, GROUPS

PREDICT = ("predict", "Qwen/Qwen3-32B", "--topology", "v6e-8", "--plan", "tp=8")


def started(*arguments: str, cwd: Path, **streams: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "meshscope", *arguments],
        cwd=cwd,
        stdout=streams.get("stdout", subprocess.PIPE),
        stderr=subprocess.PIPE,
        text=True,
        env={key: value for key, value in os.environ.items() if key != "COLUMNS"},
    )


def ran(*arguments: str, cwd: Path) -> tuple[int, str, str]:
    child = started(*arguments, cwd=cwd)
    out, err = child.communicate(timeout=60)
    return child.returncode, out, err


@pytest.mark.parametrize("option", ["--version", "-V"])
def test_version(tmp_path: Path, option: str) -> None:
    assert ran(option, cwd=tmp_path) == (0, f"meshscope {__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (PREDICT[:4], "'--plan'. Give PLAN: tp=8, dp=2,tp=4, tp=8,sp, fsdp=-1; -1 fills; `meshscope plan` finds one."),
        (PREDICT[:1], "'MODEL'. Give MODEL: A model id, a config.json, or a folder with one."),
    ],
)  # fmt: skip
def test_what_is_missing_is_named_with_what_to_give(tmp_path, arguments, remedy) -> None:
    status, out, err = ran(*arguments, cwd=tmp_path)
    assert (status, out) == (2, "")
    assert err.endswith(f"{remedy}\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "expected"),
    [("meshscope pre", ["predict"]), ("meshscope predict --prefill", ["--prefill-chunk"])],
)
def test_the_shell_completes_commands_and_their_options(tmp_path, monkeypatch, words, expected):
    monkeypatch.setenv("_MESHSCOPE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
    status, out, err = ran(cwd=tmp_path)
    assert (status, out.split(), err) == (0, expected, "")


@pytest.mark.slow
def test_a_prediction_leaves_nothing_behind(tmp_path: Path) -> None:
    status, out, err = ran(*PREDICT, cwd=tmp_path)
    assert (status, err, list(tmp_path.iterdir())) == (0, "", [])
    assert "\x1b" not in out
    assert out.startswith("Qwen/Qwen3-32B (64 layers) on v6e:2x4 (8 chips), tp=8\nbatch 1,")
    assert max(map(len, out.splitlines())) <= 80
    assert not any(line.endswith(" ") for line in out.splitlines())


@pytest.mark.slow
@table
def test_a_fault_of_the_user_is_one_message(tmp_path, arguments, message) -> None:
    status, out, err = ran(*arguments, cwd=tmp_path)
    assert (status, out, list(tmp_path.iterdir())) == (1, "", [])
    assert err.startswith(message)
    assert err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [(), ("bogus",), ("predict",), (*PREDICT, "--batch", "x"), (*PREDICT, "--partitioner", "x")],
    ids=["nothing", "no command", "no model", "no number", "no choice"],
)
def test_a_wrong_call_is_told_with_the_usage(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    status, out, err = ran(*arguments, cwd=tmp_path)
    assert (status, out) == (2, "")
    assert err.startswith("Usage: ")
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_reader_that_leaves_early_is_no_fault(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    child = started(*PREDICT, "--json", cwd=tmp_path, stdout=write_end)
    os.close(write_end)
    _, err = child.communicate(timeout=60)
    assert err == ""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this platform")
@pytest.mark.parametrize("arguments", [PREDICT, ("--help",)], ids=" ".join)
def test_a_full_disk_is_a_message(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        child = started(*arguments, cwd=tmp_path, stdout=full.fileno())
        _, err = child.communicate(timeout=60)
    assert (child.returncode, err.count("\n")) == (1, 1)
    assert "No space left" in err


def test_predict_loads_no_table_library_no_framework_and_no_reader(tmp_path: Path) -> None:
    """Times in closed form are arrays, so that NumPy is the one that it needs; nothing is fitted again.

    How long it takes is for benchmarks/start_up.py.
    """
    program = """
import sys
from meshscope.cli import main
try:
    main()
finally:
    heavy = {"polars", "duckdb", "jax", "jaxlib", "torch"}
    parts = "analysis.samples", "backends", "programs.jax", "readers", "reports.export", "reports.html"
    rooms = tuple(f"meshscope.{part}" for part in parts)
    print(sorted(n for n in sys.modules if n.split(".")[0] in heavy or n.startswith(rooms)))
"""
    command = [sys.executable, "-c", program, *PREDICT, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    document, loaded = done.stdout.splitlines()
    assert json.loads(document)["source"] == "predicted"
    assert loaded == "[]"


HELP = Path(meshscope.__file__).with_name("help.txt")
SHOWN = """
import sys
sys.argv = ["meshscope", "--help"]
from meshscope.{module} import main
try:
    main()
finally:
    print("typer" in sys.modules)
"""


@pytest.mark.parametrize(("module", "loaded"), [("__main__", "False"), ("cli", "True")])
def test_the_stored_help_is_that_of_the_command_line(module: str, loaded: str, monkeypatch) -> None:
    """To renew it: COLUMNS=80 python -c 'from meshscope.cli import main; main()' --help > src/meshscope/help.txt."""
    monkeypatch.setenv("COLUMNS", "80")
    command = [sys.executable, "-c", SHOWN.format(module=module)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"{HELP.read_text(encoding='utf-8')}{loaded}\n"


def test_help_on_a_narrow_terminal_fits_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    command = [sys.executable, "-m", "meshscope", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert max(map(len, done.stdout.splitlines())) <= 60
    assert {name for name in COMMANDS if " " not in name} < {*done.stdout.split()}


def test_help_has_a_line_for_every_command(tmp_path: Path) -> None:
    _, out, _ = ran("--help", cwd=tmp_path)
    lines = [line.split(maxsplit=1) for line in out.split("Commands:\n")[1].splitlines()]
    single = [[name, command.summary] for name, command in COMMANDS.items() if " " not in name]
    assert lines == [*single, *map(list, GROUPS.items())]


# Stops the import of the command line, as Ctrl-C in the first moments does.
INTERRUPTED = """
import signal, sys
class Interrupting:
    def find_spec(self, name, *_):
        if name == "{module}":
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                if name == "numpy":
                    raise ImportError("numpy._core.multiarray failed to import")
                raise
sys.meta_path.insert(0, Interrupting())
import runpy
runpy.run_module("meshscope", run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.parametrize("module", ["meshscope.cli", "typer", "meshscope.api.predict", "numpy"])
def test_an_interruption_of_the_start_is_no_traceback(tmp_path: Path, module: str) -> None:
    program = [sys.executable, "-c", INTERRUPTED.format(module=module), *PREDICT]
    done = subprocess.run(program, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.slow
@table
def test_a_closed_stream_is_no_traceback(tmp_path, streams, plan, status, err) -> None:
    words = [sys.executable, "-m", "meshscope", *PREDICT[:-1], plan]
    shell = ["sh", "-c", f'"$@" {streams}', "sh", *words]
    done = subprocess.run(shell, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == status
    assert done.stdout.startswith("Qwen/Qwen3-32B" if status == 0 else "")
    assert done.stderr.startswith(err)
    assert done.stderr.count("\n") == bool(err)


def test_an_unknown_axis_is_answered_in_two_lines(meshscope) -> None:
    message = meshscope(*PREDICT[:-1], "xx=8").err
    assert "unknown axis 'xx'. Known: pp, dp, fsdp, cp, tp, ep, sp" in message
    assert len(message) < 160
