"""Every option of every command changes what its command answers, is refused with the reason, or has a test elsewhere.

The options are those that the command line declares, so that one without a row here fails.
"""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from tables import stored

from meshscope.cli import COMMANDS, SETTINGS, typer_command
from meshscope.errors import SpecError
from meshscope.serving.grid import SearchProgress

TESTS = Path(__file__).parents[1]
TABLES: dict[str, Any] = stored(Path(__file__).with_suffix(".yaml"))
CHANGES, REFUSED, HANDED = TABLES["changes"], TABLES["refused"], TABLES["handed"]
UNTRIED = {tuple(option) for option in TABLES["untried"]}


def words(line: str) -> list[str]:
    """The words of a command line, in which `{qwen}` stands for that of the tables."""
    return shlex.split(line.format(**TABLES["asked"]))


def options_of(table: dict[str, dict[str, Any]]) -> list[tuple[str, str]]:
    return [(command, option) for command, options in table.items() for option in options]


def declared() -> list[tuple[str, tuple[str, ...]]]:
    """Each command with the names of each of its options."""
    declared_options: list[tuple[str, tuple[str, ...]]] = []
    for words, command in COMMANDS.items():
        app = typer.Typer(**SETTINGS, add_completion=False)
        app.command(words)(typer_command(command.load()))
        options = (p for p in typer.main.get_command(app).params if p.opts[0].startswith("--"))
        declared_options += [(words, (*option.opts, *option.secondary_opts)) for option in options]
    return declared_options


def texts(places: list[str]) -> str:
    """The tests at these places, with their tables."""
    kinds = ("*.py", "*.yaml")
    files = [f for p in places for kind in kinds for f in (TESTS / p).rglob(kind)]
    files += [TESTS / p for p in places if p.endswith(".py")]
    return "\n".join(f.read_text() for f in files if f.stem != Path(__file__).stem)


def test_an_option_name_means_one_thing() -> None:
    """A name takes the same kind of value in every command, and is a flag in all of them or in none."""
    kinds: dict[str, dict[tuple[bool, str], list[str]]] = {}
    for words, command in COMMANDS.items():
        app = typer.Typer(**SETTINGS, add_completion=False)
        app.command(words)(typer_command(command.load()))
        params = typer.main.get_command(app).params
        for one in (param for param in params if param.opts[0].startswith("--")):
            for name in (*one.opts, *one.secondary_opts):
                kind = (one.is_flag, one.type.name.removesuffix(" range"))
                kinds.setdefault(name, {}).setdefault(kind, []).append(words)
    # plan and explore try several batches, and explore several lengths of requests.
    different = {name for name, of in kinds.items() if len(of) > 1}
    assert different == {"--batch", "--prompt", "--output"}


def is_tried(command: str, names: tuple[str, ...]) -> bool:
    name = names[0]
    if any(name in table.get(command, {}) for table in (CHANGES, REFUSED, HANDED)):
        return True
    text, keyword = texts(TABLES["elsewhere"][command]), name.removeprefix("--").replace("-", "_")
    return any(n in text for n in names) or f"{keyword}=" in text or (command, name) in UNTRIED


def test_every_option_has_a_row_or_a_test() -> None:
    options = declared()
    assert len(options) > 300
    assert [one for one in options if not is_tried(*one)] == []


SLOW = {"models", "plan", "serve-sim", "sql"}
KEPT: dict[tuple[str, ...], Any] = {}  # outcomes without the option, which several options share


def answer(out: str) -> Any:
    """The answer without the lines that only repeat the options: the figures of a document, or the text."""
    try:
        document = json.loads(out)
    except ValueError:
        return out
    return document | {"experiment": None} if isinstance(document, dict) else document


@pytest.mark.parametrize(
    ("command", "option"),
    [
        pytest.param(*one, marks=(pytest.mark.slow,) if one[0] in SLOW else ())
        for one in options_of(CHANGES)
    ],
)
def test_an_option_changes_the_answer(meshscope, monkeypatch, kept, command, option) -> None:
    monkeypatch.chdir(kept)
    asked, added = map(words, CHANGES[command][option])
    # Figures count, not the line that repeats the options.
    is_kept = command in {"predict", "plan", "serve-sim"}  # which change no file
    is_text = option in {
        "--json",
        "--full",
        "--top",
        "--fit",
        "--next-measurement",
        "--rows",
    }
    form = ("--json",) * (is_kept and not is_text)
    line = (*command.split(), *asked, *form)
    without = (KEPT.get(line) if is_kept else None) or meshscope(*line)
    KEPT[line] = without
    changed = meshscope(*command.split(), *asked, *added, *form)
    assert (without.status, changed.status) == (0, 0), changed.err
    assert answer(changed.out) != answer(without.out)


@pytest.mark.parametrize(("command", "option"), options_of(HANDED))
def test_an_option_changes_the_work(meshscope, monkeypatch, kept, command, option) -> None:
    """Without the work itself: a compiler, devices or a search of minutes."""
    monkeypatch.chdir(kept)
    handed: list[Any] = []

    def work(*values: Any, **options: Any) -> None:
        options.pop("progress", None)
        given = (*values, *options.values())
        handed.append([one for one in given if not isinstance(one, Path | SearchProgress)])
        raise SpecError("the test ends here")

    monkeypatch.setattr(TABLES["work"][command], work)
    asked, added = map(words, HANDED[command][option])
    outcomes = [meshscope(command, *asked), meshscope(command, *asked, *added)]
    assert ["the test ends here" in one.err for one in outcomes] == [True, True], outcomes[1].err
    without, changed = handed
    assert changed != without


@pytest.mark.parametrize(("command", "option"), options_of(REFUSED))
def test_an_option_without_effect_is_refused(meshscope, monkeypatch, kept, command, option) -> None:
    monkeypatch.chdir(kept)
    line, message = REFUSED[command][option]
    outcome = meshscope(command, *words(line))
    assert outcome.status in {1, 2}
    assert message in outcome.err
