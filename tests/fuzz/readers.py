"""The readers under test: seeds, mutations that keep the syntax, and all that follows a reading."""

import gzip
import json
import random
import sqlite3
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import made_kineto
import made_nsys
import made_profiles as made
import made_xplane
from mutations import Mutation, gzipped, json_value, protobuf_field, text_line

import meshscope
from meshscope.errors import SpecError
from meshscope.plans.mesh import Mesh
from meshscope.readers.hlo.collectives import module_collectives
from meshscope.readers.hlo.parse import read_hlo
from meshscope.readers.profile.executions import executions
from meshscope.readers.profile.quality import capture_faults
from meshscope.readers.profile.xplane import read_profile
from meshscope.readers.traces.attribution import attributed
from meshscope.readers.traces.chrome import read_chrome
from meshscope.readers.traces.kineto import read_kineto
from meshscope.readers.traces.merge import merged
from meshscope.readers.traces.nsys import read_nsys
from meshscope.readers.traces.sniff import format_of
from meshscope.readers.traces.trace import Trace
from meshscope.readers.traces.xplane import read_xplane
from meshscope.reports.export.card import read_card
from meshscope.serving.benchmarks import read_bench

TESTS = Path(__file__).parents[1]
MESH = Mesh(axes=(("dp", 2), ("tp", 4)))


@dataclass(frozen=True)
class Reader:
    """Reads a damaged file at a path; a MeshscopeError is an answer, any other error a bug."""

    name: str
    ending: str
    seeds: Callable[[], Sequence[bytes]]
    read: Callable[[Path], object]
    structural: tuple[Mutation, ...] = ()

    @property
    def family(self) -> str:
        """What reads the file, whatever its form: `hlo` of `hlo-gzip`, `run` of a run's files."""
        return "run" if self.name in {"manifest", "events"} else self.name.partition("-")[0]


def _hlo_seeds() -> Sequence[bytes]:
    names = ("v5e_dp2tp4_prefill_scan", "v6e_several")
    folder = TESTS / "golden" / "hlo"
    return [gzip.decompress((folder / f"{n}.jax-0.10.2.txt.gz").read_bytes()) for n in names]


def _read_hlo(path: Path) -> None:
    module_collectives(read_hlo(path), mesh=MESH).rows()


def _xplane_seeds() -> Sequence[bytes]:
    chip = made.tpu(made.Event(made.REDUCE, 0, 400), made.Event(made.START, 400, 10))
    hosts = [made.xspace(chip), made.xspace(*made.v6e_host()), made.xspace(made.gpu())]
    sparse, megascale, host = _other_planes()
    others = [made.xspace(chip, sparse, megascale), made.xspace(chip, host)]
    return [*hosts, _with_program(), *others]


def _other_planes() -> Sequence[object]:
    """A SparseCore, and transfers between slices in both forms."""
    ops = [made.Event(made.REDUCE, 100, 200), made.Event(made.FUSION, 300, 50)]
    sparse = made.Plane("/device:TPU:3 SparseCore 1", [made.Line("Sparse Core Ops", ops)])
    key = {"graph_key": "device_200001_gid_send.1$1^i0"}
    sends = [made.Event(f"Network{way} END", 100, 90, key) for way in ("Send", "Receive")]
    megascale = made.Plane("/device:CUSTOM:Megascale Trace", [made.Line("dcn", sends)])
    facts = {
        "dcn_label": "all-reduce.1",
        "dcn_source_slice_id": 1,
        "dcn_source_per_slice_device_id": 0,
        "dcn_destination_slice_id": 0,
        "dcn_destination_per_slice_device_id": 0,
        "payload_size_bytes": 32768,
        "duration_us": 50,
    }
    name = "MegaScale: Communication Transport Send"
    steps = made.Event("execute_model: 8 reqs, 8 toks", 0, 900)
    host = made.Plane("/host:CPU", [made.Line("dcn", [made.Event(name, 500, 0, facts), steps])])
    return [sparse, megascale, host]


def _any_seeds() -> Sequence[bytes]:
    return [*_xplane_seeds(), *_kineto_seeds(), *_nsys_seeds(), *_hlo_seeds(), CARD]


def _rows(*traces: Trace) -> None:
    """What an import makes of traces, with a plan and without."""
    trace = merged(traces)
    attributed(trace, None)
    try:
        attributed(trace, MESH)
    except SpecError:  # a damaged trace may have more devices than the plan
        attributed(trace, Mesh(axes=(("tp", max(2, trace.n_devices)),)))


def _read_xplane(path: Path) -> None:
    profile = read_profile(path)
    capture_faults(profile, profile.ops, executions(profile.ops))
    _rows(read_xplane(path))


def _with_program() -> bytes:
    """A chip whose collective the HLO inside describes."""
    program = made_xplane.hlo_proto(made_xplane.golden_text("v6e_several"), 8)
    inside = made_xplane.metadata_plane({"jit_decode(12345678901234567890)": program})
    return made.xspace(inside, made.tpu(made.Event(made.REDUCE, 0, 400)))


