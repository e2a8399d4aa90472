"""Tiny random models in `transformers`: the logits of a prompt and 16 greedy steps.

Names with a dtype are the same models with dequantized 8-bit weights.

Run: make golden, or this file with names of configs. Writes logits/NAME.npz; needs torch and
transformers. Weights have the names of published checkpoints and are made again from their names.
"""

import json
import re
import sys
import tempfile
import zlib
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

DIRECTORY = Path(__file__).parent / "logits"
BATCH, PROMPT, N_DECODE = 8, 16, 16
LOGIT_STEP = (
    2**-17
)  # of stored logits; rounding to it changes them by a fifth of the tests' tolerance at most

# A vocabulary of 101 divides by no tp, weights start large enough that logits differ between tokens, and an
# indexer has so many heads that none of its sums of rectified products is zero.
CONFIGS: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("logits_configs.json").read_text()
)

# Names of logits that are stored for the dequantized weights of a config: the config and the dtype; and for 8-bit
# weights and activations, with the number of tp devices that scale their own activations.
_ROUNDED = json.loads(Path(__file__).with_name("logits_rounded.json").read_text())
QUANTIZED: dict[str, tuple[str, str]] = _ROUNDED["quantized"]
NARROW: dict[str, tuple[str, str, int]] = _ROUNDED["narrow"]
BLOCK = 8  # rows and columns that share a scale; DeepSeek-V3 has 128
TABLES = ("embed_tokens", "lm_head")  # that stay in bfloat16 if blocks have scales
WIDE = (  # in names of tensors that stay in bfloat16
    *("norm", "bias", "sinks", "mlp.gate.", "router", "shared_expert_gate", "weights_proj"),
    *("conv1d", "A_log", "in_proj_ba", "in_proj_b.", "in_proj_a."),
    *("_hc.", "hc_head", "tid2eid", "compressor.kv_proj", "compressor.gate_proj"),
    *("compressor.indexer.kv_proj", "compressor.indexer.gate_proj"),
)


COMPUTED = ("layer_multipliers", "ngram_heads_offsets", "ngram_heads_vocab_sizes")  # by config


def quantized_model(name: str, dtype: str, *, has_wide_tables: bool = False) -> Any:
    """The same model with matrices rounded to 8 bits, and a scale per output channel or block."""
    import torch  # noqa: PLC0415  only the oracle needs it

    model = oracle_model(name)
    has_wide_tables |= dtype == "block8" or dtype.startswith(("s4", "mxfp4"))
    wide = (*WIDE, *TABLES) if has_wide_tables else WIDE
    with torch.no_grad():
        for tensor_name, tensor in model.state_dict().items():
            if any(part in tensor_name for part in wide):
                tensor.copy_(tensor.bfloat16())
            elif dtype == "block8":
                tensor.copy_(_rounded_blocks(tensor))
            elif dtype == "s4_group8":
                tensor.copy_(_rounded(tensor.unflatten(-1, (-1, BLOCK)), -1, "s4").flatten(-2))
            elif dtype == "mxfp4_group8":
                tensor.copy_(_rounded_mxfp4(tensor.unflatten(-1, (-1, BLOCK))).flatten(-2))
            elif dtype == "s4_channel":
                tensor.copy_(_rounded(tensor, -1, "s4"))
            else:
                # gpt-oss has experts [E, in, out], all other matrices are [out, in]
                dim = -2 if name == "gpt_oss" and "experts" in tensor_name else -1
                tensor.copy_(_rounded(tensor, dim, dtype))
    return model


