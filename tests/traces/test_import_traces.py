"""`meshscope import` of traces: what users see, and every fault as one message."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import made_kineto as made
import pytest
from tables import table

import meshscope
from meshscope.cli import main
from meshscope.events.enums import Kind, Phase, Source
from meshscope.reports.answer import rests_on

GOLDEN = Path(__file__).parents[1] / "golden" / "traces"
FOLDER = GOLDEN / "vllm-tp2"


@pytest.fixture
def command(capsys, monkeypatch) -> Callable[..., tuple[int, str, str]]:
    """Runs `meshscope import` with these words: exit status, output and errors."""

    def run(*words: object, verb: str = "import") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["meshscope", verb, *map(str, words)])
        with pytest.raises(SystemExit) as status:
            main()
        return int(status.value.code or 0), *capsys.readouterr()

    return run


def ranks(folder: Path, *events: made.Event, world_sizes: Sequence[int] = ()) -> list[Path]:
    """A file for each rank, with one event."""
    sizes = world_sizes or [len(events)] * len(events)
    return [
        made.write(folder / f"{n}.json", made.document([event], rank=n, world_size=sizes[n]))
        for n, event in enumerate(events)
    ]


def test_the_golden_trace_is_that_of_its_script(tmp_path: Path) -> None:
    script = (GOLDEN / "make_traces.py").read_text()
    script = script.replace("Path(__file__).parent", f"Path({str(tmp_path)!r})")
    subprocess.run([sys.executable, "-c", script], check=True)
    made_files = {path.name: path.read_bytes() for path in (tmp_path / "vllm-tp2").iterdir()}
    assert made_files == {path.name: path.read_bytes() for path in FOLDER.glob("*.gz")}


def test_a_trace_agrees_with_the_prediction_of_its_model(tmp_path: Path) -> None:
    """73 all-reduces of 2,056 x 2,560 bf16 in prefill; as many of unknown bytes in decode."""
    run = meshscope.import_(FOLDER, out=tmp_path / "run")
    rows = {
        (row.source, row.phase): row
        for row in run.record.rows
        if row.kind is Kind.ALL_REDUCE and row.part is None
    }
    prefill, decode = (rows[Source.MEASURED, phase] for phase in (Phase.PREFILL, Phase.DECODE))
    assert (prefill.count, prefill.n_steps, prefill.payload_bytes) == (73, 1, 2056 * 2560 * 2)
    assert (decode.count, decode.n_steps, decode.payload_bytes) == (73, 3, None)
    predicted = [row for row in run.record.rows_of(Source.PREDICTED) if row.kind is Kind.ALL_REDUCE]
    for phase, n_tokens in ((Phase.PREFILL, 2056), (Phase.DECODE, 10)):
        of_phase = [row for row in predicted if row.phase is phase]
        assert sum(row.count for row in of_phase) == 73
        assert {row.payload_bytes for row in of_phase} == {n_tokens * 2560 * 2}


def test_the_quality_of_the_capture_comes_first(tmp_path, command) -> None:
    out = tmp_path / "run"
    status, text, _ = command(FOLDER / "rank0.pt.trace.json.gz", "--out", out)
    assert status == 0
    lines = text.splitlines()
    assert lines[1].startswith("Kineto: 1 file, 596 events, 588 ops on 1 device of 2 in ")
    assert lines[2].startswith("- 1 of 2 ranks have a trace (0)")
    (mean,) = (n for n, line in enumerate(lines) if line.startswith("mean step: prefill 18.3 ms ("))
    assert "decode 2.36 ms (" in lines[mean] + lines[mean + 1]  # the table has no room
    assert mean < 11
    assert max(map(len, lines)) <= 80
    page = meshscope.open(out).report(tmp_path / "report.html").read_text()
    assert page.index("1 of 2 ranks have a trace (0)") < page.index("all_reduce")
    document = json.loads(command(out, "--json", verb="show")[1])
    assert document["measured"]["findings"][0].startswith("1 of 2 ranks have a trace (0)")
    assert document["collectives"][0]["axis"] is None


def test_waiting_comes_before_the_figures_and_is_not_in_the_bandwidth(tmp_path, command) -> None:
    """Rank 1 arrives last: 100 us of its transfer for 900 us of the other; 1 MB over 2 ranks."""
    events = [made.collective(made.NCCL, 900 - dur, dur, (0, 1), 500_000) for dur in (900, 100)]
    status, text, _ = command(*ranks(tmp_path, *events), "--out", tmp_path / "run", "--rows")
    lines = text.splitlines()
    assert status == 0
    assert lines[2].startswith("- 80.0% of the time in collectives is waiting")
    assert "nothing is missing" not in text
    assert next(line for line in lines if line.startswith("all_reduce")).endswith("10 GB/s")
    run = meshscope.open(tmp_path / "run")
    (row,) = run.metrics["bandwidth"].iter_rows(named=True)
    assert (row["busbw_bytes_per_s"], row["mean_dur_s"]) == pytest.approx((10e9, 500e-6))
    assert list(rests_on(run.record)) == ["profile without known steps"]


def test_options_take_precedence_over_the_card(tmp_path: Path) -> None:
    """A mesh names axes that no plan has."""
    run = meshscope.import_(FOLDER, topology="a100:2", plan="dp=2", out=tmp_path / "run")
    assert run.experiment.topology.name == "a100:2"
    assert {row.axis for row in run.record.rows_of(Source.MEASURED)} == {"dp"}
    run = meshscope.import_(FOLDER, mesh="replica=1,model=2", out=tmp_path / "mesh")
    rows = run.record.rows_of(Source.MEASURED)
    assert {(row.axis, row.groups) for row in rows} == {("model", ((0, 1),))}
    assert run.experiment.mesh == {"replica": 1, "model": 2}


@table
def test_a_slice_that_differs_from_the_trace_is_said_first(
    tmp_path, topology, plan, messages
) -> None:
    run = meshscope.import_(FOLDER, topology=topology, plan=plan, out=tmp_path / "run")
    findings = run.record.measured.findings
    assert all(f.startswith(m) for f, m in zip(findings, messages, strict=False))
    assert not findings[len(messages)].startswith("the trace is of")
    assert meshscope.open(tmp_path / "run").experiment.topology == run.experiment.topology


@pytest.mark.parametrize(
    "layout", [{}, {"topology": "h100:4", "plan": "tp=4"}], ids=["none", "tp=4"]
)
def test_groups_without_an_axis_are_those_of_one_collective(tmp_path: Path, layout) -> None:
    """Four ranks run all-reduces in groups {0,1}, {2,3}, then {0,2}, {1,3}, whatever the plan says."""
    paths = []
    for rank in range(4):
        groups = ((rank & 2, rank | 1), (rank & 1, rank | 2))
        events = [
            made.collective(made.NCCL, 20 * i, 10, sorted(set(g) | {rank}), 64)
            for i, g in enumerate(groups)
        ]
        content = made.document(events, rank=rank, world_size=4)
        paths.append(made.write(tmp_path / f"{rank}.json", content))
    run = meshscope.import_(paths, out=tmp_path / "run", **layout)
    rows = run.record.rows_of(Source.MEASURED)
    assert [(row.axis, row.count, row.groups) for row in rows] == [
        (None, 1, ((0, 1), (2, 3))),
        (None, 1, ((0, 2), (1, 3))),
    ]
    assert not any("different numbers" in finding for finding in run.record.measured.findings)


def test_what_is_sent_is_unknown_without_the_size_of_the_group(tmp_path, command) -> None:
    facts = {"Collective name": "allreduce", "In msg nelems": 64, "dtype": "BFloat16"}
    paths = ranks(tmp_path, made.kernel(made.NCCL, 0, 10, stream=20, **facts))
    status, text, _ = command(*paths, "--out", tmp_path / "run", "--rows")
    assert status == 0
    assert "trace: 1 collective, bytes unknown" in text
    meshscope.open(tmp_path / "run").report(tmp_path / "report.html")


def test_files_of_several_sessions_are_named(tmp_path: Path) -> None:
    """Rank 1 starts 1,000 s later, and states another world size."""
    events = [made.collective(made.NCCL, rank * 1e9, 10, (0, 1), 64) for rank in range(2)]
    paths = ranks(tmp_path, *events, world_sizes=(2, 4))
    said = " ".join(meshscope.import_(paths, out=tmp_path / "run").record.measured.findings)
    assert "the files state world sizes of 2 and 4" in said
    assert "1.json: no time in common with 0.json" in said


def test_a_receiver_has_the_bandwidth_of_its_sender(tmp_path, command) -> None:
    """128 B in 10 us, in the table as in the metric."""
    name = "ncclDevKernel_SendRecv(x)"
    events = [made.collective(name, 0, 10, (0, 1), 64, kind=kind) for kind in ("send", "recv")]
    layout = ("--topology", "h100:2", "--plan", "pp=2", "--out", tmp_path / "run")
    _, text, _ = command(*ranks(tmp_path, *events), *layout, "--rows")
    table = meshscope.open(tmp_path / "run").metrics["bandwidth"].sort("kind")
    assert table["kind"].to_list() == ["recv", "send"]
    assert table["busbw_bytes_per_s"].to_list() == pytest.approx([12.8e6] * 2)
    lines = [line for line in text.splitlines() if line.startswith(("send", "recv"))]
    assert [line.split()[-2:] for line in lines] == [["12.8", "MB/s"]] * 2


def test_the_order_of_devices_decides_between_axes_of_equal_size(tmp_path: Path) -> None:
    """Ranks {0, 2} are neighbors on the mesh if the devices are in the order 0, 2, 1, 3."""
    event = made.collective(made.NCCL, 0, 10, (0, 2), 64)
    path = made.write(tmp_path / "rank0.json", made.document([event], world_size=4))
    for order, axis in ((None, "data"), ("0,2,1,3", "model")):
        out = tmp_path / f"run-{axis}"
        run = meshscope.import_([path], mesh="data=2,model=2", device_order=order, out=out)
        assert [row.axis for row in run.record.rows] == [axis]


@table
def test_a_fault_is_one_message_and_leaves_nothing(
    tmp_path, command, monkeypatch, words, message
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("et").mkdir()
    Path("et/et.json").write_text('{"schema": "1.1.1", "nodes": []}')
    Path("step.hlo.txt").write_text("HloModule jit_f, is_scheduled=true")
    names = {
        "folder": FOLDER, "rank": FOLDER / "rank0.pt.trace.json.gz", "bench": FOLDER / "bench.json",
        "none": "none.yaml", "empty": "empty", "et": "et", "hlo": "step.hlo.txt",
    }  # fmt: skip
    status, out, err = command(*(word.format(**names) for word in words))
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert message in err
    assert not Path("runs").exists()


def test_traces_of_gpus_and_of_tpus_are_not_one_session(tmp_path: Path) -> None:
    gpu = made.write(tmp_path / "gpu.json", made.document([made.kernel("gemm", 0.0, 5.0)]))
    tpu = tmp_path / "tpu.json"
    names = [
        {"ph": "M", "pid": 3, "name": "process_name", "args": {"name": "/device:TPU:0"}},
        {"ph": "M", "pid": 3, "tid": 3, "name": "thread_name", "args": {"name": "XLA Ops"}},
    ]
    op = {"ph": "X", "pid": 3, "tid": 3, "ts": 0, "dur": 100, "name": "fusion.1"}
    made.write(tpu, {"traceEvents": [*names, op]})
    message = r"of GPUs and .* of TPUs\. Import them one by one"
    with pytest.raises(meshscope.MeshscopeError, match=message):
        meshscope.import_([gpu, tpu], out=tmp_path / "run")
