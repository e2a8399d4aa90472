"""Tables of embeddings of n-grams: their sizes, how tokens choose rows, and weights.

Letters of shapes: R rows of a table, h channels of a row, W channels of the rows of a token, d hidden, n streams, o keys
and values.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count, islice
from math import isqrt
from typing import Any

from meshscope.model.arrays import Dim, Weight, WeightBuilder, letters, packed_rows
from meshscope.model.reader import ConfigReader, refuse

ENGRAM = "engram_"  # in the names of its weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Hashes:
    """How the last tokens choose rows: the XOR of each token times its factor, modulo the prime of a head.

    Source: Qwen4ExpTextNGramEmbedding of transformers.
    """

    primes: tuple[tuple[int, ...], ...]  # rows of the heads of each table
    factors: tuple[tuple[int, ...], ...]  # for a token and those before it; below 2^63 / vocabulary
    end: int  # the token that no n-gram crosses
    n_tensors: int  # of a table in the checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Engram:
    """Tables of embeddings of n-grams (DeepSeek-V4.1): hashes of the last tokens choose rows, which enter the streams.

    Before each of `layers`, `n_heads` rows for each length of n-grams from 2 on give a key for each stream and a
    value, which a gate adds to the stream. Without `hashes`, those of our programs have the same sizes and cost.
    """

    layers: tuple[int, ...]
    n_rows: tuple[int, ...]  # of the table of each
    n_orders: int  # lengths of n-grams
    n_heads: int
    head_dim: int
    hashes: Hashes | None = None  # of tables whose layers have the weights that take rows in

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
            builder = WeightBuilder(f"model.layers.{layer}.", dims)
            name, is_ours = f"{ENGRAM}{layer}", self.hashes is None
            tensor = "ple.ple_embedding.ngram_embedding.shard_{part}.weight"
            table = builder.vector(name, "Rh", "engram.embed.weight" if is_ours else tensor)
            if self.hashes is not None:
                table = replace(table, n_tensors=self.hashes.n_tensors)
            if n_parts:
                # Formats of matrices leave embeddings out; DeepSeek-V4.1 stores its tables as them.
                inputs = (1,) if is_ours else ()
                yield replace(table, is_vector=False, is_row_major=True, inputs=inputs)
            if not is_ours:
                continue
            yield builder.matrix(f"{name}_wkv", "Wo", "engram.wkv.weight")
            yield builder.vector(f"{name}_q_norm", "nd", "engram.q_weight")
            yield builder.vector(f"{name}_k_norm", "nd", "engram.k_weight")


MAX_ROWS = (1 << 25) - (1 << 20)  # a hash has no more, as the program computes it in 32 bits
MAX_HASHES = 1024
MAX_INDEX = 2**31 - 1  # rows that 32 bits number


def hashed_tables(reader: ConfigReader, n_layers: int) -> Engram | None:
    """The tables of a Qwen3.8 config, with the defaults of Qwen4ExpTextConfig; None without layers that read them."""
    layers = tuple(sorted({at - 1 for at in reader.integers("ple_layer_ids")}))
    n_orders = reader.integer("ngram_size", 3, minimum=2) - 1
    n_heads = reader.integer("heads_per_ngram", 8)
    hidden, vocab = reader.integer("hidden_size"), reader.integer("vocab_size")
    width, n_read = reader.integer("ple_embed_dim", hidden), n_orders * n_heads
    least = reader.integer("ngram_vocab_size_base", 20_000_000, maximum=MAX_ROWS)
    multiple = reader.integer("make_ngram_vocab_size_divisible_by", 128)
    n_tensors = reader.integer("split_ngram_parts", 512)
    reader.get("ple_conv_kernel_size")  # of layers behind tables; without tables, nothing reads it
    seed, ends = reader.integer("seed", 1234), reader.get("eos_token_id")
    end: Any = ends[0] if isinstance(ends, list) and ends else ends
    if not layers:
        return None
    problems = {
        f"'ple_layer_ids' must be between 1 and num_hidden_layers={n_layers}": (
            layers[0] < 0 or layers[-1] >= n_layers
        ),
        f"ple_embed_dim={width} is not a multiple of {n_read} hashes": width % n_read > 0,
        "eos_token_id, which no n-gram crosses, is missing": type(end) is not int,
        f"eos_token_id={end} is not below vocab_size={vocab}": (
            type(end) is int and not 0 <= end < vocab
        ),
        f"{n_read} hashes for each of {len(layers)} tables are more than {MAX_HASHES}": (
            n_read * len(layers) > MAX_HASHES
        ),
    }
    refuse(reader.source, problems)
    every = _primes(least, n_read * len(layers))
    rows = f"a table has {sum(every[:n_read]):,} rows, more than {MAX_INDEX:,}"
    refuse(reader.source, {rows: sum(every[-n_read:]) > MAX_INDEX})
    primes = tuple(every[at * n_read : (at + 1) * n_read] for at in range(len(layers)))
    most = max(1, (2**63 - 1) // vocab // 2)
    factors = tuple(
        tuple(2 * (_mixed(seed + 10_007 * at, n + 1) % most) + 1 for n in range(n_orders + 1))
        for at in range(len(layers))
    )
    return Engram(
        layers=layers,
        n_rows=tuple(-(-sum(one) // multiple) * multiple for one in primes),
        n_orders=n_orders,
        n_heads=n_heads,
        head_dim=width // n_read,
        hashes=Hashes(primes=primes, factors=factors, end=end, n_tensors=n_tensors),
    )


@lru_cache(maxsize=8)
def _primes(least: int, n: int) -> tuple[int, ...]:
    """The first `n` primes from `least` on."""
    primes = (x for x in count(max(least, 2)) if all(x % d for d in range(2, isqrt(x) + 1)))
    return tuple(islice(primes, n))


def _mixed(seed: int, step: int) -> int:
    """The `step`-th number of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    gamma, mask = 0x9E3779B97F4A7C15, 2**64 - 1
    z = (seed + gamma * step + gamma) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)
