"""What is shown while something is made: plain lines in a file, rows on a terminal, and the time left if known."""

import io
import sys
from pathlib import Path

import pytest

from meshscope.api.console import WorkProgress, reporting, time_left_text
from meshscope.errors import RunFailedError
from meshscope.workers import Worker, WorkerTask


class Terminal(io.StringIO):
    """Takes what is written, as a terminal."""

    def isatty(self) -> bool:
        return True


def lines(text: str) -> list[str]:
    """What follows the seconds."""
    return [line.split("] ")[1] for line in text.splitlines()]


def test_a_file_gets_a_line_a_step_with_the_time_left_where_it_is_known(capsys) -> None:
    with WorkProgress() as display:
        progress = reporting(display, "draft")
        progress("decode", "compiling", None)
        reporting(display)("devices", "request 2 of 3", 250.0)
        reporting(None)("devices", "not shown", None)
    out, err = capsys.readouterr()
    assert out == ""
    assert lines(err) == [
        "draft decode: compiling",
        "devices: request 2 of 3, about 4 min left",
    ]


def test_a_terminal_has_a_row_for_each_part(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    with WorkProgress() as display:
        assert not display.disable
        display("prefill", "compiling [bold]", 30.0)
        display("decode", "compiling")
        display.refresh()
        display("prefill", "done")
        display.refresh()
    text = terminal.getvalue()
    assert "prefill  compiling [bold], about 30 s left" in text
    assert "left" not in text[text.rindex("prefill  done") :]


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.4, "0 s"), (99, "99 s"), (720, "12 min"), (12_600, "3.5 h")]
)
def test_time_left_is_rough(seconds: float, words: str) -> None:
    assert time_left_text(seconds) == f"about {words} left"


TASK = WorkerTask(
    process="the worker",
    activity="working",
    rejection="Python refused",
    memory_remedy="",
    crash_remedy="Try again.",
    error=RunFailedError,
)


def test_a_worker_reports_steps_and_answers_each_request(tmp_path: Path) -> None:
    reports: list[tuple[str, str, float | None]] = []
    with Worker("meshscope.workers:report_progress", tmp_path) as worker:
        for step in ("request 1", "request 2"):
            answer = worker.do(
                step, TASK, part="devices", progress=lambda *report: reports.append(report)
            )
            assert answer is None
        worker.process.stdin.close()  # it ends by itself
        assert worker.process.wait(timeout=60) == 0
    assert reports == [("devices", "request 1", None), ("devices", "request 2", None)]


def test_an_exception_in_a_worker_is_one_message_and_the_next_request_is_answered(tmp_path) -> None:
    with Worker("builtins:int", tmp_path) as worker:
        with pytest.raises(RunFailedError, match="Python refused: ValueError: invalid literal"):
            worker.do("x", TASK)
        assert worker.do("7", TASK) == 7