def narrow_model(name: str, dtype: str, n_devices: int) -> Any:
    """The quantized model whose layers round the inputs of every product, by a scale for each token.

    Up-projections of latents take them as they are. The products that tp sums over devices have a scale for each of the `n_devices` parts of their inputs.
    """
    import torch  # noqa: PLC0415  only the oracle needs it

    model = quantized_model(name, dtype, has_wide_tables=True)
    for module_name, module in model.model.named_modules():
        if module_name.endswith("kv_b_proj") or any(part in f"{module_name}." for part in WIDE):
            continue  # decode multiplies the up-projection with queries and outputs, not with latents
        if isinstance(module, torch.nn.Linear):
            is_summed = module_name.endswith(("o_proj", "o_b_proj", "out_proj", "down_proj"))
            n_parts = n_devices if is_summed else 1
            module.register_forward_pre_hook(
                lambda _, inputs, n=n_parts: _rounded_parts(inputs[0], n, dtype)
            )
        elif module_name.endswith("mlp.experts"):
            module.forward = partial(_narrow_experts, module, n_devices, dtype)
    return model


def _narrow_experts(  # noqa: PLR0917  as the module's own, and how inputs are rounded
    experts: Any, n_parts: int, dtype: str, x: Any, top_k_index: Any, top_k_weights: Any
) -> Any:
    """The weighted sum of experts for tokens x [T, D], with rounded inputs of both products."""
    import torch  # noqa: PLC0415  only the oracle needs it

    def gated(both: Any) -> Any:
        gate, up = both.chunk(2, dim=-1)
        return experts.act_fn(gate) * up

    gated = getattr(experts, "_apply_gate", gated)  # DeepSeek-V4 has its own
    rounded, out = _rounded_parts(x, 1, dtype), torch.zeros_like(x)
    for expert in range(len(experts.down_proj)):
        inner = gated(rounded @ experts.gate_up_proj[expert].T)
        inner = _rounded_parts(inner, n_parts, dtype)
        share = (top_k_weights * (top_k_index == expert)).sum(dim=-1, keepdim=True)
        out += inner @ experts.down_proj[expert].T * share
    return out


def _rounded_parts(x: Any, n_parts: int, dtype: str) -> Any:
    """Activations [..., width] rounded in parts of the width."""
    return _rounded(x.unflatten(-1, (n_parts, -1)), -1, dtype).flatten(-2)


def _rounded(matrix: Any, dim: int, dtype: str) -> Any:
    """The matrix as 8-bit or 4-bit values times scales, whose inputs are along `dim`.

    Int4 has bfloat16 scales.
    """
    import torch  # noqa: PLC0415  only the oracle needs it

    largest = {"s4": 7, "s8": 127, "f8e4m3fn": 448}[dtype]
    scale = matrix.abs().amax(dim=dim, keepdim=True) / largest
    scale = scale.bfloat16().float() if dtype == "s4" else scale
    values = matrix / scale
    return scale * (
        values.to(torch.float8_e4m3fn).float() if dtype == "f8e4m3fn" else values.round()
    )


def _rounded_mxfp4(groups: Any) -> Any:
    """Groups [..., inputs] as numbers of e2m1 times powers of two (OCP MX 1.0, section 6.3)."""
    import ml_dtypes  # noqa: PLC0415  only the oracle needs them
    import torch  # noqa: PLC0415

    scale = 2.0 ** (groups.abs().amax(dim=-1, keepdim=True).log2().floor() - 2)
    values = (groups / scale).clamp(-6, 6).numpy().astype(ml_dtypes.float4_e2m1fn)
    return scale * torch.from_numpy(values.astype(np.float32))


