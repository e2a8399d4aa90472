"""A simulated server as a timeline for the trace writers: engine steps, requests, and counters.

Each request is on the first free line: its wait for the first token, and the rest of it.
"""

from collections.abc import Iterator
from itertools import chain

import numpy as np
import polars as pl

from meshscope.events.timeline import ARGUMENT, Counter, Timeline, Track
from meshscope.reports.export.run_timeline import free_lane, tracks_of
from meshscope.serving.engine import BatchingEngine, ServedRequests
from meshscope.serving.simulation import ServingOutcome

PS_PER_S, NS_PER_S = 1e12, 1e9
MAX_REQUESTS = 2000  # drawn, the first ones
STEP_NAMES = ("decode", "prefill", "prefill and decode")
REQUEST_NAMES = ("first token", "other tokens")
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
    simulation = outcome.simulation
    engines = {
        f"{role} {number}" if len(of_role) > 1 else str(role): engine
        for role, of_role in simulation.engines.items()
        for number, engine in enumerate(of_role)
    }
    lines = {f"line {n}": s for n, s in enumerate(_request_lines(simulation.requests), start=1)}
    steps = {name: _steps(engine) for name, engine in engines.items()}
    groups = (("engines", STEP_NAMES, steps), ("requests", REQUEST_NAMES, lines))
    tracks: list[Iterator[Track]] = []
    for pid, (group, names, of_group) in enumerate(groups, start=1):
        kinds = pl.DataFrame({"name": names}).with_row_index("kind")
        lanes = ((name, kinds, slices) for name, slices in of_group.items())
        tracks.append(tracks_of(pid, f"{group}: {title}", (title, group), list(lanes)))
    return Timeline(
        tracks=chain.from_iterable(tracks),
        counters=tuple(
            Counter(
                name=f"{name}: {label}",
                unit=unit,
                samples=tuple(zip(at_ns, samples[:, column].tolist(), strict=True)),
            )
            for name, engine in engines.items()
            for samples in [engine.samples]
            for at_ns in [(samples[:, 0] * NS_PER_S).astype(np.int64).tolist()]
            for column, (label, unit) in COUNTERS.items()
        ),
        metadata={"title": title},
    )


def _steps(engine: BatchingEngine) -> pl.DataFrame:
    """Steps from one sample to the next; equal decode steps that follow each other are one slice."""
    time_s, running, waiting, used, n_prompt, n_decoded = engine.samples.T
    end_s = np.append(time_s[1:], engine.now_s)
    frame = pl.DataFrame(
        {
            "kind": np.where(n_prompt > 0, np.where(n_decoded > 0, 2, 1), 0).astype(np.uint32),
            "start_ps": (time_s * PS_PER_S).astype(np.int64),
            "dur_ps": ((end_s - time_s) * PS_PER_S).astype(np.int64),
            ARGUMENT + "prompt_tokens": n_prompt.astype(np.int64),
            ARGUMENT + "decoded_tokens": n_decoded.astype(np.int64),
            ARGUMENT + "sequences": running.astype(np.int64),
            ARGUMENT + "waiting": waiting.astype(np.int64),
            ARGUMENT + "cache_blocks": used.astype(np.int64),
        }
    )
    return frame.filter(pl.Series(n_prompt + n_decoded > 0))


def _request_lines(requests: ServedRequests) -> Iterator[pl.DataFrame]:
    ends_s: list[float] = []
    lines: list[list[tuple[int, float, float, int, int]]] = []
    for number in range(min(len(requests.arrival_s), MAX_REQUESTS)):
        times = (a[number] for a in (requests.arrival_s, requests.first_token_s, requests.finish_s))
        arrival_s, first_s, finish_s = map(float, times)
        line = free_lane(ends_s, arrival_s, finish_s)
        lines += [[]] * (line == len(lines))
        n_output = int(requests.load.n_output[number])
        lines[line].append((0, arrival_s, first_s - arrival_s, number, n_output))
        if finish_s > first_s:
            lines[line].append((1, first_s, finish_s - first_s, number, n_output))
    for line in lines:
        kind, start_s, dur_s, numbers, n_output = (
            np.array(column) for column in zip(*line, strict=True)
        )
        yield pl.DataFrame(
            {
                "kind": kind.astype(np.uint32),
                "start_ps": (start_s * PS_PER_S).astype(np.int64),
                "dur_ps": (dur_s * PS_PER_S).astype(np.int64),
                ARGUMENT + "request": numbers,
                ARGUMENT + "output_tokens": n_output,
            }
        )
