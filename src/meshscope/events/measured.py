"""What live devices gave: requests that were timed, what devices did, and what the profile can bear."""

from dataclasses import dataclass

from meshscope.events.enums import Kind, Part, Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request, in seconds: from its start to the first token, then from each token to the next."""

    prefill_s: float
    decode_s: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLoad:
    """What one device did in the profiled steps of a phase, in seconds.

    `window_s` is from the first op of any device to the last, summed over the steps; `busy_s` is
    the time in which an op kept the device, `collective_s` the part of it that collectives took,
    `wait_s` the part of those in which others came later (null where it is not known).
    """

    phase: Phase
    device: int
    busy_s: float
    collective_s: float
    wait_s: float | None
    idle_s: float
    window_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTime:
    """Executions of one sort of collective on all devices in the profiled steps of a phase.

    `wire_s` and `wait_s` are means over the executions: the time of the fastest participant, and
    what the others spent beyond it.
    """

    phase: Phase
    part: Part | None
    kind: Kind
    axis: str | None
    n_executions: int
    dur_s: float
    wire_s: float
    wait_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """What one step of a phase asks of one device, by the compiler's account, and how long it took."""

    phase: Phase
    flops: float | None
    accessed_bytes: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """All that was measured beside the rows of the table.

    `n_profiled_steps` counts steps by phase; `findings` say what stands against trusting the profile.
    """

    requests: tuple[Request, ...]
    n_profiled_steps: dict[Phase, int]
    loads: tuple[DeviceLoad, ...]
    times: tuple[CollectiveTime, ...]
    findings: tuple[str, ...]
    costs: tuple[StepCost, ...] = ()
    texts: tuple[str, ...] = ()  # what was generated, where a tokenizer was given
