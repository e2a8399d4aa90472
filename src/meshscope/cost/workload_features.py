"""Workload sizes on one device, in which the costs of a step are linear."""

from enum import IntEnum


class Feature(IntEnum):
    """Index of a workload size of one device and micro-batch."""

    ONE = 0
    SEQUENCES = 1
    TOKENS = 2
    CAUSAL_PAIRS = (
        3  # query-key pairs in the blocks of a causal mask; 0 without an attention kernel
    )
    WINDOW_PAIRS = 4  # the same for the model's sliding window
    ALL_PAIRS = 5  # all query-key pairs, of plain attention
    CACHED_POSITIONS = 6  # that a decode step reads, over all sequences
    WINDOW_POSITIONS = 7  # the same in layers with a sliding window
    CHOSEN_POSITIONS = 8  # the same behind an indexer
    ALL_SEQUENCES = 9  # of all micro-batches
    # Fraction of the device's experts that get a row, summed over the blocks of tokens of a fused kernel
    HIT_FRAC = 10
    EMPTY_TILES = 11  # what the last tiles of a fused kernel lack, for each expert of the device
