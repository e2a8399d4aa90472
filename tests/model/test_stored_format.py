"""The format of a checkpoint as its config states it, in the forms that the tools write."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from meshscope.errors import SpecError
from meshscope.model.catalog import catalog
from meshscope.model.config import model_from_config
from meshscope.model.model import Model
from meshscope.model.reader import ConfigReader
from meshscope.model.stored_format import (
    ModulePatterns,
    StoredFormat,
    module_names,
    stored_format,
)
from meshscope.plans.checks import has_program_format
from meshscope.plans.experiment_record import model_as_dict, model_from_dict
from meshscope.plans.plan import Plan
from meshscope.plans.program import Partitioner
from meshscope.plans.weights import device_weight_bytes, layer_weights

DENSE, KIMI, V4 = "Qwen/Qwen3-0.6B", "moonshotai/Kimi-K2", "deepseek-ai/DeepSeek-V4-Flash-Base"
INT4_32 = {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}}
NVFP4 = {"weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}}


def expanded(value: Any) -> Any:
    """A config in which `layers.{48}.mlp` is the name of a module in each of 48 layers."""
    if isinstance(value, list):
        return [one for entry in value for one in _names(entry)]
    if isinstance(value, dict):
        return {name: expanded(v) for key, v in value.items() for name in _names(key)}
    return value


def _names(entry: Any) -> list[Any]:
    layers = re.fullmatch(r"(.*layers\.)\{(\d+)\}(.*)", str(entry))
    if layers is None:
        return [expanded(entry)]
    before, n_layers, after = layers.groups()
    return [f"{before}{layer}{after}" for layer in range(int(n_layers))]


class Case(NamedTuple):
    """A quantization config of a checkpoint of `model`; `nearest` if no weight dtype equals it."""

    name: str
    model: str
    config: dict[str, Any]
    text: str
    weight_dtype: str | None
    nearest: str | None = None
    cache: str | None = None
    source: str | None = None


CASES = [
    Case(**expanded(case))
    for case in json.loads((Path(__file__).parent / "data/stored_formats.json").read_text("utf-8"))
]


def compressed(group: dict[str, Any], **keys: Any) -> dict[str, Any]:
    """As llm-compressor writes it."""
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}} | keys


def checkpoint(name: str, config: dict[str, Any], **keys: Any) -> Model:
    """The model of the catalog with this quantization."""
    base = {key: value for key, value in catalog()[name].config.items() if key != "expert_dtype"}
    quantized = {**base, "quantization_config": config, **keys}
    return model_from_config(quantized, name=name, source="config.json")


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.model.split('/')[1]}: {case.name}")
def test_a_quantization_config_names_the_weight_dtype(case: Case) -> None:
    model = checkpoint(case.model, case.config)
    got = (model.stored_as, model.stored_dtype, model.nearest_dtype, model.stored_cache)
    assert got == (case.text, case.weight_dtype, case.nearest, case.cache)


def test_experts_of_deepseek_v4_are_in_mxfp4() -> None:
    """A key beside the quantization says so."""
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    model = checkpoint(V4, blocks, expert_dtype="fp4")
    assert model.stored_dtype == "f8e4m3fn_block128_f4e2m1fn_experts"
    assert checkpoint(V4, blocks).stored_dtype == "f8e4m3fn_block128"


def test_the_quantization_of_a_text_part_counts() -> None:
    """Kimi-K2.5 has it in `text_config`."""
    text = {**catalog()[KIMI].config, "quantization_config": compressed(INT4_32)}
    outer = {"model_type": "kimi_k25", "text_config": text}
    model = model_from_config(outer, name="outer", source="config.json")
    assert model.stored_dtype == "s4_group32"


def test_an_invalid_pattern_is_refused() -> None:
    with pytest.raises(SpecError, match=r"'re:\*lm_head' is not a regular expression.*Correct"):
        checkpoint(DENSE, compressed(INT4_32, ignore=["re:*lm_head"]))


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_a_plain_checkpoint_has_its_dtype(key: str) -> None:
    assert stored_format(ConfigReader({key: "float16"}, "x"), {}) == StoredFormat(
        text="float16", weight_dtype="f16"
    )
    for dtype, nearest in (("float64", "f32"), ("float128", "f32"), ("float8_e5m2", "f8e5m2")):
        text = dtype if nearest == "f32" else f"{dtype} without scales"
        assert stored_format(ConfigReader({key: dtype}, "x"), {}) == StoredFormat(
            text=text, nearest=nearest
        )


def test_a_config_may_state_no_format() -> None:
    assert stored_format(ConfigReader({}, "x"), {}) is None


@pytest.mark.parametrize("text", [r"(\w+\.?)+!", ".*a.*b.*c.*d.*e", "a?a?a?a?a?a?b"])
def test_expressions_that_may_match_for_hours_are_refused(text: str) -> None:
    with pytest.raises(SpecError, match="may take too long to match"):
        ModulePatterns([f"re:{text}"])


@pytest.mark.parametrize(
    "text", [r".*mlp\.(gate|up)_proj$", r"(?:model\.)?layers\.\d+\.mlp\.experts\.\d+\..*_proj"]
)
def test_expressions_of_checkpoints_are_read(text: str) -> None:
    names = [f"layers.3.mlp.{name}" for name in ("gate_proj", "experts.0.gate_proj", "gate")]
    assert sum(name in ModulePatterns([f"re:{text}"]) for name in names) == 1


def test_nvfp4_has_an_8_bit_scale_for_16_values() -> None:
    """4.5 bits in the matrices of layers; the rest of nvidia's checkpoints is in bf16."""
    model = checkpoint(DENSE, compressed(NVFP4, ignore=["lm_head"]))
    narrow, wide = (
        device_weight_bytes(model, Plan(), dtype) for dtype in (model.default_weight_dtype, "bf16")
    )
    matrices = model.n_layers * (1024 * (2048 + 1024 + 1024 + 2048) + 3 * 1024 * 3072)
    assert wide - narrow == matrices * (2 - 4.5 / 8)


