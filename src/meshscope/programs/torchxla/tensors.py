"""Placeholder tensors of torch_xla: argument names, sharding annotations and manual regions.

In a manual region a tensor is one device's shard and collectives are explicit. torch_xla traces
collectives for replicas; `lowering.py` turns them into cross-partition collectives.
"""

# pyright: reportMissingImports=false
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch_xla
import torch_xla.debug.profiler as xp
import torch_xla.distributed.spmd as xs
from torch_xla.distributed.spmd.xla_sharding import unwrap_sharded_tensor

from meshscope.events.collective import Groups
from meshscope.events.enums import Part, Phase
from meshscope.plans.experiment import Experiment
from meshscope.programs.torchxla.layouts import Spec, layouts_of, partition, residual_specs
from meshscope.programs.torchxla.lowering import CHOICE, ORDER

_XLAC = torch_xla._XLAC  # placeholders and annotations have no public name

TORCH_DTYPES = {
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f32": torch.float32,
    "s32": torch.int32,
    "s64": torch.int64,
    "f8e4m3fn": torch.float8_e4m3fn,
}
ARGUMENT = "argument."  # prefix of the scope that names an argument
SCALES = "_scale_inv"  # end of the names of scales, as in checkpoints


def scope(name: str) -> Any:
    """A named scope, which becomes part of the op_name of traced operations."""
    return xp.Trace(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """Shape, dtype and sharding of a program argument.

    In the manual region, the arrays of `layers` are stacked in the first dimension: one of each stage, or None.
    """

    shape: tuple[int, ...]
    dtype: str
    spec: Spec
    layers: tuple[int | None, ...] = ()


class Tensors:
    """Creates the arguments of the program of one phase of an experiment, and annotates its tensors with shardings.

    `streams` are the specs of the residual stream.
    """

    def __init__(self, experiment: Experiment, phase: Phase) -> None:
        self.experiment, self.phase = experiment, phase
        self.is_decode = phase is Phase.DECODE
        has_region = experiment.has_explicit_layers
        self.layouts = layouts_of(experiment.model, experiment.plan, has_region=has_region)
        self.streams = residual_specs(experiment, phase, self.layouts)
        mesh = self.layouts.mesh
        self._mesh = xs.Mesh(np.arange(mesh.n_devices), mesh.sizes, mesh.names)
        self.arguments: dict[str, Argument] = {}
        self.is_inside = False  # in a manual region, where every tensor is a shard
        self.position: Any = None  # position of the step's first token, once it is an argument
        # Weights that differ from their arguments: module, name, what makes them (it gathers what fsdp splits in a
        # region, and multiplies scales), and whether they are of experts.
        self.made: list[tuple[Any, str, Callable[[], Any], bool]] = []

    def argument(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        spec: Spec,
        *,
        layers: tuple[int | None, ...] = (),
    ) -> Any:
        """A placeholder tensor of this shape, registered as a named argument."""
        if layers:
            shape, spec = (len(layers), *shape), (self.layouts.axes("pp"), *spec)
        of_torch = next(name for name, known in TORCH_DTYPES.items() if known == dtype)
        array = {"type": of_torch, "sizes": tuple(shape)}
        tensor = _XLAC._xla_create_placeholder_tensor(array)
        with scope(f"{ARGUMENT}{name}"):
            self.annotate(tensor, spec)
        self.arguments[name] = Argument(
            shape=tuple(shape), dtype=of_torch, spec=spec, layers=layers
        )
        return tensor

    def annotate(self, tensor: Any, spec: Spec) -> Any:
        """Annotate the tensor with a sharding; no effect in a manual region."""
        if self.is_inside:
            return tensor
        sharding = self._mesh.get_op_sharding(partition(spec))
        _XLAC._xla_annotate_custom_sharding(tensor, sharding)
        return tensor

    def by_heads(self, x: Any) -> Any:
        """An array [B, S, heads, ...], with heads split over tp."""
        rest = ((),) * (x.dim() - 3)
        return self.annotate(x, (self.layouts.data, (), self.layouts.axes("tp"), *rest))

    def entered(self, tensor: Any, spec: Spec) -> Any:
        """Enter a manual region: one device's shard of a tensor with this spec."""
        local = xs.enable_manual_sharding(tensor, partition(spec), mesh=self._mesh)
        return unwrap_sharded_tensor(local)

    def of_stage(self, stack: Any, spec: Spec) -> Any:
        """Enter a manual region: one device's shard of its stage's array in a stack of arrays with this spec."""
        return self.entered(stack, (self.layouts.axes("pp"), *spec))[0]

    def left(self, tensor: Any, spec: Spec) -> Any:
        """Leave a manual region: the whole tensor assembled from the shards."""
        parts = map(self.layouts.n_parts, spec)
        shape = tuple(size * n for size, n in zip(tensor.shape, parts, strict=True))
        whole = xs.disable_manual_sharding(tensor, partition(spec), shape, mesh=self._mesh)
        return unwrap_sharded_tensor(whole)

    @contextmanager
    def inside(self) -> Generator[None]:
        """Within it, annotations have no effect, because every tensor is a shard."""
        self.is_inside = True
        yield
        self.is_inside = False

    def gathered_over_tp(self, x: Any) -> Any:
        """The input of a block, in a manual region: sp splits the prompt or the batch of the residual stream."""
        dim = self.streams.split_dim
        return x if dim is None else all_gather(x, dim, self.groups("tp"))

    def summed_over_tp(self, x: Any) -> Any:
        """The sum of the outputs of a block, in a manual region: the device's part of them under sp."""
        dim, groups = self.streams.split_dim, self.groups("tp")
        return all_reduce(x, groups) if dim is None else reduce_scatter(x, dim, groups)

    def rank(self, *axes: str) -> Any:
        """[1]: the device's rank along these plan axes, in a manual region.

        All ranks come from the number of the device: XLA merges the equal arrays of two axes of one size, and would
        permute one's shards to get the other's.
        """
        mesh = self.layouts.mesh
        device = self.entered(
            torch.arange(mesh.n_devices, device=torch_xla.device()), (mesh.names,)
        )
        rank, n_inner = torch.zeros_like(device), mesh.n_devices
        for name, size in zip(mesh.names, mesh.sizes, strict=True):
            n_inner //= size
            if name in self.layouts.axes(*axes):
                rank = rank * size + device // n_inner % size
        return rank

    def groups(self, *axes: str) -> Groups:
        """The device groups of these plan axes."""
        return self.layouts.mesh.groups(*self.layouts.axes(*axes))


def gathered(weight: Any) -> Any:
    """The weight of a module that is not called, whose argument may leave a function that makes it."""
    return weight() if callable(weight) else weight


def _lists(groups: Groups) -> list[list[int]]:
    return [list(group) for group in groups]


class Replacement(torch.nn.Module):
    """A module that takes over parts of the one that it replaces."""

    def __init__(self, replaced: Any, *names: str) -> None:
        super().__init__()
        self.keep(replaced, *names)

    def __getattr__(self, name: str) -> Any:
        """A parameter or module, of any type."""
        return super().__getattr__(name)

    def keep(self, replaced: Any, *names: str) -> None:
        """Take over these parts."""
        for name in names:
            setattr(self, name, getattr(replaced, name))


def on_output(
    module: Any, change: Callable[[Any], Any], part: Part | None = None, *, is_first: bool = False
) -> None:
    """Change the output of a module, or the first of several, in the scope of the module or of `part`.

    `is_first` puts the change before other hooks.
    """

    def behind(_module: Any, _inputs: Any, output: Any) -> Any:
        with nullcontext() if part is None else scope(part.value):
            if isinstance(output, tuple):
                return (change(output[0]), *output[1:])
            return change(output)

    module.register_forward_hook(behind, prepend=is_first)


def all_reduce(x: Any, groups: Groups, kind: str = "sum") -> Any:
    """All-reduce (`sum` or `max`) in a manual region."""
    return _XLAC._xla_spmd_all_reduce(kind, x, 1.0, _lists(groups))


def _token() -> Any:
    """A new token per collective; a shared token would serialize the collectives."""
    device = str(torch_xla.device())
    with scope(f"{ARGUMENT}{ORDER}"):
        _XLAC._set_all_reduce_token(device, None)
        return _XLAC._get_all_reduce_token(device)


def all_gather(x: Any, dim: int, groups: Groups) -> Any:
    """All-gather along `dim` in a manual region."""
    n_parts = len(groups[0])
    _token()  # all-gather uses the token that is set
    return _XLAC._xla_all_gather(x, dim, n_parts, _lists(groups), False, 1, True)


def reduce_scatter(x: Any, dim: int, groups: Groups) -> Any:
    """Reduce-scatter (sum) along `dim` in a manual region."""
    parts = (dim, len(groups[0]), _lists(groups))
    return _XLAC._xla_reduce_scatter("sum", x, _token(), 1.0, *parts, False, None, None)[0]


def all_to_all(x: Any, groups: Groups) -> Any:
    """All-to-all of [n, ...], one part per device of the group, in a manual region."""
    return _XLAC._xla_all_to_all(x, _token(), 0, 0, len(groups[0]), _lists(groups), False)[0]


def permuted(x: Any, pairs: Groups) -> Any:
    """Collective permute by (source, target) pairs in a manual region; zeros without a source."""
    return _XLAC._xla_collective_permute(x, _token(), _lists(pairs))[0]


def chosen(branch: Any, *branches: Sequence[Any]) -> list[Any]:
    """The results of the branch with this number [1], the only one that a device computes (`lowering.py`)."""
    flat = [result for results in branches for result in results]
    number = branch.reshape(()).to(torch.int32)
    shapes, dtypes = zip(*((x.shape, x.dtype) for x in branches[0]), strict=True)
    of_results = (list(shapes), list(dtypes))
    return _XLAC._xla_custom_call([number, *flat], CHOICE, *of_results, False, "", 0, {})
