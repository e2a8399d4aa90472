"""Commands on pages can be parsed, and those that only predict run."""

import re
import shlex
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
import typer
from click import Group
from tables import table

from meshscope.cli import COMMANDS, GROUPS, SETTINGS, app, typer_command

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


@table
def test_the_check_sees_a_fault(command: str, n_faults: int) -> None:
    assert len(list(faults_of(command))) == n_faults


def test_the_check_reads_spans_and_blocks() -> None:
    assert len(commands_on(ROOT / "README.md")) > 5


# Commands that need no files, no compiler, no other machine and less than a second.
RUN = ("predict ", "models", "topologies", "tpu setup ", "tpu create ")


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return [command for _, _, command, _ in import_module("demands").demands()]


def test_every_command_can_be_parsed(commands: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for command in commands:
        name, *words = shlex.split(command)
        if name == "make":
            assert set(words) <= targets, command
        elif name != "meshscope":
            assert (ROOT / command).is_file(), command
        else:
            group, context = typer.main.get_command(app()), None
            while isinstance(group, Group):
                context = group.make_context("meshscope", list(words), parent=context)
                _, group, words = group.resolve_command(context, words)
            assert group.make_context("meshscope", list(words), parent=context), command


@pytest.mark.slow
def test_commands_that_need_nothing_run(commands: list[str], meshscope, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    run = [
        words
        for c in dict.fromkeys(commands)
        if (words := c.removeprefix("meshscope ")).startswith(RUN)
    ]
    assert len(run) > 18
    for words in run:
        status, out, err = meshscope(*shlex.split(words))
        assert (status, bool(out)) == (0, True), (words, err)
