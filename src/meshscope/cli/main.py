"""The command `meshscope`: runs a subcommand, and prints a user error as one message."""

import errno
import gc
import importlib
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple, NoReturn

SETTINGS: dict[str, Any] = {
    "pretty_exceptions_enable": False,
    "rich_markup_mode": None,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}


class Subcommand(NamedTuple):
    """A subcommand: a function of a module that is imported only when it runs."""

    place: str  # the module, and the function if that is not `command`
    summary: str

    def load(self) -> Callable[..., None]:
        """The function."""
        module, _, function = self.place.partition(":")
        return getattr(importlib.import_module(f"meshscope.api.{module}"), function or "command")


# Commands of several words, such as `tpu create`, and what those of a group have in common.
GROUPS: dict[str, str] = {
    "tpu": "Run experiments on TPU slices of Google Cloud.",
    "engines": "Install serving engines, to compile with their own model code.",
    "compilers": "Install other versions of JAX and libtpu, to compile with.",
}

# In the order of --help. A summary is the first line of the command's docstring.
_COMMANDS = {
    "predict": ("predict", "Predict the collectives, memory and times of a plan."),
    "compile": ("compile", "Compile for a TPU or GPU slice without the hardware."),
    "run": ("live", "Run on live devices, timed and profiled."),
    "plan": ("plan", "Find the best plan of a model on a slice."),
    "sweep": ("sweep_shown", "Run many experiments, and resume after interruptions."),
    "import": ("import_each", "Read HLO text or traces from other tools."),
    "show": ("show", "Show a run, or rank several."),
    "compare": ("compare", "Compare predicted with compiled, or two runs with each other."),
    "flags": ("flags", "Find the compiler flags that change a program."),
    "check": ("check", "Check programs against a budget for CI."),
    "report": ("report", "Write a report for the browser, one HTML file."),
    "export": ("export", "Export a run: Perfetto, Chrome, Chakra, CSV, CCL-Bench, plots."),
    "sql": ("sql", "Query the tables of one run or several with SQL."),
    "serve-sim": ("serve", "Simulate a server under load: TTFT, TPOT, goodput."),
    "models": ("catalog:models", "List or search the models of the catalog."),
    "topologies": ("catalog:topologies", "List chips and slices: HBM, peaks and links."),
    "calibrate": ("calibrate", "Measure this machine's chip and write a profile."),
    "contribute": (
        "contribute",
        "Check a run measured on a TPU, and write its accuracy entry.",
    ),
    "tpu create": ("tpu:create", "Request a slice as a queued resource."),
    "tpu status": ("tpu:status", "Show the state of a slice."),
    "tpu install": ("tpu:install", "Install meshscope and JAX on every worker of a slice."),
    "tpu sweep": ("tpu:sweep", "Run experiments on a slice, and copy each run out."),
    "tpu ssh": ("tpu:ssh", "Run a shell command on the workers of a slice."),
    "tpu delete": ("tpu:delete", "Delete a slice and its request."),
    "tpu manifest": ("tpu:print_manifest", "Print a Kubernetes job that runs experiments on GKE."),
    "engines list": (
        "environments:engines",
        "List known releases of serving engines, and which are installed.",
    ),
    "engines install": (
        "environments:install_engine_asking",
        "Install a release of a serving engine into an environment of its own.",
    ),
    "engines remove": (
        "environments:uninstall_engine",
        "Remove the environment of a release of a serving engine.",
    ),
    "compilers list": (
        "environments:compilers",
        "List known versions of JAX and libtpu, and which are installed.",
    ),
    "compilers install": (
        "environments:install_compiler_asking",
        "Install a version of JAX and libtpu into an environment of its own.",
    ),
    "compilers remove": (
        "environments:uninstall_compiler",
        "Remove the environment of a version of JAX and libtpu.",
    ),
}
COMMANDS = {
    words: Subcommand(place=place, summary=summary) for words, (place, summary) in _COMMANDS.items()
}


def main() -> None:
    """Runs the command line and exits with 0, 1 (user error), 2 (usage) or 130 (interrupted)."""
    try:
        _run()
    except KeyboardInterrupt:
        sys.exit(130)


def _run() -> None:
    _check_streams()
    gc.set_threshold(100_000)  # a command is short and keeps most of what it allocates
    signal.signal(signal.SIGTERM, _terminate)
    # Imported here, so that Ctrl-C meanwhile is no traceback.
    from meshscope.cli.app import app  # noqa: PLC0415
    from meshscope.errors import IS_COMMAND_LINE, MeshscopeError  # noqa: PLC0415

    token = IS_COMMAND_LINE.set(True)
    try:
        try:
            app()(prog_name="meshscope")
        finally:
            sys.stdout.flush()  # raises BrokenPipeError here, not at interpreter exit
    except MeshscopeError as error:
        _fail(str(error))
    except BrokenPipeError:
        _leave_quietly()
    except OSError as error:
        if error.errno == errno.ENOSPC:
            _drop_output()
            _fail(f"{error.strerror}. Free some space and rerun the command.")
        if error.filename is None:
            raise
        _fail(f"'{error.filename}' cannot be used: {error.strerror}. Give another path.")
    finally:
        IS_COMMAND_LINE.reset(token)


def _check_streams() -> None:
    """Lets no file take the place of a closed stream, and refuses a closed output, which no reader would get."""
    is_closed = sys.stdout is None
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)
    if is_closed:
        sys.stdout = os.fdopen(1, "w", closefd=False)
        _fail("standard output is closed. Redirect it to a file, or to /dev/null.")
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  print any name


def _terminate(_number: int, _frame: FrameType | None) -> None:
    """Unwinds the stack once, so that workers end and half-written folders are removed."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(128 + signal.SIGTERM)


def _fail(message: str) -> NoReturn:
    from meshscope.reports.plain import plain  # noqa: PLC0415  only errors need it

    lines = [plain(line) for line in message.splitlines()]
    sys.stderr.write("\n".join(["meshscope: " + lines[0], *lines[1:]]) + "\n")
    sys.exit(1)


def _leave_quietly() -> None:
    """Exits without a message after the reader closed the pipe."""
    _drop_output()
    sys.exit(1)


def _drop_output() -> None:
    """Drops what stdout could not take, which the interpreter would write again when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
