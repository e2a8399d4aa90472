"""A shallow program has a layer of the same kind for every layer of the model."""

from collections import Counter

import numpy as np
import pytest

from meshscope.model.config import read_model
from meshscope.model.layers import AttentionKind, Layer, MlpKind, shallow_layers

A = Layer(attention=AttentionKind.FULL, mlp=MlpKind.DENSE)
B = Layer(attention=AttentionKind.FULL, mlp=MlpKind.MOE)
C = Layer(attention=AttentionKind.SLIDING, mlp=MlpKind.MOE)


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


@pytest.mark.parametrize("seed", range(50))
def test_every_layer_has_a_place_of_its_kind(seed: int) -> None:
    random = np.random.default_rng(seed)
    layers: list[Layer] = []
    for _ in range(random.integers(1, 5)):
        body = [(A, B, C)[i] for i in random.integers(0, 3, random.integers(1, 4))]
        layers += body * int(random.integers(1, 40))
    _assert_stands_for(layers)


@pytest.mark.parametrize(
    ("model", "n_layers", "folds"),
    [
        ("Qwen3-32B", 8, [(2, 4, 15)]),
        ("Llama-3.1-70B", 8, [(2, 4, 19)]),
        ("gpt-oss-120b", 8, [(2, 4, 8)]),
        ("DeepSeek-V3", 13, [(7, 4, 13)]),
        ("DeepSeek-V4-Flash", 11, [(5, 4, 9)]),
    ],
)
def test_a_deep_model_needs_few_layers(model, n_layers, folds) -> None:
    layers = read_model(model).layers
    shallow = shallow_layers(layers)
    assert len(shallow.layers) == n_layers
    assert [(fold.first, fold.n_layers, fold.times) for fold in shallow.folds] == folds
    _assert_stands_for(list(layers))


def test_a_short_model_stays_whole() -> None:
    shallow = shallow_layers([A] * 9)
    assert (shallow.layers, shallow.folds) == (tuple(range(9)), ())
