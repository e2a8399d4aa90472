"""Kineto traces of our own making, read into rows."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import made_kineto as made
import polars as pl
import pytest
from tables import table

from meshscope.errors import SpecError, TraceError
from meshscope.events.enums import Kind, Phase
from meshscope.events.measured import StepLabel
from meshscope.plans.plan import parse_plan
from meshscope.readers.traces.attribution import TraceRows, attributed
from meshscope.readers.traces.kineto import read_kineto
from meshscope.readers.traces.merge import merged
from meshscope.readers.traces.trace import Trace

PREFILL = "execute_2100_context_2(sq2048sk4096sqsq1sqsk1)_generation_52(sq52sk900sqsq52sqsk900)"
DECODE = "execute_context_0(0)_generation_64(64)"
MIXED = "execute_context_1(512)_generation_500(500)"


def rows_of(paths: list[Path], plan: str | None = None) -> TraceRows:
    mesh = None if plan is None else parse_plan(plan).mesh
    return attributed(merged([read_kineto(path) for path in paths]), mesh)


def written(folder: Path, *events: made.Event, name: str = "t.json", **document: int) -> Path:
    return made.write(folder / name, made.document(events, **document))


def read(folder: Path, *events: made.Event, plan: str | None = None, **document: int) -> TraceRows:
    return rows_of([written(folder, *events, **document)], plan)


def two_ranks(folder: Path, *, skew: float = 0.0) -> list[Path]:
    """Steps of prefill, decode, decode and both on two ranks."""
    paths = []
    for rank in range(2):
        late = skew if rank else 0.0
        events = [
            event
            for i, (name, n) in enumerate(
                [(PREFILL, 2100 * 4096), (DECODE, 64 * 4096), (DECODE, 64 * 4096), (MIXED, 4096)]
            )
            for event in made.vllm_step(
                name, 1000.0 + 1000 * i, rank=rank, payload=n, ranks=[0, 1], first=1 + 3 * i, skew=late
            )
        ]  # fmt: skip
        path = folder / f"rank{rank}.pt.trace.json.gz"
        paths.append(made.write(path, made.document(events, rank=rank, world_size=2)))
    return paths


def test_steps_of_vllm_become_phases(tmp_path: Path) -> None:
    rows = rows_of(two_ranks(tmp_path), "tp=2")
    counts = [
        (r.phase, r.kind, r.axis, r.count, r.n_steps, r.payload_bytes)
        for r in rows.rows
        if "nccl" in (r.opcode or "")
    ]
    reduce = Kind.ALL_REDUCE
    assert counts == [
        (Phase.PREFILL, reduce, "tp", 1, 1, 2100 * 4096 * 2),
        (Phase.DECODE, reduce, "tp", 1, 2, 64 * 4096 * 2),
        (None, reduce, "tp", 1, 1, 4096 * 2),
    ]
    assert {(s.label, s.n_steps, s.prefill_tokens, s.decode_tokens) for s in rows.steps} == {
        (StepLabel.PREFILL, 1, 2048, 52),
        (StepLabel.DECODE, 2, 0, 64),
        (StepLabel.MIXED, 1, 512, 500),
    }
    assert "steps that mix prefill and decode" in (rows.rows[-1].axis_reason or "")


def test_custom_all_reduce_counts_with_unknown_bytes(tmp_path: Path) -> None:
    rows = rows_of(two_ranks(tmp_path), "tp=2")
    custom = [row for row in rows.rows if row.opcode == "vllm::cross_device_reduce_1stage"]
    assert [(r.phase, r.axis, r.dtype, r.count, r.payload_bytes, r.wire_bytes) for r in custom] == [
        (phase, "tp", "bf16", 1, None, None) for phase in (Phase.PREFILL, Phase.DECODE, None)
    ]
    assert any("the bytes of 8 'vllm::cross_device_reduce_1stage'" in f for f in rows.findings)


def test_exposed_time_excludes_compute(tmp_path: Path) -> None:
    """The GEMM runs from 0 to 30 us; the all-reduce of rank 0 from 20 to 40, of rank 1 from 15 to 40."""
    rows = rows_of(two_ranks(tmp_path), "tp=2")
    nccl = next(row for row in rows.rows if "nccl" in (row.opcode or ""))
    assert nccl.dur_s == pytest.approx((20 + 25) / 2 * 1e-6)
    assert nccl.exposed_s == pytest.approx(10e-6)
    load = {(load.device, load.label): load for load in rows.loads}[1, StepLabel.PREFILL]
    assert (load.window_s, load.busy_s, load.idle_s) == pytest.approx((51e-6, 46e-6, 5e-6))


def test_fastest_participant_shows_the_transfer(tmp_path: Path) -> None:
    (time,) = rows_of(skewed(tmp_path, [20, 50], world_size=2)).times
    assert (time.wire_s, time.wait_s) == pytest.approx((20e-6, 15e-6))


def skewed(folder: Path, durations_us: list[float], *, world_size: int = 4) -> list[Path]:
    """An all-gather of 8.39 MB on each rank, which ends on all at the same time (vLLM issue 57001)."""
    event = {"n_out": 4_194_304, "kind": "_allgather_base"}
    name = "ncclDevKernel_AllGather_RING_LL(x)"
    return [
        written(
            folder,
            made.collective(name, 1e5 - dur, dur, range(world_size), 1_048_576, **event),
            name=f"{rank}.json",
            rank=rank,
            world_size=world_size,
        )
        for rank, dur in enumerate(durations_us)
    ]


def test_waiting_that_dominates_is_said_with_the_late_rank(tmp_path: Path) -> None:
    rows = rows_of(skewed(tmp_path, [30_418, 4_140, 36, 3_840]))
    (waiting,) = rows.waiting
    assert waiting == (
        "99.6% of the time in collectives is waiting for the rank that comes last: 100% of it for "
        "rank 2. A transfer takes 36 us on average"
    )
    (transfer,) = rows.transfers
    assert transfer.wire_s == pytest.approx(36e-6)
    # vLLM's order of dp and pp: rank 2 is the second device of the mesh
    late = rows_of(
        skewed(tmp_path, [9_000, 9_000, 36, 9_000, *[9_000] * 4], world_size=8), "pp=2,dp=2,tp=2"
    )
    assert "for rank 2" in late.waiting[0]


@pytest.mark.parametrize("durations_us", [[50, 36, 40, 44], [30_418, 4_140, 36]])
def test_short_waiting_and_incomplete_groups_are_no_warning(tmp_path, durations_us) -> None:
    """The fastest of three of four ranks may itself wait for the fourth."""
    rows = rows_of(skewed(tmp_path, durations_us))
    assert rows.waiting == ()
    assert len(rows.transfers) == (len(durations_us) == 4)
    assert (rows.times[0].wire_s is None) is (len(durations_us) < 4)


def test_clock_of_another_host_is_set_by_shared_collectives(tmp_path: Path) -> None:
    trace = merged([read_kineto(path) for path in two_ranks(tmp_path, skew=2500.0)])
    assert any("its clock is 2,500 us ahead" in finding for finding in trace.findings)
    ends = trace.events.with_columns((pl.col("start_ns") + pl.col("dur_ns")).alias("end_ns"))
    nccl = ends.filter(pl.col("dur_ns").is_in([20_000, 25_000])).sort("end_ns")
    assert nccl["end_ns"].n_unique() == len(nccl) // 2


GRID = "dp=2,tp=2"  # ranks 0 1 / 2 3: rows are tp, columns dp


def reduces(*groups: Sequence[int], **facts: Any) -> list[made.Event]:
    """An all-reduce of each group, one after the other."""
    return [
        made.collective(made.NCCL, 10.0 * i, 5.0, g, 100, **facts) for i, g in enumerate(groups)
    ]


def test_axes_of_equal_size_are_told_apart_by_ranks(tmp_path: Path) -> None:
    events = reduces([0, 1], [0, 2], [0, 1, 2, 3], [0, 3])
    rows = read(tmp_path, *events, plan=GRID, world_size=4).rows
    assert [row.axis for row in rows] == ["tp", "dp", "dp+tp", None]
    assert rows[0].groups == ((0, 1), (2, 3))
    assert rows[3].axis_reason.startswith("its 2 devices are no axis of the plan")


def test_ranks_of_vllm_count_replicas_outside_of_the_pipeline(tmp_path: Path) -> None:
    """vLLM lays ranks out as (dp, pp, tp): with dp=2, pp=2 a pipeline is {0, 1}, replicas are {0, 2}.

    An assumed order of ranks is said.
    """
    plan, pair = "pp=2,dp=2,tp=2", made.collective(made.NCCL, 30.0, 5.0, [0, 2], 100, kind="send")
    rows = read(tmp_path, *reduces([0, 1, 2, 3], [0, 4]), pair, plan=plan, world_size=8).rows
    assert [row.axis for row in rows] == ["pp+tp", "dp", "pp"]
    assumed = read(tmp_path, *reduces([0, 2]), plan=plan, world_size=8)
    assert [row.axis for row in assumed.rows] == ["dp"]
    assert assumed.findings[0].startswith("ranks are taken to count pp, dp, tp")


def test_collectives_of_unknown_bytes_are_one_finding(tmp_path: Path) -> None:
    """Kernels of five engines, two of ROCm."""
    names = (
        "EpDispatchIntraNodeKernel_bf16",
        "void mori::moe::EpCombineInterNodeV1Kernel<__hip_bfloat16>(int)",
        "ncclSymkDevKernel_AllGather_LL(ncclSymkDevWorkArgs4K const)",
        "void tensorrt_llm::kernels::mnnvl_throughput::moeA2ADispatchKernel<(int)8>(int)",
        "void flashinfer::trtllm_mnnvl_allreduce::oneshotAllreduceFusionKernel<(unsigned char)8>(int)",
    )
    kernels = [made.kernel(name, 1000 * n, 100) for n, name in enumerate(names)]
    findings = read(tmp_path, *kernels, world_size=8).findings
    (said,) = [one for one in findings if one.startswith("the bytes of ")]
    assert said.count("1 '") == 4
    assert said.endswith(", 1 other are unknown: the trace has no sizes for them")


def test_axis_of_unknown_ranks_is_said_to_be_unknown(tmp_path: Path) -> None:
    path = written(tmp_path, made.kernel(made.CUSTOM, 1.0, 2.0), world_size=4)
    (row,) = rows_of([path], GRID).rows
    assert row.axis is None
    assert row.axis_reason.startswith("2 devices may be dp or tp")
    assert [row.axis for row in rows_of([path], "dp=2,tp=4").rows] == ["dp"]


def test_descriptions_name_axes_without_a_plan(tmp_path: Path) -> None:
    names = {
        "TENSOR_MODEL_PARALLEL_GROUP": "tp",
        "mesh_pp": "pp",
        "mesh_dp_shard": "fsdp",
        "mesh_dp_replicate": "dp",
        "mesh_dp_shard_cp": "fsdp+cp",
        "DATA_PARALLEL_GROUP_WITH_CP": "dp+cp",
        "TENSOR_AND_CONTEXT_PARALLEL_GROUP": "cp+tp",
        "EXPERT_TENSOR_PARALLEL_GROUP": None,
    }
    events = [
        made.collective(made.NCCL, 10.0 * i, 5.0, [0, 1], 100, group=name)
        for i, name in enumerate(names)
    ]
    rows = read(tmp_path, *events, world_size=2).rows
    assert [row.axis for row in rows] == list(names.values())


@table
def test_the_description_of_a_group_decides_between_axes_of_one_size(
    tmp_path: Path, group: str, n: int, plan: str, axis: str | None
) -> None:
    """Without ranks in the trace."""
    event = made.collective(made.NCCL, 10.0, 5.0, range(n), 100, group=group)
    del event["args"]["Process Group Ranks"]
    (row,) = read(tmp_path, event, plan=plan, world_size=8).rows
    assert row.axis == axis


def test_begin_and_end_events_are_said_to_be_unread(tmp_path: Path) -> None:
    step = {"cat": "user_annotation", "name": "ProfilerStep#1", "pid": 9, "tid": 1}
    halves = [{**step, "ph": ph, "ts": ts} for ph, ts in (("B", 0.0), ("E", 50.0))]
    path = written(tmp_path, *halves, made.kernel(made.GEMM, 1.0, 2.0))
    said = merged([read_kineto(path)]).findings
    assert said == ("1 step or op recorded as begin and end events, which meshscope does not read",)


def test_a_rank_beyond_the_plan_is_refused(tmp_path: Path) -> None:
    event = made.collective(made.NCCL, 1.0, 2.0, [0, 7], 100)
    with pytest.raises(SpecError, match=r"rank 7.*Give the plan and the topology of all ranks"):
        read(tmp_path, event, plan="tp=4", world_size=8)


@table
def test_payload_follows_the_size_rule_of_nccl_tests(
    tmp_path, name, n, facts, expected: tuple[Kind, str, int, int]
) -> None:
    kind, n_out, dtype = facts
    options = {"kind": kind, "n_out": n_out, "dtype": dtype}
    event = made.collective(f"ncclDevKernel_{name}(x)", 1.0, 1.0, [0, 1, 2, 3], n, **options)
    (row,) = read(tmp_path, event, plan="tp=4", world_size=4).rows
    assert (row.kind, row.dtype, row.payload_bytes, row.wire_bytes) == expected


def test_old_kernels_take_the_facts_of_the_range_that_launched_them(tmp_path: Path) -> None:
    """Before PyTorch 2.2 kernels carry no sizes, and NCCL names sends and all-to-alls SendRecv."""
    shapes = {"Input Dims": [[64, 4]], "Input type": ["c10::BFloat16"]}
    name = "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*)"
    other = made.annotation("nccl:all_reduce", 10.0, 30.0, **{"Input Dims": [[], [1]]})
    events = [
        made.annotation("nccl:all_to_all", 10.0, 5.0, **shapes),
        {**other, "tid": 9},  # of another thread
        made.launch(12.0, 77),
        made.launch(25.0, 78),
        made.kernel(name, 40.0, 9.0, correlation=77),
        made.kernel(name, 60.0, 9.0, correlation=78),
    ]
    trace = read(tmp_path, *events, plan="ep=4,dp=4", world_size=4)
    (row,) = trace.rows
    assert (row.kind, row.dtype, row.payload_bytes) == (Kind.ALL_TO_ALL, "bf16", 512)
    assert "1 kernel 'ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t' communicates" in str(trace)


def test_missing_ranks_are_reported(tmp_path: Path) -> None:
    """A rank without collectives waits for no other."""
    path = written(tmp_path, made.kernel(made.GEMM, 1.0, 2.0), rank=1, world_size=2)
    assert merged([read_kineto(path)]).findings == ("1 of 2 ranks have a trace (1)",)


def test_files_without_rank_get_that_of_their_name(tmp_path: Path) -> None:
    content = made.document([made.kernel(made.GEMM, 1.0, 2.0)])
    del content["distributedInfo"]
    trace = merged([read_kineto(made.write(tmp_path / "1717-TP-3.trace.json.gz", content))])
    assert trace.events["device"].to_list() == [3]
    assert "ranks come from file names, not from traces: 3" in trace.findings


@pytest.mark.parametrize(("stage", "phase"), [("EXTEND", Phase.PREFILL), ("DECODE", Phase.DECODE)])
def test_the_file_name_of_a_stage_of_sglang_is_its_phase(tmp_path, stage, phase) -> None:
    name = f"17-TP-0-{stage}.trace.json.gz"
    path = written(tmp_path, *reduces(*[[0, 1]] * 6), name=name, world_size=2)
    rows = rows_of([path], "tp=2").rows
    assert [(row.phase, row.count, row.n_steps) for row in rows] == [(phase, 6, 1)]
    says = "the file name says what its steps process"
    assert any(says in finding for finding in read_kineto(path).findings)


def test_abridged_ranks_are_those_of_the_list_of_groups(tmp_path: Path) -> None:
    """Kineto abridges long groups to `[0, 1, ..., 63]`; the head lists them whole."""
    event = made.collective(made.NCCL, 1.0, 2.0, list(range(64)), 100)
    event["args"]["Process Group Ranks"] = "[0, 1, 2, ..., 63]"
    content = made.document([event], world_size=128)
    content["distributedInfo"]["pg_config"] = [
        {"pg_name": "1", "pg_desc": "undefined", "pg_size": 64, "ranks": list(range(64))}
    ]
    (row,) = rows_of([made.write(tmp_path / "t.json", content)], "dp=2,tp=64").rows
    assert (row.axis, row.group_size) == ("tp", 64)


def test_nested_annotations_of_a_step_are_one_step(tmp_path: Path) -> None:
    """SGLang's two annotations of a step with four all-reduces; a kernel starts before the inner one."""
    vllm = "execute_0_context_0(sq0sk0sqsq0sqsk0)_generation_32(sq32sk32785sqsq32sqsk32785)"
    events = [
        made.annotation(vllm, 1000.0, 1000.0),
        made.annotation("step[DECODE bs=32]", 1100.0, 800.0),
        made.launch(1020.0, 9),
        made.kernel("index_kernel", 1070.0, 20.0, correlation=9),
    ]
    for i in range(4):
        events += [
            made.launch(1200.0 + 100 * i, i + 1),
            made.kernel(made.CUSTOM, 1430.0 + 100 * i, 40.0, correlation=i + 1),
        ]
    rows = read(tmp_path, *events, world_size=2)
    (step,) = rows.steps
    assert (step.label, step.n_steps, step.decode_tokens) == (StepLabel.DECODE, 1, 32)
    assert step.mean_s == pytest.approx(700e-6)
    assert [(row.count, row.n_steps) for row in rows.rows] == [(4, 1)]


