"""Built-in models with their sizes, and what ids of checkpoints say."""

from typing import NamedTuple

import pytest

from meshscope.model.catalog import catalog, catalog_ids, derived_from, nearest_ids
from meshscope.model.config import read_model
from meshscope.model.quantization import WEIGHT_DTYPES
from meshscope.plans.plan import Plan
from meshscope.plans.weights import device_weight_bytes
from meshscope.units import dtype_name


class Size(NamedTuple):
    """Parameters in 1e9, from the model card or report."""

    model: str
    n_billions: float
    error_frac: float = 0.01  # two or three digits are published


# Model cards at huggingface.co, "Number of Parameters"; Llama 3.1: "The Llama 3 Herd of Models",
# Table 3 and the card; Llama 2: its card.
SIZES = [
    Size("Qwen/Qwen3-32B", 32.8),
    Size("Qwen/Qwen3-8B", 8.2),
    Size("Qwen/Qwen3-4B", 4.0),
    Size("Qwen/Qwen2.5-32B", 32.5),
    Size("meta-llama/Llama-3.1-8B", 8.0),
    Size("meta-llama/Llama-3.1-70B", 70.6),
    Size("meta-llama/Llama-3.1-405B", 405.0),
    Size("meta-llama/Llama-3.2-3B", 3.21),
    Size("meta-llama/Llama-3.3-70B", 70.6),
    Size("meta-llama/Llama-2-13B", 13.0),
    Size("deepseek-ai/DeepSeek-V3.1-Base", 671),  # arXiv 2412.19437, table of the main model
    Size("deepseek-ai/DeepSeek-V3", 671),
    Size("deepseek-ai/DeepSeek-R1", 671),
    Size("deepseek-ai/DeepSeek-V3.2", 671.9),  # V3 and its indexers: 61 x 13.96e6 more
    Size("deepseek-ai/DeepSeek-V4-Flash-Base", 284),
    Size("deepseek-ai/DeepSeek-V2-Lite", 15.7),
    Size("mistralai/Mixtral-8x7B-v0.1", 46.7),  # arXiv 2401.04088: 47e9
    Size("Qwen/Qwen3-30B-A3B", 30.5),
    Size("Qwen/Qwen3-235B-A22B", 235),
    Size("Qwen/Qwen3-0.6B", 0.596),  # two digits on the card; counted by its safetensors
    Size("Qwen/Qwen3-1.7B", 1.72),
    Size("Qwen/Qwen3-14B", 14.8),
    Size("Qwen/Qwen2.5-0.5B", 0.494),  # arXiv 2412.15115 and the cards
    Size("Qwen/Qwen2.5-1.5B", 1.54),
    Size("Qwen/Qwen2.5-3B", 3.09),
    Size("Qwen/Qwen2.5-7B", 7.61),
    Size("Qwen/Qwen2.5-14B", 14.7),
    Size("Qwen/Qwen2.5-72B", 72.7),
    Size("Qwen/Qwen3-Coder-480B-A35B", 480),
    Size("meta-llama/Meta-Llama-3-8B", 8.03),
    Size("meta-llama/Meta-Llama-3-70B", 70.6),
    Size("meta-llama/Llama-3.2-1B", 1.24),
    Size("meta-llama/Llama-2-7B", 6.74),
    Size("meta-llama/Llama-2-70B", 69.0),
    Size("mistralai/Mixtral-8x22B-v0.1", 141),
    Size("moonshotai/Kimi-K2", 1026),  # 1T on the card; 1,026e9 in its safetensors
    Size("openai/gpt-oss-120b", 116.8),  # arXiv 2508.10925, table 1
    Size("openai/gpt-oss-20b", 20.9),
    Size("moonshotai/Kimi-K2.5", 1026),  # as K2
    Size("deepseek-ai/DeepSeek-V4-Flash", 284),
    Size("deepseek-ai/DeepSeek-V4-Pro", 1600, 0.03),  # 1.6T
    Size("Qwen/Qwen3-4B-Instruct-2507", 4.0),
    Size("Qwen/Qwen3-30B-A3B-Instruct-2507", 30.5),
    Size("Qwen/Qwen3-235B-A22B-Instruct-2507", 235),
    Size("Qwen/Qwen3-Next-80B-A3B-Instruct", 80),
    Size("moonshotai/Kimi-K2-Instruct-0905", 1026),
    Size("zai-org/GLM-4.6", 355),
    Size("zai-org/GLM-5.2", 744, 0.02),
    Size("zai-org/GLM-4.7-Flash", 30, 0.02),
    Size("Qwen/Qwen3.5-0.8B", 0.75),  # the text part; the names of the others round to these
    Size("Qwen/Qwen3.5-4B", 4.2),
    Size("Qwen/Qwen3.5-9B", 9),
    Size("Qwen/Qwen3.5-27B", 27),
    Size("Qwen/Qwen3.5-35B-A3B", 35),
    Size("Qwen/Qwen3.5-122B-A10B", 122),
    Size("Qwen/Qwen3.5-397B-A17B", 397),
    Size("google/gemma-2-2b", 2.61),  # arXiv 2408.00118, table 2
    Size("google/gemma-2-9b", 9.24),
    Size("google/gemma-2-27b", 27.2),
    Size("google/gemma-3-1b-it", 1.0),  # arXiv 2503.19786, table 1: embedding and the rest
    Size("google/gemma-3-4b-it", 3.88),
    Size("google/gemma-3-12b-it", 11.77),
    Size("google/gemma-3-27b-it", 27.0),
    Size("google/gemma-4-12B", 12, 0.03),  # its name, which counts embeddings of other modes, too
    Size("google/gemma-4-26B-A4B-it", 25.2),  # its model card
    Size("google/gemma-4-31B-it", 30.7),  # its model card
    # The cards count 0.45e9 parameters of the parts for images and sound, too.
    Size("google/gemma-4-E2B-it", 5.1 - 0.45, 0.02),
    Size("google/gemma-4-E4B-it", 8.0 - 0.45, 0.02),
    Size("mistralai/Mistral-7B-v0.1", 7.24),  # the cards' safetensors
    Size("mistralai/Mistral-7B-Instruct-v0.2", 7.24),
    Size("mistralai/Mistral-7B-v0.3", 7.25),
    Size("mistralai/Ministral-8B-Instruct-2410", 8.02),
    Size("mistralai/Ministral-3-8B-Base-2512", 8.4, 0.015),  # 8.4e9 on the card, without the tower
    Size("mistralai/Mistral-Small-24B-Instruct-2501", 23.6),
    Size("mistralai/Mistral-Large-Instruct-2407", 123),
    Size("microsoft/Phi-3-mini-4k-instruct", 3.8),
    Size("microsoft/phi-4", 14.7),
    Size("microsoft/Phi-4-reasoning", 14.7),
    Size("zai-org/GLM-4.5-Air", 106),  # arXiv 2508.06471, table 1, without the MTP layer
    Size("zai-org/GLM-4.5", 355),
    Size("zai-org/GLM-5", 744, error_frac=0.002),  # arXiv 2602.15763 and the card
    Size(
        "meta-llama/Llama-4-Scout-17B-16E-Instruct", 109, 0.015
    ),  # the card, with its vision tower
    Size("meta-llama/Llama-4-Maverick-17B-128E-Instruct", 400),
    # The text parts are those of Qwen3 and Qwen2.5.
    Size("Qwen/Qwen3-VL-2B-Instruct", 1.72),
    Size("Qwen/Qwen3-VL-4B-Instruct", 4.0),
    Size("Qwen/Qwen3-VL-8B-Instruct", 8.2),
    Size("Qwen/Qwen3-VL-32B-Instruct", 32.8),
    Size("Qwen/Qwen3-VL-30B-A3B-Instruct", 30.5),
    Size("Qwen/Qwen3-VL-235B-A22B-Instruct", 235),
    Size("Qwen/Qwen2.5-VL-3B-Instruct", 3.09),
    Size("Qwen/Qwen2.5-VL-7B-Instruct", 7.61),
    Size("Qwen/Qwen2.5-VL-72B-Instruct", 72.7),
    Size("mistralai/Mistral-Small-3.2-24B-Instruct-2506", 23.6),
    Size("mistralai/Mistral-Nemo-Instruct-2407", 12.2),
    Size("moonshotai/Kimi-K2-Thinking", 1026),  # as K2
    Size("google/medgemma-27b-text-it", 27.0),
    Size("microsoft/Phi-4-mini-instruct", 3.84),  # the card's safetensors
    Size("codellama/CodeLlama-34b-hf", 33.7),
    Size("codellama/CodeLlama-70b-hf", 69.0),
    Size("tiiuae/Falcon3-1B-Base", 1.67),
    Size("tiiuae/Falcon3-3B-Base", 3.23),
    Size("tiiuae/Falcon3-7B-Base", 7.46),
    Size("tiiuae/Falcon3-10B-Base", 10.3),
    Size("HuggingFaceTB/SmolLM2-135M", 0.135),
    Size("HuggingFaceTB/SmolLM2-360M", 0.362),
    Size("HuggingFaceTB/SmolLM2-1.7B", 1.71),
    Size("TinyLlama/TinyLlama-1.1B-Chat-v1.0", 1.1),
]


