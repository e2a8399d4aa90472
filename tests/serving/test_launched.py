"""Options from launch commands: vLLM, SGLang-JAX, manifests, benchmarks, and what is refused or named as left out.

The commands are shortened from AI-Hypercomputer/tpu-recipes@1316f4d0 inference/ironwood/vLLM/Qwen3.5-397B and
inference/trillium.
"""

from pathlib import Path

import pytest
from tables import table

from meshscope.errors import SpecError
from meshscope.serving.launched import read_launch

FOLDER = Path(__file__).with_name("launch_commands")


@table
def test_a_command_gives_options(command: str, expected: str, left: str) -> None:
    launched = read_launch(command.replace("FOLDER", str(FOLDER)))
    shown = " ".join(f"{name}={value}" for name, value in launched.options.items())
    assert (shown, ", ".join(launched.not_simulated)) == (expected, left)


@table
def test_a_command_that_says_too_little_is_refused(command: str, remedy: str) -> None:
    with pytest.raises(SpecError, match=remedy):
        read_launch(command)


def test_an_option_of_the_command_line_replaces_that_of_the_command(meshscope) -> None:
    command = "vllm serve Qwen/Qwen3-4B --tensor-parallel-size 8"
    done = meshscope("predict", "--from-command", command, "--plan", "tp=4", "--topology", "v6e-4")
    assert "on v6e:2x2 (4 chips), tp=4" in done.out
    assert "Qwen/Qwen3-4B --server vllm-tpu\n" in done.err
