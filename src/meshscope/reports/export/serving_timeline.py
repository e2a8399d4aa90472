"""A simulated server as a timeline for the trace writer: engine steps, requests, and counters.

Each request is on the first free line: its wait for the first token, and the rest of it.
"""

import numpy as np
import polars as pl

from meshscope.events.timeline import ARGUMENT, Counter, Timeline
from meshscope.reports.export.timeline import NS_PER_S, tracks_of
from meshscope.serving.engine import BatchingEngine, ServedRequests
from meshscope.serving.simulation import ServingOutcome

MAX_REQUESTS = 2000  # drawn, the first ones
PROCESSES = ("engines", "requests")
SLICES = ("decode", "prefill", "prefill and decode", "first token", "other tokens")
# Name and unit of the columns of an engine's samples.
COUNTERS = {
    1: ("sequences", "sequences"),
    2: ("waiting", "sequences"),
    3: ("cache in use", "blocks"),
    4: ("prompt tokens of a step", "tokens"),
    5: ("decoded tokens of a step", "tokens"),
}


def serving_timeline(outcome: ServingOutcome, title: str) -> Timeline:
    """The engines that were simulated, and the first MAX_REQUESTS requests."""
    engines = {
        f"{role} {number}" if len(of_role) > 1 else str(role): engine
        for role, of_role in outcome.simulation.engines.items()
        for number, engine in enumerate(of_role)
    }
    rows = [_steps(engine, name) for name, engine in engines.items()]
    rows.append(_requests(outcome.simulation.requests))
    kinds = pl.DataFrame({"name": SLICES}).with_row_index("kind")
    counters = (
        Counter(
            name=f"{name}: {label}",
            unit=unit,
            samples=tuple(zip(at_ns, engine.samples[:, column].tolist(), strict=True)),
        )
        for name, engine in engines.items()
        for at_ns in [(engine.samples[:, 0] * NS_PER_S).astype(np.int64).tolist()]
        for column, (label, unit) in COUNTERS.items()
    )
    return Timeline(
        tracks=tracks_of(
            pl.concat(rows, how="diagonal"), kinds, lambda at: f"{PROCESSES[at]}: {title}"
        ),
        counters=tuple(counters),
        metadata={"title": title},
    )


def _steps(engine: BatchingEngine, name: str) -> pl.DataFrame:
    """Steps from one sample to the next; equal decode steps that follow each other are one slice."""
    time_s, running, waiting, used, n_prompt, n_decoded = engine.samples.T
    end_s = np.append(time_s[1:], engine.now_s)
    facts = {
        "prompt_tokens": n_prompt,
        "decoded_tokens": n_decoded,
        "sequences": running,
        "waiting": waiting,
        "cache_blocks": used,
    }
    kind = np.where(n_prompt > 0, np.where(n_decoded > 0, 2, 1), 0)
    frame = pl.DataFrame(
        {
            "kind": kind.astype(np.uint32),
            "start_ns": (time_s * NS_PER_S).astype(np.int64),
            "dur_ns": ((end_s - time_s) * NS_PER_S).astype(np.int64),
            **{ARGUMENT + fact: values.astype(np.int64) for fact, values in facts.items()},
        }
    )
    placed = frame.with_columns(device=pl.lit(0, pl.Int32), lane=pl.lit(name))
    return placed.filter(pl.Series(n_prompt + n_decoded > 0))


def _requests(requests: ServedRequests) -> pl.DataFrame:
    ends_s: list[float] = []
    rows: list[tuple[str, int, int, int, int, int]] = []
    for number in range(min(len(requests.arrival_s), MAX_REQUESTS)):
        arrival_s, first_s, finish_s = (
            float(times[number])
            for times in (requests.arrival_s, requests.first_token_s, requests.finish_s)
        )
        line = next((i for i, end_s in enumerate(ends_s) if end_s <= arrival_s), len(ends_s))
        ends_s[line : line + 1] = [finish_s]
        n_output = int(requests.load.n_output[number])
        for kind, start_s, end_s in ((3, arrival_s, first_s), (4, first_s, finish_s)):
            if kind == 3 or end_s > start_s:
                start_ns, dur_ns = (int(s * NS_PER_S) for s in (start_s, end_s - start_s))
                rows.append((f"line {line + 1}", kind, start_ns, dur_ns, number, n_output))
    names = ("lane", "kind", "start_ns", "dur_ns", f"{ARGUMENT}request", f"{ARGUMENT}output_tokens")
    types = {"kind": pl.UInt32, "lane": pl.String}
    schema = {name: types.get(name, pl.Int64) for name in names}
    return pl.DataFrame(rows, schema, orient="row").with_columns(device=pl.lit(1, pl.Int32))
