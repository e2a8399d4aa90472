"""Routed experts: sizes, routing, config keys and weights; and gated MLPs, with which shared experts are built."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from math import ceil
from typing import Any

from meshscope.errors import SpecError
from meshscope.model.arrays import LAYER_BASE, ColumnSlice, Dim, Weight, WeightBuilder, letters
from meshscope.model.families import EXPERT_KEYS, Family, FamilyTraits, MlpRule
from meshscope.model.layers import MlpKind
from meshscope.model.reader import ConfigReader, refuse


class Scoring(StrEnum):
    """The function that maps router logits to scores."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    SQRT_SOFTPLUS = "sqrtsoftplus"


class GroupScore(StrEnum):
    """The score of a group of experts in group-limited routing."""

    MAX = "max"
    TOP2_SUM = "top2_sum"


class Activation(StrEnum):
    """The activation of an MLP or an expert, most with a gate."""

    SWIGLU = "swiglu"
    GEGLU = "geglu"  # Gemma: GELU by its tanh approximation
    LIMITED_SWIGLU = (
        "limited_swiglu"  # DeepSeek-V4: clamps projections, also in shared and dense ones
    )
    CLAMPED_SWIGLU = "clamped_swiglu"  # gpt-oss: clamps, scales by 1.702, adds one to the up factor
    RELU2 = "relu2"  # Nemotron-H: the square of ReLU, without a gate
    XIELU = "xielu"  # Apertus: arXiv 2411.13010, without a gate

    @property
    def is_gated(self) -> bool:
        """Whether the product of a gate scales what it returns."""
        return self not in {Activation.RELU2, Activation.XIELU}


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureOfExperts:
    """Routed experts, `n_active` of `n_experts` per token, and shared experts for every token.

    Routing scores all experts, keeps the best `n_active_groups` of `n_groups`, and picks the best experts in them.
    """

    n_experts: int
    n_active: int
    ffn: int  # of one expert
    shared_ffn: int | None = None  # of all shared experts together
    scoring: Scoring
    is_normalized: bool  # scores of the chosen experts are scaled to sum to one
    scale: float = 1.0
    n_groups: int = 1
    n_active_groups: int = 1
    group_score: GroupScore = GroupScore.MAX
    has_correction_bias: bool = False  # added to the scores for expert selection only
    has_bias: bool = False  # router and experts have biases
    has_shared_gate: bool = False  # a sigmoid scales the output of the shared experts
    # Gemma 4: router and experts each have scales for the normed input, and each expert a scale of its score.
    has_scales: bool = False
    scales_inputs: bool = False  # the score of the chosen expert scales its input, not its output
    activation: Activation = Activation.SWIGLU
    activation_limit: float | None = None
    router_softcap: float | None = None  # the largest magnitude of router logits
    shared_scale: float = 1.0  # of the output of the shared experts
    latent: int | None = None  # channels that routed experts take and return, if not the residual's

    def row_width(self, hidden: int) -> int:
        """Channels of a row that experts take and return."""
        return self.latent or hidden

    def check(self, source: str) -> None:
        """Raise SpecError unless groups divide the experts and have enough of them."""
        n_experts, n, n_active = self.n_experts, self.n_groups, self.n_active_groups
        n_choices = n_experts // n * n_active
        available = f"{n_choices} available in {n_active} of {n} groups"
        problems = {
            f"n_group={n} does not divide {n_experts} experts": n_experts % n > 0,
            f"topk_group={n_active} exceeds n_group={n}": n_active > n,
            f"{self.n_active} experts per token exceed the {available}": self.n_active > n_choices,
        }
        refuse(source, problems)

    def n_slots(self, n_tokens: int, capacity_factor: float | None) -> int:
        """Slots of one device for one expert: all its tokens, or the factor times the mean (at least 1)."""
        if capacity_factor is None:
            return n_tokens
        mean = n_tokens * self.n_active * capacity_factor / self.n_experts
        return min(n_tokens, max(1, ceil(mean)))

    def most_skew(self, n_devices: int) -> float:
        """The load of a device over the mean if every token chooses as many of its experts as it can."""
        return n_devices * min(self.n_active, self.n_experts // n_devices) / self.n_active

    def miss_frac(self, load: float) -> float:
        """Probability that a token does not choose a given expert of a device with `load` times the mean rows."""
        return max(0.0, 1 - load * self.n_active / self.n_experts)

    def router_weights(
        self, hidden: int, vocab: int, row: FamilyTraits, *, has_table: bool
    ) -> Iterator[Weight]:
        """The replicated weights of the router; a table maps each token id to its experts instead of a correction bias."""
        dims = letters(Dim.NORM, d=hidden, e=self.n_experts, V=vocab, k=self.n_active)
        builder = WeightBuilder(LAYER_BASE + row.router, dims)
        yield builder.matrix("router", "de", "weight", inputs=())
        if has_table:
            yield replace(builder.vector("router_table", "Vk", "tid2eid"), dtype="s32")
        elif self.has_correction_bias:
            dtype = "f32" if row.has_pools or row.image_correction is not None else None
            of_layer = replace(builder, base=LAYER_BASE) if "." in row.correction else builder
            of_text = of_layer.vector("router_correction", "e", row.correction)
            yield replace(of_text, dtype=dtype)
            if row.image_correction is not None:
                of_images = builder.vector("router_image_correction", "e", row.image_correction)
                yield replace(of_images, dtype=dtype)
        if self.has_bias:
            yield builder.vector("router_bias", "e", "bias")
        if self.has_scales:
            beside = replace(builder, base=f"{LAYER_BASE}router.")
            yield beside.vector("router_scale", "d", "scale")
            yield beside.vector("expert_scale", "e", "per_expert_scale")

    def expert_weights(self, hidden: int, row: FamilyTraits) -> Iterator[Weight]:
        """The weights of the routed experts, stacked over experts."""
        f, fused, tensors = self.ffn, row.fused_experts, row.tensors("expert")
        width = self.row_width(hidden)
        dims = letters(Dim.EXPERT, E=self.n_experts) | letters(Dim.NORM, d=width)
        dims |= letters(Dim.EXPERT_HIDDEN, D=width) | letters(Dim.EXPERT_FFN, F=f)
        builder, columns, is_transposed = WeightBuilder(LAYER_BASE, dims), None, True
        if fused is not None:
            builder = replace(builder, base=LAYER_BASE + fused.base)
            is_transposed = fused.is_transposed
            tensors = {"gate": "gate_up_proj", "up": "gate_up_proj", "down": "down_proj"}
        for number, name in enumerate(("gate", "up")):
            if name == "gate" and not self.activation.is_gated:
                continue
            if fused is not None:
                start = number if fused.step > 1 else number * f
                stop = start + fused.step * (f - 1) + 1
                columns = ColumnSlice(whole=2 * f, start=start, stop=stop, step=fused.step)
            into = builder.matrix(
                f"experts_w_{name}", "EDF", tensors[name], columns=columns, inputs=(1,)
            )
            yield replace(into, is_transposed=is_transposed, is_row_major=True)
            if self.has_bias:
                bias = f"{tensors[name]}_bias"
                yield builder.vector(f"experts_b_{name}", "EF", bias, columns=columns)
        out = builder.matrix("experts_w_down", "EFD", tensors["down"], inputs=(1,))
        yield replace(out, is_transposed=is_transposed, is_row_major=True)
        if self.has_bias:
            yield builder.vector("experts_b_down", "Ed", f"{tensors['down']}_bias")

    def latent_weights(self, hidden: int, row: FamilyTraits) -> Iterator[Weight]:
        """The replicated matrices from the residual width to rows of experts and back, if these are narrower."""
        if self.latent is not None:
            dims = letters(Dim.HIDDEN, D=hidden) | letters(Dim.NORM, l=self.latent)
            builder = WeightBuilder(LAYER_BASE + row.mlp, dims)
            yield builder.matrix("experts_latent_in", "Dl", "fc1_latent_proj.weight")
            yield builder.matrix("experts_latent_out", "lD", "fc2_latent_proj.weight")

    def shared_weights(self, hidden: int, row: FamilyTraits) -> Iterator[Weight]:
        """The weights of the shared experts, stored as one gated MLP, and their gate, if they have one."""
        if self.shared_ffn is not None:
            tensors, has_gate = row.tensors("shared"), self.activation.is_gated
            yield from mlp_weights(hidden, self.shared_ffn, "shared_", tensors, has_gate=has_gate)
            if self.has_shared_gate:
                builder = WeightBuilder(LAYER_BASE, letters(Dim.NORM, d=hidden, o=1))
                tensor = "mlp.shared_expert_gate.weight"
                yield builder.matrix("shared_gate", "do", tensor, inputs=())


def mlp_weights(  # noqa: PLR0913  sizes, names, and what a family adds
    d: int,
    f: int,
    prefix: str,
    tensors: Mapping[str, str],
    *,
    has_bias: bool = False,
    has_gate: bool = True,
) -> Iterator[Weight]:
    """The matrices of an MLP of width `f`, and its biases."""
    dims = letters(Dim.HIDDEN, D=d) | letters(Dim.FFN, F=f) | letters(Dim.NORM, d=d)
    builder, shapes = WeightBuilder(LAYER_BASE, dims), {"gate": "DF", "up": "DF", "down": "FD"}
    for role, shape in shapes.items():
        if has_gate or role != "gate":
            yield builder.matrix(f"{prefix}w_{role}", shape, tensors[role])
    for role, shape in {"gate": "F", "up": "F", "down": "d"}.items() if has_bias else ():
        tensor = tensors[role].replace(".weight", ".bias")
        yield builder.vector(f"{prefix}b_{role}", shape, tensor)


XIELU = ("alpha_p", "alpha_n", "beta", "eps")  # numbers of a layer


def xielu_numbers() -> Iterator[Weight]:
    """The numbers of the activation of an MLP without a gate."""
    builder = WeightBuilder(f"{LAYER_BASE}mlp.act_fn.", letters(Dim.NORM, o=1))
    yield from (builder.vector(f"xielu_{name}", "o", name) for name in XIELU)


# Keys that say which layers have experts: a family that reads them may have a model without such a layer.
_EXPERT_LAYER_KEYS = {
    *("first_k_dense_replace", "moe_layer_start_index", "mlp_only_layers", "decoder_sparse_step"),
    *("mlp_layer_types", "interleave_moe_layer_step", "moe_layers"),
}


def read_mixture(
    reader: ConfigReader, family: Family, *, has_experts: bool
) -> MixtureOfExperts | None:
    """The experts of a config; None if all of its layers are dense, whose keys for experts may be incomplete."""
    if has_experts:
        return read_moe(reader, family)
    if reader.used & _EXPERT_LAYER_KEYS:
        with suppress(SpecError):
            read_moe(reader, family)  # so that its keys count as read
    return None


def read_moe(reader: ConfigReader, family: Family) -> MixtureOfExperts:
    """The experts of a config; keys and routing depend on the family."""
    name = family.traits.experts
    assert name is not None
    keys = EXPERT_KEYS[name]
    enums = {"scoring": Scoring, "activation": Activation, "group_score": GroupScore}
    fields: dict[str, Any] = {
        key: enums[key](v) if key in enums else v for key, v in keys.fixed.items()
    }
    read = {"deepseek_v4": _deepseek_v4_routing, "bailing_moe": _bailing_routing}
    read |= dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "glm5_next", "bailing_hybrid"), _deepseek_routing
    )
    if name in read:
        fields |= read[name](reader, family)
    ffn = reader.integer(keys.ffn)
    present = (key for key in keys.n_experts if reader.get(key) is not None)
    if keys.normalized is not None:
        fields["is_normalized"] = reader.boolean("norm_topk_prob", default=keys.normalized)
    if keys.scale is not None:
        fields["scale"] = reader.number(keys.scale_key, keys.scale)
    if keys.limit is not None:
        fields["activation_limit"] = reader.number("swiglu_limit", keys.limit)
    if keys.latent is not None:
        fields["latent"] = reader.optional_integer(keys.latent)
    if keys.softcap is not None:
        fields["router_softcap"] = reader.optional_number(keys.softcap)
    if keys.shared is not None:
        n_shared = 1 if keys.n_shared is None else reader.count(keys.n_shared, 1)
        shared = ffn if keys.shared == "ffn" else reader.integer(keys.shared)
        fields["shared_ffn"] = n_shared * shared or None
    has_one = fields.get("scales_inputs") is True
    n_active = reader.integer(keys.n_active, 1 if has_one else None)
    several = f"num_experts_per_tok={n_active} is not supported where scores scale the inputs of experts, only 1"
    refuse(reader.source, {several: has_one and n_active != 1})
    n_experts = reader.integer(next(present, keys.n_experts[-1]))
    return MixtureOfExperts(n_experts=n_experts, n_active=n_active, ffn=ffn, **fields)


