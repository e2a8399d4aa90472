"""Routed experts: sizes, routing, config keys and weights; and gated MLPs, with which shared experts are built."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum

from meshscope.errors import SpecError
from meshscope.model.arrays import EXPERT_IN, EXPERT_OUT, ColumnSlice, Dim, Weight, WeightBuilder
from meshscope.model.families import Family, FamilyTraits, FusedGateUp, MlpRule
from meshscope.model.layers import MlpKind
from meshscope.model.reader import ConfigReader


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
    """The activation of a gated MLP or an expert."""

    SWIGLU = "swiglu"
    GEGLU = "geglu"  # Gemma: GELU by its tanh approximation
    LIMITED_SWIGLU = (
        "limited_swiglu"  # DeepSeek-V4: clamps both projections, also in shared experts
    )
    CLAMPED_SWIGLU = "clamped_swiglu"  # gpt-oss: clamps, scales by 1.702, adds one to the up factor


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureOfExperts:
    """Routed experts, `n_active` of `n_experts` per token, and shared experts for every token.

    `ffn` is the width of one expert, `shared_ffn` that of all shared experts together. Routing
    scores all experts, keeps the best `n_active_groups` of `n_groups`, and picks the best experts
    of those.
    """

    n_experts: int
    n_active: int
    ffn: int
    shared_ffn: int | None
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
    scales_inputs: bool = (
        False  # the score of the one chosen expert scales its input, not its output
    )
    activation: Activation = Activation.SWIGLU
    activation_limit: float | None = None

    def check(self, source: str) -> None:
        """Raise SpecError unless groups divide the experts and have enough of them."""
        if self.n_experts % self.n_groups:
            raise SpecError(
                f"{source}: n_group={self.n_groups} does not divide {self.n_experts} experts. "
                "Correct the config."
            )
        n_choices = self.n_experts // self.n_groups * self.n_active_groups
        if self.n_active_groups > self.n_groups or self.n_active > n_choices:
            raise SpecError(
                f"{source}: {self.n_active} experts per token exceed the {n_choices} available in "
                f"{self.n_active_groups} of {self.n_groups} groups. Correct the config."
            )

    def router_weights(
        self, hidden: int, vocab: int, row: FamilyTraits, *, has_table: bool
    ) -> Iterator[Weight]:
        """The replicated weights of the router.

        With `has_table`, a table maps each token id to its experts and there is no correction bias.
        """
        builder, n = WeightBuilder(base="model.layers.{layer}." + row.router), self.n_experts
        dims = (Dim.NORM, Dim.NORM)
        yield builder.matrix("router", dims, (hidden, n), "weight", inputs=())
        if has_table:
            table = builder.vector("router_table", dims, (vocab, self.n_active), "tid2eid")
            yield replace(table, dtype="s32")
        elif self.has_correction_bias:
            yield builder.vector("router_correction", (Dim.NORM,), (n,), row.correction)
        if self.has_bias:
            yield builder.vector("router_bias", (Dim.NORM,), (n,), "bias")
        if self.has_scales:
            beside = WeightBuilder(base="model.layers.{layer}.router.")
            yield beside.vector("router_scale", (Dim.NORM,), (hidden,), "scale")
            yield beside.vector("expert_scale", (Dim.NORM,), (n,), "per_expert_scale")

    def expert_weights(self, hidden: int, row: FamilyTraits) -> Iterator[Weight]:
        """The weights of the routed experts, stacked over experts."""
        fused = row.fused_experts
        if fused is None:
            weights = self._single_experts(hidden, row.expert_tensors)
        else:
            weights = self._fused_experts(hidden, fused)
        for weight in weights:
            yield weight if weight.is_vector else replace(weight, is_row_major=True)

    def _single_experts(self, d: int, tensors: Mapping[str, str]) -> Iterator[Weight]:
        builder, n, f = WeightBuilder(), self.n_experts, self.ffn
        for name in ("gate", "up"):
            tensor, shape = tensors[name], (n, d, f)
            yield builder.matrix(f"experts_w_{name}", EXPERT_IN, shape, tensor, inputs=(1,))
        tensor, shape = tensors["down"], (n, f, d)
        yield builder.matrix("experts_w_down", EXPERT_OUT, shape, tensor, inputs=(1,))

    def _fused_experts(self, d: int, fused: FusedGateUp) -> Iterator[Weight]:
        builder = WeightBuilder(base="model.layers.{layer}." + fused.base)
        n, f, step = self.n_experts, self.ffn, fused.step
        for number, name in enumerate(("gate", "up")):
            start = number if step > 1 else number * f
            stop = start + step * (f - 1) + 1
            columns = ColumnSlice(whole=2 * f, start=start, stop=stop, step=step)
            shape, tensor = (n, d, f), "gate_up_proj"
            into = builder.matrix(f"experts_w_{name}", EXPERT_IN, shape, tensor, inputs=(1,))
            yield replace(into, columns=columns, is_transposed=fused.is_transposed)
            if self.has_bias:
                bias, tensor = (Dim.EXPERT, Dim.EXPERT_FFN), "gate_up_proj_bias"
                yield builder.vector(f"experts_b_{name}", bias, (n, f), tensor, columns=columns)
        out = builder.matrix("experts_w_down", EXPERT_OUT, (n, f, d), "down_proj", inputs=(1,))
        yield replace(out, is_transposed=fused.is_transposed)
        if self.has_bias:
            bias = (Dim.EXPERT, Dim.NORM)
            yield builder.vector("experts_b_down", bias, (n, d), "down_proj_bias")

    def shared_weights(self, hidden: int, row: FamilyTraits) -> Iterator[Weight]:
        """The weights of the shared experts, stored as one gated MLP, and their gate, if they have one."""
        if self.shared_ffn is not None:
            yield from gated_mlp(hidden, self.shared_ffn, "shared_", row.shared_tensors)
            if self.has_shared_gate:
                tensor, dims = "mlp.shared_expert_gate.weight", (Dim.NORM, Dim.NORM)
                yield WeightBuilder().matrix("shared_gate", dims, (hidden, 1), tensor, inputs=())


def gated_mlp(
    d: int, f: int, prefix: str, tensors: Mapping[str, str], *, has_bias: bool = False
) -> Iterator[Weight]:
    """The matrices of a gated MLP of width `f`, and its biases."""
    builder = WeightBuilder()
    for name in ("gate", "up"):
        yield builder.matrix(f"{prefix}w_{name}", (Dim.HIDDEN, Dim.FFN), (d, f), tensors[name])
    yield builder.matrix(f"{prefix}w_down", (Dim.FFN, Dim.HIDDEN), (f, d), tensors["down"])
    if has_bias:
        biases = {role: tensor.replace(".weight", ".bias") for role, tensor in tensors.items()}
        for name in ("gate", "up"):
            yield builder.vector(f"{prefix}b_{name}", (Dim.FFN,), (f,), biases[name])
        yield builder.vector(f"{prefix}b_down", (Dim.NORM,), (d,), biases["down"])


# Keys that say which layers have experts: a family that reads them may have a model without such a layer.
_EXPERT_LAYER_KEYS = frozenset(
    {"first_k_dense_replace", "mlp_only_layers", "decoder_sparse_step", "mlp_layer_types"}
    | {"interleave_moe_layer_step", "moe_layers"}
)


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
    experts = family.traits.experts
    assert experts is not None
    return _READERS[experts](reader, family)


def _softmax_moe(reader: ConfigReader, ffn_key: str = "intermediate_size") -> MixtureOfExperts:
    """Routed experts with softmax scores and no shared experts."""
    return MixtureOfExperts(
        n_experts=reader.integer("num_local_experts"),
        n_active=reader.integer("num_experts_per_tok"),
        ffn=reader.integer(ffn_key),
        shared_ffn=None,
        scoring=Scoring.SOFTMAX,
        is_normalized=True,
    )


def _qwen3_moe(reader: ConfigReader) -> MixtureOfExperts:
    """The number of experts has another name before transformers 5."""
    if reader.get("num_local_experts") is None:
        reader = reader.over({**reader.config, "num_local_experts": reader.integer("num_experts")})
    is_normalized = reader.boolean("norm_topk_prob", default=False)
    return replace(_softmax_moe(reader, "moe_intermediate_size"), is_normalized=is_normalized)


def _gpt_oss_moe(reader: ConfigReader) -> MixtureOfExperts:
    return replace(
        _softmax_moe(reader),
        has_bias=True,
        activation=Activation.CLAMPED_SWIGLU,
        activation_limit=reader.number("swiglu_limit", 7.0),
    )


def _qwen3_5_moe(reader: ConfigReader) -> MixtureOfExperts:
    """Source: Qwen3NextSparseMoeBlock and Qwen3_5MoeSparseMoeBlock of transformers; Qwen3.5 always normalizes."""
    return MixtureOfExperts(
        n_experts=reader.integer("num_experts"),
        n_active=reader.integer("num_experts_per_tok"),
        ffn=reader.integer("moe_intermediate_size"),
        shared_ffn=reader.integer("shared_expert_intermediate_size"),
        scoring=Scoring.SOFTMAX,
        is_normalized=True,
        has_shared_gate=True,
    )


def _qwen3_next_moe(reader: ConfigReader) -> MixtureOfExperts:
    is_normalized = reader.boolean("norm_topk_prob", default=True)
    return replace(_qwen3_5_moe(reader), is_normalized=is_normalized)


def _llama4_moe(reader: ConfigReader) -> MixtureOfExperts:
    """Source: Llama4TextMoe of transformers."""
    n_active = reader.integer("num_experts_per_tok", 1)
    if n_active != 1:
        raise SpecError(
            f"{reader.source}: num_experts_per_tok={n_active} is not supported for llama4_text, whose scores "
            "scale the inputs of experts. Supported: 1."
        )
    ffn = reader.integer("intermediate_size")
    return MixtureOfExperts(
        n_experts=reader.integer("num_local_experts"),
        n_active=n_active,
        ffn=ffn,
        shared_ffn=ffn,
        scoring=Scoring.SIGMOID,
        is_normalized=False,
        scales_inputs=True,
    )


def _gemma4_moe(reader: ConfigReader) -> MixtureOfExperts:
    """Source: Gemma4TextRouter and Gemma4TextExperts of transformers."""
    return MixtureOfExperts(
        n_experts=reader.integer("num_experts"),
        n_active=reader.integer("top_k_experts"),
        ffn=reader.integer("moe_intermediate_size"),
        shared_ffn=None,
        scoring=Scoring.SOFTMAX,
        is_normalized=True,
        has_scales=True,
        activation=Activation.GEGLU,
    )


def _deepseek_moe(reader: ConfigReader, family: Family) -> MixtureOfExperts:
    """Source: DeepseekV2TopkRouter and DeepseekV3TopkRouter of transformers."""
    is_v2 = family.traits.experts == "deepseek_v2"
    method = reader.text("topk_method", "greedy" if is_v2 else "noaux_tc")
    known = {"greedy", "group_limited_greedy"} if is_v2 else {"noaux_tc"}
    if method not in known:
        raise SpecError(
            f"{reader.source}: topk_method={method!r} is not supported for {family}. "
            f"Supported: {', '.join(sorted(known))}."
        )
    scoring = Scoring.SOFTMAX if is_v2 else Scoring.SIGMOID
    if reader.text("scoring_func", scoring.value) != scoring:
        raise SpecError(
            f"{reader.source}: scoring_func={reader.config['scoring_func']!r} is not supported for {family}, "
            f"which uses '{scoring}' in transformers. Correct the config."
        )
    is_limited = method != "greedy"
    ffn, n_shared = reader.integer("moe_intermediate_size"), reader.integer("n_shared_experts")
    return MixtureOfExperts(
        n_experts=reader.integer("n_routed_experts"),
        n_active=reader.integer("num_experts_per_tok"),
        ffn=ffn,
        shared_ffn=ffn * n_shared,
        scoring=scoring,
        is_normalized=not is_v2 and reader.boolean("norm_topk_prob", default=True),
        scale=reader.number("routed_scaling_factor", family.traits.routed_scale),
        n_groups=reader.integer("n_group", 1) if is_limited else 1,
        n_active_groups=reader.integer("topk_group", 1) if is_limited else 1,
        group_score=GroupScore.MAX if is_v2 else GroupScore.TOP2_SUM,
        has_correction_bias=not is_v2,
    )


def _deepseek_v4_moe(reader: ConfigReader) -> MixtureOfExperts:
    """The experts; the shared expert is as wide as one routed expert, whatever the config counts."""
    scoring = reader.text("scoring_func", Scoring.SQRT_SOFTPLUS.value)
    if scoring not in set(Scoring):
        raise SpecError(
            f"{reader.source}: scoring_func={scoring!r} is not supported. Supported: {', '.join(Scoring)}."
        )
    if reader.boolean("mlp_bias", default=False):
        raise SpecError(
            f"{reader.source}: mlp_bias=true is not supported for deepseek_v4. Set it to false."
        )
    ffn = reader.integer("moe_intermediate_size")
    return MixtureOfExperts(
        n_experts=reader.integer("n_routed_experts"),
        n_active=reader.integer("num_experts_per_tok"),
        ffn=ffn,
        shared_ffn=ffn,
        scoring=Scoring(scoring),
        is_normalized=True,
        scale=reader.number("routed_scaling_factor", 1.5),
        has_correction_bias=True,
        activation=Activation.LIMITED_SWIGLU,
        activation_limit=reader.number("swiglu_limit", 10.0),
    )


_READERS: Mapping[str, Callable[[ConfigReader, Family], MixtureOfExperts]] = {
    "mixtral": lambda reader, _: _softmax_moe(reader),
    "qwen3_moe": lambda reader, _: _qwen3_moe(reader),
    "gpt_oss": lambda reader, _: _gpt_oss_moe(reader),
    "qwen3_next": lambda reader, _: _qwen3_next_moe(reader),
    "qwen3_5": lambda reader, _: _qwen3_5_moe(reader),
    "llama4": lambda reader, _: _llama4_moe(reader),
    "gemma4": lambda reader, _: _gemma4_moe(reader),
    "deepseek_v2": _deepseek_moe,
    "deepseek_v3": _deepseek_moe,
    "deepseek_v4": lambda reader, _: _deepseek_v4_moe(reader),
}


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
            n_dense = reader.count("first_k_dense_replace", row.n_dense)
            default = ["dense" if index < n_dense else "sparse" for index in range(n_layers)]
            names = reader.names("mlp_layer_types", n_layers, kinds, default)
            return [kinds[name] for name in names]
        case _:
            return [MlpKind.DENSE] * n_layers
    return [MlpKind.DENSE if index in dense else MlpKind.MOE for index in range(n_layers)]
