"""Model families: one row each, with the config keys, defaults, layers and tensor names in which they differ."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


class Family(StrEnum):
    """Model families that the programs implement; values are the config's `model_type`."""

    LLAMA = "llama"
    LLAMA4 = "llama4_text"
    MISTRAL = "mistral"
    MINISTRAL = "ministral"
    MINISTRAL3 = "ministral3"
    PHI3 = "phi3"
    GEMMA2 = "gemma2"
    GEMMA3 = "gemma3_text"
    GEMMA4 = "gemma4_text"
    QWEN2 = "qwen2"
    QWEN3 = "qwen3"
    MIXTRAL = "mixtral"
    QWEN3_MOE = "qwen3_moe"
    QWEN3_NEXT = "qwen3_next"
    QWEN3_5 = "qwen3_5_text"
    QWEN3_5_MOE = "qwen3_5_moe_text"
    GLM4_MOE = "glm4_moe"
    GPT_OSS = "gpt_oss"
    DEEPSEEK_V2 = "deepseek_v2"
    DEEPSEEK_V3 = "deepseek_v3"
    DEEPSEEK_V32 = "deepseek_v32"
    GLM_MOE_DSA = "glm_moe_dsa"
    DEEPSEEK_V4 = "deepseek_v4"

    @property
    def traits(self) -> "FamilyTraits":
        """The row of this family."""
        return TRAITS[self]


class LayerRule(StrEnum):
    """How a config gives the attention of each layer."""

    FULL = "full"
    WINDOWS = (
        "windows"  # `layer_types`, else full attention in every `period`-th layer; 0: all alike
    )
    UNIFORM = "uniform"  # windows in all layers or in none, whatever `layer_types` says
    CHUNKS = "chunks"  # `no_rope_layers`
    HYBRID = "hybrid"  # linear attention but for every fourth layer
    INDEXERS = "indexers"  # some layers take the choice of an earlier one
    ENTRIES = "entries"  # windows and compressed entries


