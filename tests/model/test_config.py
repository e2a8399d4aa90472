"""Reading Hugging Face configs: values, defaults and refusals."""

import json
import os
import urllib.error
import urllib.request
from dataclasses import replace
from email.message import Message
from pathlib import Path
from typing import Any, NoReturn, Self

import pytest

from meshscope.errors import SpecError
from meshscope.model.catalog import catalog
from meshscope.model.config import MAX_CONFIG_BYTES, model_from_config, read_model
from meshscope.model.families import Family
from meshscope.model.layers import AttentionKind, Layer, MlpKind
from meshscope.model.mechanisms.attention import Indexer
from meshscope.model.mechanisms.grouped import GroupedAttention
from meshscope.model.mechanisms.latent import LatentAttention
from meshscope.model.mechanisms.linear import LinearAttention
from meshscope.model.mechanisms.mixture import GroupScore, MixtureOfExperts, Scoring
from meshscope.model.model import Model
from meshscope.model.reader import Rope, RopeType
from meshscope.plans.caches import layer_cache
from meshscope.plans.experiment_record import model_as_dict, model_from_dict
from meshscope.plans.plan import parse_plan
from meshscope.plans.weights import layer_weights, outer_weights

# Published configs; SOURCES.md in this folder says where each file is from.
PUBLISHED_CONFIGS = Path(__file__).parent / "data" / "configs"

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 100,
}


def _model(**changes: Any) -> Model:
    """The model of the small config with `changes`; None removes a key."""
    config = {key: value for key, value in (LLAMA | changes).items() if value is not None}
    return model_from_config(config, name="small", source="small.json")


def test_a_minimal_config_uses_the_defaults_of_transformers() -> None:
    assert _model() == Model(
        name="small",
        family=Family.LLAMA,
        layers=(Layer(), Layer()),
        hidden=64,
        ffn=96,
        vocab=100,
        attention=GroupedAttention(
            n_heads=4,
            n_kv_heads=4,
            head_dim=16,
            has_qkv_bias=False,
            has_o_bias=False,
            has_qk_norm=False,
            rope=Rope(theta=10_000.0),
        ),
        norm_eps=1e-6,
        has_tied_embeddings=False,
        has_mlp_bias=False,
        max_position=None,
        source="small.json",
    )


@pytest.mark.parametrize("key", sorted(LLAMA.keys() - {"num_key_value_heads"}))
def test_a_missing_required_key_is_named(key: str) -> None:
    with pytest.raises(
        SpecError, match=rf"small.json: the config has no '{key}'.*complete config.json"
    ):
        _model(**{key: None})


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("hidden_size", "64", "'hidden_size' must be an integer, got '64'"),
        ("hidden_size", 64.0, "'hidden_size' must be an integer"),
        ("num_hidden_layers", True, "'num_hidden_layers' must be an integer"),
        ("num_attention_heads", 0, "'num_attention_heads' must be positive, got 0"),
        ("num_key_value_heads", 0, "'num_key_value_heads' must be positive, got 0"),
        (
            "num_key_value_heads",
            3,
            "num_attention_heads=4 is not a multiple of num_key_value_heads=3",
        ),
        ("vocab_size", -1, "'vocab_size' must be positive, got -1"),
        ("hidden_size", 10**30, "'hidden_size' is 1000000000000000000000000000000, more than any"),
        (
            "num_hidden_layers",
            10**5,
            "'num_hidden_layers' is 100000, more than any model has. Use at most 10,000",
        ),
        ("max_position_embeddings", -1, "'max_position_embeddings' must be positive"),
        ("num_attention_heads", 65, "'head_dim' must be positive, got 0"),
        ("rms_norm_eps", "small", "'rms_norm_eps' must be a number"),
        ("tie_word_embeddings", 1, "'tie_word_embeddings' must be true or false"),
        ("model_type", ["llama"], "'model_type' must be a string"),
        ("quantization_config", "int8", "must be an object with a quant_method, got 'int8'"),
        ("rope_theta", float("nan"), "'rope_theta' must be finite, got nan"),
        ("rope_theta", float("inf"), "'rope_theta' must be finite, got inf"),
        ("rope_theta", 0, "'rope_theta' must be positive, got 0"),
        ("rope_scaling", {"type": "linear", "factor": 0}, "'factor' must be positive, got 0"),
        ("hidden_act", "gelu", "hidden_act='gelu' is not supported. Supported: 'silu'"),
        ("use_sliding_window", True, "Set it to false"),
        (
            "rope_scaling",
            {"rope_type": "ntk"},
            "rope type 'ntk' is not supported. Supported: default",
        ),
        (
            "rope_scaling",
            {
                "rope_type": "longrope",
                "original_max_position_embeddings": 64,
                "max_position_embeddings": 128,
                "short_factor": [1.0],
            },
            "longrope needs 8 numbers in short_factor and in long_factor, got 1 and 0",
        ),
        ("rope_scaling", {"rope_type": ["llama3"]}, "'rope_type' must be a string"),
        ("rope_scaling", "linear", "'rope_scaling' must be an object, got 'linear'"),
        ("rope_scaling", {"factor": "8"}, "'factor' must be a number"),
    ],
    ids=str,
)
def test_an_invalid_value_is_refused_with_its_key(key: str, value: Any, complaint: str) -> None:
    with pytest.raises(SpecError) as caught:
        _model(**{key: value})
    assert str(caught.value).startswith(("small.json: ", "'quantization_config'"))
    assert complaint in str(caught.value)


