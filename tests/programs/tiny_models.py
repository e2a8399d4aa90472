"""The tiny models of the golden logits, and the logits of their programs on virtual CPU devices."""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import make_golden_logits as golden
import numpy as np
import pytest
from made import experiment_with

from meshscope.backends.live.session import chunk_runs, merged_tokens
from meshscope.events.enums import Phase
from meshscope.hardware.chips import CHIPS
from meshscope.model.config import model_from_config
from meshscope.model.model import Model
from meshscope.plans.experiment import Experiment
from meshscope.plans.kernel_choice import KernelChoices, kernel_choices
from meshscope.plans.plan import parse_plan
from meshscope.plans.program import Program
from meshscope.programs.jax import build
from meshscope.programs.jax.build import BuiltProgram, build_program
from meshscope.programs.jax.decode_attention import DecodeKernel
from meshscope.programs.jax.grouped_matmul import GroupedKernel
from meshscope.programs.jax.values import placed_weights

# The order of float32 sums differs by mesh; larger logits than 2 round more.
TOLERANCE = 2e-5
DTYPES = ("weight_dtype", "activation_dtype", "cache_dtype")


def tiny_experiment(
    model: str | Model, plan: str, program: Program | None = None, **workload: Any
) -> Experiment:
    """The experiment of the golden logits on virtual CPU devices, in float32 unless `workload` says otherwise."""
    if isinstance(model, str):
        model = model_from_config(golden.CONFIGS[model], name="tiny", source="test")
    sizes = {"batch": golden.BATCH, "prompt": golden.PROMPT, "output": 1 + golden.N_DECODE}
    options = {**dict.fromkeys(DTYPES, "f32"), **sizes, **workload, "program": program}
    return experiment_with(model, plan, f"cpu:{parse_plan(plan).n_devices}", **options)


def check_logits(experiment: Experiment, name: str) -> None:
    """The logits of prefill and of greedy decode steps are the golden ones of this name."""
    _, _, expected = golden.read_golden(name)
    got = logits_of(experiment, name)
    rounding = TOLERANCE * max(1.0, float(np.abs(expected).max()) / 2)
    np.testing.assert_allclose(got, expected, atol=rounding, rtol=TOLERANCE)


def logits_of(experiment: Experiment, name: str) -> np.ndarray:
    """The logits of all steps from the golden weights and prompts of this name."""
    weights, prompt, _ = golden.read_golden(name)
    return np.stack(list(generated_logits(experiment, weights, prompt)))


def interpret_kernels(monkeypatch: pytest.MonkeyPatch, chip: str) -> None:
    """Experiments choose the kernels of this chip, which are interpreted."""

    def of_chip(experiment: Experiment) -> KernelChoices:
        return kernel_choices(experiment, CHIPS[chip])

    monkeypatch.setattr("meshscope.plans.experiment.kernel_choices", of_chip)
    for kernel in (DecodeKernel, GroupedKernel):
        monkeypatch.setattr(build, kernel.__name__, partial(kernel, is_interpreted=True))


class Prefilled(NamedTuple):
    """A program of the last chunk, its weights, the cache after prefill, and the outputs of last chunks."""

    program: BuiltProgram
    weights: Any
    cache: Any
    outs: list[Any]


def prefilled(
    experiment: Experiment, weights: dict[str, np.ndarray], prompt: np.ndarray
) -> Prefilled:
    """Prefill of the prompt [B, S], in chunks if the experiment has them."""
    devices = jax.devices()[: experiment.plan.n_devices]
    programs = {
        program.name: build_program(experiment, Phase.PREFILL, devices, chunk=chunk)
        for chunk, program in enumerate(experiment.programs(Phase.PREFILL))
    }
    last = programs["prefill"]
    arrays = placed_weights(experiment, last, weights.__getitem__)
    cache, outs = empty_cache(last), []
    for run in chunk_runs(experiment, prompt.astype(np.int32)):
        out = programs[run.program].step(arrays, run.tokens, cache, run.first_row)
        cache = out[2]
        outs += [out] if run.is_last else []
    return Prefilled(program=last, weights=arrays, cache=cache, outs=outs)


def empty_cache(program: BuiltProgram) -> Any:
    """A cache of zeros on the program's devices."""
    return jax.tree.map(
        lambda like: jax.device_put(np.zeros(like.shape, like.dtype), like.sharding),
        program.arguments[2],
    )


def generated_logits(
    experiment: Experiment,
    weights: dict[str, np.ndarray],
    prompt: np.ndarray,
    given: np.ndarray | None = None,
) -> Iterator[np.ndarray]:
    """Logits of prefill and of each decode step, greedy or with the tokens [B, n] that are given."""
    prefill, arrays, cache, outs = prefilled(experiment, weights, prompt)
    devices = jax.devices()[: experiment.plan.n_devices]
    decode = build_program(experiment, Phase.DECODE, devices)
    n_data = experiment.plan.data_size
    parts = [np.asarray(prefill.logits(out)) for out in outs]
    by_device = [part.reshape(n_data, -1, part.shape[-1]) for part in parts]
    yield np.concatenate(by_device, axis=1).reshape(golden.BATCH, -1)
    out = (merged_tokens([out[0] for out in outs], data_size=n_data), None, cache)
    for step in range(golden.N_DECODE if given is None else given.shape[1]):
        tokens = out[0] if given is None else given[:, step].astype(np.int32)
        position = np.int32(prompt.shape[1] + step)
        out = decode.step(arrays, np.asarray(tokens)[:, None], out[2], position)
        yield np.asarray(decode.logits(out))
