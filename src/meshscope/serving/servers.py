"""Serving engines by name and version, as `--server` simulates them (`engines.toml`)."""

import re
from dataclasses import dataclass
from itertools import zip_longest

from meshscope.errors import SpecError, nearest
from meshscope.files import own_table
from meshscope.serialize import from_plain
from meshscope.serving.engine import EnginePolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingEngine(EnginePolicy):
    """A row of `engines.toml`: a policy that published runs of one date fit, with default limits and cache pages.

    In a step the host takes `host_layer_s` for each layer. `attention` and `experts` are keys of `paged_attention` and `grouped_experts` in hardware/operation_rates.json.
    """

    name: str
    version: str
    dated: str
    n_runs: int  # that were fitted
    interval_factor: float  # 90 % of their figures are within it
    memory_frac: float
    page_tokens: int
    host_layer_s: float
    rank_step_tokens: int | None = None  # default of a data-parallel rank
    source: str

    @property
    def basis(self) -> str:
        """What its figures rest on, and how far published ones are from them."""
        return (
            f"{self}, fitted to {self.n_runs} runs; 9 of 10 figures within {self.interval_factor} x"
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
