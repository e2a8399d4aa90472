"""The mesh given to the SPMD partitioner, and the shardings of parameters and activations.

A spec lists, for each dimension, the mesh axes that split it, outermost first. If layers have fewer
KV heads than tp devices, tp becomes two axes, `tp.kv` over the heads and `tp.rep` over their
copies, so that KV weights are split as far as possible without splitting a head.

`plans/weights.py` declares each weight with its checkpoint name. Modules of transformers store some of them
differently: all experts of a layer in one array, with gate and up stacked, also in those that `replaced.py` changes.
"""

# pyright: reportPrivateUsage=false
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshscope.events.enums import Phase
from meshscope.model.arrays import Dim, Weight, mesh_axes_of
from meshscope.model.families import Family
from meshscope.model.model import Model
from meshscope.plans.experiment import Experiment
from meshscope.plans.mesh import Mesh
from meshscope.plans.plan import Plan
from meshscope.plans.weights import layer_weights, outer_weights
from meshscope.programs.jax.collectives import layout_of

KV_AXES = ("tp.kv", "tp.rep")

Spec = tuple[tuple[str, ...], ...]


def partition(spec: Spec) -> tuple[Any, ...]:
    """The spec as JAX and torch_xla take it."""
    return tuple(axes if len(axes) > 1 else next(iter(axes), None) for axes in spec)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layouts:
    """Maps logical axes to mesh axes; with `has_kv_axis`, `mesh` has tp as two axes.

    With `has_region`, the layers are in a manual region.
    """

    plan: Plan
    mesh: Mesh
    has_kv_axis: bool
    has_region: bool = False

    def axes(self, *names: str) -> tuple[str, ...]:
        """The mesh axes of these plan axes, without axes of size 1."""
        axes: list[str] = []
        for name in names:
            parts = KV_AXES if name == "tp" and self.has_kv_axis else (name,)
            axes += [part for part in parts if self.mesh.size(part) > 1]
        return tuple(axes)

    def split(self, dim: Dim) -> tuple[str, ...]:
        """The mesh axes that split a logical dimension of weights."""
        return self.kv_heads if dim is Dim.KV_HEADS else self.axes(*mesh_axes_of(dim, self.plan))

    @property
    def kv_heads(self) -> tuple[str, ...]:
        """The mesh axes that split KV heads."""
        return tuple(axis for axis in self.axes("tp") if axis != KV_AXES[1])

    @property
    def data(self) -> tuple[str, ...]:
        """The mesh axes that split the batch."""
        return self.axes(self.plan.data_axis)

    def sharding(self, spec: Spec) -> str:
        """The spec in XLA's text form: `{devices=[2,1,4]<=[8] last_tile_dim_replicate}`."""
        mesh = AbstractMesh(self.mesh.sizes, self.mesh.names)
        return str(NamedSharding(mesh, P(*partition(spec)))._to_xla_hlo_sharding(len(spec)))

    def n_parts(self, axes: Iterable[str]) -> int:
        """The number of parts into which these mesh axes split a dimension."""
        return prod(self.mesh.size(axis) for axis in axes)