def _of_gpu(path: Path, device: int, *events: made.Event, **stated: int) -> Trace:
    """A file whose events are of this GPU, and which states a rank or a world size."""
    content = made.document(list(events))
    content["distributedInfo"] = stated
    if not stated:
        del content["distributedInfo"]
    for event in events:
        event["args"]["device"] = event["pid"] = device
    return read_kineto(made.write(path, content))


@table
def test_the_number_of_a_gpu_is_no_rank(tmp_path, file, devices: tuple[list[int], int]) -> None:
    name, device, groups, stated = file
    events = reduces(*groups) or [made.kernel(made.GEMM, 1.0, 2.0)]
    trace = merged([_of_gpu(tmp_path / name, device, *events, **stated)])
    assert (trace.events["device"].to_list(), trace.n_devices) == devices
    no_rank = f"the trace names no rank: it counts as rank {devices[0][0]}"
    assert (no_rank in trace.findings) is (name != "b.json" and devices[1] > 1)
    assert trace.findings == () or devices != ([0], 1)


def test_gpus_of_several_files_are_ranks_of_their_own(tmp_path: Path) -> None:
    """A stated rank that also copies on another GPU, and files that number GPUs differently."""

    def gemm() -> made.Event:
        return made.kernel(made.GEMM, 1.0, 2.0)

    _of_gpu(tmp_path / "d.json", 1, gemm(), rank=1, world_size=4)
    content = json.loads((tmp_path / "d.json").read_text())
    content["traceEvents"].append({**made.kernel("Memcpy HtoD", 5.0, 1.0), "cat": "gpu_memcpy"})
    stated = read_kineto(made.write(tmp_path / "d.json", content))
    both = merged([stated, _of_gpu(tmp_path / "e.json", 1, gemm())])
    assert both.events["device"].to_list() == [1, 1, 0]
    assert any("all of them count as rank 1" in finding for finding in both.findings)
    two = merged(
        [_of_gpu(tmp_path / name, n, gemm()) for name, n in (("f.json", 6), ("g.json", 3))]
    )
    assert (sorted(two.events["device"].to_list()), two.n_devices) == ([0, 1], 2)


