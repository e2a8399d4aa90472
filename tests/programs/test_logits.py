"""Tiny random models give the logits of `transformers` in prefill and 16 decode steps, for every plan."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from tables import read_cases, read_rows
from tiny_models import (
    TOLERANCE,
    check_logits,
    generated_logits,
    golden,
    interpret_kernels,
    tiny_experiment,
)

from meshscope.model import quantization
from meshscope.model.config import model_from_config
from meshscope.model.families import Family
from meshscope.model.quantization import FP8_BLOCKS, MXFP4, quantization_of
from meshscope.plans.caches import ContextForm
from meshscope.plans.dispatch import DispatchForm
from meshscope.plans.experiment import Experiment
from meshscope.plans.kernel_choice import Kernel, KernelChoice
from meshscope.plans.plan import parse_plan
from meshscope.plans.program import Loop, Partitioner, Program
from meshscope.programs.jax import build

PLANS = ("tp=1", "tp=8", "tp=8,sp", "dp=8", "dp=2,tp=4", "dp=2,tp=4,sp", "fsdp=8", "fsdp=2,tp=4")
EXPERT_PLANS = (
    *("tp=1", "tp=8,sp", "tp=8,ep=8", "dp=8,ep=8", "dp=4,tp=2,ep=4", "dp=2,tp=4,ep=8"),
    *("dp=2,tp=4,ep=8,sp", "fsdp=2,tp=4,ep=2", "fsdp=4,tp=2"),
)
OF_COMPILER = ("tp=8", "dp=2,tp=4,ep=8", "dp=2,tp=4,sp")  # with the auto partitioner


class Case(NamedTuple):
    config: str
    plan: str
    partitioner: Partitioner = Partitioner.MANUAL
    loop: Loop = Loop.UNROLL
    dispatch: DispatchForm = DispatchForm.AUTO
    context: ContextForm = ContextForm.RING
    microbatches: int | None = None
    chunk: int | None = None


def _stored(group: str, tier: str) -> list[Case]:
    return read_cases(Path(__file__).parent / "logits_cases.csv", Case, group=group, tier=tier)


def _parameters(cases: Iterable[Case], of_matrix: Iterable[Case]) -> list[Any]:
    """Each case once, those of the matrix with its marker."""
    return [pytest.param(case, id=_name(case)) for case in dict.fromkeys(cases)] + [
        pytest.param(case, id=_name(case), marks=pytest.mark.matrix)
        for case in dict.fromkeys(of_matrix)
        if case not in cases
    ]


def _of_group(group: str) -> list[Any]:
    return _parameters(_stored(group, "usual"), _stored(group, "matrix"))


def _name(case: Case) -> str:
    *words, microbatches, chunk = case
    numbers = {"microbatches": microbatches, "chunk": chunk}
    return "-".join([*words, *(f"{name}{n}" for name, n in numbers.items() if n is not None)])


# Families that differ from the others in few places.
CLOSE_CONFIGS = tuple(
    name for (name,) in read_rows(Path(__file__).parent / "close_configs.csv", str)
)

EXPERTS_OF_TOKEN = {"num_experts_per_tok", "top_k_experts", "moe_k"}
DENSE = [name for name, config in golden.CONFIGS.items() if not EXPERTS_OF_TOKEN & set(config)]
MIXTURES = [name for name in golden.CONFIGS if name not in DENSE]
CONTEXT_CONFIGS = (
    *("llama", "qwen3", "mixtral", "gpt_oss", "deepseek_v2", "deepseek_v3", "deepseek_v32"),
)
RING, ALLGATHER = ContextForm.RING, ContextForm.ALLGATHER


def _context(config: str) -> ContextForm:
    """Latents and keys go around a ring; states of linear attention and entries are gathered."""
    return ALLGATHER if config in {"qwen3_next", "qwen3_5", "qwen3_5_moe", "deepseek_v4"} else RING


def _plans_of_family(config: str) -> list[Case]:
    """Every axis: scanned layers on stages, and unrolled ones with blocks of the prompt."""
    ep = "" if config in DENSE else ",ep=4"
    return [
        Case(config, f"pp=2,dp=2,tp=2,sp{ep}", loop=Loop.SCAN),
        Case(config, f"fsdp=2,cp=2,tp=2{ep}", context=_context(config)),
    ]


# Both plans of each family; of those that are close to others in turn the one and the other.
IN_TURN = [_plans_of_family(config)[i % 2] for i, config in enumerate(CLOSE_CONFIGS)]
FAMILIES = [
    case
    for config in golden.CONFIGS
    for case in _plans_of_family(config)
    if config not in CLOSE_CONFIGS or case in IN_TURN
]


# Families that transformers lacks, which have oracles of their own: test_reused.py and test_plain.py.
WITHOUT_TRANSFORMERS = {"deepseek_v41_text", "grok1", "bailing_moe", "deepseek"}


def test_every_family_has_logits_of_transformers() -> None:
    models = (model_from_config(one, name="t", source="test") for one in golden.CONFIGS.values())
    assert {model.family for model in models} == set(Family) - WITHOUT_TRANSFORMERS


# In the matrix: every dense family under every plan with both partitioners; scanned layers for one family;
# cp alone, with each other axis, and with experts over the data axis.
CASES = [
    *(case for config in CLOSE_CONFIGS for case in _plans_of_family(config)),
    *(
        Case(config, plan, partitioner, loop)
        for config in DENSE
        for plan in PLANS
        for partitioner in Partitioner
        for loop in ((Loop.UNROLL, Loop.SCAN) if config == "qwen3" else (Loop.UNROLL,))
    ),
    *(Case(config, plan) for config in MIXTURES for plan in EXPERT_PLANS),
    *(Case(config, "dp=2,tp=2,ep=4", loop=Loop.SCAN) for config in MIXTURES),
    *(
        Case(config, plan, Partitioner.AUTO)
        for config in MIXTURES
        for plan in OF_COMPILER
        if "ple_layer_ids" not in golden.CONFIGS[config]  # tables of n-grams have explicit lookups
    ),
    *(
        Case(config, plan, loop=loop, context=form)
        for config in (*CONTEXT_CONFIGS, *CLOSE_CONFIGS)
        for plan, loop, form in (
            ("cp=8", Loop.UNROLL, RING),
            ("cp=8", Loop.UNROLL, ALLGATHER),
            ("cp=2,tp=4", Loop.SCAN, RING),
            ("cp=2,tp=4,sp", Loop.SCAN, ALLGATHER),
            ("fsdp=2,cp=4", Loop.UNROLL, RING),
            ("dp=2,cp=2,tp=2", Loop.UNROLL, RING),
            ("dp=2,cp=2,tp=2,ep=4", Loop.SCAN, RING),
        )
        if "ep" not in plan or config in MIXTURES
    ),
    *(
        Case(config, plan, loop=loop)
        for config in CLOSE_CONFIGS
        for plan, loop in (("pp=2,tp=4", Loop.SCAN), ("pp=2,tp=2,dp=2,sp", Loop.UNROLL))
    ),
]


@pytest.mark.parametrize(
    "case",
    _parameters([*FAMILIES, *_stored("all", "usual")], [*CASES, *_stored("all", "matrix")]),
)
def test_logits_equal_those_of_transformers(case: Case) -> None:
    """The same weights and greedy tokens give logits equal within float32 rounding."""
    fields = ("partitioner", "loop", "dispatch", "context", "microbatches")
    program = Program(**{name: getattr(case, name) for name in fields})
    experiment = tiny_experiment(case.config, case.plan, program, prefill_chunk=case.chunk)
    check_logits(experiment, case.config)


# Formats with smaller blocks or groups for the tiny models.
SMALL_BLOCKS = {"block8": FP8_BLOCKS, "s4_group8": "s4_group32", "mxfp4_group8": MXFP4}


def quantized_experiment(case: Case) -> Experiment:
    """A tiny model with 8-bit weights on virtual CPU devices."""
    name, dtype = golden.QUANTIZED[case.config]
    program = Program(partitioner=case.partitioner, loop=case.loop, context=case.context)
    dtype = SMALL_BLOCKS.get(dtype, dtype)
    return tiny_experiment(name, case.plan, program, weight_dtype=dtype)


@pytest.mark.parametrize("case", _of_group("quantized"))
def test_8_bit_weights_give_the_logits_of_dequantized_ones(case: Case) -> None:
    """`transformers` with matrices dequantized in float32, and norms and routers in bfloat16."""
    check_logits(quantized_experiment(case), case.config)


@pytest.mark.parametrize("most_rows", [4, 1024])
@pytest.mark.parametrize("case", _of_group("four_bits"))
def test_4_bit_weights_give_the_logits_of_dequantized_ones(
    case: Case, most_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By sums over groups for few rows, and by the whole matrix for the rows of a prefill."""
    formats = dict(quantization._QUANTIZATIONS)
    for name in ("s4_group32", MXFP4):
        formats[name] = replace(formats[name], block=golden.BLOCK)
    monkeypatch.setattr("meshscope.model.quantization._QUANTIZATIONS", formats)
    monkeypatch.setattr("meshscope.programs.jax.matrix.MAX_BLOCK_ROWS", most_rows)
    check_logits(quantized_experiment(case), case.config)


