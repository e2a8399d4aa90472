"""XPlanes of any program, read into rows: by the HLO inside, else by the names of their events."""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import made_profiles as profiles
import made_xplane as made
import polars as pl
import pytest
from made_hlo import module_text
from tables import table

import meshscope
from meshscope.backends.compile.import_hlo import read_imported
from meshscope.errors import SpecError
from meshscope.events.collective import Collective
from meshscope.events.enums import Kind, Phase, Source
from meshscope.events.measured import ProgramFacts
from meshscope.hardware.topology import parse_topology
from meshscope.plans.experiment_record import ExperimentRecord
from meshscope.plans.plan import parse_plan
from meshscope.readers.hlo.parse import parse_hlo
from meshscope.readers.traces.attribution import TraceRows, attributed
from meshscope.readers.traces.merge import merged
from meshscope.readers.traces.xplane import read_xplane

pytestmark = pytest.mark.slow

UNTIMED = {"start_s": None, "dur_s": None, "exposed_s": None, "time_basis": None}
V6E_8 = parse_topology("v6e-8")


def rows_of(paths: list[Path], plan: str | None = "tp=8") -> TraceRows:
    mesh = None if plan is None else parse_plan(plan).filled(8).mesh
    trace = merged([read_xplane(path) for path in paths])
    return attributed(trace, mesh, crosses_slices=V6E_8.crosses_slices)


def of_source(read: TraceRows, source: Source) -> list[Collective]:
    return [row for row in read.rows if row.source is source]


def untimed(rows: list[Collective]) -> list[Collective]:
    return [replace(row, source=Source.COMPILED, **UNTIMED) for row in rows]


@table
def test_recorded_rows_equal_those_of_the_hlo_inside(name: str, plan: str, tmp_path: Path) -> None:
    read = rows_of(made.hosts(tmp_path, name), plan)
    measured, compiled = (untimed(of_source(read, s)) for s in (Source.MEASURED, Source.COMPILED))
    experiment = ExperimentRecord(topology=V6E_8, mesh=dict(parse_plan(plan).mesh.axes))
    imported = read_imported(experiment, {name: parse_hlo(made.golden_text(name), name)})
    recorded = [row for row in compiled if row.hlo_name in {m.hlo_name for m in measured}]
    assert measured == recorded
    n_loops = [replace(row, n_steps=1) for row in compiled]
    assert n_loops == [replace(row, **UNTIMED) for row in imported.rows]
    assert measured
    assert {row.n_steps for row in measured} == {2}


def test_collectives_of_a_loop_without_trips_are_read_from_their_names(tmp_path: Path) -> None:
    """A text that is of another build than the profile may say that its loop never runs."""
    trace = merged([read_xplane(path) for path in made.hosts(tmp_path, "v6e_tp8_decode_scan")])
    never = r"""\1, backend_config={"known_trip_count":{"n":"0"}}"""
    loop = re.compile(r"(, condition=[^\s,]+, body=[^\s,]+)")
    programs = {name: loop.sub(never, text) for name, text in trace.programs.items()}
    read, whole = (
        of_source(attributed(one, parse_plan("tp=8").mesh), Source.MEASURED)
        for one in (replace(trace, programs=programs), trace)
    )
    assert {(r.kind, r.axis) for r in read} == {(r.kind, r.axis) for r in whole} != set()


@pytest.mark.parametrize("lost", [0, 1])
def test_hosts_that_number_their_chips_alike_stay_apart(tmp_path: Path, lost: int) -> None:
    """A lost event is a count other than compiled."""
    read = rows_of(made.hosts(tmp_path, "v6e_tp8_decode_scan", lost=lost))
    assert sorted(load.device for load in read.loads) == list(range(8))
    (program,) = read.programs
    n = program.n_collectives
    facts = {"n_runs": 2, "n_collectives": n, "n_as_compiled": n - lost, "n_missing": 0}
    assert n > 0
    assert program == ProgramFacts(name=program.name, **facts)


