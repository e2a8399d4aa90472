"""Faults of the user: one message, on standard error, and nothing is left."""

from pathlib import Path

from tables import table
from tests.cli.conftest import words_of


@table
def test_a_fault_is_one_message_and_leaves_nothing(meshscope, line, status, message) -> None:
    outcome = meshscope(*words_of(line))
    assert (outcome.status, outcome.out) == (status, "")
    assert message in outcome.err
    assert status == 2 or (outcome.err.count("\n"), len(outcome.err) < 700) == (1, True)
    assert list(Path().iterdir()) == []


def test_a_path_that_is_too_long_is_escaped(meshscope) -> None:
    status, out, err = meshscope(*words_of("$predict"), "--out", "a\x1b[31m/" + "x" * 300)
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert [path for path in Path().rglob("*") if path.is_file()] == []
    assert "cannot write the run 'a\\x1b[31m/xxx" in err
