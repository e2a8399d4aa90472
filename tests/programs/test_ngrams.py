"""The hashes of n-grams at their real size, in integers of any length and in the 32 bits of the program."""

from dataclasses import replace

import numpy as np

from meshscope.model.config import read_model
from meshscope.programs.jax.ngrams import hashes


def test_hashes_in_32_bits_equal_those_of_long_integers() -> None:
    """No n-gram crosses the end of a sequence; tokens before the first one count as its end."""
    model = read_model("Qwen/Qwen3.8-Flash-Next")
    engram = model.engram
    assert engram is not None
    assert engram.hashes is not None
    of, end = engram.hashes, engram.hashes.end
    ids = np.random.default_rng(0).integers(model.vocab, size=40).tolist()
    ids[-1] = model.vocab - 1  # the largest product
    ids[5] = ids[11] = ids[12] = end
    expected: list[list[int]] = []
    for at in range(len(ids)):
        gram = [ids[at - back] if at >= back else end for back in range(3)]
        if gram[1] == end:
            gram[2] = end
        products = [token * factor for token, factor in zip(gram, of.factors[0], strict=True)]
        mixed = [products[0] ^ products[1], products[0] ^ products[1] ^ products[2]]
        sizes = of.primes[0]
        rows = [mixed[head // 8] % prime for head, prime in enumerate(sizes)]
        expected.append([row + sum(sizes[:head]) for head, row in enumerate(rows)])
    tokens = np.array([[0, 0, *(token + 1 for token in ids)]], np.int32)
    got = np.asarray(hashes(engram, tokens, engram.layers))
    assert got[0, :, 0].tolist() == expected
    unended = replace(engram, hashes=replace(of, end=model.vocab))
    assert (np.asarray(hashes(unended, tokens, engram.layers)) != got).any()