def test_the_number_of_the_only_chip_is_no_rank(tmp_path: Path) -> None:
    op = profiles.Event("%f.1 = f32[4] fusion(f32[4] %x)", 0, 5)
    chip = profiles.Plane(name="/device:TPU:2", lines=[profiles.Line("XLA Ops", [op])])
    others = [profiles.Plane(name=f"/device:TPU:{n}", lines=[]) for n in (0, 1, 3)]
    for planes, expected in (([chip], ([0], 1)), ([*others, chip], ([2], 4))):
        trace = merged([read_xplane(profiles.write(tmp_path / "t.xplane.pb", *planes))])
        assert (trace.events["device"].to_list(), trace.n_devices) == expected


def test_the_chip_of_an_xplane_is_compared_with_the_slice(tmp_path: Path) -> None:
    paths = made.hosts(tmp_path, "v6e_tp8_decode_scan")
    run = meshscope.import_(paths, topology="v5e-8", plan="tp=8", out=tmp_path / "run")
    first = run.record.measured.findings[0]
    assert first.startswith("the trace is of 'TPU v6 Lite', and the slice is 'v5e:2x4'")
    with pytest.raises(SpecError, match=r'a trace of TPUs \(TPU v6 Lite\).*mesh="dp=8"'):
        meshscope.import_(paths, topology="h100:8", plan="tp=8", out=tmp_path / "other")


def test_steps_that_hosts_annotate_count_once_on_each_chip(tmp_path: Path) -> None:
    """Each of two hosts annotates two steps, twice: in two conventions."""
    module = parse_hlo(made.golden_text("v6e_tp8_decode_scan"), "m")
    paths = []
    for host in range(2):
        chip = made.chip(0, module, n_runs=2)
        ends = [run.start_ps + run.dur_ps for run in chip.lines[0].events]
        marks = [
            profiles.Event(name, start + cut, dur - 2 * cut)
            for start, dur in ((0, ends[0]), (ends[0], ends[1] - ends[0]))
            for cut, name in ((0, "execute_model: 8 reqs, 8 toks"), (10, "step[DECODE bs=8]"))
        ]
        plane = profiles.Plane(name="/host:CPU", lines=[profiles.Line("main", marks)])
        paths.append(profiles.write(tmp_path / f"host{host}.xplane.pb", plane, chip))
    steps = attributed(merged([read_xplane(path) for path in paths]), None).steps
    labeled = [(step.label.value, step.n_steps) for step in steps if step.label.phase]
    assert labeled == [("decode", 2)]


