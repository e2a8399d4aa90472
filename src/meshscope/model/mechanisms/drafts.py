"""Parts of a checkpoint that no step of the model itself reads: what drafts tokens, and the encoder of images.

Letters of shapes: D hidden (d unsplit), V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from meshscope.model.arrays import Dim, Weight, WeightBuilder, letters
from meshscope.model.reader import ConfigReader, refuse


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftHead:
    """What joins the embedding of a token and the hidden state before it: a matrix [2 hidden, hidden].

    With norms as in DeepSeek-V3 (arXiv 2412.19437, equation 21); EAGLE has none (arXiv 2401.15077, section 4.1).
    """

    has_norms: bool

    def n_reads(self, weight: Weight) -> int:
        """Times that a pass reads a weight."""
        return 1

    def weights(self, hidden: int, vocab: int, n_layers: int) -> Iterator[Weight]:
        """The norms of both inputs, and the matrix that joins them, not quantized, named as in DeepSeek-V3's checkpoints."""
        dims = letters(Dim.HIDDEN, D=hidden) | letters(Dim.NORM, d=hidden, j=2 * hidden)
        builder = WeightBuilder(f"model.layers.{n_layers}.", dims)
        if self.has_norms:
            yield builder.vector("draft_embed_norm", "d", "enorm.weight")
            yield builder.vector("draft_hidden_norm", "d", "hnorm.weight")
        yield builder.matrix("draft_join", "jD", "eh_proj.weight", inputs=())


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftBlocks:
    """Blocks that draft several tokens in one pass (DSpark of DeepSeek-V4.1): layers with windows and fewer experts."""

    n_blocks: int
    n_tokens: int
    n_experts: int
    n_active: int
    rank: int  # of the product that corrects logits by the token before
    n_sources: int  # layers whose inputs the first block takes

    @classmethod
    def read(cls, reader: ConfigReader, n_layers: int) -> "DraftBlocks | None":
        """The drafts of a config; None without."""
        n_blocks = reader.count("num_nextn_predict_layers", 0)
        if not n_blocks:
            return None
        sources = reader.integers("dspark_target_layer_ids")
        wrong = f"'dspark_target_layer_ids' {sources} must name layers below num_hidden_layers={n_layers}"
        is_wrong = not sources or not all(0 <= one < n_layers for one in sources)
        refuse(reader.source, {wrong: is_wrong})
        return cls(
            n_blocks=n_blocks,
            n_tokens=reader.integer("dspark_block_size"),
            n_experts=reader.integer("dspark_n_routed_experts"),
            n_active=reader.integer("dspark_num_experts_per_tok"),
            rank=reader.integer("dspark_markov_rank"),
            n_sources=len(sources),
        )

    def n_reads(self, weight: Weight) -> int:
        """Times that a pass reads a weight: the product that corrects logits follows each token, from a few of its rows."""
        times = {"draft_markov_embed": 0, "draft_markov_head": self.n_tokens}
        return times.get(weight.name, 1)

    def weights(self, hidden: int, vocab: int, n_layers: int) -> Iterator[Weight]:
        """The weights before and after the blocks, replicated but for the first; embedding and head are those of the model."""
        dims = letters(Dim.HIDDEN, S=self.n_sources * hidden)
        dims |= letters(Dim.NORM, d=hidden, r=self.rank, c=hidden + self.rank, o=1, V=vocab)
        first, last = (WeightBuilder(f"mtp.{n}.", dims) for n in (0, self.n_blocks - 1))
        yield first.matrix("draft_main", "Sd", "main_proj.weight")
        yield first.vector("draft_main_norm", "d", "main_norm.weight")
        yield last.vector("draft_norm", "d", "norm.weight")
        yield last.vector("draft_markov_embed", "Vr", "markov_head.embed.weight")
        yield last.matrix("draft_markov_head", "rV", "markov_head.head.weight", inputs=())
        yield last.matrix("draft_confidence", "co", "confidence_head.proj.weight", inputs=())


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageTower:
    """The encoder of images in the checkpoint of DeepSeek-V4.1, in bf16. No step reads it: prompts are text."""

    n_layers: int
    hidden: int
    ffn: int
    patch: int  # pixels of an edge
    ratio: int  # patches that an edge of an image token joins

    @classmethod
    def read(cls, reader: ConfigReader) -> "ImageTower":
        """The tower of a `vision_config`."""
        return cls(
            n_layers=reader.integer("num_hidden_layers"),
            hidden=reader.integer("hidden_size"),
            ffn=reader.integer("intermediate_size"),
            patch=reader.integer("patch_size"),
            ratio=reader.integer("downsample_ratio"),
        )

    def n_parameters(self, hidden: int) -> int:
        """Parameters of the tower, and of what brings its outputs into a model of width `hidden`."""
        d = self.hidden
        # Queries, keys, values and outputs with biases, a gated MLP without, and two norms.
        block = 4 * (d + 1) * d + 3 * d * self.ffn + 2 * d
        patches = (3 * self.patch**2 + 1) * d
        aligner = (self.ratio**2 * d + 1) * hidden + (hidden + 1) * hidden
        marks = 3 * hidden  # start, end and line of an image
        return self.n_layers * block + patches + d + aligner + marks
