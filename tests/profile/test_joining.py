"""Profiles joined with the instructions of their program, and faults of a capture."""

import json
from pathlib import Path

import made_profiles
import polars as pl
import pytest
from made_profiles import DONE, FUSION, GOLDEN, REDUCE, START, WHILE, Event, Line, Plane, tpu, write
from tables import table

from meshscope.errors import TraceError
from meshscope.events.schema import in_schema
from meshscope.readers.profile.executions import (
    OPS_SCHEMA,
    executions,
    measured_executions,
    with_hlo,
)
from meshscope.readers.profile.quality import capture_faults
from meshscope.readers.profile.steps import annotated_steps, step_of_events
from meshscope.readers.profile.xplane import Profile, read_profile
from meshscope.readers.traces.servers import phase_of

PS = 1e-12


def read(tmp_path: Path, *planes: Plane) -> Profile:
    return read_profile(write(tmp_path / "a.xplane.pb", *planes))


def joined(profile: Profile, facts: dict[tuple[str, str], dict[str, object]]) -> pl.DataFrame:
    return measured_executions(with_hlo(profile.ops, facts))


def golden_facts() -> dict[tuple[str, str], dict[str, object]]:
    modules = json.loads((GOLDEN.parent / "cpu8.json").read_text())
    kinds = {"all-reduce": "all_reduce", "all-gather": "all_gather"}
    return {
        (module, name): {
            "kind": kinds[facts["opcode"]],
            "opcode": facts["opcode"],
            "groups": [[int(d) for d in g.split(",")] for g in facts["groups"][2:-2].split("},{")],
            "part": "mlp",
            "axis": "tp",
            "payload_bytes": 4096,
            "dtype": "f32",
            **({"layers": [0, 1]} if facts["opcode"] == "all-reduce" else {}),
        }
        for module, instructions in modules.items()
        for name, facts in instructions.items()
    }


TWO_PAIRS = (Event(START, 0, 5), Event(DONE, 50, 40), Event(START, 100, 5), Event(DONE, 150, 40))
MOVED = (Event(START, 2, 70), Event(START, 102, 75))


@pytest.mark.parametrize(
    ("plane", "expected"),
    [
        # From its start to its end: 90 ps, of which it blocks for 45.
        (
            tpu(Event(START, 0, 5), Event(FUSION, 10, 20), Event(DONE, 50, 40)),
            [("cs.1", True, 0, 90, 45), ("fusion.1", True, 10, 20, 20)],
        ),
        # A transfer sets the times of its pair.
        (
            tpu(*TWO_PAIRS, asynchronous=MOVED),
            [("cs.1", True, 2, 70, 45), ("cs.1", True, 102, 75, 45)],
        ),
        (tpu(Event(DONE, 0, 5), Event(START, 10, 5)), [("cd.1", False, 0, 5, 5), ("cs.1", False, 10, 5, 5)]),
        (tpu(Event(WHILE, 0, 90), Event(REDUCE, 0, 40)), [("ar.1", True, 0, 40, 40)]),
    ],
    ids=["a pair", "a transfer", "no partner", "a container"],
)  # fmt: skip
def test_a_pair_is_one_execution_and_a_container_none(tmp_path, plane, expected) -> None:
    rows = executions(read(tmp_path, plane).ops)
    joined = rows.select("hlo_name", "is_paired", "start_s", "dur_s", "exposed_s").rows()
    in_ps = [
        (name, is_paired, *(round(s / PS) for s in times)) for name, is_paired, *times in joined
    ]
    assert in_ps == expected
    assert set(rows.filter(hlo_name="cs.1", is_paired=True)["is_async"]) <= {True}


@table
def test_a_phase_is_a_word_of_the_name(name: str, phase: str | None) -> None:
    assert phase_of(name) == phase


def names_of_steps(profile: Profile) -> list[str | None]:
    """The name of the step of each op."""
    steps = annotated_steps(profile)
    at = step_of_events(profile, steps, profile.ops.events)
    return [None if row < 0 else steps["name"][row] for row in at.tolist()]


def test_steps_of_a_device_take_precedence_over_those_of_the_host(tmp_path: Path) -> None:
    host = Plane("/host:CPU", [Line("python", [Event("decode", 0, 500, {"step_num": 5})])])
    profile = read(tmp_path, host, tpu(Event(FUSION, 10, 20)))
    assert names_of_steps(profile) == ["1"]
    assert annotated_steps(profile)["name"].to_list() == ["decode", "1"]


