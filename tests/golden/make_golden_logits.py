"""Tiny random models, run by `transformers`: weights, a prompt, and the logits of 17 greedy steps.

Run: make golden. Writes logits/NAME.npz beside this file; needs torch and transformers.
"""

from pathlib import Path
from typing import Any

import numpy as np

DIRECTORY = Path(__file__).parent / "logits"
BATCH, PROMPT, N_DECODE = 8, 16, 16

BASE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "vocab_size": 101,  # no multiple of any tp: the vocabulary is padded
    "max_position_embeddings": 64,
    "initializer_range": 0.2,  # large enough that logits differ between tokens
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": BASE
    | {"model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 2, "mlp_bias": True}
    | {"attention_bias": True, "rope_parameters": LLAMA3_ROPE},
    "llama-tied": BASE
    | {"model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 8}
    | {"tie_word_embeddings": True},
    "qwen2": BASE | {"model_type": "qwen2", "num_attention_heads": 8, "num_key_value_heads": 4},
    "qwen3": BASE
    | {"model_type": "qwen3", "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16},
}


def oracle_model(name: str) -> Any:
    """The Hugging Face model of this config, random but reproducible, in float32."""
    import torch  # noqa: PLC0415  only the oracle needs it
    import transformers  # noqa: PLC0415

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**CONFIGS[name])
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for tensor_name, tensor in model.named_parameters():
            if "norm" in tensor_name or tensor_name.endswith("bias"):
                tensor.add_(0.1 * torch.randn(tensor.shape))  # ones and zeros would hide a mistake
    return model.float().eval()


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
    """Weights by checkpoint name, prompt [BATCH, PROMPT], and greedy logits."""
    with np.load(DIRECTORY / f"{name}.npz") as stored:
        weights = {key: stored[key] for key in stored.files if key not in {"prompt", "logits"}}
        return weights, stored["prompt"], stored["logits"]


def main() -> None:
    """Writes every golden file."""
    DIRECTORY.mkdir(exist_ok=True)
    for name, config in CONFIGS.items():
        model = oracle_model(name)
        generator = np.random.default_rng(0)
        prompt = generator.integers(0, config["vocab_size"], (BATCH, PROMPT))
        weights = {key: value.detach().numpy() for key, value in model.state_dict().items()}
        logits = greedy_logits(model, prompt)
        np.savez_compressed(DIRECTORY / f"{name}.npz", prompt=prompt, logits=logits, **weights)


if __name__ == "__main__":
    main()
