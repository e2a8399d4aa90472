"""Whatever a file contains, a reader answers with rows or with one message, soon.

By default each reader gets the same few damaged files. MESHSCOPE_FUZZ_SECONDS=60 gives each reader
other files for a minute (`make fuzz`, which CI runs); forms of a file that one reader reads share its
minute. What a run finds is printed as a line of `examples.json`, and a line there is a test for ever.
"""

import base64
import json
import os
import random
import time
import zlib
from itertools import count
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from mutations import damaged
from readers import READERS, Reader

from meshscope.errors import MeshscopeError

BUDGET_S = float(os.environ.get("MESHSCOPE_FUZZ_SECONDS", "0"))
EXAMPLES = Path(__file__).parent / "examples.json"
N_FILES = 50
MAX_READ_S = 20.0  # a machine that runs other tests may be slow

checked = settings(
    max_examples=N_FILES,
    database=None,
    deadline=None,
    phases=[Phase.generate],  # a file with other mutations is not a simpler file
    suppress_health_check=list(HealthCheck),
)


def answer_of(reader: Reader, path: Path, content: bytes) -> str:
    """Whether the file gives rows or a message, which must not be empty, in time."""
    path.write_bytes(content)
    started = time.monotonic()
    message = None
    try:
        reader.read(path)
    except MeshscopeError as error:
        message = str(error)
    assert message != ""
    assert time.monotonic() - started < MAX_READ_S
    return "rows" if message is None else "message"


def line_of(reader: Reader, content: bytes) -> str:
    """The reader and the file as JSON."""
    packed = base64.b85encode(zlib.compress(content, 9)).decode()
    return json.dumps({"reader": reader.name, "file": packed})


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_examples_give_rows_or_one_message(reader: Reader, tmp_path: Path) -> None:
    """The files of examples.json: one for each different answer, and those that once failed."""
    examples = [one for one in json.loads(EXAMPLES.read_text()) if one["reader"] == reader.name]
    assert examples
    for example in examples:
        content = zlib.decompress(base64.b85decode(example["file"]))
        answer_of(reader, tmp_path / f"example{reader.ending}", content)


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_a_damaged_file_gives_rows_or_one_message(reader: Reader, tmp_path: Path) -> None:
    path = tmp_path / f"damaged{reader.ending}"
    answers = {"rows": 0, "message": 0}
    seeds = reader.seeds()

    def read(seed_of_file: int, n_mutations: int) -> None:
        rng = random.Random(seed_of_file)
        content = damaged(seeds, reader.structural, rng, n_mutations)
        try:
            answers[answer_of(reader, path, content)] += 1
        except Exception as error:
            error.add_note(f"As a line of {EXAMPLES.name}: {line_of(reader, content)}")
            raise

    files = given(seed_of_file=st.integers(0, 2**64), n_mutations=st.integers(1, 5))
    n_forms = sum(other.family == reader.family for other in READERS)
    until = time.monotonic() + BUDGET_S / n_forms
    rounds = count(time.time_ns() if BUDGET_S else 0)
    for round_ in rounds:
        seed(round_)(checked(files(read)))()
        if time.monotonic() >= until:
            break
    assert sum(answers.values()) >= N_FILES / 2  # the others were equal files
