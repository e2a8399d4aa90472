"""The compiler's cycle profile, in files as libtpu 0.0.42.1 writes them."""

import json
from pathlib import Path

from meshscope.backends.compile import compile as compiling
from meshscope.backends.compile.compile import CYCLES_FLAG, profiling_environment, read_profile
from meshscope.errors import CompileError
from meshscope.events.enums import Phase
from meshscope.hardware.topology import parse_topology
from meshscope.model.config import read_model
from meshscope.plans.experiment import Experiment, experiment_of
from meshscope.plans.plan import parse_plan
from meshscope.plans.program import Cycles
from meshscope.plans.workload import Workload

WRITTEN = """hlo_op_estimate {
  hlo_op_name: "fusion.7"
  estimated_cycles: 10790
  num_equivalent_hlos: 1
  dma_instruction_type: DMA_INSTRUCTION_TYPE_LOCAL
  scalar_inputs: 0
}
"""


def _experiment() -> Experiment:
    return experiment_of(
        model=read_model("meta-llama/Llama-3.1-8B"),
        plan=parse_plan("tp=8"),
        topology=parse_topology("v6e-8"),
        workload=Workload(output=1),
        n_layers=1,
    )


def test_cycles_are_keyed_by_the_name_of_the_operation(tmp_path: Path):
    (tmp_path / "fusion_static_llo_profile.textproto").write_text(WRITTEN)
    (tmp_path / "other.textproto").write_text("the format of another version")
    assert read_profile(tmp_path) == {"fusion.7": 10_790}


def test_the_flag_is_appended_to_those_of_the_user():
    given = {"LIBTPU_INIT_ARGS": "--mine=1", "PATH": "/bin"}
    flags = f"--mine=1 {CYCLES_FLAG}=/x"
    assert profiling_environment(given, Path("/x")) == {**given, "LIBTPU_INIT_ARGS": flags}


def _compile(
    monkeypatch, folder: Path, run_workers, cycles: Cycles = Cycles.PROFILE
) -> tuple[str, ...]:
    monkeypatch.setattr(compiling, "_run_workers", run_workers)
    program = compiling._Program(experiment=_experiment(), phase=Phase.PREFILL, folder=folder)
    return compiling._compile_programs((program,), (program,), lambda *_: None, cycles)


def test_the_profile_is_written_beside_the_program(monkeypatch, tmp_path):
    def run_workers(_programs, _progress, profile_of):
        for folder in profile_of.values():
            folder.mkdir()
            (folder / "a.textproto").write_text(WRITTEN)

    assert _compile(monkeypatch, tmp_path, run_workers) == ()
    kept = json.loads((tmp_path / "prefill.cycles.json").read_text())
    assert kept == {"fusion.7": 10_790}


def test_a_compiler_without_profiles_gives_a_note(monkeypatch, tmp_path):
    def run_workers(_programs, _progress, profile_of):
        for folder in profile_of.values():
            folder.mkdir()

    (note,) = _compile(monkeypatch, tmp_path, run_workers)
    assert "writes none" in note


def test_a_compiler_without_the_flag_compiles_without_it(monkeypatch, tmp_path):
    calls = []

    def run_workers(_programs, _progress, profile_of=None):
        calls.append(profile_of)
        if profile_of:
            raise CompileError("Unknown command line flag")

    (note,) = _compile(monkeypatch, tmp_path, run_workers)
    assert "Unknown command line flag" in note
    assert len(calls) == 2
    assert calls[1] is None


def test_profile_is_off_by_default(monkeypatch, tmp_path):
    calls = []
    _compile(monkeypatch, tmp_path, lambda *args: calls.append(args), Cycles.ESTIMATED)
    assert [len(arguments) for arguments in calls] == [2]  # programs and progress
    assert not list(tmp_path.iterdir())
