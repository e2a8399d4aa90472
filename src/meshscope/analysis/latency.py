"""Latency and throughput of requests that were timed; every figure is defined where it is made."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import fsum

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
    """Durations of requests; null where a request makes a single token.

    `ttft` is from the request's start to its first token: prefill. `itl` is from one token to the
    next, one figure for each decode step. `tpot` is, for each request, what follows the first
    token over the tokens that follow it. `e2e` is from the start to the last token. Rates are
    over the mean request and count the tokens of all sequences of the batch: `output_tokens_per_s`
    output tokens over e2e, `prefill_tokens_per_s` prompt tokens over ttft, `decode_tokens_per_s`
    the tokens after the first over e2e without ttft.
    """

    ttft: Spread
    itl: Spread | None
    tpot: Spread | None
    e2e: Spread
    output_tokens_per_s: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float | None


def latency_of(requests: Sequence[Request], *, batch: int, prompt: int) -> Latency:
    """TTFT, ITL, TPOT and e2e of requests of `batch` sequences with `prompt` tokens each.

    `ttft` is from the start of a request to its first token: prefill. `itl` is from one token to the next,
    one figure for each decode step. `tpot` is, for each request, the time after the first token over the
    tokens after it. `e2e` is from the start to the last token. Nothing waits in a queue: these are times
    on the devices. Percentiles lie between neighbours in proportion (numpy's `linear`).

    Source: vLLM's benchmark (`vllm bench serve`), whose TPOT is (latency - TTFT) / (output length - 1)
    and whose ITL is the list of gaps between tokens; there as seen by a client.
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
    """From the request's start to its last token, in seconds."""
    return request.prefill_s + fsum(request.decode_s)


def spread_of(durations_s: Iterable[float]) -> Spread:
    """Mean and percentiles of at least one duration."""
    ordered = sorted(durations_s)
    return Spread(
        mean_s=fsum(ordered) / len(ordered),
        p50_s=percentile(ordered, 0.5),
        p90_s=percentile(ordered, 0.9),
        p95_s=percentile(ordered, 0.95),
        p99_s=percentile(ordered, 0.99),
        n=len(ordered),
    )


def percentile(ordered: Sequence[float], share_frac: float) -> float:
    """The value below which this share lies, between neighbours in proportion (numpy's `linear`)."""
    at = share_frac * (len(ordered) - 1)
    below = int(at)
    above = ordered[min(below + 1, len(ordered) - 1)]
    return ordered[below] + (at - below) * (above - ordered[below])
