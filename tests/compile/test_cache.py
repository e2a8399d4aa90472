"""A program that was compiled is taken from the cache until something changes that it depends on."""

from pathlib import Path

import pytest
from made import experiment_with

from meshscope import workers
from meshscope.backends.compile import cache
from meshscope.backends.compile.compile import CompileResult, compile_experiment
from meshscope.errors import CompileError
from meshscope.plans.program import Loop, Program

# A worker that writes a program without collectives.
COMPILER = """
import gzip, json, pathlib, sys
asked = json.loads(sys.stdin.readline())
text = '''HloModule jit_prefill, is_scheduled=true, num_partitions=8

ENTRY %main (x: f32[8,512]) -> f32[8,512] {
  %x = f32[8,512] parameter(0)
  ROOT %y = f32[8,512] multiply(%x, %x)
}
'''
path = pathlib.Path(asked["folder"]) / (asked["phase"] + ".hlo.txt.gz")
path.write_bytes(gzip.compress(text.encode()))
sizes = ("argument", "output", "alias", "temp", "code")
result = {
    "memory": {name + "_bytes": 8 for name in sizes},
    "versions": {},
    "flags": {},
    "programs": [""],
    "seconds": {"compile": 9.0},
}
print("meshscope: " + json.dumps({"result": result}))
"""
NO_COMPILER = "raise SystemExit(3)"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHSCOPE_CACHE", str(tmp_path / "programs"))


def compiled(folder: Path, worker: str, monkeypatch: pytest.MonkeyPatch) -> CompileResult:
    """Prefill of all layers in a loop, compiled by workers that run `worker`."""
    monkeypatch.setattr(workers, "MAIN", ("-c", worker))
    folder.mkdir()
    experiment = experiment_with(
        "Llama-3.2-3B", "tp=8", "v6e-8", program=Program(loop=Loop.SCAN), output=1
    )
    return compile_experiment(experiment, folder, progress=lambda *_: None)


def test_a_second_run_starts_no_compiler(tmp_path, monkeypatch) -> None:
    first = compiled(tmp_path / "first", COMPILER, monkeypatch)
    second = compiled(tmp_path / "second", NO_COMPILER, monkeypatch)
    assert (second.times, second.memory) == (first.times, first.memory)
    assert first.seconds["prefill.compile"] == 9.0
    assert "prefill.compile" not in second.seconds


@pytest.mark.parametrize("change", ["flags", "version", "source", "damage"])
def test_what_changes_a_program_compiles_it_again(change, tmp_path, monkeypatch) -> None:
    compiled(tmp_path / "first", COMPILER, monkeypatch)
    match change:
        case "flags":
            monkeypatch.setenv("XLA_FLAGS", "--xla_dump_hlo_as_text")
        case "version":
            monkeypatch.setattr(cache, "version", lambda _: "0.0.1")
        case "source":
            monkeypatch.setattr(
                "meshscope.backends.compile.compile.source_digest", lambda: "another"
            )
        case _:
            (text,) = (tmp_path / "programs").glob("*/prefill.hlo.txt.gz")
            text.unlink()
    with pytest.raises(CompileError, match="exit code 3"):
        compiled(tmp_path / "second", NO_COMPILER, monkeypatch)


def test_a_cache_that_cannot_be_written_costs_only_the_cache(tmp_path, monkeypatch) -> None:
    (tmp_path / "programs").write_text("a file in the way")
    assert compiled(tmp_path / "first", COMPILER, monkeypatch).times