@pytest.mark.parametrize("model_type", ["llama", "phi3"])
def test_a_llama_without_kv_heads_has_as_many_as_heads(model_type: str) -> None:
    attention = _model(model_type=model_type, num_key_value_heads=None).attention
    assert isinstance(attention, GroupedAttention)
    assert attention.n_kv_heads == 4


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "mistral", "gemma2"])
def test_kv_heads_that_other_families_do_not_state_are_not_guessed(model_type: str) -> None:
    """Their classes have a number of their own; null means as many as heads."""
    with pytest.raises(SpecError, match="the config has no 'num_key_value_heads'"):
        _model(model_type=model_type, num_key_value_heads=None)
    config = LLAMA | {"model_type": model_type, "num_key_value_heads": None}
    attention = model_from_config(config, name="small", source="small.json").attention
    assert isinstance(attention, GroupedAttention)
    assert attention.n_kv_heads == 4


LLAMA3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3_ROPE}},
        {"rope_theta": 500000.0, "rope_scaling": {"type": "llama3", **LLAMA3_ROPE}},
        {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "llama3", **LLAMA3_ROPE}},
    ],
    ids=["rope_type", "type, the old name", "rope_parameters of transformers 5"],
)
def test_old_and_new_names_of_rope_scaling_are_equivalent(keys: dict[str, Any]) -> None:
    assert _model(**keys).attention.rope == Rope(
        theta=500_000.0, rope_type=RopeType.LLAMA3, factor=8.0, original_max_position=8192
    )


def test_linear_rope_scaling_keeps_its_factor() -> None:
    rope = _model(rope_scaling={"type": "linear", "factor": 2}).attention.rope
    assert rope == Rope(theta=10_000.0, rope_type=RopeType.LINEAR, factor=2.0)


def test_null_rope_scaling_is_none() -> None:
    config = LLAMA | {"rope_scaling": None}
    model = model_from_config(config, name="small", source="small.json")
    assert model.attention.rope.rope_type is RopeType.DEFAULT


@pytest.mark.parametrize(
    ("family", "has_qkv_bias", "has_o_bias", "has_qk_norm"),
    [("llama", False, False, False), ("qwen2", True, False, False), ("qwen3", False, False, True)],
)
def test_families_differ_in_bias_and_norm(family, *, has_qkv_bias, has_o_bias, has_qk_norm) -> None:
    attention = _model(model_type=family).attention
    flags = (attention.has_qkv_bias, attention.has_o_bias, attention.has_qk_norm)
    assert flags == (has_qkv_bias, has_o_bias, has_qk_norm)


