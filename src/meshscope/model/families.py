"""Model families: one row each, with the config keys, defaults, layers and tensor names in which they differ."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from meshscope.files import own_table
from meshscope.serialize import from_plain

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


_ROWS = own_table("model/families.toml")


class Family(StrEnum):
    """Model families that the programs implement, a row of `families.toml` each; values are the config's `model_type`."""

    vars().update({name.upper(): name for name in _ROWS["families"]})

    @property
    def traits(self) -> "FamilyTraits":
        """The row of this family."""
        return TRAITS[self]


class LayerRule(StrEnum):
    """How a config gives the attention of each layer."""

    FULL = "full"
    WINDOWS = "windows"  # `layer_types`, else every `period`-th layer is full; 0: all are alike
    UNIFORM = "uniform"  # windows in all layers or in none, whatever `layer_types` says
    CHUNKS = "chunks"  # `no_rope_layers`, with chunks in the others
    NOPES = "nopes"  # `no_rope_layers`
    BLOCKS = "blocks"  # `hybrid_override_pattern`: state spaces, attention or a feed-forward block
    HYBRID = "hybrid"  # linear attention except in every fourth layer
    KIMI = "kimi"  # `linear_attn_config` or `layer_types`: linear attention in most
    KEY_BLOCKS = "key_blocks"  # `layer_types`, or `sparse_attention_config`
    POOLED_KEYS = "pooled_keys"  # as hybrid; layers of `ple_layer_ids` have tables of n-grams
    INDEXERS = "indexers"  # some layers take the choice of an earlier one
    ENTRIES = "entries"  # windows and compressed entries
    SOURCES = "sources"  # some layers make entries for those after them


class MlpRule(StrEnum):
    """How a config says which layers have experts."""

    DENSE = "dense"
    ALL = "all"
    BESIDE = "beside"  # in parallel with an MLP in all layers, or in none
    INTERLEAVED = "interleaved"  # `moe_layers`, else every `interleave_moe_layer_step`-th
    STEP = "step"  # every `decoder_sparse_step`-th
    FIRST_DENSE = "first_dense"  # `first_k_dense_replace`
    HASHED = "hashed"  # the first ones by a table of token ids


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedGateUp:
    """Gate and up columns of all experts in one tensor [E, D, 2F], or [E, 2F, D] if it `is_transposed`."""

    base: str
    step: int = 1  # 2 if they alternate; 1 if the gate columns come first
    is_transposed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyTraits:
    """A row of `families.toml`. Defaults come from the family's config class in transformers."""

    mechanism: str = "grouped"  # of attention
    engine_class: str | None = None  # as vLLM and SGLang name it in `architectures`
    # Whether the partitioner can split its modules of transformers: not fused matrices, linear attention, indexers,
    # experts beside an MLP, or several sizes of heads.
    is_traced: bool = False
    is_plain: bool = False  # config keys name everything in its layers
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    rope: Mapping[str, Any] = field(default_factory=dict[str, Any])  # defaults of positions
    fixed: Mapping[str, Any] = field(default_factory=dict[str, Any])  # keys with one possible value
    ignored_keys: tuple[str, ...] = ()  # read only for some models, or repeated by layers
    aliases: Mapping[str, str] = field(default_factory=dict[str, str])  # other names of keys
    has_layer_lists: bool = False  # rotary embeddings, limits and MLPs by layer, MTP included
    # Layers.
    layers: LayerRule = LayerRule.FULL
    period: int = 1
    period_key: str | None = None
    pattern_key: str | None = None  # or a list with 1 for layers with windows
    mlps: MlpRule = MlpRule.DENSE
    n_dense: int = 0  # the default of `dense_key`
    dense_key: str = "first_k_dense_replace"
    mtp: tuple[str, int] = ("num_nextn_predict_layers", 0)
    # Grouped-query attention; `variant` names what else its family has.
    variant: str | None = None
    head_dim: int | None = None  # None: the hidden size over heads
    qk_norm: bool | str = False  # or the key that says it
    has_whole_norms: bool = False  # of queries and of keys over all heads, not of each head
    has_bias: bool = False
    has_o_bias: bool = True  # if queries, keys and values have biases
    has_gate: bool = False
    has_as_many_kv_heads: bool = False  # without `num_key_value_heads`; null always means this
    has_sinks: bool = False
    has_window: bool = False
    window: int | None = None  # unless `sliding_window` is there; null means full attention
    window_is_off: bool = False  # a window only if `use_sliding_window` is true
    # The residual stream and the MLP.
    is_gemma: bool = False
    has_softcap: bool = False  # of logits
    has_input_norms: bool = True  # before each block
    has_post_norms: bool = False  # after each block
    has_mean_norms: bool = False  # norms subtract the mean
    is_parallel: bool = False  # attention and MLP take the same normed input
    # Config keys of scales: of `embeddings`, of the `residual` that a block adds, of `scores` and of `logits`, or what
    # `logits_over` divides them by.
    scales: Mapping[str, str] = field(default_factory=dict[str, str])
    norm_offset: float = 0.0  # norms multiply by it plus their weight
    streams: str | None = None  # parallel ones: "mean", "weighted", "delayed" or "gated" ends
    norm_eps_key: str = "rms_norm_eps"
    hidden_act: str = "silu"  # of dense MLPs; "xielu" and "relu2" have no gate
    ffn_key: str = "intermediate_size"  # the width of dense layers
    # Experts.
    experts: str | None = None  # the reader of its routing
    routed_scale: float = 1.0
    has_shared_experts: bool = False
    fused_experts: FusedGateUp | None = None
    # Latent attention.
    has_indexer: bool = False
    has_pools: bool = False  # positions that the indexer scores and chooses together
    # Tensors of the checkpoint, within a layer.
    is_fused: bool = False  # projections of attention in one tensor
    is_fused_mlp: bool = False
    attn_norm: str = "input_layernorm.weight"
    mlp_norm: str = "post_attention_layernorm.weight"
    post_norms: tuple[str, str] = (  # after attention and after the MLP
        "post_attention_layernorm.weight",
        "post_feedforward_layernorm.weight",
    )
    mlp: str = "mlp."
    router: str = "mlp.gate."
    correction: str = "e_score_correction_bias"  # in the router, or in the layer if it has dots
    image_correction: str | None = None  # of image tokens; both corrections are then in float32
    expert: str = "mlp.experts.{expert}."
    shared: str = "mlp.shared_experts."
    expert_names: tuple[str, str, str] = PROJECTIONS
    head: str = "lm_head.weight"
    names: Mapping[str, str] = field(default_factory=dict[str, str])  # parts of names, as stored
    # Parts of names within layers as transformers has them, where the checkpoint differs (its conversion_mapping.py).
    modules: Mapping[str, str] = field(default_factory=dict[str, str])
    # tpu-inference keeps the whole context in every layer of models of its own
    # (tpu_inference/runner/kv_cache_manager.py, get_kv_cache_spec, commit b8692ff0). Its other models limit
    # layers with a window to it, if the heads of all layers have one size.
    keeps_whole_context: bool = False

    def tensors(self, part: str) -> Mapping[str, str]:
        """Tensors of the gated MLP of a `part`, by role: of dense layers (`mlp`), of `shared` experts or an `expert`."""
        names = PROJECTIONS if part == "mlp" else self.expert_names
        pairs = zip(("gate", "up", "down"), names, strict=True)
        return {role: f"{getattr(self, part)}{name}.weight" for role, name in pairs}


