"""Latency and throughput of timed requests."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import fsum

from meshscope.events.enums import Phase
from meshscope.events.measured import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Mean and percentiles of `n` durations, in seconds."""

    mean_s: float
    p50_s: float
    p90_s: float
    p95_s: float
    p99_s: float
    n: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Durations and rates of the timed requests; `latency_of` defines the durations.

    `itl`, `tpot` and `decode_tokens_per_s` are null if a request generates a single token. Rates are those
    of the mean request and count the tokens of all sequences in the batch: `output_tokens_per_s` = output
    tokens / e2e, `prefill_tokens_per_s` = prompt tokens / ttft, `decode_tokens_per_s` = tokens after the
    first / (e2e - ttft).
    """

    ttft: Spread
    itl: Spread | None
    tpot: Spread | None
    e2e: Spread
    output_tokens_per_s: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float | None

    @property
    def step_s(self) -> dict[Phase, float]:
        """Mean seconds of a step of each timed phase."""
        spreads = {Phase.PREFILL: self.ttft, Phase.DECODE: self.itl}
        return {phase: spread.mean_s for phase, spread in spreads.items() if spread is not None}


def latency_of(requests: Sequence[Request], *, batch: int, prompt: int) -> Latency:
    """TTFT, ITL, TPOT and end-to-end time of the timed requests, on the devices.

    `ttft` is the time from the start of a request to its first token (prefill). `itl` is the time from one
    token to the next, one value for each decode step. `tpot` = time after the first token / number of
    tokens after it, one value for each request. `e2e` is the time from the start to the last token.
    Queueing is excluded. Percentiles interpolate linearly (numpy's `linear`).

    Source: vLLM's benchmark (`vllm bench serve`), where TPOT = (latency - TTFT) / (output length - 1) and
    ITL is the list of gaps between tokens, both measured by a client.
    """
    ttft = spread_of(r.prefill_s for r in requests)
    e2e = spread_of(e2e_s(r) for r in requests)
    steps = [step_s for r in requests for step_s in r.decode_s]
    n_decode_steps = len(steps) / len(requests)
    return Latency(
        ttft=ttft,
        itl=spread_of(steps) if steps else None,
        tpot=spread_of(fsum(r.decode_s) / len(r.decode_s) for r in requests) if steps else None,
        e2e=e2e,
        output_tokens_per_s=batch * (1 + n_decode_steps) / e2e.mean_s,
        prefill_tokens_per_s=batch * prompt / ttft.mean_s,
        decode_tokens_per_s=(
            batch * n_decode_steps / (e2e.mean_s - ttft.mean_s) if steps else None
        ),
    )


def e2e_s(request: Request) -> float:
    """Seconds from the start of the request to its last token."""
    return request.prefill_s + fsum(request.decode_s)


def spread_of(durations_s: Iterable[float]) -> Spread:
    """Mean and percentiles of at least one duration."""
    ordered = sorted(durations_s)
    return Spread(
        mean_s=fsum(ordered) / len(ordered),
        **{f"p{q}_s": percentile(ordered, q / 100) for q in (50, 90, 95, 99)},
        n=len(ordered),
    )


def percentile(ordered: Sequence[float], fraction: float) -> float:
    """The value below which this fraction of the values is, interpolated linearly (numpy's `linear`)."""
    at = fraction * (len(ordered) - 1)
    below = int(at)
    above = ordered[min(below + 1, len(ordered) - 1)]
    return ordered[below] + (at - below) * (above - ordered[below])
