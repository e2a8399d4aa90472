"""Serving engines by name and version, as `--server` simulates them (`engines.toml`)."""

import re
from dataclasses import dataclass
from itertools import zip_longest

from meshscope.errors import SpecError, nearest
from meshscope.files import own_table
from meshscope.serialize import from_plain


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingEngine:
    """A row of `engines.toml`: scheduler, default limits, buckets, cache pages, and time of the host in seconds.

    `host_s` is for each step, `host_sequence_s` for each sequence that decodes in it, `host_request_s` between a
    client and the scheduler.
    """

    name: str
    version: str
    dated: str  # of the published runs that its terms are fitted to
    max_sequences: int
    max_step_tokens: int
    memory_frac: float
    page_tokens: int
    has_mixed_steps: bool
    reserved_frac: float
    token_bucket: int
    sequence_bucket: int
    hides_host: bool
    gathers_tokens: bool  # of all data-parallel ranks for the experts, and does not send their rows
    holds_prompts: bool  # until each data-parallel rank can have one
    counts_requests: bool  # to choose a rank, and not prompt tokens
    host_s: float
    host_sequence_s: float
    host_request_s: float
    attention: (
        str  # version of its kernel, a key of `paged_attention` in hardware/operation_rates.json
    )
    experts: str  # version of its kernels of experts, a key of `grouped_experts` there
    cache_reads: float  # time of attention that reads the cache, over the closed form's
    source: str
    offloads_from: int | None = None  # bytes of all-reduces of SparseCores, by its compiler options
    rank_step_tokens: int | None = None  # default of a data-parallel rank
    fused_from: int | None = (
        None  # tokens of all ranks in a step from which its experts are one kernel
    )

    def __str__(self) -> str:
        return f"{self.name}@{self.version}"


_TABLE = own_table("serving/engines.toml")
ENGINES = from_plain(
    tuple[ServingEngine, ...],
    [{**_TABLE["defaults"][row["name"]], **row} for row in _TABLE["engines"]],
)


def serving_engine(text: str) -> ServingEngine:
    """The engine of NAME or NAME@VERSION, by default its newest version; SpecError for another."""
    name, _, version = text.strip().partition("@")
    versions = [engine for engine in ENGINES if engine.name == name]
    if not versions:
        names = dict.fromkeys(engine.name for engine in ENGINES)
        raise SpecError(f"--server '{text}': {nearest(name, names)}")
    if not version:
        return versions[-1]
    for engine in versions:
        if engine.version == version:
            return engine
    known = [engine.version for engine in versions]
    wanted = _numbers(version)

    def distance(one: str) -> tuple[int, ...]:
        return tuple(abs(a - b) for a, b in zip_longest(_numbers(one), wanted, fillvalue=0))

    closest = min(reversed(known), key=distance)
    raise SpecError(
        f"--server '{text}': version {version} of {name} has no published runs to fit. Use the nearest, "
        f"{name}@{closest}; all are {', '.join(known)}."
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall("[0-9]+", version)))
