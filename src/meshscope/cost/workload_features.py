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
    CACHED_POSITIONS = 6  # over all sequences
    ALL_SEQUENCES = 7  # of all micro-batches
    HIT_FRAC = 8  # fraction of the device's experts that get a row
    LONE_SEQUENCE_TOKENS = 9  # prompt tokens of a device with one sequence
    SEVERAL_TOKENS = 10  # 1 for a device with more than one token
