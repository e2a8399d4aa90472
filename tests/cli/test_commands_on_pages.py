"""Every command line in the README and the docs uses commands and options that exist."""

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import typer

from meshscope.cli import COMMANDS, GROUPS, SETTINGS, typer_command

ROOT = Path(__file__).parents[2]
SKILL = ROOT / "src/meshscope/api/SKILL.md"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), SKILL])
HELP = {"-h", "--help", "--version", "-V", "--install-completion"}

# `meshscope ...` in a code span, or on its own line or behind a prompt in a code block.
SPAN = re.compile(r"`(meshscope [^`]+)`")
LINE = re.compile(r"^(?:\$ )?(?:\.venv/bin/)?(meshscope (?:.*\\\n)*.*)$", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def commands_on(page: Path) -> list[str]:
    text = page.read_text(encoding="utf-8")
    blocks = FENCE.findall(text)
    spans = SPAN.findall(FENCE.sub("", text))
    return spans + [line for block in blocks for line in LINE.findall(block)]


def words_of(command: str) -> list[str]:
    """The words after `meshscope`, without a comment at the end."""
    return shlex.split(command.replace("\\\n", " "), comments=True)[1:]


@cache
def options_of(name: str) -> frozenset[str]:
    single = typer.Typer(**SETTINGS)
    single.command(name)(typer_command(COMMANDS[name].load()))
    parameters = typer.main.get_command(single).params
    return frozenset(option for p in parameters for option in (*p.opts, *p.secondary_opts))


def faults_of(command: str) -> Iterator[str]:
    """What a command line uses that does not exist."""
    name, *words = words_of(command)
    if name in GROUPS and words:
        name = f"{name} {words.pop(0)}"
    if name in HELP or name == "COMMAND" or name in GROUPS:
        return
    if name not in COMMANDS:
        yield f"{command}: no command '{name}'"
        return
    used = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
    for option in sorted(used - options_of(name) - HELP):
        yield f"{command}: '{name}' has no option {option}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_options_exist(page: Path) -> None:
    assert [fault for command in commands_on(page) for fault in faults_of(command)] == []


@pytest.mark.parametrize(
    ("command", "n_faults"),
    [
        ("meshscope predict MODEL --topology v6e-8 --plan tp=8  # text", 0),
        ("meshscope predict MODEL --topologi v6e-8", 1),
        ("meshscope pedict MODEL", 1),
    ],
)
def test_the_check_sees_a_fault(command: str, n_faults: int) -> None:
    assert len(list(faults_of(command))) == n_faults


def test_the_check_reads_spans_and_blocks() -> None:
    assert len(commands_on(ROOT / "README.md")) > 5