def test_clocks_of_hosts_are_set_by_shared_collectives(tmp_path: Path) -> None:
    first, second = made.hosts(tmp_path, "v6e_tp8_decode_scan")
    late = read_xplane(second)
    late = replace(late, events=late.events.with_columns(pl.col("start_ns") + 1_000_000))
    trace = merged([read_xplane(first), late])
    assert any("1,000 us ahead" in finding for finding in trace.findings)
    spans = trace.events.group_by(pl.col("device") // 4).agg(pl.col("start_ns").min())
    assert spans["start_ns"].n_unique() == 1


def test_times_are_means_over_devices(tmp_path: Path) -> None:
    read = rows_of(made.hosts(tmp_path, "v5e_dp2tp4_prefill_scan"), "dp=2,tp=4")
    rows = of_source(read, Source.MEASURED)
    assert {(round(row.dur_s * 1e6), round(row.exposed_s * 1e6)) for row in rows} == {(10, 10)}


def test_names_of_events_serve_where_the_profile_has_no_hlo(tmp_path: Path) -> None:
    totals = []
    for with_hlo in (True, False):
        (folder := tmp_path / str(with_hlo)).mkdir()
        paths = made.hosts(folder, "v5e_dp2tp4_prefill_scan", with_hlo=with_hlo)
        read = rows_of(paths, "dp=2,tp=4")
        assert bool(read.programs) is with_hlo
        counts: Counter[tuple[object, ...]] = Counter()
        for row in of_source(read, Source.MEASURED):
            facts = (row.kind, row.axis, row.dtype, row.payload_bytes, row.group_size)
            counts[facts] += row.count * row.n_steps
        totals.append(counts)
    assert totals[0] == totals[1]


def test_without_a_plan_the_axis_is_unknown(tmp_path: Path) -> None:
    rows = rows_of(made.hosts(tmp_path, "v5e_dp2tp4_prefill_scan"), None).rows
    assert {row.axis for row in rows} == {None}
    assert all((row.axis_reason or "").startswith("the plan is unknown") for row in rows)
    assert all(row.payload_bytes for row in rows)


def gpu(kernels: list[tuple[str, str | None]]) -> object:
    """A GPU that ran these (kernel, HLO op)."""
    of_program = {"hlo_module": profiles.Ref("jit_f"), "program_id": 3}
    events = [
        profiles.Event(kernel, n * 100 * made.US, 10 * made.US, {"hlo_op": profiles.Ref(op), **of_program} if op else {})
        for n, (kernel, op) in enumerate(kernels)
    ]  # fmt: skip
    return profiles.Plane(name="/device:GPU:0", lines=[profiles.Line("Stream #7(Kernel)", events)])


REDUCE_KERNEL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def test_nccl_kernels_without_hlo_have_unknown_bytes(tmp_path: Path) -> None:
    path = profiles.write(tmp_path / "gpu.xplane.pb", gpu([(REDUCE_KERNEL, None), ("gemm", None)]))
    read = rows_of([path], None)
    (row,) = read.rows
    assert (row.kind, row.dtype, row.payload_bytes, row.count) == (Kind.ALL_REDUCE, "bf16", None, 1)
    assert any("bytes" in finding for finding in read.findings)


HLO = module_text("""\
  %p = f32[256]{0} parameter(0)
  ROOT %all-reduce.1 = f32[256]{0} all-reduce(%p), channel_id=1, replica_groups={{0,1}}, use_global_device_ids=true, to_apply=%add
""").replace("ENTRY %main {", "ENTRY %main (p: f32[256]) -> f32[256] {")


def test_kernels_get_their_size_from_the_hlo_and_copies_do_not_count(tmp_path: Path) -> None:
    kernels = [("MemcpyD2D", "all-reduce.1"), (REDUCE_KERNEL, "all-reduce.1"), ("gemm", "fusion.2")]
    inside = made.metadata_plane({"jit_f(3)": made.hlo_proto(HLO, 2)})
    path = profiles.write(tmp_path / "gpu.xplane.pb", inside, gpu(kernels))
    trace = merged([read_xplane(path)])
    read = attributed(trace, parse_plan("tp=2").mesh)
    (row,) = of_source(read, Source.MEASURED)
    assert (row.payload_bytes, row.axis, row.count, row.n_steps) == (1024, "tp", 1, 1)
    assert any("1 of 2 ranks" in finding for finding in trace.findings)


def test_custom_calls_of_a_recorded_program_may_communicate(tmp_path: Path) -> None:
    """Also if the program has no collective."""
    call = 'ROOT %fft.1 = f32[256]{0} custom-call(%p), custom_call_target="pfft3d"'
    text = re.sub("ROOT %all-reduce.*", call, HLO)
    inside = made.metadata_plane({"jit_f(3)": made.hlo_proto(text, 2)})
    path = profiles.write(tmp_path / "gpu.xplane.pb", inside, gpu([("fft_kernel", "fft.1")]))
    run = meshscope.import_(path, topology="h100:2", plan="tp=2", out=tmp_path / "run")
    said = "1 custom call 'pfft3d' may communicate"
    assert [other["text"] for other in run.as_dict()["other_operations"]] == [said]
    assert said in run.text()


def test_steps_of_a_server_give_phases(tmp_path: Path) -> None:
    """The annotation is on the host; the device runs later what was launched inside of it."""
    reduce, us = "%all-reduce.1 = f32[4]{0} all-reduce(f32[4]{0} %x), replica_groups={{0}}", made.US
    names = (
        "context_1(512)_generation_0(0)",
        "context_0(0)_generation_8(8)",
        "context_0(0)_generation_9(9)",
    )
    runs, ops, host = [], [], []
    for n, name in enumerate(names, start=1):
        runs.append(profiles.Event(f"jit_step({n})", n * 1000 * us, 500 * us, {"run_id": n}))
        ops.append(profiles.Event(reduce, n * 1000 * us, 100 * us))
        launch = {"run_id": n, "device_ordinal": 0}
        host.append(profiles.Event(f"execute_{name}", n * 100 * us, 90 * us))
        host.append(profiles.Event("Launch", (n * 100 + 10) * us, 5 * us, launch))
    lines = [profiles.Line("XLA Modules", runs), profiles.Line("XLA Ops", ops)]
    chip = profiles.Plane(name="/device:TPU:0", lines=lines)
    on_host = profiles.Plane(name="/host:CPU", lines=[profiles.Line("main", host)])
    read = rows_of([profiles.write(tmp_path / "server.xplane.pb", chip, on_host)], None)
    counts = [(row.phase, row.count, row.n_steps) for row in read.rows]
    assert counts == [(Phase.PREFILL, 1, 1), (Phase.DECODE, 1, 2)]


def test_the_imported_run_keeps_the_hlo(tmp_path: Path) -> None:
    paths = made.hosts(tmp_path, "v6e_tp8_decode_scan")
    run = meshscope.import_(paths, topology="v6e-8", plan="tp=8", out=tmp_path / "run")
    (text,) = (tmp_path / "run" / "hlo").iterdir()
    again = meshscope.import_(text, topology="v6e-8", plan="tp=8", out=tmp_path / "again")
    compiled = run.record.rows_of(Source.COMPILED)
    assert [replace(row, **UNTIMED) for row in again.record.rows] == [
        replace(row, n_steps=1, **UNTIMED) for row in compiled
    ]


def test_what_all_files_lack_is_said_once(tmp_path: Path) -> None:
    paths = made.hosts(tmp_path, "v6e_tp8_decode_scan")
    findings = merged([read_xplane(path) for path in paths]).findings
    (text,) = [finding for finding in findings if "no step markers" in finding]
    assert text.startswith("2 files, such as host0.xplane.pb: ")


def test_a_trace_is_compared_with_the_programs_inside(tmp_path: Path) -> None:
    """One all-reduce of the last run is lost on a chip: the counts differ, and compare says so."""
    for name, lost in (("whole", 0), ("lossy", 1)):
        folder = tmp_path / name
        folder.mkdir()
        paths = made.hosts(folder, "v6e_tp8_decode_scan", lost=lost)
        run = meshscope.import_(paths, topology="v6e-8", plan="tp=8", out=folder / "run")
        comparison = meshscope.compare(folder / "run")
        assert run.path is not None
        assert comparison.left.source is Source.COMPILED
        assert comparison.is_equal is (lost == 0)
        assert "measured" in comparison.text()
        assert comparison.as_dict()["verdict"] == ("equal" if lost == 0 else "different")


def test_damaged_hlo_is_a_finding(tmp_path: Path) -> None:
    inside = made.metadata_plane({"jit_decode(12345678901234567890)": b"\x0a\x05\xff\xff"})
    chip = profiles.tpu(profiles.Event(profiles.REDUCE, 0, 100))
    path = profiles.write(tmp_path / "a.xplane.pb", inside, chip)
    trace = read_xplane(path)
    assert any("damaged" in finding for finding in trace.findings)
    assert [row.payload_bytes for row in rows_of([path], None).rows] == [16]
