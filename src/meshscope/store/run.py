"""What a run holds: the experiment, how it was made, its rows and its memory figures."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshscope.events.collective import Collective
from meshscope.events.enums import Phase, Source
from meshscope.events.measured import Measured
from meshscope.events.step_time import StepTime
from meshscope.spec.plan.memory import Memory

MAX_WORD = 120  # characters of a name in the short form of a run


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """How a run came to be; enough to make it again."""

    source: Source  # the strongest that the run has: measured, compiled, predicted
    experiment: Mapping[str, Any]  # see `Experiment.as_dict`; an imported run knows less
    phases: tuple[Phase, ...]  # of the request; decode is absent when it makes one token
    command: tuple[str, ...]
    created: str  # ISO 8601, UTC
    versions: Mapping[str, str]
    flags: Mapping[str, str]  # environment variables that change what the compiler does
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RunRecord:
    """A run in memory; `path` is null while it is in no folder."""

    path: Path | None
    manifest: Manifest
    rows: tuple[Collective, ...]
    memory: Mapping[Source, Memory]
    measured: Measured | None = None
    times: tuple[StepTime, ...] = ()  # modelled, of predicted and compiled steps

    def __repr__(self) -> str:
        """One line: a notebook and a failed test show it whole."""
        asked = self.manifest.experiment
        model = (asked.get("model") or {}).get("name")
        told = (self.manifest.source.value, model, asked.get("plan"), asked.get("topology"))
        words = ", ".join(repr(str(word)[:MAX_WORD]) for word in told if word is not None)
        return f"Run({str(self.path)!r}: {words}, {len(self.rows)} rows)"

    def times_of(self, source: Source) -> tuple[StepTime, ...]:
        """The modelled step times of one source, in the order of the phases."""
        return tuple(time for time in self.times if time.source is source)

    @property
    def sources(self) -> tuple[Source, ...]:
        """The sources that the run has, also where nothing communicates."""
        found = {row.source for row in self.rows} | set(self.memory) | {self.manifest.source}
        return tuple(source for source in Source if source in found)

    def rows_of(self, source: Source) -> tuple[Collective, ...]:
        """The rows of one source."""
        return tuple(row for row in self.rows if row.source is source)
