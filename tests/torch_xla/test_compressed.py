"""Attention over a cache of fixed shape gives what transformers' gives with arrays that grow (DeepSeek-V4)."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tables import stored

pytest.importorskip("torch_xla.core", reason="the extra 'torchxla' has an environment of its own")
torch = pytest.importorskip("torch")

import transformers  # noqa: E402  after the skip
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as theirs  # noqa: E402

from meshscope.model.config import model_from_config  # noqa: E402
from meshscope.model.mechanisms.compressed import CompressedAttention  # noqa: E402
from meshscope.plans.caches import layer_cache  # noqa: E402
from meshscope.plans.plan import parse_plan  # noqa: E402
from meshscope.programs.torchxla.caching import States  # noqa: E402
from meshscope.programs.torchxla.compressed import EntryAttention  # noqa: E402

BATCH, N_POSITIONS = 2, 20
CONFIG: dict[str, Any] = stored(Path(__file__).with_suffix(".yaml"))["config"]
UNSHARDED: Any = SimpleNamespace(
    annotate=lambda x, _: x,
    by_heads=lambda x: x,
    layouts=SimpleNamespace(data=(), axes=lambda *_: ()),
)


@pytest.mark.parametrize("n_prompt", [1, 3, 17])
@pytest.mark.parametrize("layer", [0, 1, 2], ids=["window", "sparse", "heavy"])
def test_steps_equal_those_of_transformers(layer: int, n_prompt: int) -> None:
    """From prompts shorter than an entry and than the window to the last position."""
    torch.manual_seed(0)
    described = model_from_config(CONFIG, name="tiny", source="test")
    assert isinstance(described.attention, CompressedAttention)
    config = transformers.AutoConfig.for_model(**CONFIG)
    config._attn_implementation = "eager"
    expected_of = theirs.DeepseekV4Attention(config, layer).eval()
    rotary = theirs.DeepseekV4RotaryEmbedding(config)
    for parameter in expected_of.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(BATCH, N_POSITIONS, CONFIG["hidden_size"])
    arrays = {
        array.name: torch.zeros(BATCH, array.n_slots(N_POSITIONS), array.shape[-1])
        for array in layer_cache(described, parse_plan("tp=1"), described.layers[layer])
    }
    grown = transformers.DynamicCache(config=config)
    fixed = SimpleNamespace(layers=dict.fromkeys(range(3), States(arrays)))

    expected = _outputs(expected_of, grown, x, n_prompt, rotary)
    kind, decoder = described.layers[layer].attention, SimpleNamespace(rotary_emb=rotary)
    ours = EntryAttention(expected_of, kind, described.attention, UNSHARDED, decoder)
    got = _outputs(ours, fixed, x, n_prompt, rotary)

    torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)


def _outputs(attention: Any, cache: Any, x: Any, n_prompt: int, rotary: Any) -> Any:
    """[B, T, D]: the outputs of a prompt and of one step for each position behind it."""
    outputs: list[Any] = []
    for start, end in [(0, n_prompt), *((at, at + 1) for at in range(n_prompt, N_POSITIONS))]:
        UNSHARDED.is_decode = bool(start)
        places = torch.arange(start, end)
        angles = {
            name: rotary(x, position_ids=places[None], layer_type=name)
            for name in ("main", "compress")
        }
        with torch.no_grad():
            out, _ = attention(
                hidden_states=x[:, start:end],
                position_embeddings=angles,
                position_ids=places[None],
                attention_mask=_mask_of_window(places),
                past_key_values=cache,
            )
        outputs.append(out)
    return torch.cat(outputs, dim=1)


def _mask_of_window(places: Any) -> Any:
    """[B, 1, S, T] over the keys that the cache of transformers has kept."""
    width = CONFIG["sliding_window"]
    keys = torch.arange(max(0, int(places[0]) - width + 1), int(places[-1]) + 1)
    distance = places[:, None] - keys
    seen = (distance >= 0) & (distance < width)
    return torch.where(seen, 0.0, float("-inf"))[None, None].expand(BATCH, 1, -1, -1)