class MlpRule(StrEnum):
    """How a config says which layers have experts."""

    DENSE = "dense"
    ALL = "all"
    BESIDE = "beside"  # beside an MLP in all layers, or in none
    INTERLEAVED = "interleaved"  # `moe_layers`, else every `interleave_moe_layer_step`-th
    STEP = "step"  # every `decoder_sparse_step`-th
    FIRST_DENSE = "first_dense"  # `first_k_dense_replace`
    HASHED = "hashed"  # the first ones by a table of token ids


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedGateUp:
    """Gate and up columns of all experts in one tensor [E, D, 2F], or [E, 2F, D] if it `is_transposed` (Gemma 4).

    They alternate with `step` 2 (gpt-oss); with 1, those of the gate come first (Llama 4).
    """

    base: str
    step: int = 1
    is_transposed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyTraits:
    """A row of the table of families. Defaults are those of the family's config class in transformers.

    `mechanism` names the attention of its layers, `experts` the reader of its routing.
    """

    mechanism: str = "grouped"
    engine_class: str | None = None  # as vLLM and SGLang name it in `architectures`
    is_plain: bool = False  # its layers have nothing that no key of its config names
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    ignored_keys: frozenset[str] = frozenset()  # read only for some models, or repeated by layers
    # Layers.
    layers: LayerRule = LayerRule.FULL
    period: int = 1
    period_key: str | None = None
    mlps: MlpRule = MlpRule.DENSE
    n_dense: int = 0  # default of `first_k_dense_replace`
    mtp: tuple[str, int] = ("num_nextn_predict_layers", 0)
    # Grouped-query attention; `variant` names what else its family has.
    variant: str | None = None
    head_dim: int | None = None  # None: the hidden size over heads
    qk_norm: bool | str = False  # or the key that says it
    has_bias: bool = False
    has_o_bias: bool = True  # if queries, keys and values have biases
    has_gate: bool = False
    has_sinks: bool = False
    has_window: bool = False
    window: int | None = (
        None  # if the config has no `sliding_window`; null there means full attention
    )
    window_is_off: bool = False  # a window only if `use_sliding_window` is true
    # The residual stream and the MLP.
    is_gemma: bool = False
    norm_offset: float = 0.0  # norms multiply by it plus their weight
    ffn_key: str = "intermediate_size"  # the width of dense layers
    has_complex_rope: bool = False  # in transformers
    # Experts.
    experts: str | None = None
    routed_scale: float = 1.0
    has_shared_experts: bool = False
    fused_experts: FusedGateUp | None = None
    # Latent attention.
    has_indexer: bool = False
    # Tensors of the checkpoint, within a layer.
    is_fused: bool = False  # projections of attention in one tensor
    is_fused_mlp: bool = False
    attn_norm: str = "input_layernorm.weight"
    mlp_norm: str = "post_attention_layernorm.weight"
    mlp: str = "mlp."
    router: str = "mlp.gate."
    correction: str = "e_score_correction_bias"
    expert: str = "mlp.experts.{expert}."
    shared: str = "mlp.shared_experts."
    expert_names: tuple[str, str, str] = PROJECTIONS
    head: str = "lm_head.weight"
    # tpu-inference keeps the whole context in every layer of models of its own
    # (tpu_inference/runner/kv_cache_manager.py, get_kv_cache_spec, commit b8692ff0). Its other models limit
    # layers with a window to it, if the heads of all layers have one size.
    keeps_whole_context: bool = False

    @property
    def dense_tensors(self) -> Mapping[str, str]:
        """Tensors of the MLP of dense layers, by role."""
        return _gated(self.mlp, PROJECTIONS)

    @property
    def expert_tensors(self) -> Mapping[str, str]:
        """Tensors of the expert `{expert}`, by role in the gated MLP."""
        return _gated(self.expert, self.expert_names)

    @property
    def shared_tensors(self) -> Mapping[str, str]:
        """Tensors of the shared experts, by role in the gated MLP."""
        return _gated(self.shared, self.expert_names)


def _gated(base: str, names: tuple[str, str, str]) -> Mapping[str, str]:
    roles = ("gate", "up", "down")
    return {role: f"{base}{name}.weight" for role, name in zip(roles, names, strict=True)}


# Tensors of the norms after attention and after the MLP, in families that have them.
POST_NORM_TENSORS = ("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")
# Scales of an MLP beside experts (Gemma 4): of the MLP's output, and of the experts' input and output.
SIDE_NORM_TENSORS = {
    "dense_post_norm": "post_feedforward_layernorm_1.weight",
    "experts_norm": "pre_feedforward_layernorm_2.weight",
    "experts_post_norm": "post_feedforward_layernorm_2.weight",
}
_WIDE_HEAD = 256  # of Gemma2Config, Gemma3TextConfig, Qwen3NextConfig and Qwen3_5TextConfig
_GEMMA = FamilyTraits(
    is_gemma=True,
    layers=LayerRule.WINDOWS,
    head_dim=_WIDE_HEAD,
    has_window=True,
    window=4096,
    norm_offset=1.0,
    mlp_norm="pre_feedforward_layernorm.weight",
)
_HYBRID = FamilyTraits(
    layers=LayerRule.HYBRID,
    head_dim=_WIDE_HEAD,
    qk_norm=True,
    has_gate=True,
    norm_offset=1.0,
    mtp=("mtp_num_hidden_layers", 1),  # vllm/model_executor/models/qwen3_5_mtp.py
    defaults={"partial_rotary_factor": 0.25},
    ignored_keys=frozenset({"attn_output_gate", "output_gate_type", "full_attention_interval"}),
)
_HYBRID_EXPERTS = replace(_HYBRID, has_shared_experts=True, shared="mlp.shared_expert.")
_WINDOWED = FamilyTraits(layers=LayerRule.UNIFORM, has_window=True)
_QWEN = FamilyTraits(window_is_off=True, keeps_whole_context=True)
_QWEN3 = replace(
    _QWEN,
    head_dim=128,  # of Qwen3Config for every hidden size
    qk_norm=True,
    ignored_keys=frozenset({"use_qk_norm"}),
)
_DEEPSEEK = FamilyTraits(
    mechanism="latent",
    is_plain=True,
    mlps=MlpRule.FIRST_DENSE,
    n_dense=3,
    experts="deepseek_v3",
    routed_scale=2.5,
    has_shared_experts=True,
    ignored_keys=frozenset(
        {"head_dim", "qk_head_dim", "num_key_value_heads", "n_group", "topk_group"}
        | {"index_share_for_mtp_iteration", "index_topk_freq", "index_skip_topk_offset"}
    ),
)
_SPARSE = replace(_DEEPSEEK, is_plain=False, has_indexer=True)

