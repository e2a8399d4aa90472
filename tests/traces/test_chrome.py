"""The Chrome trace of the TPU profiler gives the rows of the XPlane that it was exported from."""

import json
from pathlib import Path
from typing import Any

import pytest

import meshscope
from meshscope.events.enums import Kind

REDUCE = (
    "%all-reduce.1 = f32[1024,256]{1,0} all-reduce(f32[1024,256]{1,0} %x), channel_id=1, "
    "replica_groups={{0,2},{1,3}}, use_global_device_ids=true, to_apply=%add"
)
START = (
    "%all-gather-start.2 = (bf16[64]{0}, bf16[128]{0}) all-gather-start(bf16[64]{0} %y), "
    "replica_groups={{0,1},{2,3}}, dimensions={0}, use_global_device_ids=true"
)
DONE = "%all-gather-done.2 = bf16[128]{0} all-gather-done((bf16[64]{0}, bf16[128]{0}) %all-gather-start.2)"
FUSION = "%fusion.3 = f32[1024]{0} fusion(f32[1024]{0} %z), kind=kLoop, calls=%f"
MODULES, OPS = 1, 2

Event = dict[str, Any]


def meta(pid: int, tid: int | None, name: str) -> Event:
    thread = {} if tid is None else {"tid": tid}
    kind = "process_name" if tid is None else "thread_name"
    return {"ph": "M", "pid": pid, **thread, "name": kind, "args": {"name": name}}


def op(pid: int, text: str, start_us: float, dur_us: float, category: str) -> Event:
    args = {
        "long_name": text, "hlo_category": category, "program_id": "7", "bytes_accessed": "2097152",
        "device_offset_ps": str(round(start_us * 1e6)), "device_duration_ps": str(round(dur_us * 1e6)),
    }  # fmt: skip
    name = text.partition(" ")[0].lstrip("%")
    times = {"ts": start_us, "dur": dur_us}
    return {"ph": "X", "pid": pid, "tid": OPS, "name": name, **times, "args": args}


def tpu_trace(n_chips: int = 4) -> dict[str, Any]:
    """One run of a decode module on each chip."""
    events = [meta(99, None, "/host:CPU")]
    for chip in range(n_chips):
        pid = chip + 1
        events += [
            meta(pid, None, f"/device:TPU:{chip}"),
            meta(pid, MODULES, "XLA Modules"),
            meta(pid, OPS, "XLA Ops"),
        ]
        module = op(pid, "jit_decode(7)", 10.0, 90.0, "")
        events += [
            {**module, "tid": MODULES, "args": {"run_id": "5"}},
            op(pid, START, 10.0, 1.0, "all-gather-start"),
            op(pid, FUSION, 11.0, 20.0, "loop fusion"),
            op(pid, DONE, 31.0, 9.0, "all-gather-done"),
            op(pid, REDUCE, 40.0, 50.0 + chip, "all-reduce"),
        ]  # fmt: skip
    document = {"displayTimeUnit": "ns", "metadata": {"highres-ticks": True}}
    return {**document, "traceEvents": events}


def test_ops_of_chips_with_groups_of_their_hlo_lines(tmp_path: Path) -> None:
    path = tmp_path / "host.trace.json"
    path.write_text(json.dumps(tpu_trace()))
    run = meshscope.import_(path, topology="v6e-4", plan="dp=2,tp=2", out=tmp_path / "run")
    rows = {row.kind: row for row in run.record.rows}
    reduce, gather = rows[Kind.ALL_REDUCE], rows[Kind.ALL_GATHER]
    assert (reduce.phase, reduce.axis, reduce.groups) == ("decode", "dp", ((0, 2), (1, 3)))
    assert (reduce.dtype, reduce.payload_bytes, reduce.count) == ("f32", 1024 * 256 * 4, 1)
    assert reduce.dur_s == pytest.approx(51.5e-6)
    assert (gather.axis, gather.payload_bytes, gather.count) == ("tp", 256, 1)
    assert gather.dur_s == pytest.approx(30e-6)
    assert gather.exposed_s == pytest.approx(10e-6)


def test_devices_that_no_machine_has_are_unknown_groups(tmp_path: Path) -> None:
    text = json.dumps(tpu_trace()).replace("{0,2}", "{0,99999999999999999999}")
    (tmp_path / "t.json").write_text(text)
    run = meshscope.import_(
        tmp_path / "t.json", topology="v6e-4", plan="dp=2,tp=2", out=tmp_path / "run"
    )
    rows = {row.kind: row for row in run.record.rows}
    assert (rows[Kind.ALL_REDUCE].axis, rows[Kind.ALL_GATHER].axis) == (None, "tp")


def test_an_export_that_stops_at_its_cap_is_reported(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("meshscope.readers.traces.merge.EXPORT_CAP", 30)
    (tmp_path / "t.json").write_text(json.dumps(tpu_trace()))
    run = meshscope.import_(tmp_path / "t.json", out=tmp_path / "run")
    measured = run.record.measured
    assert any(
        "the profiler stops its export near one million" in text for text in measured.findings
    )


def test_a_folder_with_card_gives_plan_and_slice(tmp_path: Path) -> None:
    """As CCL-Bench keeps them: a card, traces, and files of other content."""
    folder = tmp_path / "llama-tp4-tpu"
    folder.mkdir()
    (folder / "host.trace.json").write_text(json.dumps(tpu_trace()))
    (folder / "latency.txt").write_text("nothing to read")
    (tmp_path / "secret.json").write_text(json.dumps(tpu_trace()))
    (folder / "link.json").symlink_to(tmp_path / "secret.json")
    meshscope.predict(
        "Qwen/Qwen3-4B",
        topology="v6e-4",
        plan="dp=2,tp=2",
        batch=2,
        layers=1,
        out=tmp_path / "predicted",
    )
    card = (tmp_path / "predicted" / "card.yaml").read_text()
    (folder / "card.yaml").write_text(card.partition("\nmeshscope:")[0] + "\n")
    run = meshscope.import_(folder, out=tmp_path / "run")
    experiment = run.experiment
    assert (str(experiment.plan), experiment.topology and experiment.topology.name) == (
        "dp=2,tp=2",
        "v6e:2x2",
    )
    assert experiment.model_name == "Qwen/Qwen3-4B"
    measured = run.record.measured
    assert "1 links lead out of the folder, and were not read: link.json" in measured.findings
    assert "1 files are no traces, and were not read: latency.txt" in measured.findings