def test_the_order_of_keys_has_no_effect() -> None:
    """Of several groups for all linear layers, which of them counts is unknown."""
    bits = {
        kind: {"targets": ["Linear"], "weights": {"num_bits": 8, "type": kind}}
        for kind in ("int", "float")
    }
    first, second = (
        checkpoint(
            DENSE,
            {
                "quant_method": "compressed-tensors",
                "config_groups": {kind: bits[kind] for kind in kinds},
            },
        )
        for kinds in (("int", "float"), ("float", "int"))
    )
    assert first.stored_as == second.stored_as
    assert {first.nearest_dtype, second.nearest_dtype, first.stored_dtype, second.stored_dtype} == {
        None
    }


Q_BYTES, MLP_BYTES = 1024 * 2048, 3 * 1024 * 3072  # at 8 bits, of Qwen3-0.6B
OF_BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
INT8 = {"weights": {"num_bits": 8, "type": "int", "strategy": "channel"}, "targets": ["Linear"]}


@pytest.mark.parametrize(
    ("config", "n_bytes"),
    [
        (
            OF_BLOCKS | {"modules_to_not_convert": ["model.layers.3.self_attn.q_proj"]},
            Q_BYTES - Q_BYTES // 128**2 * 4,
        ),
        (
            compressed(INT8, ignore=["re:.*layers.[01].mlp.*"]),
            2 * MLP_BYTES - 2 * (3072 + 3072 + 1024) * 4,
        ),
        (
            {"quant_method": "gptq", "bits": 4, "dynamic": {r"+:.*layers\.2\.mlp.*": {"bits": 8}}},
            MLP_BYTES // 2 - MLP_BYTES // 128 * 2 + (3072 + 3072 + 1024) * 4,
        ),
    ],
    ids=["blocks of fp8", "int8", "8 bits among 4"],
)
def test_matrices_that_are_left_out_count_in_their_own_format(config, n_bytes: int) -> None:
    """In bytes, and not with an option that names a format of all matrices."""
    model = checkpoint(DENSE, config)
    alike = replace(model, layers=tuple(replace(one, formats=()) for one in model.layers))
    dtype = model.default_weight_dtype
    assert dtype == model.stored_dtype
    bytes_of = [device_weight_bytes(one, Plan(), dtype) for one in (model, alike)]
    assert bytes_of[0] - bytes_of[1] == n_bytes
    assert device_weight_bytes(model, Plan(), "bf16") == device_weight_bytes(alike, Plan(), "bf16")
    assert model_from_dict(model_as_dict(model)) == model


def test_attention_of_other_bits_than_the_mlps_counts_in_its_own() -> None:
    """A mix without an equal: its nearest has bf16 in attention."""
    (case,) = (case for case in CASES if case.name == "Qwen3.6-27B-NVFP4")
    model = checkpoint(case.model, case.config)
    layers = {name.split("_")[0] for layer in model.layers for name, _ in layer.formats}
    assert layers == {"self", "linear"}
    assert {dtype for layer in model.layers for _, dtype in layer.formats} == {"f8e4m3fn"}


def test_programs_take_one_format_of_experts() -> None:
    """And none of four bits for some matrices."""
    for name, left_out, has in (
        ("Qwen/Qwen3-30B-A3B", "model.layers.0.mlp.experts", False),
        ("Qwen/Qwen3-30B-A3B", "model.layers.0.self_attn", True),
    ):
        model = checkpoint(name, OF_BLOCKS | {"modules_to_not_convert": [left_out]})
        dtype = model.default_weight_dtype
        assert has_program_format(model, Plan(), dtype, Partitioner.MANUAL) is has


def test_the_modules_of_a_family_are_those_of_its_weights() -> None:
    """Some layers have no such projection, because they share one or because the config has none."""
    missing: set[str] = set()
    for name, entry in catalog().items():
        model = model_from_config(entry.config, name=name, source="config.json")
        weights = {layer: layer_weights(model, Plan(), layer) for layer in set(model.layers)}
        for module in (m for of in module_names(model.family, model.layers).values() for m in of):
            _, index, short = module.split(".", 2)
            tensors = (
                w.checkpoint.replace("{expert}", "0") for w in weights[model.layers[int(index)]]
            )
            if not any(f".{short}." in f"{tensor}." for tensor in tensors):
                missing.add(f"{model.family} {short}")
    assert missing == {
        "bailing_hybrid attention.q_a_proj",
        "bailing_hybrid attention.q_b_proj",
        "deepseek_v2 self_attn.q_a_proj",
        "deepseek_v2 self_attn.q_b_proj",
        "kimi_linear self_attn.q_a_proj",
        "kimi_linear self_attn.q_b_proj",
        "gemma4_text self_attn.k_proj",
        "gemma4_text self_attn.v_proj",
    }
