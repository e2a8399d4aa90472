"""Models from configs, and the catalog of published ones."""

import json
import urllib.error
import urllib.request
from collections import Counter
from dataclasses import replace
from email.message import Message
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import msgspec
import pytest
from make_golden_logits import causal_models
from tables import stored, table

from meshscope.analysis.utilization import n_parameters
from meshscope.errors import SpecError
from meshscope.model.catalog import catalog, catalog_ids, nearest_ids
from meshscope.model.config import MAX_CONFIG_BYTES, model_from_config, read_model
from meshscope.model.families import Family
from meshscope.model.layers import Layer
from meshscope.model.mechanisms.grouped import GroupedAttention
from meshscope.model.model import Model
from meshscope.model.reader import Rope
from meshscope.plans.caches import layer_cache
from meshscope.plans.experiment_record import model_as_dict, model_from_dict
from meshscope.plans.plan import Plan, parse_plan
from meshscope.plans.weights import device_weight_bytes, layer_weights, outer_weights

# Published configs; SOURCES.md in this folder says where each file is from.
PUBLISHED_CONFIGS = Path(__file__).parent / "data" / "configs"
TABLES: dict[str, Any] = stored(Path(__file__).with_suffix(".yaml"))
BASES: dict[str, dict[str, Any]] = TABLES["bases"]
LLAMA = BASES["llama"]


def _model(base: str, changes: dict[str, Any]) -> Model:
    """The model of a small config with `changes`; the value "absent" removes a key."""
    config = {key: value for key, value in (BASES[base] | changes).items() if value != "absent"}
    return model_from_config(config, name="small", source="small.json")


def _part(value: Any, expected: Any) -> Any:
    """What a value has of the keys that are expected."""
    if not isinstance(expected, dict) or not isinstance(value, dict):
        return [_part(one, None) for one in value] if isinstance(value, tuple) else value
    return {key: _part(value[key], part) for key, part in expected.items()}


@table
def test_a_config_gives_the_model(base: str, changes: dict, facts: dict[str, Any]) -> None:
    """Defaults are those of the classes in transformers."""
    model = _model(base, changes)
    got = msgspec.to_builtins(model) | {"layers": [layer.name for layer in model.layers]}
    assert _part(got, facts) == facts


@table
def test_an_invalid_config_is_refused_with_its_key(base, changes, complaint) -> None:
    with pytest.raises(SpecError, match=complaint) as caught:
        _model(base, changes)
    assert str(caught.value).startswith(("small.json: ", "'quantization_config'"))


def test_a_minimal_config_uses_the_defaults_of_transformers() -> None:
    assert _model("llama", {}) == Model(
        name="small",
        family=Family("llama"),
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


def test_a_folder_its_config_file_and_another_json_file_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "tiny-llama"
    folder.mkdir()
    paths = (folder / "config.json", tmp_path / "other.json")
    for path in paths:
        path.write_text(json.dumps(LLAMA))
    names = [read_model(str(path)).name for path in (folder, *paths)]
    assert names == ["tiny-llama", "tiny-llama", "other"]


@pytest.mark.parametrize("name", ["Qwen/Qwen3-32B", "qwen/qwen3-32b", "Qwen3-32B", "qwen3-32b"])
def test_an_id_is_found_in_any_case_and_without_its_owner(name: str) -> None:
    assert read_model(name).name == "Qwen/Qwen3-32B"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"{", "cannot be read: not JSON at line 1, column 2. Give"),
        (b"\xff\xfe\xfa", "cannot be read: not text, byte "),
        (b"[" * 100_000, "cannot be read: nested too deeply. Give the config.json"),
        (b"[1]", "must contain a JSON object, got list"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "cannot be read: the key 'c' is there twice"),
        (b" " * (MAX_CONFIG_BYTES + 1), f"larger than {MAX_CONFIG_BYTES:,} bytes"),
    ],
    ids=["truncated", "not text", "nested too deep", "a list", "repeats", "too large"],
)
def test_a_file_without_a_valid_config_is_refused(tmp_path, content, complaint) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(SpecError, match=complaint):
        read_model(str(path))


