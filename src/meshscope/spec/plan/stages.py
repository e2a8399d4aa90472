"""Pipeline stages: which layers each has, how they are stored, and how a batch passes through them.

A batch is cut into micro-batches that follow each other through the stages, one stage a tick
(GPipe: Huang et al., arXiv 1811.06965, section 2.3): M micro-batches take M + P - 1 ticks over P
stages, and in each tick a stage is either busy with one of them or idle.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from meshscope.spec.model.model import Layer


def stage_layers(n_layers: int, n_stages: int) -> tuple[range, ...]:
    """The layers of each pipeline stage.

    Where they do not divide, one layer more goes to the stages before the last, counted from behind,
    because the first and the last stage also hold the embedding and the head
    (get_pp_indices in vllm/distributed/utils.py, vLLM pull request 13839).
    """
    n_each, n_left = divmod(n_layers, n_stages)
    ends = [0]
    for stage in range(n_stages):
        has_one_more = n_stages - 1 - n_left <= stage < n_stages - 1
        ends.append(ends[-1] + n_each + has_one_more)
    return tuple(range(first, end) for first, end in pairwise(ends))


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRun:
    """Stages in a row whose layers are of the same kinds in the same order: they share a program.

    `first_layer` is that of the first stage; each stage begins where the one before it ends.
    """

    stages: range
    first_layer: int
    kinds: tuple[Layer, ...]


def stage_runs(layers: Sequence[Layer], n_stages: int) -> tuple[StageRun, ...]:
    """The stages as few programs: runs as long as the kinds of layers stay the same."""
    of_stage = stage_layers(len(layers), n_stages)

    def kinds(stage: int) -> tuple[Layer, ...]:
        return tuple(layers[index] for index in of_stage[stage])

    runs: list[StageRun] = []
    for shared, members in groupby(range(n_stages), kinds):
        stages = list(members)
        runs.append(
            StageRun(
                stages=range(stages[0], stages[-1] + 1),
                first_layer=of_stage[stages[0]].start,
                kinds=shared,
            )
        )
    return tuple(runs)


def stage_slots(layers: Sequence[Layer], kind: Layer, n_stages: int) -> tuple[int | None, ...]:
    """Which layer is stored at each place of the arrays that stack the layers of one kind.

    One program for all stages gives every stage the same number of places, as many as the stage
    with the most layers of the kind needs; None is room that a stage does not use.
    """
    of_stage = [
        [index for index in indices if layers[index] == kind]
        for indices in stage_layers(len(layers), n_stages)
    ]
    n_each = max(map(len, of_stage))
    return tuple(
        index for indices in of_stage for index in [*indices, *[None] * (n_each - len(indices))]
    )


def stored_layers(layers: Sequence[Layer], n_stages: int) -> tuple[Layer, ...]:
    """The layers that one device has room for, unused room included."""
    return tuple(
        kind
        for kind in dict.fromkeys(layers)
        for _ in range(len(stage_slots(layers, kind, n_stages)) // n_stages)
    )


def default_microbatches(local_batch: int, n_stages: int) -> int:
    """As many micro-batches as stages, or the largest smaller number that divides the batch."""
    return next(n for n in range(min(n_stages, local_batch), 0, -1) if local_batch % n == 0)


def n_ticks(n_microbatches: int, n_stages: int) -> int:
    """Ticks until the last micro-batch has left the last stage."""
    return n_microbatches + n_stages - 1