@pytest.mark.parametrize("case", _of_group("grouped"))
def test_logits_with_the_grouped_kernel_equal_those_of_transformers(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel of int8 experts on tpu7x, interpreted; scanned layers read their part of the stack."""
    interpret_kernels(monkeypatch, "tpu7x")
    experiment = quantized_experiment(case)
    assert experiment.kernels.experts.kernel is Kernel.GROUPED

    check_logits(experiment, case.config)


@pytest.mark.parametrize(
    ("case", "chip"),
    [
        pytest.param(case, chip, id=f"{_name(case)}-{chip}")
        for chip in ("cpu", "v6e")
        for case in _stored(f"blocks_{chip}", "usual")
    ],
)
def test_scales_of_blocks_give_the_logits_of_dequantized_weights(
    case: Case, chip: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of 8 x 8; on v6e, an interpreted kernel applies the scales of experts."""
    blocks = quantization_of(FP8_BLOCKS)
    assert blocks is not None
    small = {FP8_BLOCKS: replace(blocks, block=golden.BLOCK)}
    monkeypatch.setattr("meshscope.model.quantization._QUANTIZATIONS", small)
    interpret_kernels(monkeypatch, chip)
    for module in ("experts", "latent"):  # a prefill has more rows
        monkeypatch.setattr(f"meshscope.programs.jax.{module}.MAX_BLOCK_ROWS", 4)
    experiment = quantized_experiment(case)
    has_kernel = experiment.kernels.experts == KernelChoice(kernel=Kernel.GROUPED)
    assert has_kernel == (chip == "v6e")

    check_logits(experiment, case.config)


@pytest.mark.parametrize("case", _of_group("kernel"))
def test_logits_with_the_decode_kernel_equal_those_of_transformers(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel of TPUs, interpreted, in a cache that is longer than the request."""
    interpret_kernels(monkeypatch, "v6e")
    model = model_from_config(golden.CONFIGS[case.config], name="tiny", source="test")
    program = Program(partitioner=case.partitioner, loop=case.loop)
    output = 150 * parse_plan(case.plan).cp
    experiment = tiny_experiment(
        replace(model, max_position=None), case.plan, program, output=output
    )
    assert experiment.kernels.decode_attention.kernel is Kernel.FLASH_DECODE

    check_logits(experiment, case.config)


@pytest.mark.parametrize("case", _of_group("separate"))
def test_the_decode_kernel_reads_keys_and_values_of_narrow_heads_apart(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each in a cache array of its own, instead of one for both."""
    monkeypatch.setattr(build, "joined_narrow_heads", lambda arrays: arrays)
    test_logits_with_the_decode_kernel_equal_those_of_transformers(case, monkeypatch)


@pytest.mark.parametrize("n_prompt", [3, 21])
def test_prefill_may_end_inside_a_window(n_prompt: int) -> None:
    """DeepSeek-V4: before the first entry (4 positions), and inside windows of 4 and 8 positions."""
    weights, prompt, expected = golden.read_golden("deepseek_v4")
    tokens = np.concatenate([prompt, expected[:-1].argmax(axis=-1).T], axis=1)
    output = golden.PROMPT + golden.N_DECODE + 1 - n_prompt
    experiment = tiny_experiment(
        "deepseek_v4", "tp=1", Program(loop=Loop.SCAN), prompt=n_prompt, output=output
    )
    parts = (tokens[:, :n_prompt], tokens[:, n_prompt:])
    got = np.stack(list(generated_logits(experiment, weights, *parts)))

    first = max(n_prompt, golden.PROMPT)
    wanted = expected[first - golden.PROMPT :]
    np.testing.assert_allclose(got[first - n_prompt :], wanted, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.oracle
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.matrix) if name in CLOSE_CONFIGS else name
        for name in golden.CONFIGS
    ],
)
def test_golden_logits_equal_those_of_transformers(name: str) -> None:
    """The installed `transformers` gives the stored logits."""
    pytest.importorskip("torch", reason="the oracle needs torch")
    pytest.importorskip("transformers", reason="the oracle needs transformers")
    _, prompt, expected = golden.read_golden(name)
    logits = golden.greedy_logits(golden.oracle_model(name), prompt)
    # Processors differ by up to 3e-5.
    np.testing.assert_allclose(logits, expected, atol=2 * TOLERANCE)
