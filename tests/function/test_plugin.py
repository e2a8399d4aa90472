"""The pytest plugin: assertions by meaning, whose failures name line, axis and bytes."""

from pathlib import Path

import pytest

pytest.importorskip("jax")  # here: an inner session forgets what it imports, and JAX loads once
pytest_plugins = ["pytester", "meshscope.pytest_plugin"]
pytestmark = [pytest.mark.slow, pytest.mark.tpu]

PLUGIN = ("-p", "meshscope.pytest_plugin", "-p", "no:cacheprovider")
HEAD = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import meshscope
import pytest
from programs import REPLICATED, SLICE, SPLIT, data_parallel
SLICE = dict(topology=SLICE, mesh="dp=4")
"""


@pytest.fixture(autouse=True)
def _no_other_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the inner sessions would import every plugin again."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def results(pytester: pytest.Pytester, body: str, *options: str) -> tuple[dict[str, int], str]:
    """The outcomes of a test file, and what pytest prints."""
    pytester.makepyfile(test_program=HEAD + body)
    run = pytester.runpytest_inprocess(*PLUGIN, *options)
    return run.parseoutcomes(), "\n".join(run.outlines)


def test_expectations_hold_or_name_the_collective(pytester: pytest.Pytester) -> None:
    outcomes, text = results(
        pytester,
        """
def test_nothing_is_sent(meshscope_compile):
    comm = meshscope_compile(data_parallel, *REPLICATED, **SLICE)
    comm.none()
    comm.none("all_gather", axis="dp")
    comm.expect(all_gather=0, max_wire_bytes=0, max_memory_bytes=1e6, min_flops=64 / 4 * 256 * 512 * 2)

def test_weights_are_gathered(meshscope_compile):
    comm = meshscope_compile(data_parallel, *SPLIT, **SLICE)
    comm.expect(all_gather=1, axis="dp", max_wire_bytes=256 * 512 * 2 * 3 / 4)
    comm.none("all_reduce")
    assert comm.run.time.step_s > 0

def test_fails(meshscope_compile):
    meshscope_compile(data_parallel, *SPLIT, **SLICE).none("all_gather", axis="dp")

def test_fails_on_bytes(meshscope_compile):
    meshscope_compile(data_parallel, *SPLIT, **SLICE).expect(all_gather=1, max_wire_bytes=1000)

def test_typo(meshscope_compile):
    with pytest.raises(meshscope.MeshscopeError, match="Did you mean 'all_gather'"):
        meshscope_compile(data_parallel, *SPLIT, **SLICE).expect(all_gathers=1)
""",
    )
    assert outcomes == {"passed": 3, "failed": 2}
    assert "all_gather over dp: count 1, exactly 0" in text
    assert "step: 1 x all_gather bf16[256,512] over dp, 197 kB sent each by the partitioner" in text
    assert "programs.py:" in text
    assert "all_gather: wire_bytes 197 kB, at most 1 kB" in text


def test_the_plugin_loads_no_library(pytester: pytest.Pytester) -> None:
    """Every pytest session of an environment with meshscope imports it."""
    code = "import meshscope.pytest_plugin, sys; print(sorted({'jax', 'polars', 'numpy'} & set(sys.modules)))"
    done = pytester.runpython_c(code)
    done.stdout.fnmatch_lines(["[[]]"])
