"""FLOPs of a model by the published formulas, against every product in the traced program of its prefill.

The program computes what is masked, too: windows and the choice of an indexer are as wide as the prompt.
"""

import json
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import jax
import pytest
from made import experiment_with

from meshscope.analysis.utilization import model_flops
from meshscope.events.enums import Phase
from meshscope.model.config import model_from_config
from meshscope.model.layers import AttentionKind
from meshscope.model.mechanisms.attention import Indexer
from meshscope.model.mechanisms.compressed import CompressedAttention
from meshscope.model.model import Model
from meshscope.plans.program import Loop, Program
from meshscope.programs.jax.build import build_program

PROMPT = 16
CONFIGS: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "traced_configs.json").read_text()
)["flops"]


def products(jaxpr: Any) -> Iterator[float]:
    """FLOPs of every dot in a program and in the programs that it calls."""
    for equation in jaxpr.eqns:
        shapes = [getattr(v.aval, "shape", ()) for v in equation.invars]
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            shared = prod(shapes[0][i] for i in contracted)
            yield 2.0 * shared * prod(equation.outvars[0].aval.shape)
        elif equation.primitive.name.startswith("ragged_dot"):
            yield 2.0 * prod(shapes[0]) * shapes[1][-1]
        for value in equation.params.values():
            for called in value if isinstance(value, (list, tuple)) else (value,):
                body = getattr(called, "jaxpr", called)
                if hasattr(body, "eqns"):
                    yield from products(body)


@pytest.mark.parametrize("family", CONFIGS)
def test_model_flops_count_every_dot_of_the_program(family: str) -> None:
    model = model_from_config(CONFIGS[family], name="m", source="t")
    sizes = {"batch": 2, "prompt": PROMPT, "output": 2}
    experiment = experiment_with(model, "tp=1", "cpu:1", program=Program(loop=Loop.UNROLL), **sizes)
    built = build_program(experiment, Phase.PREFILL, jax.devices()[:1])
    traced = built.step.trace(*built.arguments)
    traced_flops = sum(products(traced.jaxpr.jaxpr))
    counted = model_flops(experiment.model, experiment.workload, Phase.PREFILL)
    masked = 2 * masked_flops(experiment.model)
    assert traced_flops == counted + masked + 2 * PROMPT * mixed_flops(experiment.model)


def masked_flops(model: Model) -> float:
    """FLOPs of one sequence for keys that the causal mask hides: the program multiplies all pairs."""
    attention, n_hidden = model.attention, PROMPT * (PROMPT - 1) / 2
    flops = 0.0
    for layer in model.layers:
        kind = layer.attention
        if not isinstance(attention, CompressedAttention):
            flops += attention.pair_flops() * n_hidden
            indexer = getattr(attention, "indexer", None)
            flops += 0.0 if indexer is None else index_flops(indexer) * n_hidden
            continue
        n_pairs = PROMPT**2
        if kind is not AttentionKind.SLIDING:
            n_entries = PROMPT * (PROMPT // attention.entry_rate(kind))
            n_pairs += n_entries
            if kind is AttentionKind.COMPRESSED_SPARSE:
                n_seen = sum((i + 1) // attention.sparse_rate for i in range(PROMPT))
                flops += index_flops(attention.indexer) * (n_entries - n_seen)
        flops += attention.pair_flops() * (n_pairs - attention.attended_pairs(kind, PROMPT))
    return flops


def index_flops(indexer: Indexer) -> float:
    """FLOPs of an indexer for one query and one position or entry."""
    return 2.0 * indexer.n_heads * (indexer.head_dim + 1)


def mixed_flops(model: Model) -> float:
    """FLOPs per token that the formulas omit: weighted sums of residual streams.

    Those of expert outputs are no dots.
    """
    n_streams = 0 if model.hyper is None else model.hyper.n_streams
    return model.n_layers * 2 * 2 * n_streams**2 * model.hidden