def test_an_op_of_a_cpu_is_in_the_step_that_launched_its_run(tmp_path: Path) -> None:
    """Dispatch is asynchronous: the op executes while the host is in the next step."""
    run = {"run_id": 3}
    op = {"hlo_op": "fusion.1", "hlo_module": "jit_f", "device_ordinal": 0, **run}
    python = [
        Event("prefill", 0, 100_000, {"step_num": 0}),
        Event("Execute (jit_f)", 50_000, 5, run),
        Event("decode", 100_000, 100_000, {"step_num": 1}),
    ]
    lines = [Line("python", python), Line("worker", [Event("fusion.1", 120_000, 30, op)])]
    assert names_of_steps(read(tmp_path, Plane("/host:CPU", lines))) == ["prefill"]


def test_the_join_fills_the_event_table(tmp_path: Path) -> None:
    profile = read(tmp_path, tpu(Event(REDUCE, 10, 500)))
    facts = {"layer": 4, "part": "mlp", "axis": "tp", "groups": [[0, 1, 2, 3]], "stage": 1}
    table = in_schema(joined(profile, {("jit_decode", "ar.1"): facts}), OPS_SCHEMA)
    row = {name: value for name, value in table.to_dicts()[0].items() if value is not None}
    assert row == {
        "source": "measured", "layer": 4, "part": "mlp", "kind": "all_reduce",
        "opcode": "all-reduce", "axis": "tp",
        "groups": [[0, 1, 2, 3]], "dtype": "f32", "shape": [4], "payload_bytes": 16,
        "stage": 1, "count": 1, "n_steps": 1, "is_async": False,
        "start_s": pytest.approx(10 * PS), "dur_s": pytest.approx(500 * PS),
        "exposed_s": pytest.approx(500 * PS), "time_basis": "measured", "device": 3,
        "hlo_name": "ar.1", "source_line": "model.py:7", "module": "jit_decode", "run_id": 7,
        "host": 0, "line": 1, "is_paired": True, "is_joined": True,
    }  # fmt: skip


def test_an_op_without_instruction_stays_with_its_reason(tmp_path: Path) -> None:
    profile = read(tmp_path, tpu(Event(REDUCE, 0, 5), Event(FUSION, 9, 5)))
    table = joined(profile, {("jit_decode", "ar.1"): {"layer": 0}})
    assert table.select("hlo_name", "is_joined", "axis_reason").rows() == [
        ("ar.1", True, None),
        ("fusion.1", False, "the HLO has no such instruction"),
    ]


def test_a_profile_of_another_program_is_refused_with_both_names(tmp_path: Path) -> None:
    profile = read(tmp_path, tpu(Event(REDUCE, 0, 5)))
    with pytest.raises(TraceError, match=r"'jit_decode'.*'jit_train'.*run that was profiled"):
        joined(profile, {("jit_train", "ar.1"): {"layer": 0}})


def test_what_the_hlo_calls_a_loop_is_a_container(tmp_path: Path) -> None:
    ops = read(tmp_path, tpu(Event(FUSION, 0, 9))).ops
    known = with_hlo(ops, {("jit_decode", "fusion.1"): {"opcode": "while"}})
    assert known.events["role"].to_list() == ["container"]


def test_the_recorded_cpu_profile_joins_its_program_exactly() -> None:
    """Each of 1 + 3 runs on 8 devices has two all-reduces in a loop over layers and one all-gather."""
    profile = read_profile(GOLDEN)
    table = joined(profile, golden_facts())
    step = step_of_events(profile, annotated_steps(profile), table)
    table = table.with_columns(pl.Series("step", step))
    collectives = table.filter(pl.col("kind").is_not_null())
    counts = collectives.group_by("module", "step", "kind", "layer").len().sort(pl.all())
    per_step = [("all_gather", None, 8), ("all_reduce", 0, 8), ("all_reduce", 1, 8)]
    steps = [("jit_decode", 1), ("jit_decode", 2), ("jit_decode", 3), ("jit_prefill", 0)]
    assert counts.rows() == [(*step, *row) for step in steps for row in per_step]


