"""Attention to entries and choices that layers share (DeepSeek-V4.1), in an encoder and a decoder half of the layers.

Sources: inference/model.py and the technical report (sections 2.2 and 2.3) of deepseek-ai/DeepSeek-V4.1-Flash.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import ClassVar, NamedTuple

from meshscope.model.arrays import CacheArray, Dim, Weight, WeightBuilder, letters
from meshscope.model.families import Family
from meshscope.model.layers import AttentionKind, Layer, MlpKind
from meshscope.model.mechanisms import attention as base
from meshscope.model.mechanisms.attention import AttentionStep
from meshscope.model.mechanisms.compressed import BASE, OneKeyAttention, entry_sizes
from meshscope.model.reader import ConfigReader, refuse

ENCODER = frozenset({AttentionKind.ENCODER_FULL, AttentionKind.ENCODER_REUSE})
FULL = frozenset({AttentionKind.ENCODER_FULL, AttentionKind.DECODER_FULL})
CHOOSING = FULL | {AttentionKind.DECODER_REINDEX}
DECODER = frozenset(
    {AttentionKind.DECODER_FULL, AttentionKind.DECODER_REINDEX, AttentionKind.DECODER_REUSE}
)


# Passes over the scores of entries: written, and read for the best, for the mask and for candidates. Assumed, not
# counted in a program.
CHOICE_PASSES = 4


class StoredRows(NamedTuple):
    """The format of cached rows: dtypes of values and scales, and the values that share a scale."""

    values: str
    n_each: int
    scales: str


# NVFP4 entries, MXFP4 keys of the indexer and fp8 windows: values, and how many of them share a scale of which dtype.
ENTRY_FORMAT = StoredRows("f4e2m1fn", 16, "f8e4m3fn")
INDEX_FORMAT = StoredRows("f4e2m1fn", 32, "u8")
WINDOW_FORMAT = StoredRows("f8e4m3fn", 32, "u8")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReusedAttention(OneKeyAttention):
    """Attention to a window of the layer's own and to entries that a few layers make for those after them.

    A full layer makes entries, of `rate` positions each in the encoder and of one in the decoder, and chooses
    among them. A layer that reindexes chooses again, among `n_candidates` entries that the full layer of the
    decoder kept; one that reuses takes entries and choice of layers before it.
    """

    mechanism = base.Mechanism.REUSED
    why_no_ring = "layers share entries, which are gathered"
    why_few_axes = "layers share entries and choices, and read tables of n-grams"
    has_whole_caches = True
    kv_norm: ClassVar[str] = "kv_norm.weight"
    sink_dtype: ClassVar[str | None] = "f32"
    prompt_weights = frozenset({"entry_wkv", "index_wk"})

    rate: int
    n_candidates: int
    candidate_block: int  # entries of which all or none are candidates

    def check(self, source: str) -> None:
        """Raise SpecError unless heads fit, and rows of caches are whole groups that share a scale."""
        OneKeyAttention.check(self, source)
        widths = {"head_dim": self.head_dim, "index_head_dim": self.indexer.head_dim}
        refuse(
            source, {f"{name}={n} is no multiple of 32": n % 32 > 0 for name, n in widths.items()}
        )

    def entry_rate(self, kind: AttentionKind) -> int:
        return self.rate if kind in ENCODER else 1

    def entry_weights(self, d: int, kind: AttentionKind) -> Iterator[Weight]:
        sizes = letters(Dim.NORM, h=self.head_dim, i=self.indexer.head_dim)
        builder = WeightBuilder(f"{BASE}compressor.", letters(Dim.HIDDEN, D=d) | sizes)
        if kind in FULL:  # in bf16, without scales
            names = ("wkv", "wgate") if self.entry_rate(kind) > 1 else ("wkv",)
            for name in names:
                yield builder.matrix(f"entry_{name}", "Dh", f"{name}.weight", inputs=())
            yield builder.vector("entry_norm", "h", "norm.weight")
            keys = replace(builder, base=f"{BASE}indexer.")
            yield keys.matrix("index_wk", "hi", "wk.weight", inputs=())
            yield keys.vector("index_k_norm", "i", "k_norm.weight")
        if kind in CHOOSING:
            yield from base.index_projections(d, self.q_rank, self.indexer, f"{BASE}indexer.")

    def cache(self, kind: AttentionKind, tp: int, n_tokens: int = 1) -> Iterator[CacheArray]:
        """The window of every layer; in full layers entries, keys of the indexer, and positions of open entries."""
        yield from _scaled("window", self.head_dim, WINDOW_FORMAT, self.window + n_tokens - 1)
        if kind not in FULL:
            return
        rate = self.entry_rate(kind)
        yield from _scaled("entry", self.head_dim, ENTRY_FORMAT, rate=rate)
        yield from _scaled("index", self.indexer.head_dim, INDEX_FORMAT, rate=rate)
        n_open = base.n_open_windows(rate, n_tokens) * rate if rate > 1 else 0
        for name in ("entry_kv", "entry_gate") if n_open else ():
            yield _array(name, self.head_dim, "f32", n_open)

    def over_cp(self, kind: AttentionKind, step: AttentionStep) -> base.Exchanges:
        """All-gathers of windows, and of new entries and keys of the indexer, as they are stored; none in decode.

        Layers that only the last tokens of prompts pass through have these on all devices.
        """
        is_end = kind in DECODER and step.n_positions > self.window
        names = () if is_end else ("window",)
        names += ("entry", "index") if kind in FULL else ()
        for array in self.cache(kind, step.tp) if step.is_prefill else ():
            if array.name.removesuffix("_scale") in names:
                n_slots = step.n_positions // array.rate
                width = array.shape[0] // (2 if array.dtype == ENTRY_FORMAT.values else 1)
                dtype = "u8" if array.dtype == ENTRY_FORMAT.values else array.dtype
                shape = (step.n_sequences, n_slots, 1, width)
                yield base.gather_over_cp(shape, dtype)

    def chosen_by(self, kind: AttentionKind) -> tuple[base.Indexer, int] | None:
        """The indexer of layers that choose."""
        return (self.indexer, self.entry_rate(kind)) if kind in CHOOSING else None

    @property
    def chosen_rate(self) -> int:
        return self.rate

    def attended_pairs(self, kind: AttentionKind, n: int) -> int:
        return base.seen_pairs(n, most=self.window) + self._entry_pairs(kind, n)

    def _entry_pairs(self, kind: AttentionKind, n: int) -> int:
        if kind is AttentionKind.SLIDING:
            return 0
        return base.seen_pairs(n, rate=self.entry_rate(kind), most=self.indexer.top_k)

    def score_keys(self, step: AttentionStep) -> float:
        """In decode, layers attend to chosen entries alone: as many scores as the indexer, on each device, has of all entries."""
        if step.is_prefill:
            return OneKeyAttention.score_keys(self, step)
        return self.window + step.n_keys * self.indexer.n_heads * step.tp / self.n_heads

    def _choice_flops(self, kind: AttentionKind, n: int) -> float:
        if kind not in CHOOSING:
            return 0.0
        most = self.n_candidates if kind is AttentionKind.DECODER_REINDEX else None
        n_scored = base.seen_pairs(n, rate=self.entry_rate(kind), most=most)
        return 2.0 * self.indexer.n_heads * (self.indexer.head_dim + 1) * n_scored

    def flops(self, kind: AttentionKind, n: int) -> float:
        return self.pair_flops() * self.attended_pairs(kind, n) + self._choice_flops(kind, n)

    def n_replayed(self, kind: AttentionKind, n_prompt: int) -> int | None:
        """Entries of the decoder come from its first layer, and its windows from a replay of their length."""
        return min(self.window, n_prompt) if kind in DECODER else None

    def replay_flops(self, kind: AttentionKind, n_prompt: int) -> float:
        """Their windows start with the first of them."""
        n = min(self.window, n_prompt)
        before = n_prompt - n
        n_entries = self._entry_pairs(kind, n_prompt) - self._entry_pairs(kind, before)
        choice = self._choice_flops(kind, n_prompt) - self._choice_flops(kind, before)
        return self.pair_flops() * (base.seen_pairs(n) + n_entries) + choice

    @property
    def candidate_positions(self) -> int:
        return self.n_candidates

    def shared_arrays(self, kind: AttentionKind) -> Iterator[CacheArray]:
        """The entries of a layer before, and keys to choose among them again."""
        if kind in FULL or kind is AttentionKind.SLIDING:
            return
        rate = self.entry_rate(kind)
        yield from _scaled("entry", self.head_dim, ENTRY_FORMAT, rate=rate)
        if kind in CHOOSING:
            yield from _scaled("index", self.indexer.head_dim, INDEX_FORMAT, rate=rate)

    def prompt_work(self, kind: AttentionKind, n_blocks: int) -> base.PromptWork:
        """The window and the chosen entries of each query, and the scores of all entries in layers that choose."""
        pair_flops, n_heads = self.pair_flops(), self.indexer.n_heads
        is_choosing = kind in CHOOSING
        return base.PromptWork(
            rate=self.entry_rate(kind),
            token_flops=pair_flops * self.window,
            chosen_flops=0.0 if kind is AttentionKind.SLIDING else pair_flops,
            index_flops=2.0 * n_heads * (self.indexer.head_dim + 1) * is_choosing,
            index_f32=float(CHOICE_PASSES * is_choosing),
        )

    @property
    def joint_positions(self) -> int:
        return self.rate

    def why_whole_prompts(self, name: str) -> str | None:
        return f"under cp, {name} makes the entries of a prompt together"


def _array(
    name: str, width: int, dtype: str, n_fixed: int | None = None, rate: int = 1
) -> CacheArray:
    return CacheArray(
        name=name, dims=(Dim.NORM,), shape=(width,), rate=rate, n_fixed_slots=n_fixed, dtype=dtype
    )


def _scaled(
    name: str, width: int, form: StoredRows, n_fixed: int | None = None, rate: int = 1
) -> Iterator[CacheArray]:
    values, n_each, scales = form
    yield _array(name, width, values, n_fixed, rate)
    yield _array(f"{name}_scale", width // n_each, scales, n_fixed, rate)


reused_of = partial(base.narrowed, kind=ReusedAttention)


def reused_attention(reader: ConfigReader, family: Family) -> ReusedAttention:
    """The attention parameters of all layers; a layer's kind selects the parts it uses."""
    ratios, block = reader.integers("compress_ratios"), reader.integer("candidate_block_size")
    return ReusedAttention(
        **entry_sizes(reader, family),
        rate=max((ratio for ratio in ratios if ratio > 1), default=2),
        n_candidates=reader.integer("candidate_topk_blocks") * block,
        candidate_block=block,
    )


