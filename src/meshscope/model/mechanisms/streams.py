"""What enters and mixes the residual stream: parallel streams, embeddings of layers, and tables of n-grams.

Letters of shapes: D hidden (d unsplit), V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from meshscope.errors import SpecError
from meshscope.model.arrays import (
    LAYER_BASE,
    ColumnSlice,
    Dim,
    Weight,
    WeightBuilder,
    letters,
    packed_rows,
)
from meshscope.model.reader import ConfigReader, refuse


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperConnections:
    """Parallel residual streams, mixed around every block (arXiv 2512.24880)."""

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


ENGRAM = "engram_"  # in the names of its weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Engram:
    """Tables of embeddings of n-grams (DeepSeek-V4.1): hashes of the last tokens choose rows, which enter the streams.

    Before each of `layers`, `n_heads` rows for each length of n-grams from 2 on give a key for each stream and a
    value, which a gate adds to the stream.
    """

    layers: tuple[int, ...]
    n_rows: tuple[int, ...]  # of the table of each
    n_orders: int  # lengths of n-grams
    n_heads: int
    head_dim: int

    @classmethod
    def read(cls, reader: ConfigReader, n_layers: int) -> "Engram":
        """The tables of a config; SpecError unless each has a layer, and room for the primes of its hashes."""
        layers, rows = (reader.integers(f"engram_{k}") for k in ("layer_ids", "num_embeddings"))
        n_tokens = reader.integer("engram_max_ngram_size")
        tables = cls(
            layers=tuple(layers),
            n_rows=tuple(rows),
            n_orders=n_tokens - 1,
            n_heads=reader.integer("engram_n_heads"),
            head_dim=reader.integer("engram_head_dim"),
        )
        least = reader.integer("engram_vocab_size") * tables.n_read
        n_classes, vocab = (
            reader.integer("engram_compressed_vocab_size"),
            reader.integer("vocab_size"),
        )
        problems = {
            f"engram_max_ngram_size={n_tokens} is below 2": n_tokens < 2,
            f"'engram_num_embeddings' has {len(rows)} tables for the {len(layers)} layers of 'engram_layer_ids'": (
                len(rows) != len(layers)
            ),
            f"'engram_layer_ids' {layers} must differ and be below num_hidden_layers={n_layers}": (
                len(set(layers)) != len(layers) or not all(0 <= one < n_layers for one in layers)
            ),
            f"'engram_num_embeddings' {rows} must be at least {least}, {tables.n_read} hashes of engram_vocab_size": (
                any(n < least for n in rows)
            ),
            f"engram_compressed_vocab_size={n_classes} exceeds vocab_size={vocab}": n_classes
            > vocab,
        }
        refuse(reader.source, problems)
        return tables

    @property
    def n_read(self) -> int:
        """Rows that a token reads of each table."""
        return self.n_orders * self.n_heads

    def weights(self, hidden: int, n_streams: int, n_layers: int, n_parts: int) -> Iterator[Weight]:
        """The tables before the first `n_layers` layers, with rows for `n_parts` equal parts, and what takes their rows in.

        Without parts, the tables are not on the devices.
        """
        width = self.n_read * self.head_dim
        for layer, n_rows in zip(self.layers, self.n_rows, strict=True):
            if layer >= n_layers:
                continue
            step = n_parts * packed_rows(self.head_dim) if n_parts > 1 else 1
            dims = letters(Dim.TABLE, R=-(-n_rows // step) * step)
            dims |= letters(Dim.HIDDEN, W=width) | letters(Dim.NORM, h=self.head_dim, n=n_streams)
            dims |= letters(Dim.NORM, d=hidden, o=(n_streams + 1) * hidden)
            builder = WeightBuilder(f"model.layers.{layer}.engram.", dims)
            name = f"{ENGRAM}{layer}"
            table = builder.vector(name, "Rh", "embed.weight")
            if n_parts:
                yield replace(table, is_vector=False, is_row_major=True, inputs=(1,))
            yield builder.matrix(f"{name}_wkv", "Wo", "wkv.weight")
            yield builder.vector(f"{name}_q_norm", "nd", "q_weight")
            yield builder.vector(f"{name}_k_norm", "nd", "k_weight")
