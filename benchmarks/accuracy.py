"""The tables of docs/evidence/accuracy.md: published times of collectives beside the modeled ones.

Run: make accuracy. cog calls these functions from the page; accuracy_published.py and accuracy_steps.py
have the step times.
"""

import csv
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import exp
from pathlib import Path
from typing import NamedTuple

from meshscope.events.collective import Groups
from meshscope.events.enums import Kind, wire_factor
from meshscope.hardware.chips import chip_of
from meshscope.hardware.interconnect.constants import constants_of, spec_constants
from meshscope.hardware.interconnect.lines import collective_time
from meshscope.hardware.interconnect.strategies import BIDIRECTIONAL_RING, MULTI_COLOR
from meshscope.hardware.topology import parse_topology
from meshscope.units import format_bytes, format_seconds

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tools"))
# ruff: noqa: E402

from accuracy_steps import markdown
from fit_collectives import holdout_errors, left_out_errors
from published_collectives import POINTS, groups_along, split_points


def print_table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> None:
    """A Markdown table."""
    for cells in (head, ["---"] * len(head), *lines):
        sys.stdout.write(f"| {' | '.join(cells)} |\n")


def collectives() -> None:
    """One row per published point."""
    fitted, _ = split_points(POINTS)
    lines: list[list[str]] = []
    for point in POINTS:
        time = collective_time(
            point.kind,
            groups=point.groups,
            payload_bytes=point.payload_bytes,
            topology=parse_topology(point.topology),
        )
        assert time.low_s is not None
        assert time.high_s is not None
        n = len(point.groups[0])
        wire_bytes = float(point.payload_bytes * wire_factor(point.kind, n))
        is_rate = point.payload_bytes >= 1 << 20
        lines.append(
            [
                point.topology,
                f"{len(point.groups)} x {n}",
                point.kind,
                format_bytes(point.payload_bytes),
                format_seconds(point.seconds),
                format_seconds(time.seconds),
                f"{time.seconds / point.seconds - 1:+.0%}",
                f"{format_seconds(time.low_s)} to {format_seconds(time.high_s)}",
                f"{wire_bytes / point.seconds / 1e9:.0f} / {wire_bytes / time.seconds / 1e9:.0f}"
                if is_rate
                else "",
                time.strategy,
                "fitted" if point in fitted else "holdout",
            ]
        )
    print_table(
        [
            "slice",
            "groups",
            "collective",
            "payload",
            "published",
            "ours",
            "error",
            "interval",
            "GB/s published / ours",
            "strategy",
            "half",
        ],
        lines,
    )


def sources() -> None:
    """The sources of the points, with notes on their interpretation."""
    for source in dict.fromkeys(point.source for point in POINTS):
        points = [point for point in POINTS if point.source == source]
        notes = "; ".join(dict.fromkeys(point.note for point in points if point.note))
        sys.stdout.write(f"- {source} ({len(points)}){': ' + notes if notes else ''}\n")


def summary() -> None:
    """Errors of the holdout, and of chips left out of the fit."""
    errors = holdout_errors()
    long = [abs(exp(e) - 1) for p, e in errors.items() if p.payload_bytes >= 1 << 20]
    short = [abs(exp(e) - 1) for p, e in errors.items() if p.payload_bytes < 1 << 20]
    left_out = [abs(exp(error) - 1) for error in left_out_errors()]
    groups = [
        ("holdout, 1 MiB and more", long),
        ("holdout, less than 1 MiB", short),
        ("holdout, all", [*long, *short]),
        ("with constants of the other chips", left_out),
    ]
    print_table(
        ["points", "number", "median error", "worst"],
        [
            [name, str(len(values)), f"{statistics.median(values):.0%}", f"{max(values):.0%}"]
            for name, values in groups
        ],
    )
    spreads = constants_of(chip_of("v6e")).spreads
    assert spreads is not None
    sys.stdout.write(
        f"\nIntervals reach from 1/x to x times the prediction: x = {spreads.short:.2f} if latency "
        f"exceeds transfer time ({spreads.n_short} holdout errors), {spreads.long:.2f} if transfer time dominates "
        f"({spreads.n_long}), and {spreads.out_of_sample:.2f} outside the measured range ({spreads.n_out_of_sample} errors of "
        "chips left out of the fit).\n"
    )


def constants() -> None:
    """The fitted constants of each chip."""
    lines: list[list[str]] = []
    for name in ("v4", "v5e", "v5p", "v6e", "tpu7x"):
        fitted = constants_of(chip_of(name))
        n_points = sum(point.chip == name for point in POINTS)
        assert fitted.link_bytes_per_s is not None
        assert fitted.host_bytes_per_s is not None
        assert fitted.links_at_once is not None
        exchange = fitted.rates_of(Kind.ALL_TO_ALL, 2).efficiency
        lines.append(
            [
                name,
                f"{fitted.link_bytes_per_s / 1e9:.0f} GB/s",
                format_seconds(fitted.rates.latency_s),
                f"{fitted.rates.efficiency:.0%}",
                f"{exchange:.0%}",
                f"{fitted.links_at_once:.2f} of {2 * chip_of(name).n_grid_dims}",
                f"{fitted.host_bytes_per_s / 1e9:.1f} GB/s",
                str(n_points) if n_points else "none: median of the other chips",
            ]
        )
    print_table(
        [
            "chip",
            "link",
            "latency",
            "efficiency",
            "all-to-all",
            "links at once",
            "DCN rate of a host",
            "points",
        ],
        lines,
    )


class Worked(NamedTuple):
    """A worked example of the scaling book, in seconds."""

    name: str
    topology: str
    groups: Groups
    kind: Kind
    payload_bytes: int
    strategy: str
    book_s: float
    counts_own_shard: bool
    note: str = ""


