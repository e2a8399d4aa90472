"""What enters and mixes the residual stream: parallel streams, and embeddings of layers.

Letters of shapes: D hidden (d unsplit), V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from meshscope.errors import SpecError
from meshscope.model.arrays import (
    LAYER_BASE,
    ColumnSlice,
    Dim,
    Weight,
    WeightBuilder,
    letters,
)
from meshscope.model.reader import ConfigReader


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperConnections:
    """Parallel residual streams, mixed around every block (arXiv 2512.24880)."""

    is_gated: ClassVar[bool] = False
    n_streams: int
    n_iterations: int  # of Sinkhorn-Knopp, which make the mixing matrix doubly stochastic
    eps: float
    # DeepSeek-V4.1: the input of a block has the coefficients that the block before computed, so that no weights
    # collapse the streams after the last; all in float32.
    is_delayed: bool = False
    has_mean: bool = False  # GLM-5.3: after the last block, the streams are averaged

    @classmethod
    def read(cls, reader: ConfigReader, end: str) -> "HyperConnections":
        """The parallel residual streams of a DeepSeek-V4, V4.1 or GLM-5.3 config."""
        return cls(
            is_delayed=end == "delayed",
            has_mean=end == "mean",
            n_streams=reader.integer("hc_mult", 4),
            n_iterations=reader.integer("hc_sinkhorn_iters", 20),
            eps=reader.number("hc_eps", 1e-6),
        )

    def weights(self, hidden: int, name: str, block: str) -> Iterator[Weight]:
        """Weights that mix the streams around a block: coefficients of its input, its output, and between streams."""
        n_coefficients = (2 + self.n_streams) * self.n_streams
        base = f"{LAYER_BASE}hc_{block}_"
        return self._mixing(hidden, base, f"{name}_mixing", n_coefficients, n_scales=3)

    def collapse_weights(self, hidden: int) -> Iterator[Weight]:
        """Weights that collapse the streams after the last layer; none if the last block's coefficients do, or a mean."""
        if not self.is_delayed and not self.has_mean:
            base = "model.hc_head.hc_"
            yield from self._mixing(hidden, base, "collapse", self.n_streams, n_scales=1)

    def _mixing(
        self, hidden: int, base: str, name: str, n: int, *, n_scales: int
    ) -> Iterator[Weight]:
        dims = letters(Dim.NORM, d=self.n_streams * hidden, n=n, s=n_scales)
        builder, dtype = WeightBuilder(base, dims), "f32" if self.is_delayed else None
        yield replace(builder.matrix(name, "dn", "fn", inputs=()), dtype=dtype)
        dtype = "f32" if self.has_mean else dtype
        yield replace(builder.vector(f"{name}_bias", "n", "base"), dtype=dtype)
        yield replace(builder.vector(f"{name}_scale", "s", "scale"), dtype=dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamGates:
    """Parallel residual streams whose channels have gates (Qwen3.8): a block reads their mean and adds to each.

    The gates of all channels come from their norms by a matrix of low rank. Source: Qwen4ExpTextGatedResidual of
    transformers.
    """

    is_gated: ClassVar[bool] = True
    is_delayed: ClassVar[bool] = False
    n_streams: int
    rank: int

    @classmethod
    def read(cls, reader: ConfigReader) -> "StreamGates":
        """The streams of a Qwen3.8 config, with the defaults of Qwen4ExpTextConfig."""
        n_streams = reader.integer("hc_count", 4, minimum=2)
        return cls(n_streams=n_streams, rank=reader.integer("hc_lowrank", 320))

    def weights(self, hidden: int, name: str, _: str) -> Iterator[Weight]:
        """The norm of the streams, the gates of a block's input, and what its output is multiplied by for each stream."""
        builder = self._builder(hidden, f"{LAYER_BASE}{name}_hyper_connection.")
        yield from self._gates(builder, name)
        yield builder.matrix(f"{name}_inject", "dn", "block_inject_weight.weight")

    def collapse_weights(self, hidden: int) -> Iterator[Weight]:
        """The gates of what follows the last layer, which has no other norm."""
        return self._gates(self._builder(hidden, "model.hyper_connection_mixer."), "collapse")

    def _builder(self, hidden: int, base: str) -> WeightBuilder:
        sizes = {"d": self.n_streams * hidden, "r": self.rank, "n": self.n_streams}
        return WeightBuilder(base, letters(Dim.NORM, **sizes))

    def _gates(self, builder: WeightBuilder, name: str) -> Iterator[Weight]:
        yield builder.vector(f"{name}_stream_norm", "d", "hc_norm.weight")
        yield builder.matrix(f"{name}_gate_down", "dr", "input_mix_weight_down.weight")
        yield builder.matrix(f"{name}_gate_up", "rd", "input_mix_weight_up.weight")


Streams = HyperConnections | StreamGates


def read_streams(reader: ConfigReader, end: str | None) -> Streams | None:
    """The parallel residual streams of a family whose streams have this end; None without."""
    if end == "gated":
        return StreamGates.read(reader)
    return None if end is None else HyperConnections.read(reader, end)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputs:
    """An embedding of each token for each layer (Gemma 4), scaled by a gate that the layer computes from its output."""

    width: int
    n_layers: int  # of the checkpoint's table, also if fewer are compiled

    @classmethod
    def read(cls, reader: ConfigReader, n_layers: int) -> "LayerInputs | None":
        """The embeddings of each layer, with the defaults of Gemma4TextConfig; None without them."""
        width = reader.count("hidden_size_per_layer_input", 256)
        if not width:
            return None
        sizes = reader.integer("vocab_size_per_layer_input", 262_144), reader.integer("vocab_size")
        if sizes[0] != sizes[1]:
            raise SpecError(
                f"{reader.source}: vocab_size_per_layer_input={sizes[0]} differs from vocab_size={sizes[1]}. "
                "Programs have both tables for the same tokens: correct the config."
            )
        return cls(width=width, n_layers=n_layers)

    def tables(self, hidden: int, vocab: int, n_layers: int) -> Iterator[Weight]:
        """The embeddings of `n_layers` layers in one table, the projection of the model's to them, and its norm."""
        whole = ColumnSlice(whole=self.width * self.n_layers, start=0, stop=self.width * n_layers)
        columns = None if whole.stop == whole.whole else whole
        dims = letters(Dim.VOCAB, V=vocab) | letters(Dim.HIDDEN, D=hidden, W=whole.stop)
        dims |= letters(Dim.NORM, w=self.width, n=whole.stop)
        builder = WeightBuilder("model.", dims)
        tensor = "embed_tokens_per_layer.weight"
        embed = builder.vector("layer_embed", "VW", tensor, columns=columns)
        yield replace(embed, is_vector=False, is_row_major=True, inputs=(1,))
        tensor = "per_layer_model_projection.weight"
        yield builder.matrix("layer_embed_proj", "Dn", tensor, columns=columns)
        yield builder.vector("layer_embed_norm", "w", "per_layer_projection_norm.weight")

    def weights(self, hidden: int) -> Iterator[Weight]:
        """The replicated weights that bring the embeddings of a layer into its output, and the norm after them."""
        dims = letters(Dim.HIDDEN, D=hidden) | letters(Dim.NORM, d=hidden, w=self.width)
        builder = WeightBuilder(LAYER_BASE, dims)
        yield builder.matrix("layer_input_gate", "Dw", "per_layer_input_gate.weight")
        yield builder.matrix("layer_input_out", "wD", "per_layer_projection.weight")
        yield builder.vector("layer_input_norm", "d", "post_per_layer_input_norm.weight")