def _deepseek_routing(reader: ConfigReader, family: Family) -> dict[str, Any]:
    is_v2 = family.traits.experts == "deepseek_v2"
    methods = ("greedy", "group_limited_greedy") if is_v2 else ("noaux_tc",)
    method = reader.one_of("topk_method", methods, methods[0])
    scoring = Scoring.SOFTMAX if is_v2 else Scoring.SIGMOID
    reader.one_of("scoring_func", (scoring, method), scoring)  # the second as dots.llm1 writes
    n_groups = ("n_group", "topk_group") if method != "greedy" else ()
    groups = dict(zip(("n_groups", "n_active_groups"), n_groups, strict=False))
    n_shared = reader.integer("n_shared_experts")
    return {
        "scoring": scoring,
        "shared_ffn": reader.integer("moe_intermediate_size") * n_shared,
        "scale": reader.number("routed_scaling_factor", family.traits.routed_scale),
        **{name: reader.integer(key, 1) for name, key in groups.items()},
    }


def _deepseek_v4_routing(reader: ConfigReader, _: Family) -> dict[str, Any]:
    return {"scoring": Scoring(reader.one_of("scoring_func", Scoring, Scoring.SQRT_SOFTPLUS))}


def _bailing_routing(reader: ConfigReader, _: Family) -> dict[str, Any]:
    return {
        "scoring": Scoring(reader.one_of("score_function", Scoring, Scoring.SOFTMAX)),
        "has_correction_bias": reader.boolean("moe_router_enable_expert_bias", default=False),
        "n_groups": reader.integer("n_group", 1),
        "n_active_groups": reader.integer("topk_group", 1),
    }


