"""From a tensor of a checkpoint to a weight as a plan stores it: by shapes alone."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

from meshscope.errors import SpecError
from meshscope.spec.model.model import Model
from meshscope.spec.plan.plan import Plan
from meshscope.spec.plan.weights import Dim, Weight, layer_weights, outer_weights


def tensors_of(model: Model, plan: Plan) -> Iterator[tuple[str, Weight]]:
    """Every tensor that the model's weights are made of, by name, with the weight that it makes.

    Where each expert has a tensor of its own, that is the weight of one expert.
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
    """The shape that the tensor takes before heads repeat, vocabulary is padded or a part is cut.

    `tensor` is its shape in the checkpoint, where a matrix is [out, in] and dimensions next to each
    other may be one. There may be fewer KV heads and a smaller vocabulary than the plan stores.
    SpecError where the shape makes no such weight.
    """
    is_flat = len(tensor) < 2 and (weight.is_transposed or Dim.VOCAB in weight.dims)
    own = [*tensor[:-2], tensor[-1], tensor[-2]] if weight.is_transposed and not is_flat else tensor
    shape = list(weight.shape)
    if weight.columns is not None:
        shape[-1] = weight.columns.whole
    for at, dim in enumerate(weight.dims):
        n_heads = prod(own) // (prod(shape) // shape[at])
        if dim is Dim.KV_HEADS and n_heads and shape[at] % n_heads == 0:
            shape[at] = n_heads
        elif dim is Dim.VOCAB and at < len(own) and 0 < own[at] <= shape[at]:
            shape[at] = own[at]
    if is_flat or prod(own) != prod(shape) or not _products(own) <= _products(shape):
        raise SpecError(
            f"tensor '{name}' has shape {list(tensor)}, which does not make {weight.name} "
            f"{list(weight.shape)}{' (transposed)' if weight.is_transposed else ''}. "
            "The checkpoint belongs to another config."
        )
    return tuple(shape)


def _products(shape: Sequence[int]) -> set[int]:
    """Sizes of the leading dimensions together: those of a shape whose dimensions were put together are fewer."""
    return {prod(shape[:i]) for i in range(len(shape) + 1)}
