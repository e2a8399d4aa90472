"""Every fault of a profile is reported, and a good profile has none."""

from pathlib import Path

import made_profiles
import pytest
from made_profiles import FUSION, GOLDEN, REDUCE, Event, Line, Plane, tpu, write
from tables import table

from meshscope.readers.profile.executions import executions
from meshscope.readers.profile.quality import capture_faults
from meshscope.readers.profile.xplane import read_profile

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
