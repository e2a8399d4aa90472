"""Ids that the catalog does not have: the base that they name, and ids that are near."""

import pytest

from meshscope.model.catalog import derived_from, nearest_ids
from meshscope.model.config import read_model
from meshscope.model.quantization import WEIGHT_DTYPES
from meshscope.units import dtype_name


@pytest.mark.parametrize(
    ("name", "base", "option"),
    [
        ("RedHatAI/Qwen3-32B-NVFP4", "Qwen/Qwen3-32B", "nvfp4"),
        ("nvidia/DeepSeek-R1-FP4", "deepseek-ai/DeepSeek-R1", "nvfp4"),
        ("amd/DeepSeek-R1-0528-MXFP4", "deepseek-ai/DeepSeek-R1-0528", "mxfp4"),
        (
            "unsloth/Qwen3-32B-unsloth-bnb-4bit",
            "Qwen/Qwen3-32B",
            "int4_group64, the format nearest to NF4",
        ),
        (
            "unsloth/Kimi-K2-Thinking-GGUF",
            "moonshotai/Kimi-K2-Thinking",
            "int4, or int8_layers, by the bits of the file",
        ),
        ("cyankiwi/GLM-4.5-Air-AWQ-4bit", "zai-org/GLM-4.5-Air", "int4"),
        (
            "Qwen/Qwen3-8B-MLX-8bit",
            "Qwen/Qwen3-8B",
            "int4, or int8_layers, by the bits of the file",
        ),
        ("amd/Llama-3.1-405B-Instruct-FP8-KV", "meta-llama/Llama-3.1-405B-Instruct", "fp8_layers"),
        ("amd/gpt-oss-120b-w-mxfp4-a-fp8", "openai/gpt-oss-120b", "mxfp4"),
        ("someone/Qwen3-32B-W8A16", "Qwen/Qwen3-32B", "int8_layers"),
    ],
)
def test_a_derivative_names_its_base_and_the_option_that_prices_it(
    name: str, base: str, option: str
) -> None:
    assert derived_from(name) == (
        f"By its name it is {base} in another format: use that id with --weight-dtype {option}."
    )


@pytest.mark.parametrize(
    "words", ["NVFP4", "GGUF", "bnb-4bit", "FP8-KV", "W8A16", "MXFP4", "w8a8-preview"]
)
def test_the_option_of_a_derivative_is_a_weight_dtype(words: str) -> None:
    sentence = derived_from(f"someone/Qwen3-4B-{words}")
    assert sentence is not None
    option = sentence.split("--weight-dtype ")[1].split(",")[0].rstrip(".")
    assert dtype_name(option) in WEIGHT_DTYPES


def test_a_derivative_in_16_bits_names_that_option() -> None:
    sentence = derived_from("google/gemma-3-27b-it-qat-q4_0-unquantized")
    assert sentence is not None
    assert "google/gemma-3-27b-it in another format: use that id with --dtype bf16" in sentence


@pytest.mark.parametrize(
    "name", ["nvidia/gpt-oss-120b-Eagle3", "MiniMaxAI/MiniMax-M2-NVFP4", "Qwen/Qwen3-33B"]
)
def test_another_model_is_no_derivative(name: str) -> None:
    assert derived_from(name) is None


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "gpt-oss",
            "Did you mean 'openai/gpt-oss-120b' or 'openai/gpt-oss-safeguard-120b' or 'openai/gpt-oss-20b'?",
        ),
        (
            "NousResearch/Hermes-3-Llama-3.1-70B",
            "Did you mean 'meta-llama/Llama-3.1-70B' or 'meta-llama/Meta-Llama-3.1-70B'?",
        ),
        (
            "HuggingFaceTB/SmolLM3-3B",
            "Did you mean 'HuggingFaceTB/SmolLM2-135M' or 'HuggingFaceTB/SmolLM2-360M' or 'HuggingFaceTB/SmolLM2-1.7B'?",
        ),
        (
            "lama-3.1-8b",
            "Did you mean 'meta-llama/Llama-3.1-8B' or 'meta-llama/Meta-Llama-3.1-8B' or 'meta-llama/Meta-Llama-3-8B'?",
        ),
        (
            "Deepseek 4.1",
            "Did you mean 'deepseek-ai/DeepSeek-V4' or 'deepseek-ai/DeepSeek-V4-Pro' or 'deepseek-ai/DeepSeek-V4-Flash'?",
        ),
        (
            "mistral small 24b",
            "Did you mean 'mistralai/Mistral-Small-24B-Instruct-2501' or 'mistralai/Mistral-Small-24B-Base-2501' or 'mistralai/Mistral-Small-3.1-24B-Base-2503'?",
        ),
        (
            "qwen3 30b a3b",
            "Did you mean 'Qwen/Qwen3-30B-A3B' or 'Qwen/Qwen3-30B-A3B-Instruct-2507' or 'Qwen/Qwen3-30B-A3B-Thinking-2507'?",
        ),
        ("baidu/ERNIE-4.5-300B-A47B-PT", "none"),
        ("ByteDance-Seed/Seed-OSS-36B-Instruct", "none"),
    ],
)
def test_ids_that_are_near_are_suggested(name: str, sentence: str) -> None:
    assert nearest_ids(name, "none") == sentence


def test_a_format_of_the_name_alone_is_marked() -> None:
    """The config of a listed id is known; that of another may leave matrices out."""
    assert read_model("Qwen/Qwen3-32B-AWQ").stored_as == "awq of 4 bits"
    assert read_model("someone/Qwen3-32B-AWQ").stored_as == "awq of 4 bits, by its name"
    assert read_model("unsloth/Qwen3-32B").stored_as is None
