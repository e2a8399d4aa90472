"""The configuration of the engine follows from the experiment."""

from types import SimpleNamespace

import pytest
from tables import table

from meshscope.api.request import CompileRequest
from meshscope.errors import SpecError
from meshscope.model.config import read_model
from meshscope.plans.experiment import Experiment
from meshscope.plans.program import Frontend
from meshscope.programs.engines.engine_config import (
    architecture_config,
    engine_variables_of,
    vllm_config,
)
from meshscope.programs.environments import ENGINES, known_releases, releases_of


def experiment(model: str, plan: str, **options: object) -> Experiment:
    request = CompileRequest(
        model=model, topology="v6e-8", plan=plan, frontend=Frontend.VLLM_TPU, **options
    )
    return request.experiment()


def test_a_model_has_the_keys_of_its_published_config() -> None:
    config = architecture_config(read_model("meta-llama/Llama-3.1-8B"))
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["num_key_value_heads"] == 8
    assert config["head_dim"] == 128
    assert config["rope_theta"] == 500000.0
    assert config["rope_scaling"]["rope_type"] == "llama3"
    assert config["rope_parameters"]["factor"] == 8.0


def test_unscaled_angles_have_no_scaling() -> None:
    assert architecture_config(read_model("Qwen/Qwen3-32B"))["rope_scaling"] is None


def test_an_unknown_family_is_refused() -> None:
    with pytest.raises(SpecError, match=r"no config of the family deepseek_v2.*Use --frontend jax"):
        architecture_config(read_model("deepseek-ai/DeepSeek-V2-Lite"))


def test_gpt_oss_has_the_keys_that_only_it_has() -> None:
    config = architecture_config(read_model("openai/gpt-oss-20b"))
    assert (config["num_local_experts"], config["num_experts_per_tok"]) == (32, 4)
    assert (config["intermediate_size"], config["sliding_window"]) == (2880, 128)
    assert config["rope_scaling"]["beta_fast"] == 32.0


def test_experts_over_dp_have_an_axis_beside_data_parallel_attention() -> None:
    latent = experiment("deepseek-ai/DeepSeek-V3", "dp=8,ep=8", batch=64)
    config = vllm_config(latent, None)
    assert config.additional_config["sharding"]["sharding_strategy"] == {
        "enable_dp_attention": True,
        "expert_parallelism": 8,
    }
    assert config.parallel_config.data_parallel_size == 1
    assert config.scheduler_config.max_num_seqs == 8
    assert config.model_config.use_mla
    assert config.model_config.get_head_size() == 512 + 64
    assert engine_variables_of(latent) == {"NEW_MODEL_DESIGN": "1"}


@table
def test_quantized_weights_are_those_of_an_fp8_checkpoint(dtype, block, variables) -> None:
    made = experiment("Qwen/Qwen3-32B", "tp=8", weight_dtype=dtype)
    config = vllm_config(made, None).model_config
    assert config.quantization == (None if block is None else "fp8")
    quantization = getattr(config.hf_config, "quantization_config", {})
    assert quantization.get("weight_block_size") == block
    assert engine_variables_of(made) == variables


def test_the_scheduler_has_the_sequences_and_tokens_of_one_rank() -> None:
    config = vllm_config(
        experiment("Qwen/Qwen3-32B", "dp=2,tp=4", batch=16, prompt=2048, prefill_chunk="4096"), None
    )
    assert config.scheduler_config == SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=4096)
    assert config.parallel_config.tensor_parallel_size == 4
    assert config.parallel_config.data_parallel_size == 2
    assert config.model_config.max_model_len == 2048 + 128
    assert config.additional_config == {}


@pytest.mark.parametrize("engine", sorted({release.product for release in known_releases(ENGINES)}))
def test_releases_are_sorted_from_old_to_new(engine: Frontend) -> None:
    versions = [release.version for release in releases_of(engine)]
    numbers = [tuple(map(int, version.split("."))) for version in versions if version != "main"]
    assert numbers == sorted(numbers)
    assert "main" not in versions[:-1]