@pytest.mark.parametrize(
    ("family", "head_dim"), [("llama", 64 // 4), ("qwen2", 64 // 4), ("qwen3", 128)]
)
def test_head_dim_defaults_to_hidden_over_heads_except_in_qwen3(family: str, head_dim: int) -> None:
    assert _model(model_type=family).attention.head_dim == head_dim


def test_attention_bias_of_llama_is_on_all_four_projections() -> None:
    attention = _model(attention_bias=True).attention
    assert (attention.has_qkv_bias, attention.has_o_bias) == (True, True)


def test_a_folder_its_config_file_and_another_json_file_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "tiny-llama"
    folder.mkdir()
    for path in (folder / "config.json", tmp_path / "other.json"):
        path.write_text(json.dumps(LLAMA))

    names = [
        read_model(str(p)).name for p in (folder, folder / "config.json", tmp_path / "other.json")
    ]

    assert names == ["tiny-llama", "tiny-llama", "other"]


@pytest.mark.parametrize("name", ["Qwen/Qwen3-32B", "qwen/qwen3-32b", "Qwen3-32B", "qwen3-32b"])
def test_an_id_is_found_in_any_case_and_without_its_owner(name: str) -> None:
    assert read_model(name).name == "Qwen/Qwen3-32B"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"{", "is not valid JSON"),
        (b"\xff\xfe\xfa", "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
        (b"[1]", "must contain a JSON object, got list"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "is not valid JSON: the key 'c' is there twice"),
        (b" " * (MAX_CONFIG_BYTES + 1), f"larger than {MAX_CONFIG_BYTES:,} bytes"),
    ],
    ids=["truncated", "not text", "nested too deep", "a list", "repeats", "too large"],
)
def test_a_file_without_a_valid_config_is_refused(tmp_path, content, complaint) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(SpecError, match=complaint):
        read_model(str(path))


def test_a_file_that_cannot_be_read_is_refused(tmp_path, monkeypatch) -> None:
    path = tmp_path / "config.json"
    path.write_text("{}")

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(SpecError, match=r"config.json' cannot be read: Permission denied"):
        read_model(str(path))


@pytest.mark.parametrize("name", ["./no/such/folder", "missing.json", "~/model"])
def test_a_missing_path_is_not_looked_up_as_an_id(name: str) -> None:
    with pytest.raises(SpecError, match=r"no config file at .* or a model id"):
        read_model(name)


@pytest.fixture
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise urllib.error.URLError("Network is unreachable")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)


@pytest.mark.usefixtures("_offline")
def test_an_unknown_id_without_network_is_refused_with_suggestions() -> None:
    with pytest.raises(SpecError) as caught:
        read_model("Qwen/Qwen3-33B")
    assert str(caught.value) == (
        "'Qwen/Qwen3-33B' is not in the catalog. Did you mean 'Qwen/Qwen3-32B' or 'Qwen/Qwen3-32B-FP8' or "
        "'Qwen/Qwen3-32B-AWQ'? Or give its config.json, or a folder with one. "
        "Its config was not downloaded: the Hub cannot be reached."
    )


@pytest.mark.usefixtures("_offline")
def test_an_id_unlike_any_other_is_refused_with_the_command_that_lists_all() -> None:
    with pytest.raises(SpecError) as caught:
        read_model("state-spaces/mamba-2.8b")
    assert str(caught.value) == (
        "'state-spaces/mamba-2.8b' is not in the catalog. 'meshscope models' lists all. "
        "Or give its config.json, or a folder with one. "
        "Its config was not downloaded: the Hub cannot be reached."
    )


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("meta-llama/Llama-2-13b-hf", "meta-llama/Llama-2-13B"),
        ("meta-llama/Llama-3.3-70B-Instruct", "meta-llama/Llama-3.3-70B"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B"),
        ("deepseek-ai/DeepSeek-V3.1", "deepseek-ai/DeepSeek-V3.1-Base"),
        ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-0.5B"),
        ("Qwen/Qwen3-32B-FP8", "Qwen/Qwen3-32B"),
        ("Qwen/Qwen3-30B-A3B-Thinking-2507", "Qwen/Qwen3-30B-A3B-Instruct-2507"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mistralai/Mixtral-8x7B-v0.1"),
        ("RedHatAI/Meta-Llama-3.1-70B-Instruct-quantized.w8a8", "meta-llama/Llama-3.1-70B"),
    ],
)
@pytest.mark.usefixtures("_offline")
def test_a_variant_has_the_sizes_of_its_base_model(name: str, base: str) -> None:
    variant = read_model(name)
    assert variant.name == name
    assert replace(variant, name=base) == read_model(base)


