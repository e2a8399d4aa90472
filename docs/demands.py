"""What the documents behind this project ask for, with the command that answers each demand.

For cog: `table` prints Markdown. `commands` is for the test that parses them.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import yaml

DATA = Path(__file__).parent / "evidence" / "demands.yaml"
STATES = ("works", "until a TPU", "partly", "no")


def demands() -> Iterator[tuple[str, str, str, str]]:
    """Document, demand, command and state of each demand; ValueError for a state that is none of STATES."""
    for document, rows in yaml.safe_load(DATA.read_text(encoding="utf-8")).items():
        for demand, command, state in rows:
            if state.partition(":")[0] not in STATES:
                raise ValueError(f"'{demand}' has the state '{state}'. Use one of {STATES}.")
            yield document, demand, command, state


def table() -> None:
    """The number of demands in each state, then a table for each document."""
    rows = list(demands())
    counts = Counter(state.partition(":")[0] for *_, state in rows)
    listed = ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])
    sys.stdout.write(f"{len(rows)} demands: {listed}.\n")
    for name in dict.fromkeys(document for document, *_ in rows):
        sys.stdout.write(f"\n## {name}\n\n| demand | command | state |\n| --- | --- | --- |\n")
        for document, demand, command, state in rows:
            if document == name:
                shown = f"[{command}](../{command.removeprefix('docs/')})"
                is_page = command.startswith("docs/")
                link = shown if is_page else f"`{command}`"
                sys.stdout.write(f"| {demand} | {link} | {state} |\n")
