"""The commands of docs/evidence/demands.md: all can be parsed, and those that only predict run."""

import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest
import typer
from click import Group

from meshscope.cli import app

ROOT = Path(__file__).parents[2]
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