@pytest.mark.usefixtures("_offline")
def test_the_catalog_needs_no_network() -> None:
    assert [read_model(name).name for name in catalog()] == list(catalog())


def test_a_name_without_owner_is_not_requested_from_the_hub(monkeypatch) -> None:
    requests: list[Any] = []
    monkeypatch.setattr(urllib.request, "urlopen", lambda *args, **_: requests.append(args))
    with pytest.raises(SpecError, match="'llama' is not in the catalog"):
        read_model("llama")
    assert requests == []


class _Reply:
    def __init__(self, text: bytes) -> None:
        self.text = text

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def read(self, limit: int) -> bytes:
        return self.text[:limit]


def test_an_id_outside_the_catalog_is_read_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        urllib.request, "urlopen", lambda *_, **__: _Reply(json.dumps(LLAMA).encode())
    )
    model = read_model("someone/small")
    assert (model.name, model.hidden) == ("someone/small", 64)
    assert model.source.endswith("/someone/small/resolve/main/config.json")


def test_the_quantization_file_of_modelopt_is_read_from_the_hub(monkeypatch) -> None:
    """Only for an id that names a format; a model without the file has the dtype of its config."""
    files = {
        "someone/small-FP8-KV/resolve/main/config.json": LLAMA,
        "someone/small-FP8-KV/resolve/main/hf_quant_config.json": {
            "quantization": {"quant_algo": "FP8"}
        },
        "someone/other-FP8-KV/resolve/main/config.json": LLAMA,
        "someone/plain/resolve/main/config.json": LLAMA,
    }
    asked: list[str] = []

    def reply(request: urllib.request.Request, **_: object) -> _Reply:
        path = request.full_url.removeprefix("https://huggingface.co/")
        asked.append(path)
        if path not in files:
            raise urllib.error.HTTPError(request.full_url, 404, "Not Found", Message(), None)
        return _Reply(json.dumps(files[path]).encode())

    monkeypatch.setattr(urllib.request, "urlopen", reply)
    assert read_model("someone/small-FP8-KV").stored_as == "modelopt FP8"
    assert read_model("someone/other-FP8-KV").stored_as is None
    assert read_model("someone/plain").stored_as is None
    assert [path.rsplit("/", 1)[-1] for path in asked] == [
        *("config.json", "hf_quant_config.json") * 2,
        "config.json",
    ]


