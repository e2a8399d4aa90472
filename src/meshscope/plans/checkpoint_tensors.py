"""Maps checkpoint tensors to the weights of a plan, by names and shapes."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

from meshscope.errors import SpecError
from meshscope.model.arrays import Dim, Weight
from meshscope.model.model import Model
from meshscope.plans.plan import Plan
from meshscope.plans.weights import layer_weights, outer_weights


def tensors_of(model: Model, plan: Plan) -> Iterator[tuple[str, Weight]]:
    """Every checkpoint tensor by name, with the weight it provides.

    If each expert has a separate tensor, the weight is that of one expert.
    """
    for weight in outer_weights(model, plan):
        yield weight.checkpoint, weight
    for index, layer in enumerate(model.layers):
        for weight in layer_weights(model, plan, layer):
            yield from _tensors(weight, index)


def _tensors(weight: Weight, layer: int) -> Iterator[tuple[str, Weight]]:
    if "{expert}" not in weight.checkpoint:
        yield weight.checkpoint.format(layer=layer), weight
        return
    at = weight.dims.index(Dim.EXPERT)
    dims = weight.dims[:at] + weight.dims[at + 1 :]
    one = replace(weight, dims=dims, shape=weight.shape[:at] + weight.shape[at + 1 :])
    for expert in range(weight.shape[at]):
        yield weight.checkpoint.format(layer=layer, expert=expert), one


def reshaped(weight: Weight, tensor: Sequence[int], name: str) -> tuple[int, ...]:
    """The shape of the tensor before KV heads are repeated, vocabulary padded or columns selected.

    `tensor` is its shape in the checkpoint, where a matrix is [out, in] and adjacent dimensions may
    be merged. It may have fewer KV heads and a smaller vocabulary than the plan stores. SpecError if
    the shape does not match the weight.
    """
    is_flat = len(tensor) < 2 and (weight.is_transposed or Dim.VOCAB in weight.dims)
    tensor_shape = (
        [*tensor[:-2], tensor[-1], tensor[-2]] if weight.is_transposed and not is_flat else tensor
    )
    columns = weight.columns
    shape = list(weight.shape)
    if columns is not None and columns.is_flat:
        shape = [shape[0], columns.whole]
    elif columns is not None:
        shape[columns.dim] = columns.whole
    for at, dim in enumerate(weight.dims[: len(shape)]):
        if columns is not None and at - len(shape) == columns.dim:
            continue
        n_heads = prod(tensor_shape) // (prod(shape) // shape[at])
        if dim is Dim.KV_HEADS and n_heads and shape[at] % n_heads == 0:
            shape[at] = n_heads
        elif dim is Dim.VOCAB and at < len(tensor_shape) and 0 < tensor_shape[at] <= shape[at]:
            shape[at] = tensor_shape[at]
    if (
        is_flat
        or prod(tensor_shape) != prod(shape)
        or not _products(tensor_shape) <= _products(shape)
    ):
        raise SpecError(
            f"tensor '{name}' has shape {list(tensor)}, which does not match {weight.name} "
            f"{list(weight.shape)}{' (transposed)' if weight.is_transposed else ''}. "
            "Use the checkpoint of this config."
        )
    return tuple(shape)


def _products(shape: Sequence[int]) -> set[int]:
    """Products of leading dimensions; merging dimensions yields a subset."""
    return {prod(shape[:i]) for i in range(len(shape) + 1)}
