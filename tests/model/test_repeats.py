"""Loops over layers: every layer once, in order, in few loops."""

import numpy as np
import pytest

from meshscope.model.config import read_model
from meshscope.model.layers import AttentionKind, Layer, MlpKind, Repeat, repeats_of, unrolled

A = Layer(attention=AttentionKind.FULL, mlp=MlpKind.DENSE)
B = Layer(attention=AttentionKind.FULL, mlp=MlpKind.MOE)
C = Layer(attention=AttentionKind.SLIDING, mlp=MlpKind.MOE)


def _kinds(repeats: tuple[Repeat, ...]) -> list[Layer]:
    """The layers covered by the loops, by index."""
    layers = {
        index: layer
        for repeat in repeats
        for position, layer in enumerate(repeat.body)
        for index in repeat.layers_at(position)
    }
    return [layers[index] for index in range(len(layers))]


@pytest.mark.parametrize("seed", range(50))
def test_loops_cover_every_layer_in_order(seed: int) -> None:
    random = np.random.default_rng(seed)
    layers = [(A, B, C)[i] for i in random.integers(0, 3, random.integers(1, 30))]
    assert _kinds(repeats_of(layers)) == layers
    assert _kinds(unrolled(layers)) == layers


@pytest.mark.parametrize(
    ("model", "loops"),
    [
        ("Qwen3-32B", [(0, 1, 64)]),
        ("DeepSeek-V3", [(0, 1, 3), (3, 1, 58)]),
        ("DeepSeek-V2-Lite", [(0, 1, 1), (1, 1, 26)]),
        ("gpt-oss-120b", [(0, 2, 18)]),
    ],
)
def test_loops_of_published_models(model: str, loops: list[tuple[int, int, int]]) -> None:
    repeats = repeats_of(read_model(model).layers)
    assert [(r.first, len(r.body), r.times) for r in repeats] == loops


def test_the_pattern_that_covers_more_layers_wins() -> None:
    repeats = repeats_of([A, A, B, A, A, B, C])
    assert [(r.first, len(r.body), r.times) for r in repeats] == [(0, 3, 2), (6, 1, 1)]


def test_layers_of_a_position_are_a_period_apart() -> None:
    (repeat,) = repeats_of([B, C] * 3, first=10)
    assert [list(repeat.layers_at(position)) for position in (0, 1)] == [[10, 12, 14], [11, 13, 15]]
