"""The contents of a run folder: the experiment, how it was made, its collectives, memory and times; manifest.json."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from meshscope.errors import read_only
from meshscope.events.collective import Collective, Effect, OtherOperation
from meshscope.events.enums import Phase, Source
from meshscope.events.measured import Measured
from meshscope.events.step_time import StepTime
from meshscope.model.layers import ShallowLayers
from meshscope.plans.experiment_record import ExperimentRecord, record_from_dict
from meshscope.plans.memory import Memory
from meshscope.plans.plan import with_parallelism
from meshscope.plans.speculation import Speculation
from meshscope.serialize import FormatError, from_plain, picked, to_plain
from meshscope.units import counted, format_rate, format_seconds

MAX_NAME = 120  # characters of a name in the short form of a run
_FOLDER_KEYS = ("tool", "schema", "files", "digest")  # the store adds them


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedFigures:
    """Medians of a simulated serving engine with the batch in flight, its output tokens per second, and its room.

    `n_cache_tokens` are the positions that its caches hold over all engines, in its own layout, and `n_fitting` the
    requests of this length that they hold at once; None in runs of before version 0.1.
    """

    server: str
    n_in_flight: int
    ttft_s: float
    tpot_s: float | None  # None if no request has a second token
    output_tokens_per_s: float
    n_cache_tokens: int | None = None
    n_fitting: int | None = None

    @property
    def fits(self) -> str | None:
        """`yes: the server's cache holds 521,696 tokens, 452 requests`; None if unknown."""
        if self.n_cache_tokens is None or self.n_fitting is None:
            return None
        label = "yes" if self.n_fitting >= self.n_in_flight else "NO"
        room = counted(self.n_fitting, "request")
        if label == "NO":
            room = f"{self.n_fitting:,} of {counted(self.n_in_flight, 'request')}; the others wait"
        return f"{label}: the server's cache holds {self.n_cache_tokens:,} tokens, {room}"

    def __str__(self) -> str:
        tpot = "" if self.tpot_s is None else f", TPOT {format_seconds(self.tpot_s)}"
        rate = f"{format_rate(self.output_tokens_per_s)} tokens/s"
        load = f"{self.n_in_flight:,} in flight"
        return f"{load}: TTFT {format_seconds(self.ttft_s)}{tpot}, {rate} ({self.server})"


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestFacts:
    """How a run was made, but for its experiment."""

    source: Source  # the strongest that the run has: measured, compiled, predicted
    phases: tuple[Phase, ...]  # of the request; without decode if it makes one token
    created: str  # ISO 8601, UTC
    command: tuple[str, ...]
    versions: Mapping[str, str]
    flags: Mapping[str, str]  # environment variables that change the compiled program
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    # of the unrolled programs of compiled times; None for the programs of all layers
    timed_layers: ShallowLayers | None = None
    speculation: Speculation | None = None  # what --speculate asks for; its parts are runs
    served: ServedFigures | None = None  # what --server asks for
    # of the compiled programs: what may communicate, and host transfers
    other_operations: tuple[OtherOperation, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest(ManifestFacts):
    """How a run was made: enough to make it again."""

    experiment: ExperimentRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeRuns:
    """The parts of speculative decoding: the step that verifies drafted tokens, and the draft."""

    verify: "RunRecord"
    draft: "RunRecord"

    @property
    def by_name(self) -> "Mapping[str, RunRecord]":
        """The parts by the names of their folders."""
        return {VERIFY: self.verify, DRAFT: self.draft}


VERIFY, DRAFT = "verify", "draft"  # the folders of the parts
SPECULATION = "speculation"  # their folder in the folder of the run


@read_only
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RunRecord:
    """A run in memory; `path` is None until the run is in a folder. Its rows have their parallelism.

    `speculative` are the parts of speculative decoding, if `manifest.speculation` asks for it.
    """

    path: Path | None
    manifest: Manifest
    rows: tuple[Collective, ...]
    memory: Mapping[Source, Memory]
    measured: Measured | None = None
    times: tuple[StepTime, ...] = ()  # modeled, of predicted and compiled steps
    speculative: SpeculativeRuns | None = None

    def __post_init__(self) -> None:
        experiment = self.manifest.experiment
        model = experiment.architecture
        rows = with_parallelism(self.rows, experiment.plan, None if model is None else model.hidden)
        object.__setattr__(self, "rows", rows)

    def __repr__(self) -> str:
        experiment = self.manifest.experiment
        topology = None if experiment.topology is None else experiment.topology.name
        names = (self.manifest.source.value, experiment.model_name, experiment.layout, topology)
        text = ", ".join(repr(str(name)[:MAX_NAME]) for name in names if name is not None)
        return f"RunRecord({str(self.path)!r}: {text}, {len(self.rows)} rows)"

    @property
    def is_trace(self) -> bool:
        """Whether the run was imported from a trace."""
        return self.measured is not None and self.measured.trace is not None

    @property
    def open_operations(self) -> tuple[OtherOperation, ...]:
        """The operations of its programs that may communicate: without them the rows are all collectives."""
        others = self.manifest.other_operations
        return tuple(other for other in others if other.effect is Effect.UNKNOWN)

    def placed(self, path: Path) -> "RunRecord":
        """The run, and its parts, in this folder."""
        parts = self.speculative
        if parts is not None:
            placed = {n: p.placed(path / SPECULATION / n) for n, p in parts.by_name.items()}
            parts = SpeculativeRuns(**placed)
        return replace(self, path=path, speculative=parts)

    def times_of(self, source: Source) -> tuple[StepTime, ...]:
        """The modeled step times of one source, in the order of the phases."""
        return tuple(time for time in self.times if time.source is source)

    @property
    def sources(self) -> tuple[Source, ...]:
        """The sources of the run, weakest first, including one without collectives."""
        present = {row.source for row in self.rows} | set(self.memory) | {self.manifest.source}
        return tuple(source for source in Source if source in present)

    def rows_of(self, source: Source) -> tuple[Collective, ...]:
        """The rows of one source."""
        return tuple(row for row in self.rows if row.source is source)


def manifest_as_dict(manifest: Manifest) -> dict[str, Any]:
    """Plain values, by the keys of manifest.json."""
    stored = to_plain(picked(manifest, *ManifestFacts.__slots__))
    for name in ("speculation", "served", "other_operations"):
        if not stored[name]:
            del stored[name]
    return {**stored, "experiment": manifest.experiment.as_dict()}


def manifest_from_dict(document: Mapping[str, Any]) -> Manifest:
    """The manifest that `manifest_as_dict` wrote; FormatError or MeshscopeError for anything else."""
    keys = {key: value for key, value in document.items() if key not in _FOLDER_KEYS}
    if "experiment" not in keys:
        raise FormatError("experiment: missing key")
    experiment = from_plain(dict[str, Any], keys.pop("experiment"), "experiment")
    facts = picked(from_plain(ManifestFacts, keys), *ManifestFacts.__slots__)
    return Manifest(**facts, experiment=record_from_dict(experiment))
