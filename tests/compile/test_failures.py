"""A compiler that crashes, is killed or rejects a program gives one message that names it."""

from dataclasses import replace
from pathlib import Path

import pytest
from tables import table

import meshscope
from meshscope import workers
from meshscope.backends.compile import compile as compile_module
from meshscope.backends.compile.compile import compile_experiment
from meshscope.errors import CompileError, MeshscopeError, MissingToolError, SpecError
from meshscope.hardware.topology import parse_topology
from meshscope.model.config import read_model
from meshscope.plans.experiment import Experiment, experiment_of
from meshscope.plans.plan import parse_plan
from meshscope.plans.program import Loop, Program
from meshscope.plans.workload import Workload

WHAT = r"prefill of meta-llama/Llama-3.2-3B \(28 layers, plan 'tp=8'\) for v6e:2x4"


def experiment(topology: str = "v6e-8") -> Experiment:
    return experiment_of(
        model=read_model("Llama-3.2-3B"),
        plan=parse_plan("tp=8"),
        topology=parse_topology(topology),
        workload=Workload(output=1),  # no decode, and a loop of layers: one child
        program=Program(loop=Loop.SCAN),
    )


def compile_with_worker(program: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiles with a worker that runs `program` instead of the compiler."""
    monkeypatch.setattr(workers, "MAIN", ("-c", program))
    monkeypatch.setattr(compile_module, "check_can_compile", lambda *_: None)
    compile_experiment(experiment(), directory, progress=lambda *_: None)


@table
def test_a_crash_of_the_worker_is_one_message(program, message, tmp_path, monkeypatch) -> None:
    with pytest.raises(CompileError, match=message):
        compile_with_worker(program, tmp_path, monkeypatch)


def test_a_rejection_has_the_message_of_the_compiler(tmp_path, monkeypatch) -> None:
    program = (
        "import json\n"
        "said = {'type': 'XlaRuntimeError', 'message': 'no such shape', 'is_ours': False, 'errno': None}\n"
        "print('a line of a library\\nmeshscope: ' + json.dumps({'error': said}))"
    )
    with pytest.raises(CompileError, match=rf"rejected {WHAT}: XlaRuntimeError: no such shape"):
        compile_with_worker(program, tmp_path, monkeypatch)
    assert list(tmp_path.iterdir()) == []


def test_a_failure_of_one_phase_stops_the_other(tmp_path, monkeypatch) -> None:
    """The decode worker would sleep for an hour."""
    program = (
        "import json, sys, time\nif json.loads(sys.stdin.readline())['phase'] == 'decode':\n"
        "    time.sleep(3600)\nraise SystemExit(3)"
    )
    monkeypatch.setattr(workers, "MAIN", ("-c", program))
    monkeypatch.setattr(compile_module, "check_can_compile", lambda *_: None)
    both = experiment_of(
        model=read_model("Llama-3.2-3B"),
        plan=parse_plan("tp=8"),
        topology=parse_topology("v6e-8"),
        workload=Workload(output=2),
    )

    with pytest.raises(CompileError, match="exit code 3"):
        compile_experiment(both, tmp_path, progress=lambda *_: None)


def test_a_failure_of_the_unrolled_program_names_its_layers(tmp_path, monkeypatch) -> None:
    """The worker of all layers would sleep for an hour."""
    program = (
        "import json, sys, time\n"
        "if not json.loads(sys.stdin.readline())['folder'].endswith('unrolled'):\n    time.sleep(3600)\n"
        "raise SystemExit(3)"
    )
    monkeypatch.setattr(workers, "MAIN", ("-c", program))
    monkeypatch.setattr(compile_module, "check_can_compile", lambda *_: None)
    deep = replace(experiment(), program=Program(loop=Loop.AUTO))

    with pytest.raises(CompileError, match=r"exit code 3.*Llama-3.2-3B \(8 layers"):
        compile_experiment(deep, tmp_path, progress=lambda *_: None)


def test_cpu_devices_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"'cpu:8' is neither a TPU nor a GPU.*use predict"):
        compile_experiment(experiment("cpu:8"), tmp_path, progress=lambda *_: None)


def test_a_missing_compiler_names_what_to_install(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(MissingToolError, match=r"pip install -e '.\[tpu\]' in your clone"):
        compile_experiment(experiment(), tmp_path, progress=lambda *_: None)


@table
def test_int4_weights_that_no_program_has_are_refused(
    model: str, plan: str, options: dict[str, str], message: str
) -> None:
    with pytest.raises(MeshscopeError, match=message):
        meshscope.compile(
            model, plan=plan, batch=8, weight_dtype="int4", **({"topology": "v6e-8"} | options)
        )
