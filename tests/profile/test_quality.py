"""Every fault of a profile is reported, and a good profile has none."""

from pathlib import Path

import pytest
from made_profiles import DONE, FUSION, GOLDEN, REDUCE, START, Event, Line, Plane, tpu, write

from meshscope.readers.profile.quality import Fault, Finding, capture_faults
from meshscope.readers.profile.steps import ops_in_steps
from meshscope.readers.profile.xplane import read_profile

EXPECTED = {("jit_decode", "ar.1"): 2}


def faults(path: Path, **options: object) -> dict[Fault, Finding]:
    profile = read_profile(path)
    findings = capture_faults(profile, ops_in_steps(profile), **options)
    return {finding.fault: finding for finding in findings}


def profile(tmp_path: Path, *planes: Plane, errors: tuple[str, ...] = ()) -> Path:
    return write(tmp_path / "h.xplane.pb", *planes, errors=errors)


def host(*events: Event) -> Plane:
    return Plane("/host:CPU", [Line("python", list(events))])


def test_the_recorded_cpu_profile_has_no_fault() -> None:
    expected = {
        (f"jit_{phase}", name): n
        for phase in ("prefill", "decode")
        for name, n in {"psum.7": 2, "all_gather.3": 1}.items()
    }
    assert faults(GOLDEN, expected=expected) == {}


def test_lost_events_are_the_difference_to_the_program(tmp_path: Path) -> None:
    findings = faults(profile(tmp_path, tpu(Event(REDUCE, 0, 9))), expected=EXPECTED)
    assert findings[Fault.LOST_EVENTS].n_events == 1
    assert (
        "recorded 1 times; 1 runs on all devices should give 2"
        in findings[Fault.LOST_EVENTS].message
    )


def test_an_expected_op_without_events_is_lost(tmp_path: Path) -> None:
    findings = faults(profile(tmp_path, tpu(Event(FUSION, 0, 9))), expected=EXPECTED)
    assert findings[Fault.LOST_EVENTS].n_events == 2


@pytest.mark.parametrize(("due", "n_lost"), [({3: 1}, 0), ({3: 2}, 1), ({1: 5}, 1), ({}, 1)])
def test_an_op_of_some_devices_is_expected_only_there(
    tmp_path: Path, due: dict[int, int], n_lost: int
) -> None:
    """Only device 3 ran, so nothing is expected of the others."""
    recorded = profile(tmp_path, tpu(Event(REDUCE, 0, 9)))
    findings = faults(recorded, expected_by_device=dict.fromkeys(EXPECTED, due))
    lost = findings.get(Fault.LOST_EVENTS)
    assert (0 if lost is None else lost.n_events) == n_lost
    assert Fault.UNKNOWN_OPS not in findings


def test_ops_of_programs_without_hlo_are_reported(tmp_path: Path) -> None:
    findings = faults(profile(tmp_path, tpu(Event(FUSION, 0, 9))), expected={("jit_f", "x"): 1})
    assert list(findings) == [Fault.UNKNOWN_OPS]
    assert "jit_decode" in findings[Fault.UNKNOWN_OPS].message


@pytest.mark.parametrize(("half", "missing"), [(START, "done"), (DONE, "start")])
def test_a_start_or_done_without_its_partner_is_reported(
    tmp_path: Path, half: str, missing: str
) -> None:
    findings = faults(profile(tmp_path, tpu(Event(half, 0, 9))))
    assert f"lack their {missing}" in findings[Fault.UNPAIRED].message


def test_a_device_with_fewer_runs_than_another_is_reported(tmp_path: Path) -> None:
    def chip(ordinal: int, n_runs: int) -> Plane:
        runs = [Event("jit_f(1)", 100 * i, 90, {"run_id": i}) for i in range(n_runs)]
        ops = [Event("%a = f32[] add()", 100 * i, 50) for i in range(n_runs)]
        kind = {"%a = f32[] add()": {"program_id": 1}}
        lines = [Line("XLA Modules", runs), Line("XLA Ops", ops), Line("Steps", [Event("0", 0, 9)])]
        return Plane(f"/device:TPU:{ordinal}", lines, kind_stats=kind)

    findings = faults(profile(tmp_path, chip(0, 5), chip(1, 3)))
    assert list(findings) == [Fault.TRUNCATED_PLANE]
    message = findings[Fault.TRUNCATED_PLANE].message
    assert message.startswith("Device 1 recorded 3 runs of 'jit_f', another device 5")


def test_an_empty_device_plane_is_reported(tmp_path: Path) -> None:
    findings = faults(profile(tmp_path, tpu(Event(FUSION, 0, 9)), Plane("/device:TPU:1")))
    assert "'/device:TPU:1' of host 'h' contains no op" in findings[Fault.EMPTY_PLANE].message


def test_a_profile_without_ops_says_how_to_get_them(tmp_path: Path) -> None:
    findings = faults(profile(tmp_path, host(Event("e", 0, 1))))
    assert "block_until_ready" in findings[Fault.NO_OPS].message


@pytest.mark.parametrize(
    "name", ["backend_compile", "PjRtCpuClient::Compile", "TfrtTpuCompiler::Compile"]
)
def test_a_compilation_between_ops_is_reported_and_an_earlier_one_is_not(
    tmp_path: Path, name: str
) -> None:
    chip = tpu(Event(FUSION, 0, 9), Event(FUSION, 500, 9))
    within = faults(profile(tmp_path, chip, host(Event(name, 200, 50))))
    assert "Run every program once" in within[Fault.COMPILATION].message
    before = faults(profile(tmp_path, tpu(Event(FUSION, 500, 9)), host(Event(name, 0, 50))))
    assert Fault.COMPILATION not in before


def test_a_profile_without_steps_says_how_to_mark_them(tmp_path: Path) -> None:
    chip = Plane("/device:TPU:0", [Line("XLA Ops", [Event(FUSION, 0, 9)])])
    assert "StepTraceAnnotation" in faults(profile(tmp_path, chip))[Fault.NO_STEPS].message


def test_ops_without_device_number_are_reported(tmp_path: Path) -> None:
    op = {"hlo_op": "fusion.1", "hlo_module": "jit_f"}
    findings = faults(profile(tmp_path, host(Event("fusion.1", 0, 9, op))))
    assert findings[Fault.NO_DEVICE].n_events == 1


def test_errors_of_the_profiler_and_impossible_times_are_reported(tmp_path: Path) -> None:
    path = profile(tmp_path, tpu(Event(FUSION, 50, -9)), errors=("buffer overflow",))
    findings = faults(path)
    assert "buffer overflow" in findings[Fault.PROFILER_ERROR].message
    assert "end before they start" in findings[Fault.BAD_TIMES].message


def test_hosts_on_a_guessed_clock_are_reported(tmp_path: Path) -> None:
    for name in ("h0", "h1"):
        write(tmp_path / f"{name}.xplane.pb", tpu(Event(FUSION, 0, 9)))
    assert (
        "host 'h1' is aligned by: start of the profile"
        in faults(tmp_path)[Fault.LOOSE_CLOCKS].message
    )