PUBLISHED_AS = {
    "Meta-Llama-3.1-8B": "Llama-3.1-8B",
    "Meta-Llama-3.1-70B": "Llama-3.1-70B",
    "Meta-Llama-3.1-405B": "Llama-3.1-405B",
    "Llama-3.3-70B-Instruct": "Llama-3.3-70B",
    "Llama-2-13b-hf": "Llama-2-13B",
    "Qwen3-Coder-480B-A35B-Instruct": "Qwen3-Coder-480B-A35B",
    "Kimi-K2-Instruct": "Kimi-K2",
    "Qwen3.5-397B-A17B-FP8": "Qwen3.5-397B-A17B",
}
# Models whose config.json is not among the published files here; their sizes are tested.
WITHOUT_CONFIG = {
    "deepseek-ai/DeepSeek-V3.1-Base",
    "deepseek-ai/DeepSeek-V4-Flash-Base",
    "Qwen/Qwen3-14B",
    *(f"Qwen/Qwen2.5-{size}" for size in ("0.5B", "1.5B", "3B", "7B", "14B", "72B")),
    "meta-llama/Llama-2-7B",
    "meta-llama/Llama-2-70B",
    "meta-llama/Llama-3.2-1B",
    "meta-llama/Meta-Llama-3-8B",
    "meta-llama/Meta-Llama-3-70B",
    "moonshotai/Kimi-K2-Instruct-0905",
    "moonshotai/Kimi-K2-Thinking",
    "Qwen/Qwen3-Next-80B-A3B-Instruct",
    *(f"Qwen/Qwen3-{size}-Instruct-2507" for size in ("4B", "30B-A3B", "235B-A22B")),
    *(f"Qwen/Qwen3.5-{size}" for size in ("0.8B", "4B", "9B")),
    *(f"Qwen/Qwen2.5-VL-{size}-Instruct" for size in ("3B", "7B", "72B")),
    *(name for name in catalog() if name.startswith("zai-org/GLM-4")),
    *(name for name in catalog() if name.startswith(("google/gemma-2", "google/gemma-3"))),
    *(f"google/gemma-4-{size}" for size in ("12B", "31B-it", "E2B-it", "E4B-it")),
    "google/medgemma-27b-text-it",
    *(
        name
        for name in catalog()
        if name.startswith(
            (
                *("mistralai/Ministral", "mistralai/Mistral", "microsoft/"),
                *("codellama/", "tiiuae/", "HuggingFaceTB/", "TinyLlama/"),
            )
        )
    ),
}
UNSUPPORTED = {"deepseek"}


def test_the_catalog_equals_the_published_configs() -> None:
    """Where the file has no context, as those from MaxText, that of the catalog is taken."""
    seen: set[str] = set()
    for path in PUBLISHED_CONFIGS.glob("*.json"):
        config = json.loads(path.read_text())
        if config["model_type"] in UNSUPPORTED:
            continue
        short_name = path.stem.split("--")[1]
        entry = read_model(PUBLISHED_AS.get(short_name, short_name))
        if "text_config" not in config:
            config.setdefault("max_position_embeddings", entry.max_position)
        published = model_from_config(config, name=entry.name, source=entry.source)
        assert entry == published
        assert entry.text_part_of == published.text_part_of
        assert (entry.unread_keys, published.unread_keys) == ((), ())
        seen.add(PUBLISHED_AS.get(short_name, short_name))
    assert seen == {name.partition("/")[2] for name in set(catalog()) - WITHOUT_CONFIG}


DEEPSEEK: dict[str, Any] = LLAMA | {
    "model_type": "deepseek_v3",
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 16,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 4,
    "n_group": 4,
    "topk_group": 2,
}


def test_a_minimal_deepseek_config_uses_the_defaults_of_transformers() -> None:
    model = model_from_config(DEEPSEEK, name="small", source="small.json")
    assert [layer.name for layer in model.layers] == ["full/dense"] * 3 + ["full/moe"]
    assert model.moe == MixtureOfExperts(
        n_experts=16,
        n_active=4,
        ffn=8,
        shared_ffn=16,
        scoring=Scoring.SIGMOID,
        is_normalized=True,
        scale=2.5,
        n_groups=4,
        n_active_groups=2,
        group_score=GroupScore.TOP2_SUM,
        has_correction_bias=True,
    )


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"scoring_func": "softmax"}, "scoring_func='softmax' is not supported for deepseek_v3"),
        ({"topk_method": "greedy"}, "topk_method='greedy' is not supported for deepseek_v3"),
        ({"n_group": 3}, "n_group=3 does not divide 16 experts"),
        ({"topk_group": 5}, "topk_group=5 exceeds n_group=4. Correct the config"),
        ({"num_experts_per_tok": 9}, "9 experts per token exceed the 8 available in 2 of 4 groups"),
        ({"mlp_layer_types": ["dense"] * 3}, "must list one of dense, sparse .*, got 3 entries"),
        ({"mlp_layer_types": ["dense"] * 3 + ["wide"]}, r"must list .*, got \['wide'\]"),
        ({"first_k_dense_replace": -1}, "'first_k_dense_replace' must be positive, got -1"),
        ({"kv_lora_rank": None}, "the config has no 'kv_lora_rank'"),
    ],
)
def test_invalid_experts_are_refused_with_their_key(changes, complaint) -> None:
    config = {k: v for k, v in (DEEPSEEK | changes).items() if v is not None}
    with pytest.raises(SpecError, match=complaint):
        model_from_config(config, name="small", source="small.json")


