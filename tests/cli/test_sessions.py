"""Sessions of a user: commands one after the other in one folder, and what each of them answers.

sessions.yaml says what a step may expect.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from tables import stored, table
from tests.cli.conftest import words_of, write_changed
from tests.conftest import Outcome

SESSIONS: dict[str, list[Any]] = stored(Path(__file__).with_name("sessions.yaml"))
SLOW = {"plan", "serve-sim", "report", "sql"}


def value_at(document: Any, path: str) -> Any:
    """The value at a dotted path; `*` stands for each entry of a list."""
    key, _, rest = path.partition(".")
    if key == "*":
        ones = document.values() if isinstance(document, dict) else document
        return [value_at(one, rest) if rest else one for one in ones]
    value = document[int(key)] if isinstance(document, list) else document[key]
    return value_at(value, rest) if rest else value


def assert_answered(outcome: Outcome, before: Outcome | None, *expected: Any) -> None:
    """A failure prints nothing else, and a success no message that is not expected."""
    status = next((one for one in expected if isinstance(one, int)), 0)
    more = {name: of for one in expected if isinstance(one, dict) for name, of in one.items()}
    assert outcome.status == status, outcome.err
    assert status or more.pop("err", "") in outcome.err
    if status or "err" not in str(expected):
        assert (outcome.out if status else outcome.err) == ""
    assert status != 1 or outcome.err.count("\n") == 1
    shown = " ".join((outcome.err if status else outcome.out).split())
    assert [one for one in expected if isinstance(one, str) and one not in shown] == []
    assert [one for one in more.pop("not", []) if one in shown] == []
    assert set(more.pop("top", [])) <= {*outcome.out.splitlines()[:12]}
    assert (outcome == before) is more.pop("same", outcome == before)
    assert not Path(more.pop("missing", "nothing")).exists()
    for name in [name for name in more if Path(name).is_file()]:
        text = Path(name).read_text("utf-8")
        assert [one for one in more.pop(name) if one not in text] == []
    document = json.loads(outcome.out) if more else {}
    assert {path: value_at(document, path) for path in more} == more


def session(name: str, steps: list[Any]) -> Any:
    """Searches, simulations, reports and databases are slow."""
    lines = [step[0] if isinstance(step, list) else step for step in steps]
    is_slow = any(words_of(line)[0] in SLOW for line in lines if isinstance(line, str))
    return pytest.param(steps, id=name, marks=(pytest.mark.slow,) if is_slow else ())


@pytest.mark.parametrize("steps", [session(*one) for one in SESSIONS.items()])
def test_a_session(meshscope, here: Path, steps: list[Any]) -> None:
    before = None
    for step in steps:
        if isinstance(step, dict):
            for file, how in step.items():
                write_changed(file, *how)
            continue
        line, *expected = [step] if isinstance(step, str) else step
        files = sorted(here.rglob("*"))
        outcome = meshscope(*words_of(line))
        assert_answered(outcome, before, *expected)
        assert outcome.status == 0 or sorted(here.rglob("*")) == files
        before = outcome


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
