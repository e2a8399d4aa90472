"""Pipeline stages: the layers of each stage, their storage, and the micro-batch schedule.

A batch is split into micro-batches that advance one stage per tick (GPipe: Huang et al., arXiv
1811.06965, section 2.3). M micro-batches take M + P - 1 ticks over P stages; in each tick a stage
processes one micro-batch or is idle.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby, pairwise

from meshscope.model.layers import AttentionKind, Layer
from meshscope.model.model import Model

CACHED_STAGES = 1024  # models and numbers of stages of a search


def stage_layers(n_layers: int, n_stages: int) -> tuple[range, ...]:
    """The layers of each pipeline stage.

    Remaining layers go, one each, to the stages before the last, from the back: the first and last stage
    also hold embedding and head (vllm/distributed/utils.py, get_pp_indices, vLLM pull request 13839).
    """
    n_each, n_left = divmod(n_layers, n_stages)
    sizes = [n_each + (n_stages - 1 - n_left <= n < n_stages - 1) for n in range(n_stages)]
    return tuple(range(first, end) for first, end in pairwise(accumulate(sizes, initial=0)))


@lru_cache(maxsize=CACHED_STAGES)
def layer_kinds(model: Model, n_stages: int) -> tuple[int, tuple[tuple[int, int, int], ...]]:
    """The stage with the most layers, and for each kind of layer one of them, and how many this stage and all have.

    The layer is one of that stage if it has any, else the first of its kind.
    """
    layers, ranges = model.layers, stage_layers(model.n_layers, n_stages)
    fullest = ranges.index(max(ranges, key=len))
    of_fullest = layers[ranges[fullest].start : ranges[fullest].stop]
    n_tick, n_pass = Counter(of_fullest), Counter(layers)
    first = {kind: layers.index(kind) for kind in n_pass}
    first |= {kind: ranges[fullest].start + of_fullest.index(kind) for kind in n_tick}
    kinds = dict.fromkeys((*n_tick, *n_pass))
    return fullest, tuple((first[kind], n_tick[kind], n_pass[kind]) for kind in kinds)


def cut_entries(model: Model, n_stages: int) -> int | None:
    """The first layer of a stage that reads entries of a layer before it, which no stage sends; None without one."""
    for at in (stage.start for stage in stage_layers(model.n_layers, n_stages)):
        kind = model.layers[at].attention
        if any(model.attention_of(model.layers[at]).shared_arrays(kind)):
            return at
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRun:
    """Consecutive stages with the same kinds of layers in the same order, which share a program."""

    stages: range
    first_layer: int  # of the first stage
    kinds: tuple[Layer, ...]


def stage_runs(
    layers: Sequence[Layer], n_stages: int, tables: Collection[int] = ()
) -> tuple[StageRun, ...]:
    """The stages as maximal runs with the same kinds of layers; those with a layer of `tables` alone."""
    layers_of_stage = stage_layers(len(layers), n_stages)
    kinds = [tuple(layers[index] for index in indices) for indices in layers_of_stage]
    numbers = [{*tables} & {*indices} for indices in layers_of_stage]
    runs = [
        (of, list(stages))
        for (of, _), stages in groupby(range(n_stages), lambda n: (kinds[n], numbers[n]))
    ]
    return tuple(
        StageRun(
            stages=range(stages[0], stages[-1] + 1),
            first_layer=layers_of_stage[stages[0]].start,
            kinds=shared,
        )
        for shared, stages in runs
    )


def stage_slots(layers: Sequence[Layer], kind: Layer, n_stages: int) -> tuple[int | None, ...]:
    """The layer index of each slot in the stacked arrays of one kind of layer; None if unused by a stage of fewer layers."""
    layers_of_stage = [
        [index for index in indices if layers[index] == kind]
        for indices in stage_layers(len(layers), n_stages)
    ]
    n_each = max(map(len, layers_of_stage))
    padded = ([*indices, *[None] * (n_each - len(indices))] for indices in layers_of_stage)
    return tuple(index for indices in padded for index in indices)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSends:
    """What stages send with the residual stream: results of earlier layers that layers of later stages read."""

    n_inputs: int = 0  # last layers whose embeddings are sent
    has_choice: bool = False  # positions that an indexer chose
    has_weights: bool = False  # with which the next input sums the streams
    caches: tuple[Layer, ...] = ()  # kinds of layers whose entries of the step later layers share


@lru_cache(maxsize=CACHED_STAGES)
def stage_sends(model: Model, n_stages: int) -> StageSends:
    """What all stages of a pipeline send, as they run one program; nothing without one."""
    first, *later = stage_layers(model.n_layers, n_stages)
    starts = [stage.start for stage in later]
    return StageSends(
        n_inputs=0 if model.layer_inputs is None else model.n_layers - first.stop,
        has_choice=any(model.layers[at].attention is AttentionKind.SHARED for at in starts),
        has_weights=model.hyper is not None and model.hyper.is_delayed,
        caches=tuple(dict.fromkeys(kind for at in starts for kind in caches_before(model, at))),
    )


def caches_before(model: Model, first: int) -> tuple[Layer, ...]:
    """The kinds of the layers before layer `first` whose caches it or layers after it share."""
    sharing = dict.fromkeys(layer for layer in model.layers[first:] if layer.shares_cache)
    sources = (model.cache_layer(layer) for layer in sharing)
    return tuple(kind for kind in sources if kind not in model.layers[first:])


def shared_slot(model: Model, kind: Layer, n_stages: int) -> int:
    """The slot in the stacked cache of a kind whose layer others share: the last one of its stage, in all stages."""
    of_stages = (model.layers[s.start : s.stop] for s in stage_layers(model.n_layers, n_stages))
    return [n for layers in of_stages if (n := layers.count(kind))][-1] - 1


@lru_cache(maxsize=CACHED_STAGES)
def stacked_layers(
    layers: tuple[Layer, ...], n_stages: int
) -> Mapping[int, tuple[int | None, ...]]:
    """The layers of all stages in the slot of each layer: one of each stage, or None."""
    stacked: dict[int, tuple[int | None, ...]] = {}
    for kind in dict.fromkeys(layers):
        slots = stage_slots(layers, kind, n_stages)
        n_each = len(slots) // n_stages
        for members in (slots[number::n_each] for number in range(n_each)):
            stacked |= {index: members for index in members if index is not None}
    return stacked


@lru_cache(maxsize=CACHED_STAGES)
def stored_layers(model: Model, n_stages: int) -> Mapping[Layer, int]:
    """How many layers of each kind one device allocates, including unused slots."""
    kinds = dict.fromkeys(model.layers)
    return {kind: len(stage_slots(model.layers, kind, n_stages)) // n_stages for kind in kinds}


@lru_cache(maxsize=CACHED_STAGES)
def default_microbatches(local_batch: int, n_stages: int) -> int:
    """The number of stages, or the largest smaller number that divides the batch."""
    return next(n for n in range(min(n_stages, local_batch), 0, -1) if local_batch % n == 0)


def n_ticks(n_microbatches: int, n_stages: int) -> int:
    """Ticks until the last micro-batch leaves the last stage."""
    return n_microbatches + n_stages - 1
