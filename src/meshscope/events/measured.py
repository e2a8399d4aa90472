"""Measurements besides the event table: requests, device loads, profile findings, effects of flags."""

from dataclasses import dataclass, field
from enum import StrEnum

from meshscope.errors import read_only
from meshscope.events.enums import Kind, Part, Phase


class StepLabel(StrEnum):
    """The class of the steps of a trace; `trace` is everything, if no steps are annotated."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"
    STEP = "step"  # annotated without saying whether it is prefill or decode
    OUTSIDE = "outside of steps"
    TRACE = "trace"

    @property
    def phase(self) -> Phase | None:
        """The phase of its rows."""
        return Phase(self.value) if self.value in set(Phase) else None

    @property
    def reason(self) -> str | None:
        """Why its rows have no phase."""
        return {
            StepLabel.MIXED: "steps that mix prefill and decode",
            StepLabel.OUTSIDE: "outside of the annotated steps",
            StepLabel.TRACE: "the trace annotates no steps",
        }.get(self)

    @classmethod
    def of_row(cls, phase: Phase | None, reason: str | None) -> "StepLabel":
        """The class of the steps of a row, by its phase and the reason why it has none."""
        if phase is not None:
            return cls(phase.value)
        reasons = (reason or "").split("; ")
        return next((label for label in cls if label.reason in reasons), cls.TRACE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Latencies of one request: `prefill_s` to the first token, then `decode_s` per further token."""

    prefill_s: float
    decode_s: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLoad:
    """Busy and idle seconds of one device over the profiled steps of a phase.

    `window_s` spans the first to the last op of the device in each step, summed over the steps.
    `busy_s` is the time with an op running, `collective_s` the part of it in collectives,
    `exposed_s` the part of that in which the device computes nothing, and `wait_s` what collectives
    wait for later participants, as far as that is known (None in imported traces). `label` is the
    class of the steps if they belong to no phase, as in server traces.
    """

    phase: Phase | None
    device: int
    busy_s: float
    collective_s: float
    wait_s: float | None
    idle_s: float
    window_s: float
    label: StepLabel | None = None
    exposed_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTime:
    """Mean times of one kind of collective over all devices in the profiled steps of a phase.

    `wire_s` is the time of the fastest participant, which does not wait; `wait_s` is the extra time
    of the others. All are means over the `n_executions`; they are None with too few participants.
    """

    phase: Phase | None
    part: Part | None
    kind: Kind
    axis: str | None
    n_executions: int
    dur_s: float
    wire_s: float | None
    wait_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferTime:
    """Mean time of the transfer of a collective in a trace, without waiting for participants."""

    label: StepLabel
    kind: Kind
    axis: str | None
    dtype: str | None
    payload_bytes: int | None
    wire_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """The compiler's cost analysis of one step on one device."""

    phase: Phase
    flops: float | None
    accessed_bytes: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepClass:
    """Steps of one class in a trace: prefill, decode, mixed, or steps of unknown content.

    Times are device times, from the first op to the end of the last, over all devices. Tokens are
    means of a step; None if the trace does not say.
    """

    label: StepLabel
    n_steps: int
    mean_s: float
    p50_s: float
    p99_s: float
    prefill_tokens: float | None = None
    decode_tokens: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramFacts:
    """A program in a trace that holds its HLO: its collectives as compiled and as recorded.

    `n_as_compiled` of the `n_collectives` instructions executed as often as the HLO says, and
    `n_missing` were not recorded at all.
    """

    name: str
    n_runs: int  # on one device
    n_collectives: int
    n_as_compiled: int
    n_missing: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedTime:
    """One latency of a serving benchmark over its requests; None for what its file lacks."""

    name: str  # ttft, tpot, itl or e2e
    mean_s: float | None
    p50_s: float | None
    p90_s: float | None
    p99_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedBenchmark:
    """What a serving benchmark's client measured: queueing and the network included."""

    path: str
    n_requests: int | None
    times: tuple[ServedTime, ...]
    requests_per_s: float | None = None
    output_tokens_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFacts:
    """What an imported trace consists of."""

    formats: tuple[str, ...]
    n_files: int
    n_events: int  # in the files, on hosts and devices
    n_ops: int  # executed on devices
    devices: tuple[int, ...]
    n_devices: int  # of the session
    window_s: float
    steps: tuple[StepClass, ...] = ()
    transfers: tuple[TransferTime, ...] = ()
    programs: tuple[ProgramFacts, ...] = ()
    benchmarks: tuple[ServedBenchmark, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """All measurements besides the rows of the event table.

    `findings` list the reasons not to trust the profile.
    """

    requests: tuple[Request, ...]
    n_profiled_steps: dict[Phase, int]
    loads: tuple[DeviceLoad, ...]
    times: tuple[CollectiveTime, ...]
    findings: tuple[str, ...]
    costs: tuple[StepCost, ...] = ()
    texts: tuple[str, ...] = ()  # generated text, if the run has a tokenizer
    trace: TraceFacts | None = None  # of an imported trace
    # seconds of each timed step of a function, by its phase
    step_s: dict[Phase, tuple[float, ...]] = field(default_factory=dict[Phase, tuple[float, ...]])


@read_only
@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """A compiler flag and its value."""

    name: str
    value: str

    def __str__(self) -> str:
        """As in the environment."""
        return f"--{self.name}={self.value}"


@read_only
@dataclass(frozen=True, slots=True, kw_only=True)
class FlagEffect:
    """What a flag changes in a program; `refused` is why the compiler rejects it.

    `step_s` and `total_bytes` are the figures with the flag. A program that is changed, but not in its
    collectives, has another schedule or other code. `notes` say which of its times have no measured basis, with the
    flag or without.
    """

    flag: Flag
    phase: Phase
    refused: str | None = None
    is_changed: bool = False
    is_other_collectives: bool = False
    step_s: float | None = None
    total_bytes: int | None = None
    base_step_s: float | None = None
    base_total_bytes: int | None = None
    notes: tuple[str, ...] = ()