def test_categories_of_old_traces_are_read(tmp_path: Path) -> None:
    """PyTorch before 1.11: capital names, steps among the operators, streams as text."""
    cats = {"kernel": "Kernel", "cuda_runtime": "Runtime", "user_annotation": "Operator"}
    events = [
        made.annotation("ProfilerStep#3", 0.0, 100.0),
        made.annotation("aten::mm", 1.0, 1.0),
        *(made.launch(5.0 + i, i) for i in (1, 2)),
        made.kernel(made.GEMM, 110.0, 40.0, correlation=1),
        made.kernel("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", 120.0, 40.0, correlation=2),
        {**made.kernel("Memcpy HtoD", 500.0, 5.0), "cat": "Memcpy"},
    ]  # fmt: skip
    for event in events:
        event["cat"] = cats.get(event["cat"], event["cat"])
        if "stream" in event["args"]:
            event["tid"] = f"stream {event['tid']}"
            event["args"]["stream"] = str(event["args"]["stream"])
    content = {"schemaVersion": 1, "traceEvents": events}
    trace = read_kineto(made.write(tmp_path / "t.json", content))
    assert trace.events["stream"].to_list() == [7, 7, 7]
    rows = attributed(merged([trace]), None)
    labels = {(step.label, step.n_steps) for step in rows.steps}
    assert labels == {(StepLabel.STEP, 1), (StepLabel.OUTSIDE, 1)}
    (row,) = rows.rows
    assert (row.kind, row.count, row.n_steps) == (Kind.ALL_REDUCE, 1, 1)
    assert row.exposed_s == pytest.approx(10e-6)


