"""Whatever a file contains, a reader answers with rows or with one message, soon.

By default each reader gets the same few hundred damaged files. MESHSCOPE_FUZZ_SECONDS=60 gives each
reader other files for a minute (`make fuzz`); what it finds becomes a test of the reader.
"""

import os
import random
import time
from itertools import count
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from mutations import damaged
from readers import READERS, Reader

from meshscope.errors import MeshscopeError

BUDGET_S = float(os.environ.get("MESHSCOPE_FUZZ_SECONDS", "0"))
N_FILES = 50
MAX_READ_S = 20.0  # a machine that runs other tests may be slow

checked = settings(
    max_examples=N_FILES,
    database=None,
    deadline=None,
    phases=[Phase.generate],  # a file with other mutations is not a simpler file
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_a_damaged_file_gives_rows_or_one_message(reader: Reader, tmp_path: Path) -> None:
    path = tmp_path / f"damaged{reader.ending}"
    answers = {"rows": 0, "message": 0}
    seeds = reader.seeds()

    def read(seed_of_file: int, n_mutations: int) -> None:
        rng = random.Random(seed_of_file)
        path.write_bytes(damaged(seeds, reader.structural, rng, n_mutations))
        started = time.monotonic()
        try:
            reader.read(path)
            answers["rows"] += 1
        except MeshscopeError as error:
            answers["message"] += len(str(error)) > 0
        assert time.monotonic() - started < MAX_READ_S

    files = given(seed_of_file=st.integers(0, 2**64), n_mutations=st.integers(1, 5))
    until = time.monotonic() + BUDGET_S
    rounds = count(time.time_ns() if BUDGET_S else 0)
    for round_ in rounds:
        seed(round_)(checked(files(read)))()
        if time.monotonic() >= until:
            break
    assert sum(answers.values()) >= N_FILES / 2  # the others were equal files
