"""What enters and mixes the residual stream: parallel streams, embeddings of layers, the head of a draft."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from meshscope.errors import SpecError
from meshscope.model.arrays import ColumnSlice, Dim, Weight, WeightBuilder
from meshscope.model.reader import ConfigReader


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperConnections:
    """`n_streams` parallel residual streams, mixed around every block (arXiv 2512.24880).

    `n_iterations` of Sinkhorn-Knopp make the mixing matrix doubly stochastic.
    """

    n_streams: int
    n_iterations: int
    eps: float

    @property
    def n_coefficients(self) -> int:
        """Mixing coefficients per token and block: input, output and stream-to-stream."""
        return (2 + self.n_streams) * self.n_streams

    @classmethod
    def read(cls, reader: ConfigReader) -> "HyperConnections":
        """The parallel residual streams of a DeepSeek-V4 config."""
        return cls(
            n_streams=reader.integer("hc_mult", 4),
            n_iterations=reader.integer("hc_sinkhorn_iters", 20),
            eps=reader.number("hc_eps", 1e-6),
        )

    def weights(self, hidden: int, name: str, block: str) -> Iterator[Weight]:
        """Weights that mix the streams around a block."""
        builder = WeightBuilder(base=f"model.layers.{{layer}}.hc_{block}_")
        n = self.n_coefficients
        shape = (self.n_streams * hidden, n)
        yield builder.matrix(f"{name}_mixing", (Dim.NORM, Dim.NORM), shape, "fn", inputs=())
        yield builder.vector(f"{name}_mixing_bias", (Dim.NORM,), (n,), "base")
        yield builder.vector(f"{name}_mixing_scale", (Dim.NORM,), (3,), "scale")

    def collapse_weights(self, hidden: int) -> Iterator[Weight]:
        """Weights that collapse the streams after the last layer."""
        builder, n = WeightBuilder(base="model.hc_head.hc_"), self.n_streams
        shape = (n * hidden, n)
        yield builder.matrix("collapse", (Dim.NORM, Dim.NORM), shape, "fn", inputs=())
        yield builder.vector("collapse_bias", (Dim.NORM,), (n,), "base")
        yield builder.vector("collapse_scale", (Dim.NORM,), (1,), "scale")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputs:
    """An embedding of each token for each layer, of `width` numbers (Gemma 4).

    A gate that the layer computes from its output scales it. The checkpoint has one table for all of its
    `n_layers` layers, also if fewer are compiled.
    """

    width: int
    n_layers: int

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
        width, whole = self.width * n_layers, self.width * self.n_layers
        columns = None if width == whole else ColumnSlice(whole=whole, start=0, stop=width)
        builder, dims = WeightBuilder(base="model."), (Dim.VOCAB, Dim.HIDDEN)
        tensor = "embed_tokens_per_layer.weight"
        table = builder.vector("layer_embed", dims, (vocab, width), tensor, columns=columns)
        yield replace(table, is_vector=False, is_row_major=True, inputs=(1,))
        dims, shape = (Dim.HIDDEN, Dim.NORM), (hidden, width)
        tensor = "per_layer_model_projection.weight"
        yield builder.matrix("layer_embed_proj", dims, shape, tensor, columns=columns)
        tensor = "per_layer_projection_norm.weight"
        yield builder.vector("layer_embed_norm", (Dim.NORM,), (self.width,), tensor)

    def weights(self, hidden: int) -> Iterator[Weight]:
        """The replicated weights that bring the embeddings of a layer into its output, and the norm after them."""
        builder, d, width = WeightBuilder(), hidden, self.width
        into, out = "per_layer_input_gate.weight", "per_layer_projection.weight"
        yield builder.matrix("layer_input_gate", (Dim.HIDDEN, Dim.NORM), (d, width), into)
        yield builder.matrix("layer_input_out", (Dim.NORM, Dim.HIDDEN), (width, d), out)
        tensor = "post_per_layer_input_norm.weight"
        yield builder.vector("layer_input_norm", (Dim.NORM,), (d,), tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftHead:
    """What joins the embedding of a token and the hidden state before it: a matrix [2 hidden, hidden].

    With `has_norms`, both are normed before (DeepSeek-V3, arXiv 2412.19437, equation 21); EAGLE joins them as
    they are (arXiv 2401.15077, section 4.1).
    """

    has_norms: bool

    def weights(self, hidden: int, n_layers: int) -> Iterator[Weight]:
        """The norms of both inputs, and the matrix that joins them, which every device of tp has.

        Named as in the checkpoints of DeepSeek-V3; the matrix is not quantized there.
        """
        builder = WeightBuilder(base=f"model.layers.{n_layers}.")
        for name, tensor in (("embed", "enorm"), ("hidden", "hnorm")):
            if self.has_norms:
                yield builder.vector(
                    f"draft_{name}_norm", (Dim.NORM,), (hidden,), f"{tensor}.weight"
                )
        shape, dims = (2 * hidden, hidden), (Dim.NORM, Dim.HIDDEN)
        yield builder.matrix("draft_join", dims, shape, "eh_proj.weight", inputs=())