# Scales of an MLP in parallel with experts (Gemma 4): of the MLP's output, and of the experts' input and output.
SIDE_NORM_TENSORS = {
    "dense_post_norm": "post_feedforward_layernorm_1.weight",
    "experts_norm": "pre_feedforward_layernorm_2.weight",
    "experts_post_norm": "post_feedforward_layernorm_2.weight",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertKeys:
    """A row of `families.toml` for experts: config keys with defaults, and `fixed` fields that no key says."""

    n_experts: tuple[str, ...] = ("num_local_experts",)
    n_active: str = "num_experts_per_tok"
    ffn: str = "moe_intermediate_size"
    shared: str | None = None
    n_shared: str | None = None
    scale_key: str = "routed_scaling_factor"
    normalized: bool | None = None
    scale: float | None = None
    limit: float | None = None
    softcap: str | None = None  # of router logits
    latent: str | None = None  # width of what experts take and return
    fixed: Mapping[str, Any] = field(default_factory=dict[str, Any])


def _row(values: Mapping[str, Any]) -> dict[str, Any]:
    inherited = _row(_ROWS["base"][values["like"]]) if "like" in values else {}
    return inherited | {key: value for key, value in values.items() if key != "like"}


TRAITS = {
    Family(name): from_plain(FamilyTraits, _row(values), name)
    for name, values in _ROWS["families"].items()
}
EXPERT_KEYS = {
    name: from_plain(ExpertKeys, values, name) for name, values in _ROWS["experts"].items()
}
SAME_DEFAULTS: Mapping[str, Mapping[str, Any]] = _ROWS["same_defaults"]
SAME_ARCHITECTURE = {
    name: Family(family) for family, names in _ROWS["same_architecture"].items() for name in names
}
