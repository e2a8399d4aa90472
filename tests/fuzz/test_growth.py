"""Four times the content takes a reader some four times the work, counted in calls and not in seconds."""

import gzip
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import made_kineto
import made_nsys
import made_profiles as made
import pytest
from made_hlo import module_text
from readers import READERS, SERVED, TESTS

import meshscope
from meshscope.serving.load import recorded_load
from meshscope.serving.server_metrics import read_metrics

FEW, MANY = 20, 80
MOST_TIMES = 5.0  # the calls of MANY over those of FEW: 4 if linear, 16 if quadratic
Made = Callable[[Path, int], object]


def _hlo(path: Path, n: int) -> None:
    groups = "replica_groups={{0,1,2,3},{4,5,6,7}}, use_global_device_ids=true, to_apply=%add"
    ring = 'source_target_pairs={{0,1},{1,2}}, metadata={op_name="jit(f)/decode/mlp/dot_general"}'
    lines = [
        "  %s0 = f32[8] parameter(0)",
        "  %p0 = f32[8] parameter(1)",
        "  %t = token[] after-all()",
    ]
    sent = "frontend_attributes={_xla_send_recv_source_target_pairs={{0,1},{1,2}}}"
    for i in range(1, n + 1):
        name = f'metadata={{op_name="jit(f)/decode/layer{i}/mlp/psum"}}'
        lines += [
            f"  %p{i} = f32[8] collective-permute(%p{i - 1}), {ring}",
            f"  %m{i} = f32[8] multiply(%s{i - 1}, %s{i - 1})",
            f"  %s{i} = f32[8] all-reduce(%m{i}), channel_id={i}, {groups}, {name}",
            f"  %o{i} = (f32[8], u32[], token[]) send(%s{i}, %t), channel_id={i}, {sent}",
            f"  %i{i} = (f32[8], u32[], token[]) recv(%t), channel_id={i}, {sent}",
        ]
    text = module_text("\n".join(lines), header=", num_partitions=8").encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)


def _xplane(path: Path, n: int) -> None:
    events = [made.Event((made.REDUCE, made.FUSION)[i % 2], 1000 * i, 400) for i in range(n)]
    path.write_bytes(made.xspace(made.tpu(*events)))


def _kineto(path: Path, n: int) -> None:
    step = partial(made_kineto.vllm_step, rank=0, payload=4096, ranks=[0, 1])
    name = "execute_context_1(512)_generation_3(3)"
    events = [event for i in range(n) for event in step(name, 1000.0 * i, first=3 * i + 1)]
    made_kineto.write(path, made_kineto.document(events, world_size=2))


def _chrome(path: Path, n: int) -> None:
    (reader,) = (one for one in READERS if one.name == "chrome")
    document = json.loads(reader.seeds()[0])
    *names, op = document["traceEvents"][:3]
    ops = [{**op, "ts": 2.0 * i} for i in range(n)]
    path.write_text(json.dumps({**document, "traceEvents": [*names, *ops]}))


def _nsys(path: Path, n: int) -> None:
    path.unlink(missing_ok=True)
    kernels = [(100 * i, 100 * i + 50, 0, 1, 7, i, 0, 3 - 2 * (i % 2), 3) for i in range(n)]
    tables: dict[str, list[tuple]] = {
        "StringIds": list(made_nsys.NAMES.items()),
        "CUPTI_ACTIVITY_KIND_KERNEL": kernels,
        "CUPTI_ACTIVITY_KIND_RUNTIME": [(100 * i, 100 * i + 9, i, 0, 0) for i in range(n)],
        "NVTX_EVENTS": [(1000 * i, 1000 * i + 900, 59, None, 4, 0) for i in range(n // 10)],
    }
    made_nsys.written(path, tables)


def _served(path: Path, n: int) -> None:
    values = {"ttfts": [0.1] * n, "itls": [[0.01] * 3] * n}
    path.write_text(json.dumps(SERVED | values))


def _card(path: Path, n: int) -> None:
    card = (TESTS / "golden" / "traces" / "vllm-tp2" / "card.yaml").read_text(encoding="utf-8")
    path.write_text(card + "".join(f"note_{i}: text\n" for i in range(n)))


def _arrivals(path: Path, n: int) -> None:
    path.write_text("arrival,prompt,output\n" + "".join(f"{i},100,10\n" for i in range(n)))


def _metrics(path: Path, n: int) -> None:
    path.write_text(
        "vllm:e2e_request_latency_seconds_count 9\nvllm:num_requests_running 4\n"
        + "".join(f'vllm:other_total{{engine="{i}"}} {i}\n' for i in range(n))
    )


MADE: dict[str, Made] = {
    "hlo": _hlo,
    "hlo-gzip": _hlo,
    "xplane": _xplane,
    "kineto": _kineto,
    "kineto-gzip": _kineto,
    "chrome": _chrome,
    "nsys": _nsys,
    "served": _served,
    "card": _card,
    "format": _kineto,
}
CASES: Sequence[tuple[str, Made, Callable[[Path], object], str]] = [
    *((one.name, MADE[one.name], one.read, one.ending) for one in READERS if one.name in MADE),
    ("arrivals", _arrivals, partial(recorded_load, rate_per_s=None, n_requests=None), ".csv"),
    ("metrics", _metrics, lambda path: read_metrics(path.read_text()), ".prom"),
]


def n_calls(work: Callable[[], object]) -> int:
    """The calls of Python and C functions that the work makes."""
    n = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal n
        n += event in {"call", "c_call"}

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return n


@pytest.mark.parametrize(("name", "make", "read", "ending"), CASES, ids=[c[0] for c in CASES])
def test_four_times_the_content_takes_four_times_the_calls(
    name: str, make: Made, read: Callable[[Path], object], ending: str, tmp_path: Path
) -> None:
    counts: list[int] = []
    for n in (FEW // 2, FEW, MANY):  # the first imports what the reader needs
        path = tmp_path / f"{name}{n}{ending}"
        make(path, n)
        counts.append(n_calls(partial(read, path)))
    assert 0 < counts[2] <= MOST_TIMES * counts[1], counts


def test_every_reader_has_a_growing_file() -> None:
    of_runs = {"manifest", "events"}  # their sizes follow from the experiment
    assert {one.name for one in READERS} == {*MADE, *of_runs}


def test_a_run_of_more_layers_is_read_in_as_many_calls_more(tmp_path: Path) -> None:
    counts: list[int] = []
    for n in (2, 8, 32):
        folder = tmp_path / f"run{n}"
        meshscope.predict("Qwen/Qwen3-4B", topology="v6e-8", plan="tp=8", layers=n, out=folder)
        counts.append(n_calls(lambda folder=folder: list(meshscope.open(folder)[0].record.rows)))
    assert counts[2] <= MOST_TIMES * counts[1], counts
