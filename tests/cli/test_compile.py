"""`compile` with a fake compiler: what is saved, printed and cleaned up."""

import gzip
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from made import TINY
from tables import table

import meshscope.api.compile as command
from meshscope.cost.collectives import predict
from meshscope.errors import CompileError
from meshscope.events.collective import Collective
from meshscope.events.enums import Part, Source
from meshscope.plans.experiment import Experiment
from meshscope.plans.memory import Memory
from meshscope.store.read import read_run
from meshscope.units import format_seconds

ASK = ("compile", "Qwen/Qwen3-32B", "--topology", "v6e-8", "--plan", "tp=8", "--layers", "2")
TEXT = gzip.compress(
    b"HloModule m, num_partitions=8\n\nENTRY %e () -> f32[] {\n  ROOT %c = f32[] constant(0)\n}\n"
)
RUN = "runs/Qwen3-32B-v6e-2x4-tp8-2layers"
MEMORY = Memory(
    weights_bytes=1, kv_cache_bytes=2, temp_bytes=3, total_bytes=6, hbm_bytes=10, fits=True
)


def exactly(experiment: Experiment) -> list[Collective]:
    return [replace(row, source=Source.COMPILED, algorithm="Ring") for row in predict(experiment)]


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Puts a function from the experiment to its rows in the place of the compiler."""

    def install(rows_of: Callable[[Experiment], list[Collective]]) -> None:
        def compile_experiment(
            experiment: Experiment, hlo_dir: Path, *, progress: Any, **_: Any
        ) -> Any:
            progress("prefill", "compiling", None)
            (hlo_dir / "prefill.hlo.txt.gz").write_bytes(TEXT)
            rows = rows_of(experiment)
            progress("prefill", "done", None)
            return SimpleNamespace(
                steps=(),
                times=(),
                timed_layers=None,
                rows=rows,
                memory=MEMORY,
                versions={"jax": "9.9"},
                seconds={"prefill.compile": 1.0},
                flags={"LIBTPU_INIT_ARGS": "--some"},
            )

        monkeypatch.setattr(command, "compile_experiment", compile_experiment)

    return install


def test_predicted_and_compiled_are_kept_together(meshscope, compiler) -> None:
    compiler(exactly)
    status, out, _ = meshscope(*ASK)
    run = read_run(Path(RUN))
    assert status == 0
    assert len(run.rows_of(Source.PREDICTED)) == len(run.rows_of(Source.COMPILED)) == 12
    assert (run.memory[Source.COMPILED], run.manifest.source) == (MEMORY, Source.COMPILED)
    assert run.manifest.versions["jax"] == "9.9"
    assert run.manifest.flags["LIBTPU_INIT_ARGS"] == "--some"
    assert run.manifest.seconds == {"prefill.compile": 1.0}
    assert (Path(RUN) / "hlo" / "prefill.hlo.txt.gz").read_bytes() == TEXT
    assert "collectives: predicted = compiled, 0 findings" in out.splitlines()[:12]


def test_progress_is_on_standard_error_and_begins_with_the_predicted_steps(
    meshscope, compiler
) -> None:
    compiler(exactly)
    status, out, err = meshscope(*ASK, "--json")
    steps = [line.split("] ")[1] for line in err.splitlines()]
    document = json.loads(out)
    times = read_run(Path(RUN)).times_of(Source.PREDICTED)
    said = ", ".join(f"{time.phase} {format_seconds(time.step.value_s)}" for time in times)
    assert steps == [f"predict: done, {said}", "prefill: compiling", "prefill: done"]
    assert (status, document["run"], document["source"]) == (0, RUN, "compiled")
    assert {row["source"] for row in document["collectives"]} == {"compiled"}
    assert document["memory"] == asdict(MEMORY)


@table
def test_the_folder_is_named_by_what_was_asked(meshscope, compiler, options, folder) -> None:
    compiler(exactly)
    assert meshscope(*ASK, *options).status == 0
    assert [str(path.parent) for path in Path().rglob("manifest.json")] == [folder]


def test_a_config_with_a_hostile_name_gets_a_harmless_folder(meshscope, compiler) -> None:
    compiler(exactly)
    folder = Path("..\x1b[31m evil")
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps(
            TINY
            | {"num_key_value_heads": 4, "num_attention_heads": 8, "max_position_embeddings": 512}
        )
    )
    status, out, _ = meshscope("compile", str(folder), *ASK[2:])
    assert status == 0
    assert "\x1b" not in out
    assert [path.name for path in Path("runs").iterdir()] == ["31m-evil-v6e-2x4-tp8-2layers"]


def test_a_compiler_that_fails_leaves_nothing(meshscope, compiler) -> None:
    def fail(_experiment: Experiment) -> list[Collective]:
        raise CompileError("the compiler crashed (SIGSEGV) while compiling decode.")

    compiler(fail)
    status, out, err = meshscope(*ASK)
    assert (status, out) == (1, "")
    assert err.splitlines()[-1:] == [
        "meshscope: the compiler crashed (SIGSEGV) while compiling decode."
    ]
    assert list(Path("runs").iterdir()) == []


def test_a_run_in_the_way_is_refused_before_anything_compiles(meshscope, compiler) -> None:
    compiler(exactly)
    meshscope(*ASK)
    calls: list[Experiment] = []
    compiler(lambda experiment: calls.append(experiment) or [])
    status, _, err = meshscope(*ASK)
    assert (status, calls) == (1, [])
    assert err.startswith(f"meshscope: '{RUN}' exists.")


def test_what_the_compiler_does_otherwise_is_told(meshscope, compiler) -> None:
    def otherwise(experiment: Experiment) -> list[Collective]:
        return [row for row in exactly(experiment) if row.part is not Part.LM_HEAD]

    compiler(otherwise)
    out = meshscope(*ASK).out
    assert "predicted and compiled differ, 0 findings\n- prefill: 1 missing" in out
    compared = meshscope("compare", RUN, "--full")
    assert compared.status == 0
    assert "5 collectives equal per step" in compared.out
    document = json.loads(meshscope("compare", RUN, "--json").out)
    assert document["verdict"] == "different"
    assert [row["verdict"] for row in document["rows"]].count("missing") == 2
