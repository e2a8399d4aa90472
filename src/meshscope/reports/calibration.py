"""A calibration profile as text: measured points with nccl-tests' bandwidths, fits and their errors."""

from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from meshscope.hardware.interconnect.profile import ChipProfile, FittedKind
from meshscope.reports.model import UNKNOWN_LABEL, CellValue, ViewTable, table
from meshscope.reports.tables import rich_table
from meshscope.reports.words import counted
from meshscope.units import format_bytes, format_dtype, format_seconds


def profile_text(profile: ChipProfile) -> Iterator[RenderableType]:
    """The conditions, points, fits and rates of a profile."""
    yield Text(_conditions(profile))
    if profile.points:
        yield Text()
        yield rich_table(_points(profile))
        yield Text()
        yield rich_table(_fits(profile))
    if profile.matrices or profile.memory:
        yield Text()
        yield Text(_rates(profile))


def _conditions(profile: ChipProfile) -> str:
    conditions = profile.conditions
    plan = f", plan {profile.plan}" if profile.plan else ""
    lines = [f"{profile.topology}{plan}; {profile.constants.source}"]
    if "n_cpus" in conditions:
        devices = counted(len(conditions["devices"]), "device")
        versions = ", ".join(f"{name} {text}" for name, text in conditions["versions"].items())
        cpus, seconds = counted(conditions["n_cpus"], "CPU"), f"{conditions['seconds']:.0f} s"
        lines.append(f"{devices}, {cpus}, {seconds}; {versions}")
    if conditions.get("n_left_out"):
        lines.append(f"{counted(conditions['n_left_out'], 'size')} skipped: time budget exhausted")
    if conditions.get("n_skipped"):
        lines.append(f"{counted(conditions['n_skipped'], 'row')} of the file skipped")
    return "\n".join(lines)


def _points(profile: ChipProfile) -> ViewTable:
    points = sorted(profile.points, key=lambda p: (p["kind"], p["axis"], p["payload_bytes"]))
    keys = (
        *("kind", "axis", "group_size", "payload_bytes", "seconds"),
        *("algbw_bytes_per_s", "busbw_bytes_per_s"),
    )
    names = ("collective", "axis", "devices#", "payload_bytes", "time_s", *keys[-2:])
    return table(names, ([point[key] for key in keys] for point in points))


def _fits(profile: ChipProfile) -> ViewTable:
    is_memory = profile.constants.memory_bytes_per_s is not None
    rate = "bytes moved_bytes_per_s" if is_memory else "of the peak_frac"
    errors = ("median error_frac", "largest error_frac")
    names = ("fit", "devices#", "latency_s", rate, "points#", *errors)
    return table(names, map(_fit_cells, profile.fits))


def _fit_cells(fit: FittedKind) -> tuple[CellValue, ...]:
    """The errors of a fit through a single point are unknown."""
    is_single = fit.n_fitted + fit.n_holdout == 1
    errors = fit.median_error_frac, fit.largest_error_frac
    return (
        fit.kind or "all kinds",
        fit.group_size if fit.kind else "",
        fit.latency_s,
        1 / fit.inverse_bandwidth,
        f"{fit.n_fitted}+{fit.n_holdout}",
        *([UNKNOWN_LABEL] * 2 if is_single else errors),
    )


def _rates(profile: ChipProfile) -> str:
    lines = [
        f"matmul {rate.n} x {rate.n}, {format_dtype(rate.dtype)}: {rate.flops_per_s / 1e9:,.1f} GFLOP/s per device"
        for rate in profile.matrices
    ]
    lines += [
        f"memory, {format_bytes(rate.array_bytes)}: {format_bytes(rate.bytes_per_s)}/s per device"
        for rate in profile.memory
    ]
    lines.append("all devices at the same time")
    lines += [
        f"product {product.rows} x {product.depth} x {product.columns}, weights {format_dtype(product.weight_dtype)}: "
        f"{format_seconds(product.seconds)}, {product.flops / product.seconds / 1e9:,.1f} GFLOP/s, "
        f"{format_bytes(product.n_bytes / product.seconds)}/s"
        for product in profile.products
    ]
    if profile.launch_s is not None:
        lines.append(f"one kernel after another: {format_seconds(profile.launch_s)}")
    return "\n".join(lines)