def test_what_does_not_count_as_communication_is_said(tmp_path: Path) -> None:
    """Kernels named like communication, and events of categories that are not read."""
    names = [*["moe_token_dispatch_kernel"] * 2, "myAllReduceKernel", made.GEMM]
    rows = read(tmp_path, *(made.kernel(name, 10.0 * i, 1.0) for i, name in enumerate(names)))
    says = "3 kernels named like communication count as compute: "
    assert (rows.rows, len(rows.findings)) == ((), 1)
    assert rows.findings[0] == f"{says}'moe_token_dispatch_kernel', 'myAllReduceKernel'"
    cats = ("hpu_op", "hpu_op", "mtia_insight", "cpu_op", "overhead", "Trace")
    others = [{**made.kernel("x", i, 1.0), "cat": cat} for i, cat in enumerate(cats)]
    path = written(tmp_path, made.kernel(made.GEMM, 1.0, 2.0), *others)
    says = "events of categories that meshscope does not read: 2 of 'hpu_op', 1 of 'mtia_insight'"
    assert read_kineto(path).findings == (says,)


def test_copies_between_devices_are_said(tmp_path: Path) -> None:
    """A pipeline may move its activations by copies, which are no kernels of NCCL."""
    copies = [
        {**made.kernel(f"Memcpy {kind} (Device -> Device)", at, 2.0), "cat": "gpu_memcpy"}
        for kind, at in (("PtoP", 10.0), ("DtoD", 20.0), ("PtoP", 30.0))
    ]
    rows = read(tmp_path, made.kernel(made.GEMM, 1.0, 2.0), *copies)
    says = "between devices count as copies, without rows"
    assert rows.findings == (f"2 'Memcpy PtoP (Device -> Device)' {says}",)