def reused_layers(reader: ConfigReader, n_layers: int) -> tuple[Layer, ...]:
    """The kind of each layer; SpecError unless sources and ratios describe an encoder, then a decoder."""
    n_drafts = reader.count("num_nextn_predict_layers", 0)
    ratios = reader.integers("compress_ratios")
    sources, choosers = (reader.integers(f"{name}_source_layer_ids") for name in ("kv", "index"))
    first = reader.integer("candidate_source_layer_id", minimum=0)
    in_encoder = [source for source in sources if source < first]
    start = in_encoder[0] if in_encoder else first
    rates = set(ratios[start:first])
    expected = [*[0] * start, *ratios[start:first], *[1] * (n_layers - first)]
    lengths = {n_layers, n_layers + n_drafts}
    refuse(
        reader.source,
        {
            f"'compress_ratios' has {len(ratios)} entries, not one for each of num_hidden_layers={n_layers} layers "
            f"and perhaps the {n_drafts} of drafts": len(ratios) not in lengths,
            f"'kv_source_layer_ids' {sources} must ascend and end with candidate_source_layer_id={first}, below "
            f"num_hidden_layers={n_layers}": not _ascend(sources)
            or sources[-1] != first
            or first >= n_layers,
            f"'index_source_layer_ids' {choosers} must ascend below num_hidden_layers={n_layers} and equal "
            f"'kv_source_layer_ids' up to candidate_source_layer_id={first}": not _ascend(choosers)
            or [one for one in choosers if one <= first] != sources
            or choosers[-1] >= n_layers,
            f"'compress_ratios' must be 0 before layer {start}, one number above 1 up to layer {first}, and 1 from "
            "there on (0 in drafts)": ratios != [*expected, *[0] * (len(ratios) - n_layers)]
            or len(rates) > 1
            or any(rate < 2 for rate in rates),
        },
    )

    def kind_of(index: int) -> AttentionKind:
        if index < start:
            return AttentionKind.SLIDING
        if index < first:
            is_source = index in sources
            return AttentionKind.ENCODER_FULL if is_source else AttentionKind.ENCODER_REUSE
        if index == first:
            return AttentionKind.DECODER_FULL
        is_chooser = choosers[bisect_right(choosers, index) - 1] == index
        return AttentionKind.DECODER_REINDEX if is_chooser else AttentionKind.DECODER_REUSE

    return tuple(Layer(attention=kind_of(i), mlp=MlpKind.MOE) for i in range(n_layers))


def _ascend(values: list[int]) -> bool:
    return bool(values) and values[0] >= 0 and all(a < b for a, b in pairwise(values))