@pytest.mark.parametrize("case", SIZES, ids=lambda case: case.model)
def test_parameter_count_equals_the_published_one(case: Size) -> None:
    """A few per cent separate a wrong geometry from rounding."""
    n_parameters = device_weight_bytes(read_model(case.model), Plan(), "bf16") / 2
    assert n_parameters == pytest.approx(case.n_billions * 1e9, rel=case.error_frac)


def test_every_model_has_a_published_size() -> None:
    assert {case.model for case in SIZES} == set(catalog())


def test_every_entry_has_its_name_as_key_and_a_source() -> None:
    assert all(name == entry.name and entry.source for name, entry in catalog().items())


def test_every_id_has_a_context() -> None:
    assert [name for name in catalog_ids() if read_model(name).max_position is None] == []


@pytest.mark.parametrize(
    ("name", "n_positions"),
    [
        ("Qwen/Qwen3-4B", 40_960),
        ("Qwen/Qwen3-4B-AWQ", 40_960),
        ("Qwen/Qwen3-4B-Base", 32_768),
        ("Qwen/Qwen3-30B-A3B-Base", 32_768),
        ("Qwen/Qwen3-4B-Instruct-2507", 262_144),
        ("Qwen/Qwen2.5-7B", 131_072),
        ("Qwen/Qwen2.5-7B-Instruct", 32_768),
        ("Qwen/Qwen2.5-7B-Instruct-AWQ", 32_768),
        ("Qwen/Qwen2.5-VL-7B-Instruct", 128_000),
        ("Qwen/QwQ-32B", 40_960),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", 131_072),
        ("meta-llama/Llama-2-13b-chat-hf", 4096),
        ("mistralai/Mistral-Large-Instruct-2411", 131_072),
    ],
)
def test_variants_have_their_own_context(name: str, n_positions: int) -> None:
    """max_position_embeddings of their config.json at huggingface.co."""
    assert read_model(name).max_position == n_positions