def test_steps_on_the_timeline_of_the_device_count_if_no_launch_is_recorded(tmp_path: Path) -> None:
    mark = made.annotation("step[DECODE bs=8]", 100.0, 50.0)
    mark["cat"] = "gpu_user_annotation"
    kernels = (made.kernel(made.GEMM, at, 5.0) for at in (110.0, 500.0))
    steps = read(tmp_path, mark, *kernels).steps
    labels = {(step.label, step.n_steps, step.decode_tokens) for step in steps}
    assert labels == {(StepLabel.DECODE, 1, 8), (StepLabel.OUTSIDE, 1, None)}


def test_stages_of_a_pipeline_have_rows_of_their_own(tmp_path: Path) -> None:
    paths = []
    for rank in range(4):
        stage = rank // 2
        group = [2 * stage, 2 * stage + 1]
        events = [made.collective(made.NCCL, 10.0 * i, 5.0, group, 100) for i in range(1 + stage)]
        if stage == 0:
            name, pair = "ncclDevKernel_SendRecv(x)", [rank, rank + 2]
            events.append(made.collective(name, 90.0, 5.0, pair, 50, kind="send"))
        paths.append(written(tmp_path, *events, name=f"r{rank}.json", rank=rank, world_size=4))
    rows = rows_of(paths, "pp=2,tp=2").rows
    facts = sorted((row.stage, row.kind.value, row.axis, row.count) for row in rows)
    assert facts == [(0, "all_reduce", "tp", 1), (0, "send", "pp", 1), (1, "all_reduce", "tp", 2)]


