"""Tensors of torch_xla without memory, and what is said of them: names, layouts, manual regions.

In a manual region a tensor is one device's share and every exchange is written out. Collectives are
traced as torch_xla writes them, for replicas; `lowering.py` makes them mean partitions.
"""

# pyright: reportMissingImports=false
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_builder as xb
import torch_xla.debug.profiler as xp
import torch_xla.distributed.spmd as xs
from torch_xla.distributed.spmd.xla_sharding import unwrap_sharded_tensor

from meshscope.events.collective import Groups
from meshscope.programs.torchxla.layouts import Layouts, Spec
from meshscope.programs.torchxla.lowering import ORDER

_XLAC = torch_xla._XLAC  # noqa: SLF001  placeholders and annotations have no public name

TORCH_DTYPES = {
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f32": torch.float32,
    "s32": torch.int32,
    "s64": torch.int64,
}
_XLA_TYPES = {
    torch.bfloat16: xb.Type.BF16,
    torch.float16: xb.Type.F16,
    torch.float32: xb.Type.F32,
    torch.int32: xb.Type.S32,
    torch.int64: xb.Type.S64,
}
ARGUMENT = "argument."  # before the name of an argument, as the scope in which it comes to be


def scope(name: str) -> Any:
    """A named scope: what is traced inside carries the name in its op_name."""
    return xp.Trace(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """What the program is given: its shape, number format and layout.

    With `n_stages` it is stacked: the same array of the same layer of each stage of a pipeline.
    """

    shape: tuple[int, ...]
    dtype: str
    spec: Spec
    n_stages: int = 1


class Tensors:
    """Makes the arguments of one program and lays its tensors out over the devices of a plan."""

    def __init__(self, layouts: Layouts) -> None:
        self.layouts = layouts
        mesh = layouts.mesh
        self._mesh = xs.Mesh(np.arange(mesh.n_devices), mesh.sizes, mesh.names)
        self.arguments: dict[str, Argument] = {}
        self.is_inside = False  # a manual region, where every tensor is a share
        self.position: Any = None  # of the step's first token, once it is an argument
        # In a pipeline, weights that fsdp splits: module, name, and what makes the whole one.
        self.shares: list[tuple[Any, str, Callable[[], Any]]] = []

    def argument(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        spec: Spec,
        *,
        n_stages: int = 1,
    ) -> Any:
        """A tensor of this shape that holds nothing; the compiler knows it by its name."""
        if n_stages > 1:
            shape, spec = (n_stages, *shape), (("pp",), *spec)
        placeholder = _XLAC._xla_create_placeholder_tensor  # noqa: SLF001
        tensor = placeholder(xb.mkshape(_XLA_TYPES[dtype], tuple(shape)).shape)
        with scope(f"{ARGUMENT}{name}"):
            self.annotate(tensor, spec)
        names = {found: name for name, found in TORCH_DTYPES.items()}
        self.arguments[name] = Argument(
            shape=tuple(shape), dtype=names[dtype], spec=spec, n_stages=n_stages
        )
        return tensor

    def annotate(self, tensor: Any, spec: Spec) -> Any:
        """The same tensor, laid out by the partitioner as the spec says; in a region, as it is."""
        if self.is_inside:
            return tensor
        _XLAC._xla_annotate_custom_sharding(tensor, self._op_sharding(spec))  # noqa: SLF001
        return tensor

    def entered(self, tensor: Any, spec: Spec) -> Any:
        """One device's share of a tensor laid out like this: here a manual region begins."""
        local = xs.enable_manual_sharding(tensor, partition(spec), mesh=self._mesh)
        return unwrap_sharded_tensor(local)

    def left(self, tensor: Any, spec: Spec) -> Any:
        """The whole tensor of which each device has a share: here a manual region ends."""
        shape = tuple(
            size * int(np.prod([self.layouts.mesh.size(axis) for axis in axes], initial=1))
            for size, axes in zip(tensor.shape, spec, strict=True)
        )
        whole = xs.disable_manual_sharding(tensor, partition(spec), shape, mesh=self._mesh)
        return unwrap_sharded_tensor(whole)

    def _op_sharding(self, spec: Spec) -> Any:
        return self._mesh.get_op_sharding(partition(spec))

    def rank(self, *axes: str) -> Any:
        """[1]: the device's place along these axes of the plan, in a manual region."""
        found = self.layouts.axes(*axes)
        size = int(np.prod([self.layouts.mesh.size(axis) for axis in found], initial=1))
        return self.entered(torch.arange(size, device=torch_xla.device()), (found,))

    def groups(self, *axes: str) -> Groups:
        """The device groups of these axes of the plan."""
        return self.layouts.mesh.groups(*self.layouts.axes(*axes))


def partition(spec: Spec) -> tuple[Any, ...]:
    """The spec as torch_xla writes it."""
    return tuple(axes if len(axes) > 1 else next(iter(axes), None) for axes in spec)


def _lists(groups: Groups) -> list[list[int]]:
    return [list(group) for group in groups]


def all_reduce(x: Any, groups: Groups, kind: str = "sum") -> Any:
    """The sum (or `max`) of all devices of a group; in a manual region."""
    return _XLAC._xla_spmd_all_reduce(kind, x, 1.0, _lists(groups))  # noqa: SLF001


def _token() -> Any:
    """A new token each time: one token for all would order the collectives one behind the other."""
    device = str(torch_xla.device())
    with scope(f"{ARGUMENT}{ORDER}"):
        _XLAC._set_all_reduce_token(device, None)  # noqa: SLF001
        return _XLAC._get_all_reduce_token(device)  # noqa: SLF001


def all_gather(x: Any, dim: int, groups: Groups) -> Any:
    """The shares of a group behind each other along `dim`; in a manual region."""
    n_parts = len(groups[0])
    _token()  # it takes the one that is set
    gather = _XLAC._xla_all_gather  # noqa: SLF001
    return gather(x, dim, n_parts, _lists(groups), False, 1, True)


def reduce_scatter(x: Any, dim: int, groups: Groups) -> Any:
    """The device's share along `dim` of the sum of all devices of a group; in a manual region."""
    scatter = _XLAC._xla_reduce_scatter  # noqa: SLF001
    n_parts = len(groups[0])
    return scatter("sum", x, _token(), 1.0, dim, n_parts, _lists(groups), False, None, None)[0]


def all_to_all(x: Any, groups: Groups) -> Any:
    """[n, ...], a part for each device of the group -> [n, ...], a part from each; in a manual region."""
    n_parts = len(groups[0])
    return _XLAC._xla_all_to_all(x, _token(), 0, 0, n_parts, _lists(groups), False)[0]  # noqa: SLF001


def permuted(x: Any, pairs: Groups) -> Any:
    """What the device before sent, by (source, target) pairs; zeros where none did; in a manual region."""
    return _XLAC._xla_collective_permute(x, _token(), _lists(pairs))[0]  # noqa: SLF001