GLM_5 = DEEPSEEK | {
    "model_type": "glm_moe_dsa",
    "index_n_heads": 4,
    "index_head_dim": 8,
    "index_topk": 2,
}


@pytest.mark.parametrize(
    "changes",
    [{}, {"index_topk_freq": 1}, {"indexer_types": ["full"] * 4}, {"index_topk_pattern": "FFFF"}],
)
def test_the_indexer_of_glm_5_pairs_neighbors(changes: dict[str, Any]) -> None:
    model = model_from_config(GLM_5 | changes, name="small", source="small.json")
    assert isinstance(model.attention, LatentAttention)
    assert model.attention.indexer == Indexer(n_heads=4, head_dim=8, top_k=2, is_interleaved=True)
    assert [layer.name for layer in model.layers] == ["full/dense"] * 3 + ["full/moe"]


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({"index_topk_freq": 2}, "FFSF"),  # from layer 1 on, every second one
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, "FFFS"),
        ({"index_topk_pattern": "FSSF"}, "FSSF"),
        ({"indexer_types": ["full", "shared"] * 2}, "FSFS"),
    ],
)
def test_layers_of_glm_5_2_share_an_indexer(changes: dict[str, Any], kinds: str) -> None:
    model = model_from_config(GLM_5 | changes, name="small", source="small.json")
    letters = {AttentionKind.FULL: "F", AttentionKind.SHARED: "S"}
    assert "".join(letters[layer.attention] for layer in model.layers) == kinds


def test_glm_5_2_has_an_indexer_in_every_fourth_layer() -> None:
    """Its config.json lists 21 layers with an indexer and 57 without."""
    kinds = [layer.attention for layer in read_model("zai-org/GLM-5.2").layers]
    has_indexer = [index for index, kind in enumerate(kinds) if kind is AttentionKind.FULL]
    assert has_indexer == [0, 1, *range(2, 78, 4)]
    assert len(has_indexer) == 21


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"indexer_types": 4}, "'indexer_types' must list one of full, F, .* for each of 4 layers"),
        ({"index_topk_pattern": "FF"}, "'index_topk_pattern' must list one of .* got 'FF'"),
        ({"index_topk_pattern": "FXFF"}, "'index_topk_pattern' must list one of"),
        ({"index_topk_pattern": "SFFF"}, "lets the first layer take the positions .* Start with"),
    ],
)
def test_wrong_lists_of_indexers_are_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(SpecError, match=complaint):
        model_from_config(GLM_5 | changes, name="small", source="small.json")


@pytest.mark.parametrize("name", catalog())
def test_a_stored_model_is_read_back_unchanged(name: str) -> None:
    model = read_model(name)
    assert model_from_dict(json.loads(json.dumps(model_as_dict(model)))) == model


GEMMA_3_4B: dict[str, Any] = {
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
}


def test_the_text_part_of_a_multimodal_config_is_the_model() -> None:
    """google/gemma-3-4b-it states only what differs from the defaults of transformers."""
    model = model_from_config(GEMMA_3_4B, name="google/gemma-3-4b-it", source="test")
    assert (model.text_part_of, model.stored_as) == ("gemma3", "bfloat16")
    entry = read_model("google/gemma-3-4b-it")
    assert replace(model, source=entry.source) == entry


GEMMA4 = LLAMA | {
    "model_type": "gemma4_text",
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "num_global_key_value_heads": 4,
    "attention_k_eq_v": True,
    "num_hidden_layers": 8,
    "hidden_size_per_layer_input": 0,
}


