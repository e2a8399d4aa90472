"""What is written is read again, and every way a run can be broken is one message with a remedy."""

import functools
import json
import operator
import random
import re
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import polars as pl
import pytest
from made import collective, estimate, part_cost, step_time
from tables import table

from meshscope.errors import RunError
from meshscope.events.enums import Kind, Phase, Source
from meshscope.events.schema import SCHEMA_VERSION
from meshscope.events.step_time import UnestimatedWork
from meshscope.plans.experiment_record import record_from_dict
from meshscope.plans.memory import Memory
from meshscope.store.read import read_events, read_run
from meshscope.store.run import Manifest, RunRecord
from meshscope.store.write import EVENTS, METRICS, sha256, write_run

MANIFEST = "manifest.json"
ROW = collective(Kind.ALL_REDUCE, (5, 7), layer=3, groups=((0, 1, 2), (3, 4, 5)))
UNKNOWN = dict.fromkeys(
    ("phase", "part", "layer", "axis", "dtype", "shape", "payload_bytes", "wire_bytes")
) | {"axis_reason": "[bold]\x1b[31mno scope\n"}
TIME = step_time(
    Phase.DECODE,
    estimate(0.3, 0.2, 0.5),
    0.1,
    exposed_s=0.15,
    idle_s=0.05,
    collective_s=0.2,
    exposed_by_axis_s={"tp": 0.15},
    by_basis_s={"compiler_cycles": 0.1, "interconnect_model": 0.15},
    parts=(part_cost(None, 0.1, collective_s=0.2, exposed_s=0.15, flops=7.0),),
    unestimated=(
        UnestimatedWork(opcode="sort", count=3, seconds=estimate(0.1, 0.0, 1.0), is_known=False),
    ),
    is_extrapolated=True,
    notes=("a note",),
)
RUN = RunRecord(
    path=None,
    manifest=Manifest(
        source=Source.COMPILED,
        experiment=record_from_dict({"plan": "tp=3,dp=2", "mesh": {"dp": 2, "tp": 3}}),
        phases=(Phase.PREFILL, Phase.DECODE),
        command=("meshscope", "compile", "a model", "--force"),
        created="2026-01-02T03:04:05+00:00",
        versions={"meshscope": "0"},
        flags={"XLA_FLAGS": "--x"},
        seconds={"prefill.compile": 1.5},
    ),
    times=(TIME,),
    rows=(
        replace(ROW, start_s=0.5, dur_s=0.25, exposed_s=0.0, time_basis="interconnect_model"),
        ROW,
        replace(ROW, source=Source.COMPILED, opcode="all-reduce", is_async=True, algorithm="Ring"),
        replace(ROW, **UNKNOWN, source=Source.COMPILED, crosses_slices=True),
    ),
    memory={
        Source.COMPILED: Memory(
            weights_bytes=1,
            kv_cache_bytes=2,
            temp_bytes=3,
            total_bytes=6,
            hbm_bytes=None,
            fits=None,
        )
    },
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "one"
    (path / "hlo").mkdir(parents=True)
    (path / "hlo" / "prefill.hlo.txt.gz").write_bytes(b"text")
    write_run(path, RUN, metrics={"verdict": None})
    return path


def test_a_run_is_read_as_it_was_written(run: Path) -> None:
    """4/3 of 70 bytes has no exact float; a manifest may lack a digest."""
    assert read_run(run) == replace(RUN, path=run)
    assert read_run(run).rows[0].wire_bytes == Fraction(4 * 70, 3)
    edit(run, MANIFEST, {"digest": "absent"})
    assert read_run(run).path == run


def test_the_manifest_has_the_hash_of_every_file(run: Path) -> None:
    files = json.loads((run / MANIFEST).read_text())["files"]
    names = [EVENTS, "hlo/prefill.hlo.txt.gz", METRICS]
    assert files == {name: sha256(run / name) for name in names}


def test_a_run_without_collectives_is_a_run(tmp_path: Path) -> None:
    write_run(tmp_path, replace(RUN, rows=()), metrics={})
    assert read_run(tmp_path) == replace(RUN, rows=(), path=tmp_path)


def edit(run: Path, name: str, changes: dict[str, object]) -> None:
    """Changes values of a JSON file by their dotted names; "absent" removes one."""
    document = json.loads((run / name).read_text())
    for key, value in changes.items():
        *outer, last = key.split(".")
        place = functools.reduce(operator.getitem, outer, document)
        if value == "absent":
            del place[last]
        else:
            place[last] = value
    (run / name).write_text(json.dumps(document))


def agree_on_events(run: Path) -> None:
    files = json.loads((run / MANIFEST).read_text())["files"]
    files[EVENTS] = sha256(run / EVENTS)
    edit(run, MANIFEST, {"files": files, "digest": "absent"})


def rewrite_events(run: Path, frame: Callable[[pl.DataFrame], pl.DataFrame]) -> None:
    """Changes the events and makes the manifest agree, as another version of the tool might."""
    frame(pl.read_parquet(run / EVENTS)).write_parquet(run / EVENTS)
    agree_on_events(run)


AGAIN = r"Make it again: meshscope compile 'a model' --out '?/.+ --force$"
BROKEN: dict[str, tuple[str, bytes | None, str]] = {
    "no manifest": (MANIFEST, None, "it has no manifest.json"),
    "manifest cut": (MANIFEST, b'{"tool":', "cannot read .*manifest"),
    "manifest a list": (MANIFEST, b"[]", "is not a JSON object"),
    "manifest deep": (MANIFEST, b"[" * 10**5, "cannot read"),
    "manifest binary": (MANIFEST, b"\xff\xfe", "cannot read"),
    "no events": (EVENTS, None, f"has no events.parquet. {AGAIN}"),
    "events cut": (EVENTS, b"PAR1", f"is damaged or was changed. {AGAIN}"),
    "no metrics": (METRICS, None, "cannot read .*metrics.json"),
}


@pytest.mark.parametrize(("name", "content", "message"), BROKEN.values(), ids=BROKEN)
def test_a_broken_file_is_one_message_with_the_remedy(run: Path, name, content, message) -> None:
    if content is None:
        (run / name).unlink()
    else:
        (run / name).write_bytes(content)
    with pytest.raises(RunError, match=message):
        read_run(run)


@table
def test_a_changed_document_is_one_message_with_the_remedy(run, name, changes, message) -> None:
    edit(run, name, changes)
    with pytest.raises(RunError, match=message.replace("AGAIN", AGAIN)):
        read_run(run)


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (lambda f: f.drop("kind"), r"missing columns \['kind'\]"),
        (lambda f: f.with_columns(x=pl.lit(1)), r"unknown columns \['x'\]"),
        (lambda f: f.with_columns(kind=pl.lit("shuffle")), f"'shuffle' is not a .*Kind.* {AGAIN}"),
    ],
    ids=["column missing", "foreign column", "foreign kind"],
)
def test_events_of_another_form_are_refused(run: Path, frame, message: str) -> None:
    rewrite_events(run, frame)
    with pytest.raises(RunError, match=message):
        read_run(run)


