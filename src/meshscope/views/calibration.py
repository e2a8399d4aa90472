"""A profile as text: what was timed with nccl-tests' rates, and the lines through it with their errors."""

from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from meshscope.interconnect.profile import ChipProfile, FittedKind
from meshscope.units import format_bytes, format_seconds
from meshscope.views.tables import new_table
from meshscope.views.words import UNKNOWN


def profile_text(profile: ChipProfile) -> Iterator[RenderableType]:
    """Conditions, points, fits, rates of one device."""
    yield Text(_conditions(profile))
    yield Text()
    yield _points(profile)
    yield Text()
    yield _fits(profile)
    if profile.matrices or profile.memory:
        yield Text()
        yield Text(_rates(profile))


def _conditions(profile: ChipProfile) -> str:
    told = profile.conditions
    plan = f", plan {profile.plan}" if profile.plan else ""
    lines = [f"{profile.topology}{plan}; {profile.constants.source}"]
    if "n_cpus" in told:
        lines.append(
            f"{len(told['devices'])} devices, {told['n_cpus']} CPUs, {told['seconds']:.0f} s; "
            + ", ".join(f"{name} {version}" for name, version in told["versions"].items())
        )
    if told.get("n_left_out"):
        lines.append(f"{told['n_left_out']} sizes were not begun: the budget of time was spent")
    if told.get("n_skipped"):
        lines.append(f"{told['n_skipped']} rows of the file are not among the points")
    return "\n".join(lines)


def _points(profile: ChipProfile) -> RenderableType:
    table = new_table(
        "collective", "axis", "devices", "payload", "time", "algbw", "busbw", n_words=2
    )
    for point in sorted(profile.points, key=lambda p: (p["kind"], p["axis"], p["payload_bytes"])):
        table.add_row(
            point["kind"],
            point["axis"],
            str(point["group_size"]),
            format_bytes(point["payload_bytes"]),
            format_seconds(point["seconds"]),
            f"{format_bytes(point['algbw_bytes_per_s'])}/s",
            f"{format_bytes(point['busbw_bytes_per_s'])}/s",
        )
    return table


def _fits(profile: ChipProfile) -> RenderableType:
    is_memory = profile.constants.memory_bytes_per_s is not None
    rate = "bytes moved" if is_memory else "of the peak"
    table = new_table(
        "fit", "devices", "floor", rate, "points", "median error", "largest", n_words=1
    )
    for fit in profile.fits:
        reached = 1 / fit.inverse_bandwidth
        table.add_row(
            fit.kind or "all together",
            str(fit.group_size) if fit.kind else "",
            format_seconds(fit.latency_s),
            f"{format_bytes(reached)}/s" if is_memory else f"{reached:.0%}",
            f"{fit.n_fitted}+{fit.n_holdout}",
            *_errors(fit),
        )
    return table


def _errors(fit: FittedKind) -> tuple[str, str]:
    """The median and the largest; a line through its only point has none that would tell anything."""
    if fit.n_fitted + fit.n_holdout == 1:
        return UNKNOWN, UNKNOWN
    return f"{fit.median_error_frac:.0%}", f"{fit.largest_error_frac:.0%}"


def _rates(profile: ChipProfile) -> str:
    lines = [
        f"matrices {rate.n} x {rate.n}, {rate.dtype}: {rate.flops_per_s / 1e9:,.1f} GFLOP/s a device"
        for rate in profile.matrices
    ]
    lines += [
        f"memory, {format_bytes(rate.array_bytes)}: {format_bytes(rate.bytes_per_s)}/s a device"
        for rate in profile.memory
    ]
    return "\n".join([*lines, "all devices at once"])