def _raising(error: OSError) -> Any:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise error

    return refuse


def test_a_file_that_cannot_be_read_is_refused(tmp_path, monkeypatch) -> None:
    path = tmp_path / "config.json"
    path.write_text("{}")
    monkeypatch.setattr(Path, "read_bytes", _raising(PermissionError(13, "Permission denied")))
    with pytest.raises(SpecError, match=r"config.json' cannot be read: Permission denied"):
        read_model(str(path))


@pytest.mark.parametrize("name", ["./no/such/folder", "missing.json", "~/model"])
def test_a_missing_path_is_not_looked_up_as_an_id(name: str) -> None:
    with pytest.raises(SpecError, match=r"no config file at .* or a model id"):
        read_model(name)


@pytest.fixture
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    error = urllib.error.URLError("Network is unreachable")
    monkeypatch.setattr(urllib.request, "urlopen", _raising(error))


@table
@pytest.mark.usefixtures("_offline")
def test_an_unknown_id_without_network_is_refused_with_suggestions(name, remedy) -> None:
    with pytest.raises(SpecError) as caught:
        read_model(name)
    assert str(caught.value) == (
        f"'{name}' is not in the catalog. {remedy} Or give its config.json, or a folder with one. "
        "Its config was not downloaded: the Hub cannot be reached."
    )


@table
@pytest.mark.usefixtures("_offline")
def test_a_variant_has_the_sizes_of_its_base_model(name: str, base: str) -> None:
    variant = read_model(name)
    assert variant.name == name
    assert replace(variant, name=base) == read_model(base)