def test_damaged_events_are_told_whatever_byte_changed(run: Path) -> None:
    good = (run / EVENTS).read_bytes()
    flip = random.Random(3)
    for _ in range(20):
        damaged = bytearray(good)
        damaged[flip.randrange(len(good))] ^= 0xFF
        (run / EVENTS).write_bytes(damaged)
        with pytest.raises(RunError, match="is damaged or was changed"):
            read_run(run)


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1" * 50, b"phase,kind\n"])
def test_a_file_that_is_no_parquet_is_a_message_even_when_the_manifest_agrees(run, content) -> None:
    (run / EVENTS).write_bytes(content)
    agree_on_events(run)
    with pytest.raises(RunError, match=f"cannot read events.parquet.*{AGAIN}"):
        read_run(run)


def test_a_half_written_run_is_told_as_such(run: Path) -> None:
    partial = run.rename(run.parent / ".one.partial-12")
    with pytest.raises(RunError, match="half-written: the command that makes 'one'"):
        read_run(partial)


@pytest.mark.parametrize("name", ["nowhere", "file"])
def test_a_path_without_a_folder_is_named_as_typed(tmp_path, monkeypatch, name) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("x")
    with pytest.raises(RunError, match=f"^no run at '{name}'"):
        read_run(Path(name))


def test_events_that_are_no_collectives_are_not_read_as_rows(run: Path) -> None:
    rewrite_events(run, lambda f: pl.concat([f, f.with_columns(kind=pl.lit(None, pl.String))]))
    assert read_run(run).rows == RUN.rows


def test_the_remedy_makes_the_run_where_it_lies_now(run: Path, tmp_path: Path) -> None:
    path = run.rename(tmp_path / "moved")
    command = ["meshscope", "compile", "m", "--force", "--out", "runs/made", "--plan", "tp=8"]
    edit(path, MANIFEST, {"schema": 0, "command": command})
    expected = f"Make it again: meshscope compile m --plan tp=8 --out {path} --force"
    with pytest.raises(RunError, match=re.escape(expected)):
        read_run(path)


ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "tests" / "golden" / "run"


def test_a_recorded_run_of_this_schema_is_read() -> None:
    run = read_run(RECORDED)
    assert run.manifest.experiment.model_name == "Qwen/Qwen3-4B"
    assert run.manifest.phases == (Phase.PREFILL, Phase.DECODE)
    assert run.sources == (Source.PREDICTED,)
    # embedding, two layers of attention and MLP, and the logits, in two phases
    assert sum(row.count for row in run.rows) == 2 * (1 + 2 * 2 + 1)
    assert {time.phase for time in run.times} == set(run.manifest.phases)
    assert run.memory[Source.PREDICTED].weights_bytes > 0


def test_the_page_has_the_schema_its_columns_and_the_files_of_a_run() -> None:
    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    documented = re.findall(r"^\| `(\w+)` \| \w", page, re.MULTILINE)
    assert set(read_events(RECORDED).columns) <= set(documented)
    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    assert f"writes and reads schema {SCHEMA_VERSION}." in page
    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    files = {path.name for path in RECORDED.iterdir()} - {"README.md"}
    assert [name for name in files if f"| `{name}` |" not in page] == []