def _kineto_seeds() -> Sequence[bytes]:
    name = "execute_context_1(512)_generation_3(3)"
    step = made_kineto.vllm_step(name, 100.0, rank=0, payload=4096, ranks=[0, 1], first=1)
    bare = made_kineto.vllm_step("ProfilerStep#7", 900.0, rank=0, payload=64, ranks=[0, 1], first=9)
    return [json.dumps(made_kineto.document([*step, *bare], world_size=2)).encode()]


def _chrome_seeds() -> Sequence[bytes]:
    line = "%ar.1 = f32[4]{0} all-reduce(f32[4]{0} %x), replica_groups={{0,1}}"
    names = [
        {"ph": "M", "pid": 3, "name": "process_name", "args": {"name": "/device:TPU:0"}},
        {"ph": "M", "pid": 3, "tid": 3, "name": "thread_name", "args": {"name": "XLA Ops"}},
    ]
    args = {"long_name": line, "hlo_category": "all-reduce", "run_id": "1"}
    op = {"ph": "X", "pid": 3, "tid": 3, "dur": 1.5, "name": "ar.1", "args": args}
    ops = [{**op, "ts": at} for at in (1.0, 3.0, 9.0)]
    return [json.dumps({"displayTimeUnit": "ns", "traceEvents": [*names, *ops]}).encode()]


def _read_chrome(path: Path) -> None:
    _rows(read_chrome(path))


@cache
def _nsys_seeds() -> Sequence[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        return [made_nsys.database(Path(folder) / "report.sqlite").read_bytes()]


def _sql(rng: random.Random, data: bytes) -> bytes:
    """Changes the tables of a database; the bytes if they are none."""
    with closing(sqlite3.connect(":memory:")) as database:
        database.text_factory = lambda name: name.decode(errors="replace")
        try:
            database.deserialize(data)
            tables = [t for (t,) in database.execute("select name from sqlite_master")]
            table = rng.choice(tables)
            column = rng.choice([row[1] for row in database.execute(f"pragma table_info({table})")])
            value = rng.choice(("null", "'text'", "-1", "1e300", "9223372036854775807", "x'ff00'"))
            database.execute(
                rng.choice(
                    (
                        f"drop table {table}",
                        f"alter table {table} drop column {column}",
                        f"alter table {table} rename column {column} to other",
                        f"update {table} set {column} = {value}",
                        f"insert into {table} select * from {table}",
                        f"delete from {table}",
                    )
                )
            )
            database.commit()
            return database.serialize()
        except (sqlite3.Error, IndexError):
            return data


CARD = (TESTS / "golden" / "traces" / "vllm-tp2" / "card.yaml").read_bytes()


@cache
def _run_folder() -> dict[str, bytes]:
    """The files of a predicted run."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        meshscope.predict("Qwen/Qwen3-4B", topology="v6e-8", plan="tp=8", layers=1, out=path)
        return {file.name: file.read_bytes() for file in path.iterdir() if file.is_file()}


def _read_run(name: str, path: Path) -> None:
    """Reads a run of which one file is damaged."""
    folder = path.parent / "run"
    folder.mkdir(exist_ok=True)
    for other, content in _run_folder().items():
        (folder / other).write_bytes(path.read_bytes() if other == name else content)
    run = meshscope.open(folder)[0]
    list(run.record.rows)
    run.text()


def _read_kineto(path: Path) -> None:
    _rows(read_kineto(path))


def _packed(seeds: Callable[[], Sequence[bytes]]) -> Callable[[], Sequence[bytes]]:
    return lambda: [gzip.compress(seed, 1) for seed in seeds()]


SERVED = {"completed": 2, "mean_ttft_ms": 5.0, "total_input_tokens": 16, "total_output_tokens": 8}


def _served_seeds() -> Sequence[bytes]:
    return [json.dumps(SERVED | {"ttfts": [0.1, 0.2]}).encode()]


def _of_run(name: str) -> Sequence[bytes]:
    return [_run_folder()[name]]


READERS = (
    Reader("hlo", ".txt", _hlo_seeds, _read_hlo, (text_line,)),
    Reader(
        "hlo-gzip", ".txt.gz", _packed(lambda: _hlo_seeds()[1:]), _read_hlo, (gzipped(text_line),)
    ),
    Reader("xplane", ".xplane.pb", _xplane_seeds, _read_xplane, (protobuf_field,)),
    Reader("kineto", ".json", _kineto_seeds, _read_kineto, (json_value,)),
    Reader("kineto-gzip", ".json.gz", _packed(_kineto_seeds), _read_kineto, (gzipped(json_value),)),
    Reader("chrome", ".json", _chrome_seeds, _read_chrome, (json_value,)),
    Reader("nsys", ".sqlite", _nsys_seeds, lambda path: _rows(read_nsys(path)), (_sql,)),
    Reader("served", ".json", _served_seeds, read_bench, (json_value,)),
    Reader("card", ".yaml", lambda: [CARD], read_card, (text_line,)),
    Reader(
        *("manifest", ".json", partial(_of_run, "manifest.json")),
        partial(_read_run, "manifest.json"),
        (json_value,),
    ),
    Reader(
        *("events", ".parquet", partial(_of_run, "events.parquet")),
        partial(_read_run, "events.parquet"),
    ),
    Reader("format", "", _any_seeds, format_of),
)