def activation_limits(
    reader: ConfigReader, kinds: list[MlpKind]
) -> list[tuple[float | None, float | None]]:
    """The limits of routed experts and of other MLPs in each layer; configs write 0 for none."""
    keys, none = ("swiglu_limits", "swiglu_limits_shared"), (0.0,) * len(kinds)
    limits = zip(kinds, *(reader.numbers(key) or none for key in keys), strict=True)
    return [
        ((kind is MlpKind.MOE and of_experts) or None, other or None)
        for kind, of_experts, other in limits
    ]


def mlp_kinds(reader: ConfigReader, family: Family, n_layers: int) -> list[MlpKind]:
    """The feed-forward block of each layer, by the rule of the family."""
    row = family.traits
    kinds = {"dense": MlpKind.DENSE, "sparse": MlpKind.MOE}
    match row.mlps:
        case MlpRule.ALL:
            return [MlpKind.MOE] * n_layers
        case MlpRule.BESIDE if reader.boolean("enable_moe_block", default=False):
            return [MlpKind.DENSE_AND_MOE] * n_layers
        case MlpRule.INTERLEAVED:
            step = reader.integer("interleave_moe_layer_step", 1)
            sparse = set(reader.integers("moe_layers") or range(step - 1, n_layers, step))
            dense = set(range(n_layers)) - sparse
        case MlpRule.STEP:
            step = reader.integer("decoder_sparse_step", 1)
            dense = set(reader.integers("mlp_only_layers"))
            dense |= {index for index in range(n_layers) if (index + 1) % step}
        case MlpRule.FIRST_DENSE:
            freq = reader.get("moe_layer_freq")
            if isinstance(freq, list):  # 1 for layers with experts
                freq = reader.flags("moe_layer_freq", n_layers)
                return [MlpKind.MOE if one else MlpKind.DENSE for one in freq]
            n_dense, end = reader.count(row.dense_key, row.n_dense), "moe_layer_end_index"
            every = f"moe_layer_freq={freq!r} is not supported, only 1, for experts in every layer"
            refuse(reader.source, {every: freq not in (None, 1)})
            if reader.get(end) not in (None, -1, n_layers - 1):
                raise SpecError(
                    f"{reader.source}: {end}={reader.config[end]!r} is not supported for {family}. Use -1, so that all "
                    f"layers from {row.dense_key} on have experts."
                )
            default = ["dense" if index < n_dense else "sparse" for index in range(n_layers)]
            names = reader.names("mlp_layer_types", n_layers, kinds, default)
            return [kinds[name] for name in names]
        case _:
            return [MlpKind.DENSE] * n_layers
    return [MlpKind.DENSE if index in dense else MlpKind.MOE for index in range(n_layers)]