def test_sizes_that_cannot_be_true_are_unknown_and_a_file_without_events_refused(tmp_path) -> None:
    event = made.collective(made.NCCL, 1.0, 2.0, [0, 1], 10**20)
    event["args"]["Group size"] = -7
    (row,) = read(tmp_path, event, plan="tp=2", world_size=2).rows
    assert (row.payload_bytes, row.group_size, row.axis) == (None, 2, "tp")
    with pytest.raises(TraceError, match="has no 'traceEvents'"):
        read_kineto(made.write(tmp_path / "t.json", {"spans": []}))


def test_two_files_of_one_rank_at_the_same_time_are_named(tmp_path: Path) -> None:
    first, other = two_ranks(tmp_path)
    copy = tmp_path / "copy.json.gz"
    copy.write_bytes(first.read_bytes())
    says = "both trace rank 0 at the same time: its ops count twice"
    trace = merged([read_kineto(path) for path in (first, other, copy)])
    assert [says in finding for finding in trace.findings] == [True]
    later = written(tmp_path, made.kernel("gemm", 9e6, 5.0), name="later.json")
    trace = merged([read_kineto(path) for path in (first, other, later)])
    assert not any("count twice" in finding for finding in trace.findings)


@pytest.mark.parametrize(
    ("rank", "ranks", "world_size", "highest"),
    [(3, [0, 1], 2, 3), (2, [0, 1], 2, 2), (0, [0, 5], 2, 5)],
)
def test_a_rank_beyond_the_world_is_refused(tmp_path, rank, ranks, world_size, highest) -> None:
    event = made.collective("all_reduce", 1.0, 2.0, ranks, 1024)
    message = rf"rank {highest} is not below the world size {world_size}\. Give"
    with pytest.raises(TraceError, match=message):
        read(tmp_path, event, rank=rank, world_size=world_size)