def test_gemma_4_has_heads_and_rotary_embeddings_by_kind_of_layer() -> None:
    """The defaults are those of transformers' Gemma4TextConfig; the last layer is always full."""
    model = model_from_config(GEMMA4, name="small", source="test")
    attention = model.attention
    assert isinstance(attention, GroupedAttention)
    kinds = [layer.attention for layer in model.layers]
    full, sliding = AttentionKind.FULL, AttentionKind.SLIDING
    assert kinds == [*[sliding] * 5, full, sliding, full]
    heads = [
        (one.n_kv_heads, one.head_dim, one.has_shared_values) for one in map(attention.of, kinds)
    ]
    assert heads[4:6] == [(16, 256, False), (4, 512, True)]
    assert attention.score_scale == 1.0
    assert (attention.window, attention.rope_of(sliding).theta) == (512, 10_000.0)
    rope = attention.rope_of(full)
    assert (rope.rope_type, rope.theta, rope.rotary_frac) == ("proportional", 1_000_000.0, 0.25)


def test_gemma_4_may_have_experts_beside_the_mlp_of_every_layer() -> None:
    experts = {"num_experts": 16, "top_k_experts": 4, "moe_intermediate_size": 704}
    model = model_from_config(
        GEMMA4 | experts | {"enable_moe_block": True}, name="small", source="test"
    )
    assert {layer.mlp for layer in model.layers} == {MlpKind.DENSE_AND_MOE}
    assert model.moe is not None
    assert (model.ffn, model.moe.ffn, model.moe.shared_ffn) == (
        LLAMA["intermediate_size"],
        704,
        None,
    )
    assert (model.moe.n_experts, model.moe.n_active) == (16, 4)
    assert model_from_config(GEMMA4 | experts, name="small", source="test").moe is None


def test_gemma_4_may_share_caches_and_embed_tokens_for_each_layer() -> None:
    """The last layers have no keys and values, wider MLPs, and the cache of the last layer of their kind before."""
    parts = {"num_kv_shared_layers": 2, "use_double_wide_mlp": True}
    parts |= {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": LLAMA["vocab_size"]}
    model = model_from_config(GEMMA4 | parts, name="small", source="test")
    assert [layer.shares_cache for layer in model.layers] == [False] * 6 + [True] * 2
    last = model.layers[-1]
    assert model.ffn_of(last) == 2 * model.ffn_of(model.layers[0]) == 2 * LLAMA["intermediate_size"]
    assert model.cache_layer(last) == model.layers[5]
    plan = parse_plan("tp=1")
    names = [
        {weight.name for weight in layer_weights(model, plan, one)}
        for one in (model.layers[5], last)
    ]
    assert names[0] - names[1] == {"wk", "k_norm"}
    assert [len(layer_cache(model, plan, one)) for one in model.layers] == [2] * 6 + [0] * 2
    tables = {weight.name: weight for weight in outer_weights(model.first(4), plan)}
    assert tables["layer_embed"].shape == (model.vocab, 4 * 16)
    assert tables["layer_embed"].columns is not None
    assert tables["layer_embed"].columns.whole == 8 * 16


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"hidden_size_per_layer_input": 256}, "vocab_size_per_layer_input=262144 differs"),
        ({"num_kv_shared_layers": 7}, "no layer of kind 'full' before them"),
        ({"num_kv_shared_layers": 8}, "no layer of kind 'sliding' before them"),
        ({"use_bidirectional_attention": "all"}, "makes an encoder"),
        ({"num_global_key_value_heads": 5}, "not a multiple of num_global_key_value_heads=5"),
    ],
)
def test_wrong_configs_of_gemma_4_are_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(SpecError, match=text):
        model_from_config(GEMMA4 | changes, name="small", source="test")


def test_gemma_3_has_windows_in_five_of_six_layers_with_their_own_rotary_embedding() -> None:
    attention = read_model("google/gemma-3-27b-it").attention
    kinds = [layer.attention for layer in read_model("google/gemma-3-27b-it").layers]
    assert isinstance(attention, GroupedAttention)
    assert kinds[:6] == [AttentionKind.SLIDING] * 5 + [AttentionKind.FULL]
    assert attention.score_scale == 168**-0.5
    local = Rope(theta=10_000.0, original_max_position=131_072)
    assert attention.rope_of(AttentionKind.SLIDING) == local
    assert attention.rope_of(AttentionKind.FULL).factor == 8.0


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({"sliding_window": None}, {AttentionKind.FULL}),
        ({"sliding_window": 16}, {AttentionKind.SLIDING}),
        ({}, {AttentionKind.SLIDING}),  # MistralConfig's default window is 4096
    ],
)
def test_mistral_has_a_window_in_all_layers_or_none(changes, kinds) -> None:
    config = LLAMA | {"model_type": "mistral"} | changes
    model = model_from_config(config, name="small", source="small.json")
    assert {layer.attention for layer in model.layers} == kinds