@pytest.mark.usefixtures("_offline")
def test_the_catalog_needs_no_network() -> None:
    assert [read_model(name).name for name in catalog()] == list(catalog())


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A Hub with `files` by path, and the paths that were `asked` for."""
    fake = SimpleNamespace(files={}, asked=[])

    class Reply(SimpleNamespace):
        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            return

    def reply(request: urllib.request.Request, **_: object) -> Reply:
        path = request.full_url.removeprefix("https://huggingface.co/")
        fake.asked.append(path.rsplit("/", 1)[-1])
        if path not in fake.files:
            raise urllib.error.HTTPError(request.full_url, 404, "Not Found", Message(), None)
        text = json.dumps(fake.files[path]).encode()
        return Reply(read=lambda limit: text[:limit])

    monkeypatch.setattr(urllib.request, "urlopen", reply)
    return fake


def test_a_name_without_owner_is_not_requested_from_the_hub(hub) -> None:
    with pytest.raises(SpecError, match="'llama' is not in the catalog"):
        read_model("llama")
    assert hub.asked == []


def test_an_id_outside_the_catalog_is_read_from_the_hub(hub) -> None:
    hub.files["someone/small/resolve/main/config.json"] = LLAMA
    model = read_model("someone/small")
    assert (model.name, model.hidden) == ("someone/small", 64)
    assert model.source.endswith("/someone/small/resolve/main/config.json")


def test_the_quantization_file_of_modelopt_is_read_from_the_hub(hub) -> None:
    """Only for an id that names a format; a model without the file has the dtype of its config."""
    for name in ("small-FP8-KV", "other-FP8-KV", "plain"):
        hub.files[f"someone/{name}/resolve/main/config.json"] = LLAMA
    quantization = {"quantization": {"quant_algo": "FP8"}}
    hub.files["someone/small-FP8-KV/resolve/main/hf_quant_config.json"] = quantization
    assert read_model("someone/small-FP8-KV").stored_as == "modelopt FP8"
    assert read_model("someone/other-FP8-KV").stored_as is None
    assert read_model("someone/plain").stored_as is None
    assert hub.asked == [*("config.json", "hf_quant_config.json") * 2, "config.json"]


PUBLISHED_AS = TABLES["published_as"]


def test_the_catalog_equals_the_published_configs() -> None:
    """Where the file has no context, as those from MaxText, that of the catalog is taken."""
    seen: set[str] = set()
    for path in PUBLISHED_CONFIGS.glob("*.json"):
        config = json.loads(path.read_text())
        if config["model_type"] == "deepseek":
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
    names = {
        name for name in catalog() if not name.startswith(tuple(TABLES["families_without_config"]))
    }
    assert seen == {name.partition("/")[2] for name in names - {*TABLES["without_config"]}}


@pytest.mark.parametrize("name", catalog())
def test_a_stored_model_is_read_back_unchanged(name: str) -> None:
    model = read_model(name)
    assert model_from_dict(json.loads(json.dumps(model_as_dict(model)))) == model


def test_a_run_of_before_says_that_its_mlp_has_no_gate() -> None:
    model = read_model("swiss-ai/Apertus-8B-Instruct-2509")
    before = {**model_as_dict(model), "activation": "swiglu", "has_gated_mlp": False}
    assert model_from_dict(before) == model
    assert model_from_dict({**model_as_dict(read_model("Qwen/Qwen3-8B")), "has_gated_mlp": True})


@table
def test_a_published_model_has_its_layers_and_sizes(name, first, counts, facts) -> None:
    model = read_model(name)
    kinds = [layer.name for layer in model.layers]
    assert (kinds[: len(first)], Counter(kinds)) == (first, counts)
    assert _part(msgspec.to_builtins(model), facts) == facts


def test_the_text_part_of_a_multimodal_config_is_the_model() -> None:
    """google/gemma-3-4b-it states only what differs from the defaults of transformers."""
    model = model_from_config(BASES["gemma3-4b"], name="google/gemma-3-4b-it", source="test")
    assert (model.text_part_of, model.stored_as) == ("gemma3", "bfloat16")
    entry = read_model("google/gemma-3-4b-it")
    assert replace(model, source=entry.source) == entry


def test_gemma_4_may_share_caches_and_embed_tokens_for_each_layer() -> None:
    """The last layers have no keys and values, wider MLPs, and the cache of the last layer of their kind before."""
    parts = {"num_kv_shared_layers": 2, "use_double_wide_mlp": True}
    parts |= {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": LLAMA["vocab_size"]}
    model = _model("gemma_4", parts)
    assert [layer.shares_cache for layer in model.layers] == [False] * 6 + [True] * 2
    before, last = model.layers[5], model.layers[-1]
    assert model.ffn_of(last) == 2 * model.ffn_of(model.layers[0]) == 2 * LLAMA["intermediate_size"]
    assert model.cache_layer(last) == before
    plan = parse_plan("tp=1")
    names = [{weight.name for weight in layer_weights(model, plan, of)} for of in (before, last)]
    assert names[0] - names[1] == {"wk", "k_norm"}
    assert [len(layer_cache(model, plan, one)) for one in model.layers] == [2] * 6 + [0] * 2
    tables = {weight.name: weight for weight in outer_weights(model.first(4), plan)}
    assert tables["layer_embed"].shape == (model.vocab, 4 * 16)
    assert tables["layer_embed"].columns.whole == 8 * 16


def test_values_that_are_keys_have_no_bias_of_their_own() -> None:
    """As v_proj of Gemma4TextAttention, which `attention_k_eq_v` leaves out of full layers."""
    model = _model("gemma_4", {"attention_bias": True})
    biases = [
        {weight.name for weight in layer_weights(model, Plan(), layer)} & {"bq", "bk", "bv", "bo"}
        for layer in dict.fromkeys(model.layers)
    ]
    assert sorted(map(len, biases)) == [3, 4]


@pytest.mark.parametrize("name", ["DeepSeek-V4", "deepseek-ai/deepseek-v4-flash"])
def test_aliases_of_a_model(name: str) -> None:
    flash, base = read_model(name), read_model("deepseek-ai/DeepSeek-V4-Flash-Base")
    assert replace(flash, name=base.name, source=base.source) == base


@pytest.mark.slow
@pytest.mark.oracle
@pytest.mark.parametrize("name", TABLES["counted_by_transformers"])
def test_transformers_counts_the_same_parameters(name: str) -> None:
    """Every parameter of the full model, without storage; corrections of routers are buffers there."""
    torch = pytest.importorskip("torch", reason="the oracle needs torch")
    transformers = pytest.importorskip("transformers", reason="the oracle needs transformers")
    config = {k: v for k, v in catalog()[name].config.items() if k != "quantization_config"}
    with torch.device("meta"):
        of = transformers.AutoConfig.for_model(**config)
        model = causal_models().from_config(of)
    buffers = (one for key, one in model.named_buffers() if "correction" in key)
    counted = sum(one.numel() for one in (*model.parameters(), *buffers))
    assert n_parameters(read_model(name))[0] == counted


@pytest.mark.slow
def test_transformers_reads_the_same_layers_and_rotations_of_deepseek_v4() -> None:
    transformers = pytest.importorskip("transformers", reason="the oracle needs transformers")
    for keys in ({}, {"compress_ratios": [0, 4, 128, 4, 0, 0], "num_hash_layers": 1}):
        model = _model("deepseek_v4", keys)
        config = transformers.AutoConfig.for_model(**(BASES["deepseek_v4"] | keys))
        kinds = [f"{layer.attention}_attention" for layer in model.layers]
        assert kinds == config.layer_types
        assert [layer.mlp.value for layer in model.layers] == config.mlp_layer_types
        assert model.attention.rope_dim == config.qk_rope_head_dim
        thetas = [model.attention.rope.theta, model.attention.compressed_rope.theta]
        assert thetas == [config.rope_parameters[key]["rope_theta"] for key in ("main", "compress")]


@table
def test_parameter_count_equals_the_published_one(model, n_billions, error_frac) -> None:
    """A few per cent separate a wrong geometry from rounding."""
    n_parameters = device_weight_bytes(read_model(model), Plan(), "bf16") / 2
    assert n_parameters == pytest.approx(n_billions * 1e9, rel=error_frac)


def test_every_model_has_a_source_a_context_and_a_published_size() -> None:
    sizes = stored(Path(__file__).with_suffix(".yaml"))[
        test_parameter_count_equals_the_published_one.__name__
    ]
    assert {row[0] for row in sizes[1:]} == set(catalog())
    assert all(name == entry.name and entry.source for name, entry in catalog().items())
    ids = catalog_ids()
    models = [read_model(name) for name in ids]
    assert [model.name for model in models] == list(ids)
    assert [model.name for model in models if model.max_position is None] == []
    assert len(ids) == len({name.lower() for name in ids})


@table
def test_variants_have_their_own_context(name: str, n_positions: int) -> None:
    """max_position_embeddings of their config.json at huggingface.co."""
    assert read_model(name).max_position == n_positions


@table
def test_weights_are_in_the_format_of_the_checkpoint(name: str, weight_dtype: str) -> None:
    assert read_model(name).default_weight_dtype == weight_dtype


@table
def test_ids_that_are_near_are_suggested(name: str, sentence: str) -> None:
    assert nearest_ids(name, "none") == sentence


def test_a_format_of_the_name_alone_is_marked() -> None:
    """The config of a listed id is known; that of another may leave matrices out."""
    assert read_model("Qwen/Qwen3-32B-AWQ").stored_as == "4-bit awq"
    assert read_model("someone/Qwen3-32B-AWQ").stored_as == "4-bit awq, by its name"
    assert read_model("unsloth/Qwen3-32B").stored_as is None