def layouts_of(model: Model, plan: Plan, *, has_region: bool = False) -> Layouts:
    """The layouts of a model under a plan."""
    n_heads = model.attention.kv_heads(model.layers[0].attention)  # 0 for latents
    if not 0 < n_heads < plan.tp:
        return Layouts(plan=plan, mesh=plan.mesh, has_kv_axis=False, has_region=has_region)
    sizes = dict(zip(KV_AXES, (n_heads, plan.tp // n_heads), strict=True))
    parts = {"tp": [(name, size) for name, size in sizes.items() if size > 1]}
    axes = (part for axis in plan.mesh.axes for part in parts.get(axis[0], [axis]))
    mesh = Mesh(axes=tuple(axes))
    return Layouts(plan=plan, mesh=mesh, has_kv_axis=True, has_region=has_region)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidualSpecs:
    """Specs of the residual stream [B, S, D] in one phase.

    `residual` applies between blocks, `entered` inside them, and `tokens` to the token ids [B, S].
    `logits` [B, 1, V] is the sharding at the head's output, `rows` at the program's output.
    `split_dim` is the dimension that sp splits over tp, as in the JAX program.
    """

    residual: Spec
    entered: Spec
    logits: Spec
    rows: Spec
    tokens: Spec
    split_dim: int | None


def residual_specs(experiment: Experiment, phase: Phase, layouts: Layouts) -> ResidualSpecs:
    """The specs of a phase."""
    data, tp = layouts.data, layouts.axes("tp")
    context = layouts.axes("cp") if phase is Phase.PREFILL else ()
    split_dim = layout_of(experiment.plan, experiment.workload, phase).split_dim
    split: dict[int | None, Spec] = {0: ((*data, *tp), (), ()), 1: (data, (*context, *tp), ())}
    return ResidualSpecs(
        residual=split.get(split_dim, (data, context, ())),
        entered=(data, context, ()),
        logits=(data, (), tp),
        rows=(data, (), ()),
        tokens=(data, context),
        split_dim=split_dim,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The logical dimensions of a parameter's `Weight`, and how its array is stored.

    `n_stacked` is the number of equal parts stacked in dimension 1: 2 for gate and up. `weights` are their tensors.
    `scale` is the rule of the scales, if the weights are quantized in square blocks, of `block` inputs and outputs each.
    """

    dims: tuple[Dim, ...]
    sizes: tuple[int, ...]
    is_transposed: bool
    n_stacked: int = 1
    weights: tuple[Weight, ...] = ()
    scale: "Rule | None" = None
    block: int = 1

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The parameter's shape as a program argument, with stacked parts in a separate dimension."""
        if self.n_stacked == 1:
            return shape
        return (shape[0], self.n_stacked, shape[1] // self.n_stacked, *shape[2:])

    def spec(self, shape: tuple[int, ...], layouts: Layouts) -> Spec:
        """The mesh axes that split each dimension of `stored_shape`."""
        axes = [layouts.split(dim) for dim in self.dims]
        if len(shape) == 1:
            return (_outermost(axes),)
        if self.n_stacked > 1:
            return (axes[0], (), *axes[1:])
        if len(shape) == len(self.dims) and not self.is_transposed:
            return tuple(axes)
        # The leading dimensions that form the input of a matrix [out, in].
        n_in = next(n for n in range(1, len(axes)) if prod(self.sizes[:n]) == shape[1])
        return (_outermost(axes[n_in:]), _outermost(axes[:n_in]))


def _outermost(axes: list[tuple[str, ...]]) -> tuple[str, ...]:
    """The axes of merged dimensions; only the outermost may be split."""
    assert not any(axes[1:])
    return axes[0]


# Parameters of experts, [E, 2F, D] and [E, D, F] with biases [E, 2F] and [E, D]: the name and the equal parts, by weight.
_OF_EXPERTS = {
    "experts_w_gate": ("gate_up_proj", 2),
    "experts_w_down": ("down_proj", 1),
    "experts_b_gate": ("gate_up_proj_bias", 2),
    "experts_b_down": ("down_proj_bias", 1),
}


def rules_of(model: Model, plan: Plan, dtype: str) -> Mapping[str, Rule]:
    """The rule of every parameter, by its name in the transformers model, if weights are stored in `dtype`."""
    weights = [(weight.checkpoint, weight) for weight in outer_weights(model, plan)]
    rules: dict[str, Rule] = {}
    for index, layer in enumerate(model.layers):
        of_layer = layer_weights(model, plan, layer)
        by_name = {weight.name: weight for weight in of_layer}
        for weight in of_layer:
            if weight.name in _OF_EXPERTS:
                name, n_stacked = _OF_EXPERTS[weight.name]
                order = range(len(weight.dims)) if weight.is_vector else (0, 2, 1)
                stacked = (weight, by_name[weight.name.replace("gate", "up")])[:n_stacked]
                rule = _rule(stacked, dtype, order, n_stacked)
                rules[f"model.layers.{index}.mlp.experts.{name}"] = rule
            if "{expert}" not in weight.checkpoint:
                weights.append((weight.checkpoint.format(layer=index), weight))
    of_names = ((module_name(name, model.family), weight) for name, weight in weights)
    return rules | {name: _rule((weight,), dtype) for name, weight in of_names if name not in rules}


def _rule(
    weights: tuple[Weight, ...], dtype: str, order: Iterable[int] = (), n_stacked: int = 1
) -> Rule:
    """The rule of a parameter that stores `weights`, with their dimensions in this order."""
    first, scale, quantization = weights[0], weights[0].scale(dtype), weights[0].quantization(dtype)
    block = None if quantization is None else quantization.square_block
    order, of_scale = tuple(order), None
    if scale is not None and block is not None:
        of_scale = Rule(
            dims=tuple(scale.dims[i] for i in order) or scale.dims,
            sizes=scale.shape,
            is_transposed=first.is_transposed and not order,
            n_stacked=n_stacked,
            block=block,
        )
    return Rule(
        dims=tuple(first.dims[i] for i in order) or first.dims,
        sizes=first.shape,
        is_transposed=first.is_transposed and not order,
        n_stacked=n_stacked,
        weights=weights,
        scale=of_scale,
    )


def module_name(name: str, family: Family) -> str:
    """The name in transformers of a tensor of the checkpoint, which differs in Mixtral and DeepSeek-V4."""
    name = name.replace(".indexer.compressor.", ".indexer.")
    if family.traits.mechanism == "compressed":
        name = name.replace(".indexer.", ".compressor.indexer.")
    parts = name.split(".")
    names = family.traits.modules if "layers" in parts else {"head": "lm_head"}
    return ".".join(names.get(part, part) for part in parts)
