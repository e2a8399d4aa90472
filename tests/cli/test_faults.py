"""Faults of the user: one message, on standard error, and nothing is left."""

import shlex
from pathlib import Path

from tables import stored, table

ASKED: dict[str, str] = stored(Path(__file__).with_suffix(".yaml"))["asked"]


@table
def test_a_fault_is_one_message_and_leaves_nothing(meshscope, line, status, message) -> None:
    """`{predict}` and others stand for command lines without a fault."""
    outcome = meshscope(*shlex.split(line.format(**ASKED)))
    assert (outcome.status, outcome.out) == (status, "")
    assert message in outcome.err
    assert status == 2 or outcome.err.count("\n") == 1
    assert list(Path().iterdir()) == []


def test_a_path_that_is_too_long_is_escaped(meshscope) -> None:
    line = shlex.split(ASKED["predict"])
    status, out, err = meshscope(*line, "--out", "a\x1b[31m/" + "x" * 300)
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert [path for path in Path().rglob("*") if path.is_file()] == []
    assert "cannot write the run 'a\\x1b[31m/xxx" in err
