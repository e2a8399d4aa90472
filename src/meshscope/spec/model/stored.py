"""A Model as plain values, for manifests, and back."""

from collections.abc import Mapping
from typing import Any

from meshscope.serialize import FormatError, from_plain, to_plain
from meshscope.spec.model.model import Model

_PATH = "experiment.model"


def model_as_dict(model: Model) -> dict[str, Any]:
    """The model as plain values; a layer is the name of its kind, e.g. `full/moe`."""
    layers = [layer.name for layer in model.layers]
    return to_plain(model) | {"n_layers": model.n_layers, "layers": layers}


def model_from_dict(values: Mapping[str, Any]) -> Model:
    """The model that `model_as_dict` wrote; FormatError or SpecError for anything else."""
    names = from_plain(list[str], values.get("layers"), f"{_PATH}.layers")
    stored = {name: value for name, value in values.items() if name != "n_layers"}
    return from_plain(Model, stored | {"layers": [_layer(name) for name in names]}, _PATH)


def _layer(name: str) -> dict[str, str]:
    attention, separator, mlp = name.partition("/")
    if not separator:
        raise FormatError(f"{_PATH}.layers: expected a kind such as 'full/moe', got {name[:40]!r}")
    return {"attention": attention, "mlp": mlp}
