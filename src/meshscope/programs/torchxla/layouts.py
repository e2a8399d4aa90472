"""The mesh given to the SPMD partitioner, and the shardings of parameters and activations.

A spec lists, for each dimension, the mesh axes that split it, outermost first. If layers have fewer
KV heads than tp devices, tp becomes two axes, `tp.kv` over the heads and `tp.rep` over their
copies, so that KV weights are split as far as possible without splitting a head. Layers with more heads are
split over both.
"""

from dataclasses import dataclass
from math import prod

import numpy as np

from meshscope.events.enums import Phase
from meshscope.model.arrays import Dim, mesh_axes_of
from meshscope.model.model import Model
from meshscope.plans.experiment import Experiment
from meshscope.plans.mesh import Mesh
from meshscope.plans.plan import Plan

KV_AXES = ("tp.kv", "tp.rep")

Spec = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layouts:
    """Maps logical axes to mesh axes; with `has_kv_axis`, `mesh` has tp as two axes."""

    plan: Plan
    mesh: Mesh
    has_kv_axis: bool

    def axes(self, *names: str) -> tuple[str, ...]:
        """The mesh axes of these plan axes, without axes of size 1."""
        axes: list[str] = []
        for name in names:
            parts = KV_AXES if name == "tp" and self.has_kv_axis else (name,)
            axes += [part for part in parts if self.mesh.size(part) > 1]
        return tuple(axes)

    def split(self, dim: Dim) -> tuple[str, ...]:
        """The mesh axes that split a logical dimension of weights, other than KV heads."""
        return self.axes(*mesh_axes_of(dim, self.plan))

    def split_heads(self, n_heads: int) -> tuple[str, ...]:
        """The mesh axes that split this many KV heads."""
        axes = self.axes("tp")
        return axes if n_heads >= self.plan.tp else tuple(a for a in axes if a != KV_AXES[1])

    @property
    def data(self) -> tuple[str, ...]:
        """The mesh axes that split the batch."""
        return self.axes(self.plan.data_axis)

    def sharding(self, spec: Spec) -> str:
        """The spec in XLA's text form: `{devices=[2,1,4]0,1,... last_tile_dim_replicate}`."""
        used = [axis for axes in spec for axis in axes]
        if not used:
            return "{replicated}"
        order = [*used, *(name for name in self.mesh.names if name not in used)]
        ids = np.arange(self.mesh.n_devices).reshape(self.mesh.sizes)
        ids = ids.transpose([self.mesh.names.index(name) for name in order]).reshape(-1)
        tiles = [prod(self.mesh.size(axis) for axis in axes) for axes in spec]
        n_copies = self.mesh.n_devices // prod(tiles)
        last = ""
        if n_copies > 1:
            tiles.append(n_copies)
            last = " last_tile_dim_replicate"
        return f"{{devices=[{','.join(map(str, tiles))}]{','.join(map(str, ids))}{last}}}"

    def local_shape(self, shape: tuple[int, ...], spec: Spec) -> tuple[int, ...]:
        """Shape of one device's shard in elements; the last shard of an uneven split is smaller."""
        return tuple(
            -(-size // prod(self.mesh.size(axis) for axis in axes))
            for size, axes in zip(shape, spec, strict=True)
        )


def layouts_of(model: Model, plan: Plan) -> Layouts:
    """The layouts of a model under a plan."""
    n_kv_heads = min((n for n in kv_heads(model) if n < plan.tp), default=plan.tp)
    if n_kv_heads == plan.tp:
        return Layouts(plan=plan, mesh=plan.mesh, has_kv_axis=False)
    sizes = {"tp.kv": n_kv_heads, "tp.rep": plan.tp // n_kv_heads}
    axes = tuple(
        part
        for name, size in plan.mesh.axes
        for part in (
            [(n, sizes[n]) for n in KV_AXES if sizes[n] > 1] if name == "tp" else [(name, size)]
        )
    )
    return Layouts(plan=plan, mesh=Mesh(axes=axes), has_kv_axis=True)


def kv_heads(model: Model) -> frozenset[int]:
    """The numbers of KV heads of the layers; none for latents."""
    return frozenset(model.attention.kv_heads(layer.attention) for layer in model.layers) - {0}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidualSpecs:
    """Specs of the residual stream [B, S, D] in one phase.

    `residual` applies between blocks, `entered` inside them, and `tokens` to the token ids [B, S].
    `logits` [B, 1, V] is the sharding at the head's output, `rows` that of the program's output.
    `is_split` is whether sp splits the residual stream over tp.
    """

    residual: Spec
    entered: Spec
    logits: Spec
    rows: Spec
    tokens: Spec
    is_split: bool


def residual_specs(experiment: Experiment, phase: Phase, layouts: Layouts) -> ResidualSpecs:
    """The specs of a phase: sp splits the prompt in prefill, and the batch in decode if tp divides it."""
    plan, workload = experiment.plan, experiment.workload
    data, tp = layouts.data, layouts.axes("tp")
    context = layouts.axes("cp") if phase is Phase.PREFILL else ()
    entered: Spec = (data, context, ())
    is_prefill = phase is Phase.PREFILL
    is_split = plan.sp and (is_prefill or workload.batch // plan.data_size % plan.tp == 0)
    residual = entered
    if is_split:
        residual = (data, (*context, *tp), ()) if is_prefill else ((*data, *tp), (), ())
    return ResidualSpecs(
        residual=residual,
        entered=entered,
        logits=(data, (), tp),
        rows=(data, (), ()),
        tokens=(data, context),
        is_split=is_split,
    )
