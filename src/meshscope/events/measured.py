"""Measurements on live devices beside the event table: requests, device loads, profile findings."""

from dataclasses import dataclass

from meshscope.events.enums import Kind, Part, Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Latencies of one request: `prefill_s` to the first token, then `decode_s` per further token."""

    prefill_s: float
    decode_s: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLoad:
    """Busy and idle seconds of one device over the profiled steps of a phase.

    `window_s` spans the first to the last op of any device, summed over the steps. `busy_s` is the
    time with an op running, `collective_s` the part of it in collectives, and `wait_s` the part of
    that spent waiting for later participants (None if unknown).
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
    """Mean times of one kind of collective over all devices in the profiled steps of a phase.

    `wire_s` is the time of the fastest participant, which does not wait; `wait_s` is the extra time
    of the others. All are means over the `n_executions`.
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
    """The compiler's cost analysis of one step on one device."""

    phase: Phase
    flops: float | None
    accessed_bytes: float | None


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
