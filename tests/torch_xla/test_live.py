"""What runs: modules of transformers, values of a checkpoint, and programs that JAX's runtime executes."""

from collections.abc import Generator
from functools import partial
from pathlib import Path

import jax
import make_golden_logits as golden
import numpy as np
import pytest

pytest.importorskip("torch_xla.core", reason="the extra 'torchxla' has an environment of its own")
pytestmark = pytest.mark.filterwarnings("ignore:.*XLA_USE_SPMD is being deprecated")

import running  # noqa: E402
from test_logits import DENSE, MIXTURES, Case, tiny_experiment  # noqa: E402

from meshscope.backends.live.checkpoint import Checkpoint  # noqa: E402  after the skip
from meshscope.backends.live.session import Session, host_tokens  # noqa: E402
from meshscope.events.enums import Phase  # noqa: E402
from meshscope.programs.torchxla.live import live_program, live_weights, weight_values  # noqa: E402
from meshscope.programs.torchxla.models import meta_model  # noqa: E402
from meshscope.programs.torchxla.program import build_program  # noqa: E402
from meshscope.programs.torchxla.tensors import Tensors  # noqa: E402


@pytest.fixture
def _narrow_again() -> Generator[None]:
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.mark.usefixtures("_narrow_again")
def test_tokens_equal_those_of_transformers(tmp_path: Path) -> None:
    """Greedy tokens of prefill and four decode steps, with the weights of a checkpoint."""
    asked = tiny_experiment(Case("qwen3", "fsdp=8"))
    golden.oracle_model("qwen3").save_pretrained(tmp_path)
    read = Checkpoint(tmp_path).read
    _, prompt, logits = golden.read_golden("qwen3")
    expected = logits.argmax(axis=-1).T[:, : asked.workload.output]
    session = Session(
        asked,
        partial(live_program, asked, devices=jax.devices()),
        make_weights=partial(live_weights, experiment=asked, seed=0, read=read),
        prompt=prompt,
        report=lambda _: None,
    )
    for _ in range(2):  # the memory of the cache is reused
        np.testing.assert_array_equal(host_tokens(session.request()[1]), expected)


@pytest.mark.parametrize(
    ("config", "plan"),
    [
        ("llama-tied", "pp=2,tp=4"),  # layers of both stages in one array
        ("qwen3_moe", "dp=2,tp=4,ep=8"),  # experts with a tensor each
        ("mixtral", "pp=2,fsdp=4,ep=4"),  # whose checkpoint has other names
        ("gpt_oss", "pp=2,tp=4"),  # gates and ups that alternate in a tensor, with biases
        ("deepseek_v3", "tp=8,ep=8"),
    ],
)
def test_a_checkpoint_fills_every_weight_that_a_plan_splits(
    config: str, plan: str, tmp_path: Path
) -> None:
    model, experiment = golden.oracle_model(config), tiny_experiment(Case(config, plan))
    model.save_pretrained(tmp_path)
    program = build_program(experiment, Phase.PREFILL, [])
    read = Checkpoint(tmp_path).read
    values = dict(weight_values(program, experiment, seed=0, read=read))
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    wanted = running.values_of(program, state)
    assert set(values) == set(wanted)
    for name, value in wanted.items():
        shape = program.arguments[name].shape
        np.testing.assert_array_equal(np.reshape(values[name], shape), np.reshape(value, shape))


@pytest.mark.parametrize("config", [*DENSE, *MIXTURES])
def test_modules_specific_to_deepseek_v4_alone_are_not_those_of_transformers(config: str) -> None:
    """Hooks and registered functions do not change them; a pipeline replaces the loop over layers (test_logits)."""
    tensors = Tensors(tiny_experiment(Case(config, "tp=8")), Phase.PREFILL)
    modules = meta_model(tensors, attention="eager").modules()
    ours = {type(m).__name__ for m in modules if type(m).__module__.startswith("meshscope")}
    replaced = {"EntryAttention", "MixedLayer", "Mixing", "Collapse"}
    assert ours == (replaced if config == "deepseek_v4" else set())