EXPECTED = {("jit_decode", "ar.1"): 2}
OP = {"hlo_op": "fusion.1", "hlo_module": "jit_f"}
UNMARKED = Plane("/device:TPU:0", [Line("XLA Ops", [Event(FUSION, 0, 9)])])


def faults(path: Path, **options: object) -> list[str]:
    profile = read_profile(path)
    return capture_faults(profile, profile.ops, executions(profile.ops), **options)


def host(*events: Event) -> Plane:
    return Plane("/host:CPU", [Line("python", list(events))])


def test_the_recorded_cpu_profile_has_no_fault() -> None:
    expected = {
        (f"jit_{phase}", name): dict.fromkeys(range(8), n)
        for phase in ("prefill", "decode")
        for name, n in {"psum.7": 2, "all_gather.3": 1}.items()
    }
    assert faults(GOLDEN, expected=expected) == []


def plane_of(kind: str, *event: str | int) -> Plane:
    """A chip or a host with an event of this name, start and duration; or another plane without steps or ops."""
    match kind, event:
        case "chip", (str(name), int(start), int(dur)):
            return tpu(Event(getattr(made_profiles, name), start, dur))
        case "host", (str(name), int(start), int(dur)):
            return host(Event(name, start, dur, OP if name == "fusion.1" else {}))
        case _:
            return UNMARKED if kind == "unmarked" else Plane("/device:TPU:1")


@table
def test_each_fault_is_reported(tmp_path, planes, expected, messages) -> None:
    made = [plane_of(*plane) for plane in planes]
    counts = {tuple(key.split()): {3: n} for key, n in (expected or {}).items()}
    errors = ("buffer overflow",) if "buffer overflow" in messages[0] else ()
    findings = faults(write(tmp_path / "h.xplane.pb", *made, errors=errors), expected=counts)
    assert len(findings) == len(messages)
    for finding, message in zip(findings, messages, strict=True):
        assert message in finding


@pytest.mark.parametrize(
    ("due", "is_lost"), [({3: 1}, False), ({3: 2}, True), ({1: 5}, True), ({}, True)]
)
def test_an_op_of_some_devices_is_expected_only_there(tmp_path, due, *, is_lost) -> None:
    """Only device 3 ran, so nothing is expected of the others."""
    recorded = write(tmp_path / "h.xplane.pb", tpu(Event(REDUCE, 0, 9)))
    findings = faults(recorded, expected=dict.fromkeys(EXPECTED, due))
    assert ["was recorded 1 times" in fault for fault in findings] == [True] * is_lost


def test_a_device_with_fewer_runs_than_another_is_reported(tmp_path: Path) -> None:
    def chip(ordinal: int, n_runs: int) -> Plane:
        runs = [Event("jit_f(1)", 100 * i, 90, {"run_id": i}) for i in range(n_runs)]
        ops = [Event("%a = f32[] add()", 100 * i, 50) for i in range(n_runs)]
        kind = {"%a = f32[] add()": {"program_id": 1}}
        lines = [Line("XLA Modules", runs), Line("XLA Ops", ops), Line("Steps", [Event("0", 0, 9)])]
        return Plane(f"/device:TPU:{ordinal}", lines, kind_stats=kind)

    (findings,) = faults(write(tmp_path / "h.xplane.pb", chip(0, 5), chip(1, 3)))
    assert findings.startswith("Device 1 recorded 3 runs of 'jit_f', another device 5")


@pytest.mark.parametrize(
    "name", ["backend_compile", "PjRtCpuClient::Compile", "TfrtTpuCompiler::Compile"]
)
def test_a_compilation_between_ops_is_reported_and_an_earlier_one_is_not(tmp_path, name) -> None:
    chip = tpu(Event(FUSION, 0, 9), Event(FUSION, 500, 9))
    (within,) = faults(write(tmp_path / "h.xplane.pb", chip, host(Event(name, 200, 50))))
    assert f"such as '{name}'" in within
    assert "Run every program once" in within
    late = tpu(Event(FUSION, 500, 9))
    assert faults(write(tmp_path / "h.xplane.pb", late, host(Event(name, 0, 50)))) == []


def test_hosts_on_a_guessed_clock_are_reported(tmp_path: Path) -> None:
    for name in ("h0", "h1"):
        write(tmp_path / f"{name}.xplane.pb", tpu(Event(FUSION, 0, 9)))
    (findings,) = faults(tmp_path)
    assert "host 'h1' is aligned by: start of the profile" in findings
