"""Ids on the Hub of models with the sizes of a catalog entry, and the weight formats that ids name.

Instruction-tuned, base, distilled and quantized checkpoints share the architecture of their base model.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

QWEN25 = ("0.5B", "1.5B", "3B", "7B", "14B", "32B", "72B")
QWEN3 = ("0.6B", "1.7B", "4B", "8B", "14B", "32B")

_NAMED: dict[str, tuple[str, ...]] = {
    "Qwen/Qwen2.5-7B": ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B",),
    "Qwen/Qwen2.5-14B": ("deepseek-ai/DeepSeek-R1-Distill-Qwen-14B",),
    "Qwen/Qwen2.5-32B": (
        *("Qwen/QwQ-32B", "Qwen/QwQ-32B-Preview", "Qwen/QwQ-32B-AWQ"),
        *("deepseek-ai/DeepSeek-R1-Distill-Qwen-32B", "Qwen/Qwen2.5-Coder-32B-Instruct-AWQ"),
    ),
    "Qwen/Qwen3-30B-A3B": (
        *("Qwen/Qwen3-30B-A3B-Base", "Qwen/Qwen3-30B-A3B-FP8", "Qwen/Qwen3-30B-A3B-GPTQ-Int4"),
    ),
    "Qwen/Qwen3-235B-A22B": ("Qwen/Qwen3-235B-A22B-FP8", "Qwen/Qwen3-235B-A22B-GPTQ-Int4"),
    "Qwen/Qwen3-Coder-480B-A35B": (
        *("Qwen/Qwen3-Coder-480B-A35B-Instruct", "Qwen/Qwen3-Coder-480B-A35B-Instruct-FP8"),
    ),
    "Qwen/Qwen3-4B-Instruct-2507": (
        *("Qwen/Qwen3-4B-Thinking-2507", "Qwen/Qwen3-4B-Instruct-2507-FP8"),
    ),
    "Qwen/Qwen3-30B-A3B-Instruct-2507": (
        *("Qwen/Qwen3-30B-A3B-Thinking-2507", "Qwen/Qwen3-30B-A3B-Instruct-2507-FP8"),
    ),
    "Qwen/Qwen3-235B-A22B-Instruct-2507": (
        *("Qwen/Qwen3-235B-A22B-Thinking-2507", "Qwen/Qwen3-235B-A22B-Instruct-2507-FP8"),
    ),
    "meta-llama/Llama-3.1-8B": (
        *("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Meta-Llama-3.1-8B"),
        *("meta-llama/Meta-Llama-3.1-8B-Instruct", "deepseek-ai/DeepSeek-R1-Distill-Llama-8B"),
        *("nvidia/Llama-3.1-8B-Instruct-FP8", "RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8"),
        "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a8",
        "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16",
    ),
    "meta-llama/Llama-3.1-70B": (
        *("meta-llama/Llama-3.1-70B-Instruct", "meta-llama/Meta-Llama-3.1-70B"),
        *("meta-llama/Meta-Llama-3.1-70B-Instruct", "deepseek-ai/DeepSeek-R1-Distill-Llama-70B"),
        *("nvidia/Llama-3.1-70B-Instruct-FP8", "RedHatAI/Meta-Llama-3.1-70B-Instruct-FP8"),
        *("nvidia/Llama-3.1-Nemotron-70B-Instruct-HF",),
        "RedHatAI/Meta-Llama-3.1-70B-Instruct-quantized.w8a8",
        "RedHatAI/Meta-Llama-3.1-70B-Instruct-quantized.w4a16",
    ),
    "meta-llama/Llama-3.1-405B": (
        *("meta-llama/Llama-3.1-405B-Instruct", "meta-llama/Meta-Llama-3.1-405B"),
        *("meta-llama/Llama-3.1-405B-FP8", "meta-llama/Llama-3.1-405B-Instruct-FP8"),
    ),
    "meta-llama/Llama-3.3-70B": ("meta-llama/Llama-3.3-70B-Instruct",),
    "meta-llama/Llama-3.2-1B": ("meta-llama/Llama-3.2-1B-Instruct",),
    "meta-llama/Llama-3.2-3B": ("meta-llama/Llama-3.2-3B-Instruct",),
    "meta-llama/Meta-Llama-3-8B": ("meta-llama/Meta-Llama-3-8B-Instruct",),
    "meta-llama/Meta-Llama-3-70B": ("meta-llama/Meta-Llama-3-70B-Instruct",),
    "meta-llama/Llama-2-7B": ("meta-llama/Llama-2-7b-hf", "meta-llama/Llama-2-7b-chat-hf"),
    "meta-llama/Llama-2-13B": ("meta-llama/Llama-2-13b-hf", "meta-llama/Llama-2-13b-chat-hf"),
    "meta-llama/Llama-2-70B": ("meta-llama/Llama-2-70b-hf", "meta-llama/Llama-2-70b-chat-hf"),
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": ("meta-llama/Llama-4-Scout-17B-16E",),
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct": (
        *(
            "meta-llama/Llama-4-Maverick-17B-128E",
            "meta-llama/Llama-4-Maverick-17B-128E-Instruct-FP8",
        ),
    ),
    "deepseek-ai/DeepSeek-V3.1-Base": ("deepseek-ai/DeepSeek-V3.1",),
    "deepseek-ai/DeepSeek-V3": (
        *("deepseek-ai/DeepSeek-V3-Base", "deepseek-ai/DeepSeek-V3-0324"),
        "deepseek-ai/DeepSeek-V3.1-Terminus",
    ),
    "deepseek-ai/DeepSeek-R1": ("deepseek-ai/DeepSeek-R1-0528", "deepseek-ai/DeepSeek-R1-Zero"),
    "deepseek-ai/DeepSeek-V3.2": ("deepseek-ai/DeepSeek-V3.2-Exp",),
    "deepseek-ai/DeepSeek-V4-Flash": ("deepseek-ai/DeepSeek-V4",),
    "deepseek-ai/DeepSeek-V2-Lite": (
        *("deepseek-ai/DeepSeek-V2-Lite-Chat", "deepseek-ai/DeepSeek-Coder-V2-Lite"),
        *("deepseek-ai/DeepSeek-Coder-V2-Lite-Base", "deepseek-ai/DeepSeek-Coder-V2-Lite-Instruct"),
    ),
    "mistralai/Mixtral-8x7B-v0.1": ("mistralai/Mixtral-8x7B-Instruct-v0.1",),
    "mistralai/Mixtral-8x22B-v0.1": ("mistralai/Mixtral-8x22B-Instruct-v0.1",),
    "mistralai/Mistral-7B-v0.1": (
        *("mistralai/Mistral-7B-Instruct-v0.1", "HuggingFaceH4/zephyr-7b-beta"),
    ),
    "mistralai/Mistral-7B-v0.3": ("mistralai/Mistral-7B-Instruct-v0.3",),
    "mistralai/Mistral-Small-24B-Instruct-2501": ("mistralai/Mistral-Small-24B-Base-2501",),
    "mistralai/Mistral-Large-Instruct-2407": ("mistralai/Mistral-Large-Instruct-2411",),
    "moonshotai/Kimi-K2": ("moonshotai/Kimi-K2-Instruct", "moonshotai/Kimi-K2-Base"),
    "google/gemma-2-2b": ("google/gemma-2-2b-it",),
    "google/gemma-2-9b": ("google/gemma-2-9b-it",),
    "google/gemma-2-27b": ("google/gemma-2-27b-it",),
    "google/gemma-3-1b-it": ("google/gemma-3-1b-pt",),
    "google/gemma-3-4b-it": ("google/gemma-3-4b-pt", "google/medgemma-4b-it"),
    "google/gemma-3-12b-it": ("google/gemma-3-12b-pt",),
    "google/gemma-3-27b-it": ("google/gemma-3-27b-pt", "google/medgemma-27b-text-it"),
    "microsoft/Phi-4-reasoning": ("microsoft/Phi-4-reasoning-plus",),
    "zai-org/GLM-4.5-Air": ("zai-org/GLM-4.5-Air-Base", "zai-org/GLM-4.5-Air-FP8"),
    "zai-org/GLM-4.5": ("zai-org/GLM-4.5-Base", "zai-org/GLM-4.5-FP8"),
}
_OF_SIZES: dict[str, tuple[str, ...]] = {
    **{
        f"Qwen/Qwen2.5-{size}": (
            *(f"Qwen/Qwen2.5-{size}-Instruct", f"Qwen/Qwen2.5-{size}-Instruct-AWQ"),
            *(f"Qwen/Qwen2.5-{size}-Instruct-GPTQ-Int4", f"Qwen/Qwen2.5-{size}-Instruct-GPTQ-Int8"),
            *(
                (f"Qwen/Qwen2.5-Coder-{size}", f"Qwen/Qwen2.5-Coder-{size}-Instruct")
                if size != "72B"
                else ()
            ),
        )
        for size in QWEN25
    },
    **{
        f"Qwen/Qwen3-{size}": (
            *((f"Qwen/Qwen3-{size}-Base",) if size != "32B" else ()),
            f"Qwen/Qwen3-{size}-FP8",
            *((f"Qwen/Qwen3-{size}-AWQ",) if size in {"4B", "8B", "14B", "32B"} else ()),
        )
        for size in QWEN3
    },
}

VARIANTS: Mapping[str, tuple[str, ...]] = {
    name: (*_OF_SIZES.get(name, ()), *_NAMED.get(name, ())) for name in {**_OF_SIZES, **_NAMED}
}

# Suffixes of ids whose models have the sizes of the model without the suffix.
_SUFFIX = re.compile(
    r"-(instruct|chat|hf|it|base|thinking|fp8|fp8-dynamic|int8|int4|w8a8|w4a16|awq|gptq|bf16|v0\.1|dynamic"
    r"|quantized\.w8a8|quantized\.w4a16|gptq-int4|gptq-int8)$"
)


def _compressed(kind: str, bits: int, *, activations: int | None) -> dict[str, Any]:
    """A `quantization_config` of compressed-tensors."""
    group = {
        "weights": {"type": kind, "num_bits": bits},
        "input_activations": None if activations is None else {"num_bits": activations},
    }
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


_FP8_BLOCKS: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
# Formats that ids name. Qwen's fp8 checkpoints have scales of blocks (their config.json), DeepSeek's too.
_FORMATS: tuple[tuple[str, dict[str, Any]], ...] = (
    (r"^(qwen|deepseek-ai)/.*-fp8$", _FP8_BLOCKS),
    (r"-fp8(-dynamic)?$", {"quant_method": "fp8"}),
    (r"-awq$", {"quant_method": "awq", "bits": 4}),
    (r"-gptq(-int4)?$", {"quant_method": "gptq", "bits": 4}),
    (r"-gptq-int8$", {"quant_method": "gptq", "bits": 8}),
    (r"[-.](w8a8|int8)$", _compressed("int", 8, activations=8)),
    (r"[-.](w4a16|int4)$", _compressed("int", 4, activations=None)),
)


def base_ids(name: str) -> Iterator[str]:
    """An id without owner in lower case, then without one suffix of a variant after the other."""
    base = name.lower().rsplit("/", 1)[-1].removeprefix("meta-")
    yield base
    while (shorter := _SUFFIX.sub("", base)) != base:
        base = shorter
        yield base


def quantization_named(name: str) -> Mapping[str, Any] | None:
    """The `quantization_config` that an id names by its suffix; None if it names none."""
    lowered = name.lower()
    for pattern, config in _FORMATS:
        if re.search(pattern, lowered):
            return config
    return None