def test_every_id_names_one_model() -> None:
    ids = catalog_ids()
    assert len(ids) == len({name.lower() for name in ids})
    assert [read_model(name).name for name in ids] == list(ids)


@pytest.mark.parametrize(
    ("name", "weight_dtype"),
    [
        ("Qwen/Qwen3-32B-FP8", "f8e4m3fn_block128"),
        ("Qwen/Qwen2.5-7B-Instruct-AWQ", "s4"),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int8", "s8_layers"),
        ("meta-llama/Llama-3.1-405B-Instruct-FP8", "f8e4m3fn_mlps"),
        ("meta-llama/Llama-4-Maverick-17B-128E-Instruct-FP8", "f8e4m3fn_experts"),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a8", "s8_w8a8"),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16", "s4"),
        ("RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic", "f8e4m3fn_w8a8"),
        ("nvidia/Llama-3.3-70B-Instruct-FP8", "f8e4m3fn_layers"),
        ("hugging-quants/Meta-Llama-3.1-70B-Instruct-AWQ-INT4", "s4"),
        ("Intel/Qwen3-30B-A3B-Instruct-2507-int4-AutoRound", "s4"),
        ("deepseek-ai/DeepSeek-V4-Flash", "f8e4m3fn_block128_f4e2m1fn_experts"),
        ("openai/gpt-oss-20b", "f4e2m1fn_experts"),
        ("unsloth/gpt-oss-20b-BF16", "bf16"),
        ("unsloth/DeepSeek-V3-0324-BF16", "bf16"),
        ("google/gemma-3-27b-it", "bf16"),
        ("zai-org/GLM-4.6-FP8", "f8e4m3fn_w8a8"),
        ("zai-org/GLM-5.1-FP8", "f8e4m3fn_block128"),
        ("moonshotai/Kimi-K2.6", "s4_group32_experts"),
        ("mistralai/Ministral-3-8B-Instruct-2512", "f8e4m3fn_layers"),
    ],
)
def test_weights_are_in_the_format_of_the_checkpoint(name: str, weight_dtype: str) -> None:
    assert read_model(name).default_weight_dtype == weight_dtype


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
def test_a_derivative_names_its_base_and_the_option_that_prices_it(name, base, option) -> None:
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
