"""What enters and mixes the residual stream: parallel streams, embeddings of layers, the head of a draft.

Letters of shapes: D hidden (d unsplit), V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from meshscope.errors import SpecError
from meshscope.model.arrays import LAYER_BASE, ColumnSlice, Dim, Weight, WeightBuilder, letters
from meshscope.model.reader import ConfigReader


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperConnections:
    """Parallel residual streams, mixed around every block (arXiv 2512.24880)."""

    n_streams: int
    n_iterations: int  # of Sinkhorn-Knopp, which make the mixing matrix doubly stochastic
    eps: float

    @classmethod
    def read(cls, reader: ConfigReader) -> "HyperConnections":
        """The parallel residual streams of a DeepSeek-V4 config."""
        return cls(
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
        """Weights that collapse the streams after the last layer."""
        return self._mixing(hidden, "model.hc_head.hc_", "collapse", self.n_streams, n_scales=1)

    def _mixing(
        self, hidden: int, base: str, name: str, n: int, *, n_scales: int
    ) -> Iterator[Weight]:
        dims = letters(Dim.NORM, d=self.n_streams * hidden, n=n, s=n_scales)
        builder = WeightBuilder(base, dims)
        yield builder.matrix(name, "dn", "fn", inputs=())
        yield builder.vector(f"{name}_bias", "n", "base")
        yield builder.vector(f"{name}_scale", "s", "scale")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftHead:
    """What joins the embedding of a token and the hidden state before it: a matrix [2 hidden, hidden].

    With norms as in DeepSeek-V3 (arXiv 2412.19437, equation 21); EAGLE has none (arXiv 2401.15077, section 4.1).
    """

    has_norms: bool

    def weights(self, hidden: int, n_layers: int) -> Iterator[Weight]:
        """The norms of both inputs, and the matrix that joins them, not quantized, named as in DeepSeek-V3's checkpoints."""
        dims = letters(Dim.HIDDEN, D=hidden) | letters(Dim.NORM, d=hidden, j=2 * hidden)
        builder = WeightBuilder(f"model.layers.{n_layers}.", dims)
        if self.has_norms:
            yield builder.vector("draft_embed_norm", "d", "enorm.weight")
            yield builder.vector("draft_hidden_norm", "d", "hnorm.weight")
        yield builder.matrix("draft_join", "jD", "eh_proj.weight", inputs=())
