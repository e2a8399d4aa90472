"""Damaged texts give rows or one ParseError, never a traceback."""

import gzip
import random
import re
from collections.abc import Callable

import pytest
from goldens import GOLDEN_DIR, GOLDENS

from meshscope.errors import ParseError
from meshscope.plans.mesh import Mesh
from meshscope.readers.hlo.collectives import collectives_of
from meshscope.readers.hlo.parse import parse_hlo

NAMES = ["v6e_tp8sp_prefill_auto", "tpu7x_fsdp2tp4_prefill_scan", "2xv6e_across_slices"]

Damage = Callable[[random.Random, list[str], int], None]


def _delete(_: random.Random, lines: list[str], at: int) -> None:
    del lines[at]


def _repeat(rng: random.Random, lines: list[str], at: int) -> None:
    lines.insert(rng.randrange(len(lines)), lines[at])


def _swap(rng: random.Random, lines: list[str], at: int) -> None:
    other = rng.randrange(len(lines))
    lines[at], lines[other] = lines[other], lines[at]


def _overwrite(rng: random.Random, lines: list[str], at: int) -> None:
    place = rng.randrange(len(lines[at]) + 1)
    lines[at] = lines[at][:place] + rng.choice('{}()=,%"[]x0 ') + lines[at][place + 1 :]


def _cut_out(rng: random.Random, lines: list[str], at: int) -> None:
    start = rng.randrange(len(lines[at]) + 1)
    lines[at] = lines[at][:start] + lines[at][start + rng.randint(1, 40) :]


def _rename(rng: random.Random, lines: list[str], at: int) -> None:
    lines[at] = re.sub(r"%[\w.-]+", lambda m: rng.choice(["%x", m[0]]), lines[at])


def _renumber(rng: random.Random, lines: list[str], at: int) -> None:
    lines[at] = re.sub(r"\d+", lambda m: rng.choice([m[0], "0", "99", ""]), lines[at])


DAMAGES: list[Damage] = [_delete, _repeat, _swap, _overwrite, _cut_out, _rename, _renumber]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("name", NAMES)
def test_a_damaged_text_gives_rows_or_one_message(name: str, damage: Damage) -> None:
    golden = GOLDENS[name]
    text = gzip.decompress((GOLDEN_DIR / f"{name}.jax-0.10.2.txt.gz").read_bytes()).decode()
    per_slice = 8 // golden.n_slices
    rng = random.Random(11)
    messages: list[str] = []
    for _ in range(12):
        lines = text.split("\n")
        for _ in range(rng.randint(1, 3)):
            damage(rng, lines, rng.randrange(len(lines)))
        try:
            collectives_of(
                parse_hlo("\n".join(lines), "damaged.hlo"),
                mesh=Mesh(axes=golden.axes),
                n_steps_of={},
                crosses_slices=lambda groups: (
                    any(len({d // per_slice for d in group}) > 1 for group in groups)
                    if golden.n_slices > 1
                    else None
                ),
            )
        except ParseError as error:
            messages.append(str(error))

    assert [m for m in messages if not m.startswith("damaged.hlo:")] == []