TRAITS: Mapping[Family, FamilyTraits] = {
    Family.LLAMA: FamilyTraits(
        is_plain=True, engine_class="LlamaForCausalLM", keeps_whole_context=True
    ),
    Family.LLAMA4: FamilyTraits(
        variant="llama4",
        has_complex_rope=True,
        layers=LayerRule.CHUNKS,
        mlps=MlpRule.INTERLEAVED,
        ffn_key="intermediate_size_mlp",
        experts="llama4",
        has_shared_experts=True,
        fused_experts=FusedGateUp(base="feed_forward.experts."),
        mlp="feed_forward.",
        router="feed_forward.router.",
        shared="feed_forward.shared_expert.",
        keeps_whole_context=True,
    ),
    Family.MISTRAL: replace(_WINDOWED, window=4096),
    Family.MINISTRAL: replace(_WINDOWED, layers=LayerRule.WINDOWS, period=0, window=4096),
    Family.MINISTRAL3: replace(_WINDOWED, variant="ministral3"),
    Family.PHI3: replace(_WINDOWED, is_fused=True, is_fused_mlp=True),
    Family.GEMMA2: replace(_GEMMA, variant="gemma2", period=2),
    Family.GEMMA3: replace(
        _GEMMA,
        variant="gemma3",
        period=6,
        period_key="sliding_window_pattern",
        qk_norm=True,
        defaults={
            "vocab_size": 262_208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131_072,
        },
    ),
    Family.GEMMA4: replace(
        _GEMMA,
        variant="gemma4",
        period=6,
        qk_norm=True,
        window=512,
        norm_offset=0.0,
        mlps=MlpRule.BESIDE,
        experts="gemma4",
        fused_experts=FusedGateUp(base="experts.", is_transposed=True),
        router="router.proj.",
        ignored_keys=frozenset(
            {"num_global_key_value_heads", "vocab_size_per_layer_input", "per_layer_config"}
            | {"num_experts", "top_k_experts", "moe_intermediate_size"}
        ),
        keeps_whole_context=True,
    ),
    Family.QWEN2: replace(_QWEN, has_bias=True, has_o_bias=False, engine_class="Qwen2ForCausalLM"),
    Family.QWEN3: replace(_QWEN3, engine_class="Qwen3ForCausalLM"),
    Family.MIXTRAL: FamilyTraits(
        is_plain=True,
        engine_class="MixtralForCausalLM",
        mlps=MlpRule.ALL,
        experts="mixtral",
        router="block_sparse_moe.gate.",
        expert="block_sparse_moe.experts.{expert}.",
        expert_names=("w1", "w3", "w2"),
    ),
    Family.QWEN3_MOE: replace(
        _QWEN3,
        engine_class="Qwen3MoeForCausalLM",
        mlps=MlpRule.STEP,
        experts="qwen3_moe",
        keeps_whole_context=False,
    ),
    Family.QWEN3_NEXT: replace(
        _HYBRID_EXPERTS,
        mlps=MlpRule.STEP,
        experts="qwen3_next",
        is_fused=True,
        mtp=("num_nextn_predict_layers", 1),  # vllm/model_executor/models/qwen3_next_mtp.py
    ),
    Family.QWEN3_5: _HYBRID,
    Family.QWEN3_5_MOE: replace(_HYBRID_EXPERTS, mlps=MlpRule.ALL, experts="qwen3_5"),
    Family.GLM4_MOE: FamilyTraits(
        is_plain=True,
        qk_norm="use_qk_norm",
        has_o_bias=False,
        mlps=MlpRule.FIRST_DENSE,
        n_dense=1,
        experts="deepseek_v3",
        has_shared_experts=True,
    ),
    Family.GPT_OSS: FamilyTraits(
        engine_class="GptOssForCausalLM",
        layers=LayerRule.WINDOWS,
        period=2,
        has_bias=True,
        has_sinks=True,
        has_window=True,
        window=128,
        mlps=MlpRule.ALL,
        experts="gpt_oss",
        fused_experts=FusedGateUp(base="mlp.experts.", step=2),
        router="mlp.router.",
        ignored_keys=frozenset({"swiglu_alpha"}),
        keeps_whole_context=True,
    ),
    Family.DEEPSEEK_V2: replace(
        _DEEPSEEK, n_dense=0, experts="deepseek_v2", routed_scale=1.0, has_complex_rope=True
    ),
    Family.DEEPSEEK_V3: replace(_DEEPSEEK, engine_class="DeepseekV3ForCausalLM"),
    Family.DEEPSEEK_V32: _SPARSE,
    Family.GLM_MOE_DSA: replace(_SPARSE, layers=LayerRule.INDEXERS),
    Family.DEEPSEEK_V4: FamilyTraits(
        mechanism="compressed",
        layers=LayerRule.ENTRIES,
        mlps=MlpRule.HASHED,
        experts="deepseek_v4",
        has_shared_experts=True,
        attn_norm="attn_norm.weight",
        mlp_norm="ffn_norm.weight",
        router="ffn.gate.",
        correction="bias",
        expert="ffn.experts.{expert}.",
        shared="ffn.shared_experts.",
        expert_names=("w1", "w3", "w2"),
        head="head.weight",
        ignored_keys=frozenset(
            {"compress_ratios", "compress_rates", "n_shared_experts", "norm_topk_prob"}
            | {"topk_method", "qk_rope_head_dim"}
        ),
    ),
}
# Model types with the layers of another family: Kimi K2's config states DeepseekV3ForCausalLM as its architecture,
# GLM-4.7-Flash has the same layers, and the text parts of Qwen-VL are Qwen2 and Qwen3.
SAME_ARCHITECTURE = {
    **dict.fromkeys(("seed_oss", "mimo"), Family.QWEN2),
    **dict.fromkeys(("granite", "smollm3", "solar", "ernie4_5"), Family.LLAMA),
    **dict.fromkeys(("kimi_k2", "glm4_moe_lite"), Family.DEEPSEEK_V3),
    **dict.fromkeys(("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"), Family.QWEN2),
    "qwen3_vl_text": Family.QWEN3,
    **dict.fromkeys(("qwen3_vl_moe_text", "qwen3_omni_moe_text"), Family.QWEN3_MOE),
    "gemma4_unified_text": Family.GEMMA4,
    "qwen3_5": Family.QWEN3_5,
    "qwen3_5_moe": Family.QWEN3_5_MOE,
}
# Families with an indexer, and those that mix layers of linear attention with layers of full attention.
SPARSE_FAMILIES = frozenset(family for family, row in TRAITS.items() if row.has_indexer)
HYBRID_FAMILIES = frozenset(
    family for family, row in TRAITS.items() if row.layers is LayerRule.HYBRID
)
