"""Loops over layers, and shallow programs that have a layer of the same kind for every layer."""

from collections import Counter
from itertools import product

import numpy as np
import pytest
from tables import seeds, table

from meshscope.model.config import read_model
from meshscope.model.layers import (
    AttentionKind,
    Layer,
    MlpKind,
    repeats_of,
    shallow_layers,
    unrolled,
)
from meshscope.model.mechanisms.attention import causal_blocks, window_blocks

A = Layer(attention=AttentionKind.FULL, mlp=MlpKind.DENSE)
B = Layer(attention=AttentionKind.FULL, mlp=MlpKind.MOE)
C = Layer(attention=AttentionKind.SLIDING, mlp=MlpKind.MOE)


def _random_layers(random: np.random.Generator, n_layers: int) -> list[Layer]:
    return [(A, B, C)[i] for i in random.integers(0, 3, random.integers(1, n_layers))]


@seeds(50)
def test_loops_cover_every_layer_in_order(seed: int) -> None:
    layers = _random_layers(np.random.default_rng(seed), 30)
    for repeats in (repeats_of(layers), unrolled(layers)):
        covered = {
            index: layer
            for repeat in repeats
            for position, layer in enumerate(repeat.body)
            for index in repeat.layers_at(position)
        }
        assert [covered[index] for index in range(len(covered))] == layers


@pytest.mark.parametrize(
    ("layers", "loops"),
    [
        ("Qwen3-32B", [(0, 1, 64)]),
        ("DeepSeek-V3", [(0, 1, 3), (3, 1, 58)]),
        ("DeepSeek-V2-Lite", [(0, 1, 1), (1, 1, 26)]),
        ("gpt-oss-120b", [(0, 2, 18)]),
        ("DeepSeek-V4", [(0, 1, 2), (2, 1, 1), (3, 2, 20)]),
        ([A, A, B, A, A, B, C], [(0, 3, 2), (6, 1, 1)]),  # the pattern that covers more layers
    ],
    ids=str,
)
def test_loops_of_layers(layers, loops) -> None:
    repeats = repeats_of(read_model(layers).layers if isinstance(layers, str) else layers)
    assert [(r.first, len(r.body), r.times) for r in repeats] == loops


def test_layers_of_a_position_are_a_period_apart() -> None:
    (repeat,) = repeats_of([B, C] * 3, first=10)
    assert [list(repeat.layers_at(position)) for position in (0, 1)] == [[10, 12, 14], [11, 13, 15]]


def _assert_stands_for(layers: list[Layer]) -> None:
    """Each layer has its kind, the repetitions of each place are contiguous, and none is left over."""
    shallow = shallow_layers(layers)
    places = [shallow.place_of(layer) for layer in range(len(layers))]
    assert [layers[shallow.layers[place]] for place, _ in places] == layers
    assert len(set(places)) == len(layers)
    expected = Counter(dict.fromkeys(range(len(shallow.layers)), 1))
    for fold in shallow.folds:
        expected |= dict.fromkeys(range(fold.first, fold.first + fold.n_layers), fold.times)
    assert Counter(place for place, _ in places) == expected


@seeds(50)
def test_every_layer_has_a_place_of_its_kind(seed: int) -> None:
    random = np.random.default_rng(seed)
    bodies = [
        _random_layers(random, 4) * int(random.integers(1, 40))
        for _ in range(random.integers(1, 5))
    ]
    _assert_stands_for([layer for body in bodies for layer in body])


@table
def test_a_deep_model_needs_few_layers(model, n_layers, folds: list[tuple[int, int, int]]) -> None:
    layers = read_model(model).layers
    shallow = shallow_layers(layers)
    assert len(shallow.layers) == n_layers
    assert [(fold.first, fold.n_layers, fold.times) for fold in shallow.folds] == folds
    _assert_stands_for(list(layers))


def test_a_short_model_stays_whole() -> None:
    shallow = shallow_layers([A] * 9)
    assert (shallow.layers, shallow.folds) == (tuple(range(9)), ())


@pytest.mark.parametrize(
    ("n_rows", "block", "window"), list(product((1, 2, 5, 9), (4, 8), (1, 3, 4, 5, 8, 9, 100)))
)
def test_blocks_are_those_of_the_mask(n_rows: int, block: int, window: int) -> None:
    at = np.arange(n_rows * block)
    distance = at[:, None] - at[None, :]
    seen = (distance >= 0) & (distance < window)
    blocks = seen.reshape(n_rows, block, n_rows, block).any(axis=(1, 3))
    width = min(n_rows, window_blocks(window, block))
    assert causal_blocks(n_rows, width) == blocks.sum()


@pytest.mark.parametrize("context", [1, 100, 128, 129, 4096])
def test_windowed_layers_of_gpt_oss_attend_to_their_window(context: int) -> None:
    attention = read_model("openai/gpt-oss-120b").attention
    assert attention.window_of(AttentionKind.SLIDING) == 128
    for kind, window in ((AttentionKind.SLIDING, 128), (AttentionKind.FULL, context)):
        n_pairs = sum(min(position + 1, window) for position in range(context))
        assert attention.attended_pairs(kind, context) == n_pairs
        widths = attention.n_heads * attention.head_widths[0]
        assert attention.flops(kind, context) == 2 * 2 * widths * n_pairs


@pytest.mark.parametrize("n", [1, 7, 8192, 8193, 20_000])
def test_chunked_layers_of_llama_4_attend_to_their_chunk(n: int) -> None:
    attention = read_model("meta-llama/Llama-4-Scout-17B-16E-Instruct").attention
    n_pairs = sum(position % 8192 + 1 for position in range(n))
    assert attention.attended_pairs(AttentionKind.CHUNKED, n) == n_pairs
    assert attention.attended_pairs(AttentionKind.FULL, n) == n * (n + 1) // 2