def worked() -> None:
    """The book's examples at published peaks and without hops, which the book leaves out."""
    v5e, v4 = parse_topology("v5e:8x4"), parse_topology("v4:4x4x4")
    rows = groups_along(v4, "x")
    planes = tuple(tuple(d for row in rows[z * 4 : z * 4 + 4] for d in row) for z in range(4))
    every = (tuple(range(32)),)
    examples = [
        Worked("v5e 4x4, corner to corner, half of bf16[8,128,8192] each way", "v5e:4x4", ((0, 15),),
               Kind.PERMUTE, 8 * 128 * 8192, BIDIRECTIONAL_RING, 188e-6, False, "194 us with six hops of 1 us"),
        Worked("v5e 8x4, gather bf16[2048,8192] over 4", "v5e:8x4", groups_along(v5e, "y"),
               Kind.ALL_GATHER, 2048 * 8192 * 2, BIDIRECTIONAL_RING, 560e-6, False, "measured there: 680 us"),
        Worked("v4 4x4x4, gather bf16[1024,1024] over X", "v4:4x4x4", rows,
               Kind.ALL_GATHER, 2 * 1024 * 4096 // 4, BIDIRECTIONAL_RING, 23e-6, True),
        Worked("v4 4x4x4, gather bf16[1024,4096] over X and Y", "v4:4x4x4", planes,
               Kind.ALL_GATHER, 2 * 1024 * 4096, MULTI_COLOR, 46e-6, True),
        Worked("v4 4x4x4, all-reduce bf16[1024,4096] over Z", "v4:4x4x4", groups_along(v4, "z"),
               Kind.ALL_REDUCE, 2 * 1024 * 4096, BIDIRECTIONAL_RING, 190e-6, True),
        Worked("v5e 4x8, gather bf16[64,8192] over all", "v5e:4x8", every,
               Kind.ALL_GATHER, 2 * 64 * 8192, BIDIRECTIONAL_RING, 11e-6, True,
               "a ring of 32 has 16 hops of 1 us more, which the book leaves out here"),
    ]  # fmt: skip
    lines: list[list[str]] = []
    for example in examples:
        topology = parse_topology(example.topology)
        ours_s = collective_time(
            example.kind,
            groups=example.groups,
            payload_bytes=example.payload_bytes,
            topology=topology,
            algorithm=example.strategy,
            constants=replace(spec_constants(topology.chip), hop_s=0.0),
        ).seconds
        n = len(example.groups[0])
        same_s = ours_s / ((n - 1) / n if example.counts_own_shard else 1)
        lines.append(
            [
                example.name,
                format_seconds(example.book_s),
                format_seconds(same_s),
                format_seconds(ours_s),
                example.note,
            ]
        )
    print_table(["example", "book", "ours, by the book's formula", "ours", "note"], lines)


class Rate(NamedTuple):
    """A published bus bandwidth of NCCL."""

    source: str
    topology: str
    kind: Kind
    payload_bytes: int
    published: float


def gpus() -> None:
    """Reported bus bandwidths beside NCCL's tuning model."""
    rates = [
        Rate("NVIDIA/nccl-tests issue 272, peak", "h200:8", Kind.ALL_REDUCE, 1 << 32, 475e9),
        Rate("NVIDIA/nccl-tests issue 149, '~200'", "a100:8", Kind.ALL_REDUCE, 1 << 30, 200e9),
        Rate("NVIDIA/nccl-tests issue 178", "a100:2", Kind.ALL_REDUCE, 1 << 33, 208e9),
    ]
    lines: list[list[str]] = []
    for rate in rates:
        topology = parse_topology(rate.topology)
        groups = (tuple(range(topology.n_devices)),)
        seconds = collective_time(
            rate.kind, groups=groups, payload_bytes=rate.payload_bytes, topology=topology
        ).seconds
        busbw = rate.payload_bytes * float(wire_factor(rate.kind, len(groups[0]))) / seconds
        lines.append(
            [
                rate.source,
                rate.topology,
                rate.kind,
                format_bytes(rate.payload_bytes),
                f"{rate.published / 1e9:.0f} GB/s",
                f"{busbw / 1e9:.0f} GB/s",
                f"{busbw / rate.published - 1:+.0%}",
            ]
        )
    print_table(
        ["source", "GPUs", "collective", "payload", "busbw published", "ours", "error"], lines
    )


def cpu_loop() -> None:
    """The last results of benchmarks/cpu_loop.py."""
    with (HERE / "cpu_loop.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    errors = [float(row["predicted_s"]) / float(row["measured_s"]) - 1 for row in rows]
    is_inside = [
        bool(row["low_s"])
        and float(row["low_s"]) <= float(row["measured_s"]) <= float(row["high_s"])
        for row in rows
    ]
    print_table(
        ["model", "plan", "phase", "collectives", "predicted", "interval", "measured", "error"],
        [
            [
                row["model"].rsplit("/", 1)[-1],
                row["plan"],
                row["phase"],
                row["n_collectives"],
                format_seconds(float(row["predicted_s"])),
                f"{format_seconds(float(row['low_s']))} to {format_seconds(float(row['high_s']))}"
                if row["low_s"]
                else "",
                format_seconds(float(row["measured_s"])),
                f"{error:+.0%}",
            ]
            for row, error in zip(rows, errors, strict=True)
        ],
    )
    sys.stdout.write(
        f"\nMedian error {statistics.median(map(abs, errors)):.0%}, worst {max(errors, key=abs):+.0%}; "
        f"{sum(is_inside)} of {len(rows)} inside the interval.\n"
    )


def step_times() -> None:
    """The tables of accuracy_steps.py."""
    sys.stdout.write(markdown().rstrip() + "\n")