def test_llama_4_has_chunks_where_it_turns_and_experts_in_every_other_layer() -> None:
    """Maverick: layers 3, 7, ... attend to all positions and do not turn; Scout has experts in all layers."""
    maverick = read_model("meta-llama/Llama-4-Maverick-17B-128E-Instruct")
    assert [layer.name for layer in maverick.layers[:4]] == [
        *("chunked/dense", "chunked/moe", "chunked/dense", "full/moe")
    ]
    attention = maverick.attention
    assert isinstance(attention, GroupedAttention)
    assert attention.rope_of(AttentionKind.FULL) is None
    assert (attention.window, attention.has_l2_norm) == (8192, False)
    scout = read_model("meta-llama/Llama-4-Scout-17B-16E-Instruct")
    assert {layer.mlp.value for layer in scout.layers} == {"moe"}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"num_experts_per_tok": 2}, "num_experts_per_tok=2 is not supported for llama4_text"),
        ({"no_rope_layers": [1]}, "'no_rope_layers' has 1 values for 2 layers"),
    ],
)
def test_other_forms_of_llama_4_are_refused(changes: dict[str, Any], complaint: str) -> None:
    config = LLAMA | {"model_type": "llama4_text", "num_local_experts": 4} | changes
    with pytest.raises(SpecError, match=complaint):
        model_from_config(config, name="small", source="small.json")


def test_qwen3_next_has_full_attention_in_every_fourth_layer() -> None:
    model = read_model("Qwen/Qwen3-Next-80B-A3B-Thinking")
    kinds = [layer.attention.value for layer in model.layers]
    assert kinds == ["linear", "linear", "linear", "full"] * 12
    assert model.moe is not None
    assert (model.moe.n_experts, model.moe.shared_ffn, model.moe.has_shared_gate) == (
        512,
        512,
        True,
    )
    assert model.attention.rope.rotary_dim(256) == 64


def test_the_text_part_of_qwen3_5_is_read() -> None:
    """The defaults of Qwen3_5TextConfig hold for what the config leaves out."""
    text = {key: value for key, value in LLAMA.items() if key != "model_type"}
    text |= {"head_dim": 16, "num_hidden_layers": 8, "full_attention_interval": 4}
    config = {"model_type": "qwen3_5", "text_config": text | {"model_type": "qwen3_5_text"}}
    model = model_from_config(config, name="small", source="small.json")
    assert (model.family, model.text_part_of) == (Family.QWEN3_5, "qwen3_5")
    assert [layer.name for layer in model.layers] == (["linear/dense"] * 3 + ["full/dense"]) * 2
    assert model.attention.rope.rotary_dim(16) == 4
    assert isinstance(model.attention, GroupedAttention)
    assert model.attention.linear == LinearAttention(
        n_key_heads=16, n_value_heads=32, key_dim=128, value_dim=128, conv_width=4
    )


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"linear_num_value_heads": 24}, "linear_num_value_heads=24 is not a multiple of"),
        ({"linear_conv_kernel_dim": 0}, "'linear_conv_kernel_dim' must be positive"),
        ({"linear_key_head_dim": 0}, "'linear_key_head_dim' must be positive"),
        ({"layer_types": ["sliding_attention"] * 2}, "must list one of linear_attention, full"),
    ],
)
def test_wrong_configs_of_qwen3_next_are_refused(changes: dict[str, Any], complaint: str) -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    config = LLAMA | {"model_type": "qwen3_next"} | experts | {"shared_expert_intermediate_size": 8}
    with pytest.raises(SpecError, match=complaint):
        model_from_config(config | changes, name="small", source="small.json")
