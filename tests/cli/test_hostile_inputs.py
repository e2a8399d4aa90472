"""Whatever a path or a number of an option is, a command answers, or refuses it with one message, soon."""

import gzip
import os
import shlex
import signal
import socket
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from tables import stored

SECONDS = 20  # in which a command ends on a loaded machine
EXPERIMENT = "model: Qwen/Qwen3-4B, topology: v6e-8, plan: tp=8"

READING, WRITING = (
    [tuple(shlex.split(line)) for line in lines]
    for lines in stored(Path(__file__).with_suffix(".yaml")).values()
)

DUMP = """\
HloModule m, is_scheduled=true

ENTRY main {
  p = f32[8]{0} parameter(0)
  ROOT r = f32[8]{0} all-reduce(p), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=add
}
"""


def _loop(at: Path) -> str:
    at.joinpath("loop").symlink_to("loop")
    return "loop"


def _pipe(at: Path) -> str:
    os.mkfifo(at / "pipe")
    return "pipe"


def _unreadable(at: Path) -> str:
    at.joinpath("secret").write_text("{}")
    at.joinpath("secret").chmod(0)
    return "secret"


def _socket(_: Path) -> str:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")  # in the current folder: the name of a socket is short
    return "socket"


def _file(name: str, content: bytes) -> Callable[[Path], str]:
    def make(at: Path) -> str:
        (at / name).write_bytes(content)
        return name

    return make


BOMB = gzip.compress(b" " * (40 << 20))


# Makes a path in the folder.
PATHS: dict[str, Callable[[Path], str]] = {
    "empty": lambda _: "",
    "too long": lambda _: "a" * 300,
    "too deep": lambda _: "/".join(["a" * 200] * 30),
    "nul byte": lambda _: "a\0b",
    "escape": lambda _: "a\x1b[31m<script>b",
    "missing": lambda _: "no/such/file",
    "below a file": lambda _: "dump.txt/x",
    "folder": lambda at: (at / "folder").mkdir() or "folder",
    "dots": lambda _: "..",
    "loop": _loop,
    "dangling": lambda at: at.joinpath("dangling").symlink_to("nowhere") or "dangling",
    "zero": lambda _: "/dev/zero",
    "null": lambda _: "/dev/null",
    "pipe without a writer": _pipe,
    "socket": _socket,
    "unreadable": _unreadable,
    "no bytes": _file("nothing", b""),
    "binary": _file("binary", bytes(range(256)) * 99),
    "utf-16": _file("utf16", '{"a": 1}'.encode("utf-16")),
    "deep json": _file("deep.json", b"[" * 100_000),
    "deep object": _file("deeper.json", b'{"traceEvents":' * 50_000),
    "long number": _file("long.json", b'{"model_type": ' + b"9" * 5000 + b"}"),
    "wrong json": _file("list.json", b"[1, NaN]"),
    "gzip bomb": _file("bomb.json.gz", BOMB),
    "cut gzip": _file("cut.gz", gzip.compress(b"x" * 9999)[:20]),
}  # fmt: skip
STARTING = {"torchxla"}  # of commands that start a process
FAST_SHARE, SHARE = 8, 4  # one in so many pairs is a fast test, and is not in the matrix


def pairs(commands: Sequence[tuple[str, ...]], paths: Sequence[str]) -> list[object]:
    """Every command with every path, in the matrix; each of both is in a fast test, too."""

    def marks(words: tuple[str, ...], number: int) -> list[pytest.MarkDecorator]:
        is_fast = number % FAST_SHARE == 0 and not STARTING & {*words}
        return [pytest.mark.slow] * (not is_fast) + [pytest.mark.matrix] * (number % SHARE != 0)

    return [
        pytest.param(words, path, marks=marks(words, i + j), id=f"{' '.join(words)}: {path}")
        for i, words in enumerate(commands)
        for j, path in enumerate(paths)
    ]


@contextmanager
def soon() -> Iterator[None]:
    """Fails if the block takes long; it may be blocked in a system call."""

    def late(_number: int, _frame: object) -> None:
        raise AssertionError("the command hangs")

    previous = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


@pytest.fixture(scope="module")
def home(kept: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run and good inputs."""
    at = tmp_path_factory.mktemp("hostile")
    (at / "dump.txt").write_text(DUMP)
    (at / "sweep.yaml").write_text(f"experiments: [{{command: predict, {EXPERIMENT}}}]")
    (at / "trace.json").write_text('{"traceEvents": []}')
    (at / "points.csv").write_text(
        "chip,kind,group_size,payload_bytes,seconds\nv6e,all_reduce,8,1024,1e-5\n"
    )
    (at / "run").symlink_to(kept / "a")
    return at


@pytest.fixture
def place(
    home: Path,
    meshscope,  # noqa: ARG001  it changes the folder
    tmp_path: Path,
) -> Generator[Path]:
    """An empty folder that sees the good inputs."""
    for path in home.iterdir():
        (tmp_path / path.name).symlink_to(path)
    yield tmp_path
    for path in tmp_path.iterdir():
        if not path.is_symlink() and path.is_file():
            path.chmod(0o600)


def assert_answered(outcome, *, words: tuple[str, ...]) -> None:
    """An answer, or one message without a traceback that fits a screen."""
    status, _, err = outcome
    assert status in {0, 1, 2}, words
    assert "Traceback" not in err
    assert "Errno" not in err
    if status == 1:
        last = err.splitlines()[-1]
        assert "meshscope: " in err
        assert len(last) < 1500 or "/aaaa" in last  # a long path, as typed
        assert not any(ord(char) < 32 for line in err.splitlines() for char in line)


@pytest.mark.parametrize(("words", "name"), pairs(READING, list(PATHS)))
def test_a_path_to_read_is_read_or_refused_with_one_message(meshscope, place, words, name) -> None:
    path = PATHS[name](place)
    before = set(place.rglob("*"))
    with soon():
        outcome = meshscope(*(word.replace("PATH", path) for word in words))
    assert_answered(outcome, words=words)
    if name not in {"folder", "dots"} and outcome.status:
        assert {p for p in place.rglob("*") if "runs" not in p.parts} - before <= {
            place / "imported"
        }


# A fault here would replace the devices of the machine, where it is root that tests.
NOT_WRITTEN = {"unreadable", "zero", "null"}


@pytest.mark.parametrize(
    ("words", "name"), pairs(WRITING, [name for name in PATHS if name not in NOT_WRITTEN])
)
def test_a_path_to_write_is_written_or_refused_with_one_message(meshscope, place, words, name):
    path = PATHS[name](place)
    with soon():
        outcome = meshscope(*(word.replace("PATH", path) for word in words))
    assert_answered(outcome, words=words)
    assert not list(place.rglob(".*partial*"))


@pytest.mark.parametrize("name", ["pipe without a writer", "socket"])
@pytest.mark.parametrize("words", [words for words in WRITING if "--force" in words])
def test_a_pipe_or_socket_is_never_replaced_by_a_file(meshscope, place, words, name) -> None:
    path = PATHS[name](place)
    with soon():
        outcome = meshscope(*(word.replace("PATH", path) for word in words))
    assert_answered(outcome, words=words)
    assert not Path(path).is_file()
    assert not Path(path).is_dir()


def test_a_link_stays_and_its_file_is_replaced(meshscope, place) -> None:
    (place / "old.csv").write_text("old")
    (place / "link.csv").symlink_to("old.csv")
    assert meshscope("export", "run", "--to", "csv", "--out", "link.csv", "--force").status == 0
    assert (place / "link.csv").is_symlink()
    assert (place / "old.csv").read_text() != "old"