def _rounded_blocks(matrix: Any) -> Any:
    """The matrix [..., out, in] as fp8 values times scales of square blocks."""
    import torch  # noqa: PLC0415  only the oracle needs it

    *lead, n_out, n_in = matrix.shape
    blocks = matrix.reshape(*lead, n_out // BLOCK, BLOCK, n_in // BLOCK, BLOCK)
    scale = blocks.abs().amax(dim=(-3, -1), keepdim=True) / 448
    return (scale * (blocks / scale).to(torch.float8_e4m3fn).float()).reshape(matrix.shape)


def oracle_model(name: str) -> Any:
    """The Hugging Face model of this config with the weights of `weights_of`, in float32."""
    import torch  # noqa: PLC0415  only the oracle needs it
    import transformers  # noqa: PLC0415
    from safetensors.numpy import save_file  # noqa: PLC0415  comes with transformers

    config = transformers.AutoConfig.for_model(**CONFIGS[name])
    with tempfile.TemporaryDirectory() as directory:
        config.save_pretrained(directory)
        save_file(weights_of(name), Path(directory) / "model.safetensors", {"format": "pt"})
        model, problems = causal_models().from_pretrained(
            directory,
            attn_implementation="eager",
            dtype=torch.float32,
            output_loading_info=True,
        )
    lacking = {key for key in problems.pop("missing_keys") if not key.endswith(COMPUTED)}
    assert not lacking | set().union(*problems.values()), (lacking, problems)
    return model.eval()


def causal_models() -> Any:
    """AutoModelForCausalLM, with what transformers 5.23 lists as a part of models for images only."""
    from transformers import (  # noqa: PLC0415
        AutoModelForCausalLM,
        MiniMaxM3SparseForConditionalGeneration,
        MiniMaxM3VLConfig,
        Mistral4Config,
        Step3p7Config,
    )
    from transformers.models.glm5_next import modeling_glm5_next as glm5  # noqa: PLC0415
    from transformers.models.mistral4 import Mistral4ForCausalLM  # noqa: PLC0415
    from transformers.models.step3p7 import Step3p7ForConditionalGeneration  # noqa: PLC0415

    class Glm5NextForCausalLM(glm5.Glm5NextPreTrainedModel):
        """The text part of GLM-5.3-Flash with its output head."""

        config: glm5.Glm5NextTextConfig

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = glm5.Glm5NextTextModel(config)
            self.lm_head = glm5.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        def forward(self, tokens: Any) -> Any:
            hidden = self.model(tokens, use_cache=False).last_hidden_state
            return SimpleNamespace(logits=self.lm_head(hidden))

    of_images = {
        glm5.Glm5NextTextConfig: Glm5NextForCausalLM,
        MiniMaxM3VLConfig: MiniMaxM3SparseForConditionalGeneration,
        Mistral4Config: Mistral4ForCausalLM,
        Step3p7Config: Step3p7ForConditionalGeneration,
    }
    for config, model in of_images.items():
        AutoModelForCausalLM.register(config, model, exist_ok=True)
    return AutoModelForCausalLM


class Spread(NamedTuple):
    """Shape, mean and standard deviation of the random values of a tensor."""

    shape: list[int]
    mean: float
    std: float


def weights_of(name: str) -> dict[str, np.ndarray]:
    """Random weights by checkpoint name, each with its name as seed, representable in float16."""
    with np.load(DIRECTORY / f"{name}.npz") as stored:
        spreads = {
            key: Spread(*spread) for key, spread in json.loads(str(stored["spreads"])).items()
        }
    return {key: _random(key, spread, CONFIGS[name]) for key, spread in spreads.items()}


def _random(name: str, spread: Spread, config: dict[str, Any]) -> np.ndarray:
    """The legacy generator's stream is frozen (NumPy's NEP 19), so the values never change."""
    generator = np.random.RandomState(zlib.crc32(name.encode()))
    if name.endswith("tid2eid"):  # the experts of each token ID, all different
        n_tokens, n_active = spread.shape
        order = generator.random_sample((n_tokens, config["n_routed_experts"])).argsort(axis=1)
        return np.ascontiguousarray(order[:, :n_active])
    values = spread.mean + spread.std * generator.standard_normal(spread.shape)
    return np.asarray(values, np.float16).astype(np.float32)


def spreads_of(name: str) -> dict[str, Spread]:
    """How `transformers` starts the tensors that it saves; constants get some noise, not to hide a mistake."""
    import torch  # noqa: PLC0415  only the oracle needs it
    import transformers  # noqa: PLC0415
    from safetensors.numpy import load_file  # noqa: PLC0415  comes with transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**CONFIGS[name])
    with tempfile.TemporaryDirectory() as directory:
        causal_models().from_config(config).save_pretrained(directory)
        stored = load_file(Path(directory) / "model.safetensors")
    spreads = {}
    for key, tensor in stored.items():
        if key.endswith(COMPUTED):
            continue
        mean, std = float(tensor.mean()), float(tensor.std())
        if std < 1e-6:
            std = 0.3 if config.model_type == "deepseek_v4" and "norm" not in key else 0.1
        if config.model_type == "gemma4_text" and "q_norm" in key:
            # scores are not divided by the width of heads: else one key wins
            mean, std = mean / 4, std / 4
        if key.endswith("A_log"):
            mean -= 3.0  # slow decays: else a state forgets a position at the next one
        named = key
        if config.model_type == "kimi_linear":  # transformers saves MLPs under the name of experts
            named = re.sub(r"block_sparse_moe\.(\w+_proj)", r"mlp.\1", key)
        spreads[named] = Spread(list(tensor.shape), round(mean, 3), round(std, 3))
    return spreads


def greedy_logits(model: Any, prompt: np.ndarray) -> np.ndarray:
    """Logits [1 + N_DECODE, BATCH, vocab] of the last position, each step fed its own argmax."""
    import torch  # noqa: PLC0415  only the oracle needs it

    tokens, logits = torch.tensor(prompt), []
    with torch.no_grad():
        for _ in range(1 + N_DECODE):
            logits.append(model(tokens).logits[:, -1].numpy())
            tokens = torch.cat([tokens, torch.tensor(logits[-1].argmax(-1))[:, None]], dim=1)
    return np.stack(logits)


def read_golden(name: str) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Weights by checkpoint name, prompt [BATCH, PROMPT], and greedy logits.

    If the name has a dtype, the weights are those before they are rounded.
    """
    base = (QUANTIZED | NARROW).get(name, (name,))[0]
    with np.load(DIRECTORY / f"{name}.npz") as stored:
        halves = np.ascontiguousarray(np.moveaxis(stored["logits"], 0, -1))
        logits = halves.view("<i4")[..., 0] * LOGIT_STEP
        weights = {
            name.removeprefix("language_model."): value for name, value in weights_of(base).items()
        }
        return weights, prompt_of(base), logits.astype(np.float32)


def stored_logits(logits: np.ndarray) -> np.ndarray:
    """The logits in multiples of LOGIT_STEP, as 16-bit halves [2, ...], which compress a third better than float32."""
    steps = np.rint(logits.astype(np.float64) / LOGIT_STEP).astype("<i4")
    return np.moveaxis(steps[..., None].view("<i2"), -1, 0)


def prompt_of(name: str) -> np.ndarray:
    return np.random.RandomState(0).randint(0, CONFIGS[name]["vocab_size"], (BATCH, PROMPT))


def main() -> None:
    """Writes the golden files of the given names, by default of all."""
    DIRECTORY.mkdir(exist_ok=True)
    for name in sys.argv[1:] or (*CONFIGS, *QUANTIZED, *NARROW):
        path = DIRECTORY / f"{name}.npz"
        if name in NARROW:
            base, extra = NARROW[name][0], {}
            model = narrow_model(*NARROW[name])
        elif name in QUANTIZED:
            base, extra = QUANTIZED[name][0], {}
            model = quantized_model(*QUANTIZED[name])
        else:
            base, extra = name, {"spreads": np.array(json.dumps(spreads_of(name)))}
            np.savez_compressed(path, **extra)
            model = oracle_model(name)
        logits = greedy_logits(model, prompt_of(base))
        np.savez_compressed(path, logits=stored_logits(logits), **extra)


if __name__ == "__main__":
    main()
