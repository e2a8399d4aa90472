"""What is shown while something is made: plain lines in a file, rows on a terminal, and the time left where known."""

import io
import sys
import time

import pytest

from meshscope.api import console
from meshscope.api.console import WorkProgress, format_left
from meshscope.api.progress import ReportedProgress
from meshscope.workers import format_progress, parse_progress


class Terminal(io.StringIO):
    """Takes what is written, as a terminal."""

    def isatty(self) -> bool:
        return True


def lines(text: str) -> list[str]:
    """What follows the seconds."""
    return [line.split("] ")[1] for line in text.splitlines()]


def test_a_file_gets_a_line_a_step_with_the_time_left_where_it_is_known(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with WorkProgress() as display:
        progress = ReportedProgress(display, {"prefill": 31.4}, earlier="runs/a")
        progress("prefill", "compiling")
        progress("decode", "compiling")
        progress("prefill", "compiled")
        progress("devices", "request 2 of 3", 250.0)
    out, err = capsys.readouterr()
    assert out == ""
    assert lines(err) == [
        "prefill: compiling, as runs/a took, about 31 s left",
        "decode: compiling",
        "prefill: compiled",
        "devices: request 2 of 3, about 4 min left",
    ]


def test_a_terminal_counts_down_and_owns_up(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    now = time.monotonic()
    with WorkProgress() as display_:
        assert display_.bars is not None
        progress = ReportedProgress(display_, {"prefill": 30.0})
        progress("prefill", "compiling [bold]")
        progress("decode", "compiling")
        monkeypatch.setattr(console.time, "monotonic", lambda: now + 20.2)
        display_.bars.refresh()
        monkeypatch.setattr(console.time, "monotonic", lambda: now + 40)
        display_.bars.refresh()
        progress("prefill", "done")
        display_.bars.refresh()
    text = terminal.getvalue()
    assert "[bold]" in text
    assert "about 10 s left" in text
    assert "longer than expected" in text
    assert "longer" not in text[text.rindex("prefill  done") :]
    decode = [line for line in text.splitlines() if "decode" in line]
    assert not any("left" in line for line in decode)


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.4, "0 s"), (99, "99 s"), (720, "12 min"), (12_600, "3.5 h")]
)
def test_time_left_is_rough(seconds: float, words: str) -> None:
    assert format_left(seconds) == words


@pytest.mark.parametrize("left_s", [None, 12.5])
def test_a_child_is_piped_as_it_told(left_s: float | None) -> None:
    assert parse_progress(format_progress("request 1 of 3", left_s)) == ("request 1 of 3", left_s)
    assert parse_progress("WARNING: a library") is None
