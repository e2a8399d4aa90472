"""A compiler that crashes, is killed or rejects a program gives one message that names it."""

from pathlib import Path
from typing import Any

import pytest
from made import experiment_with
from tables import table

import meshscope
from meshscope import workers
from meshscope.backends.compile.compile import compile_experiment
from meshscope.errors import CompileError, MeshscopeError, MissingToolError, SpecError
from meshscope.plans.experiment import Experiment
from meshscope.plans.program import Loop, Program
from meshscope.programs.frontends import check_can_compile

WHAT = r"prefill of meta-llama/Llama-3.2-3B \(28 layers, plan 'tp=8'\) for v6e:2x4"


def experiment(topology: str = "v6e-8", loop: Loop = Loop.SCAN, output: int = 1) -> Experiment:
    """By default without decode and with a loop of layers, so that one worker compiles."""
    return experiment_with(
        "Llama-3.2-3B", "tp=8", topology, program=Program(loop=loop), output=output
    )


def compile_with_worker(
    program: str, directory: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any
) -> None:
    """Compiles with workers that run `program` instead of the compiler."""
    monkeypatch.setattr(workers, "MAIN", ("-c", program))
    monkeypatch.setenv("MESHSCOPE_CACHE", str(directory / "programs"))  # empty
    compile_experiment(experiment(**changes), directory, progress=lambda *_: None)


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


@pytest.mark.parametrize(
    ("sleeps", "changes", "message"),
    [
        ("asked['phase'] == 'decode'", {"output": 2}, "exit code 3"),
        # The worker of all layers sleeps, that of the unrolled program fails.
        (
            "not asked['folder'].endswith('unrolled')",
            {"loop": Loop.AUTO},
            r"exit code 3.*Llama-3.2-3B \(8 layers",
        ),
    ],
    ids=["phase", "unrolled"],
)
def test_a_failure_of_one_program_stops_the_others(
    sleeps, changes, message, tmp_path, monkeypatch
) -> None:
    """The other worker would sleep for an hour."""
    program = (
        "import json, sys, time\nasked = json.loads(sys.stdin.readline())\n"
        f"if {sleeps}:\n    time.sleep(3600)\nraise SystemExit(3)"
    )
    with pytest.raises(CompileError, match=message):
        compile_with_worker(program, tmp_path, monkeypatch, **changes)


def test_cpu_devices_are_an_error() -> None:
    with pytest.raises(SpecError, match=r"'cpu:8' is not a TPU slice.*use predict"):
        check_can_compile(experiment("cpu:8"))


def test_a_missing_compiler_names_what_to_install(monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(MissingToolError, match=r"pip install 'meshscope\[tpu\]'"):
        check_can_compile(experiment())


@table
def test_int4_weights_that_no_program_has_are_refused(
    model: str, plan: str, options: dict[str, str], message: str
) -> None:
    with pytest.raises(MeshscopeError, match=message):
        meshscope.compile(
            model, plan=plan, batch=8, weight_dtype="int4", **({"topology": "v6e-8"} | options)
        )
