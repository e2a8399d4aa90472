"""Reads what a function left on live devices: its HLO and its profile."""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import polars as pl

from meshscope.backends.live.measurement import ProfiledProgram, ProfileRows, measured_of
from meshscope.events.collective import Collective
from meshscope.events.enums import Phase
from meshscope.events.step_time import TimeBasis
from meshscope.hardware.topology import Topology
from meshscope.plans.mesh import Mesh
from meshscope.readers.hlo.collectives import module_collectives, rows_of
from meshscope.readers.hlo.parse import read_hlo
from meshscope.readers.profile.session import Profile, profile_files, read_profile


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadFunction:
    """The compiled rows of a function, and its profile joined with them."""

    phase: Phase
    compiled: tuple[Collective, ...]
    timings: ProfileRows
    profile: Profile


def read_live_function(  # noqa: PLR0913  a program, its devices and its profile
    text: Path,
    trace: Path,
    *,
    mesh: Mesh,
    topology: Topology,
    phase: Phase | None,
    device_ids: tuple[int, ...],
    n_steps: int,
) -> ReadFunction:
    """The rows of `n_steps` profiled steps; `device_ids` are in the order of the mesh."""
    module = read_hlo(text)
    collectives = module_collectives(module, mesh=mesh, crosses_slices=topology.crosses_slices)
    rows = rows_of(
        collectives,
        n_steps_of={},
        crosses_slices=topology.crosses_slices,
        default_phase=phase or Phase.STEP,
    )
    scoped = {row.phase for row in rows}
    step = phase or (scoped.pop() if len(scoped) == 1 else None) or Phase.STEP
    rows = [replace(row, phase=step) for row in rows]
    positions = {(0, device): position for position, device in enumerate(device_ids)}
    profile = read_profile(trace, positions=positions)
    program = ProfiledProgram(phase=step, module=module, rows=rows, n_runs=n_steps)
    timings = measured_of(profile, [program], n_steps={step: n_steps})
    timed = replace(timings, rows=_with_durations(timings))
    return ReadFunction(phase=step, compiled=tuple(rows), timings=timed, profile=profile)


def _with_durations(timings: ProfileRows) -> list[Collective]:
    """The measured rows with their mean duration over all executions and devices."""
    collectives = timings.ops.filter(pl.col("kind").is_not_null())
    means = collectives.group_by("hlo_name").agg(pl.col("dur_s").mean()).iter_rows()
    dur_s = dict(means)
    return [
        replace(row, dur_s=dur_s.get(row.hlo_name), time_basis=TimeBasis.MEASURED.value)
        for row in timings.rows
    ]


def flatten_trace(folder: Path) -> None:
    """Moves the profiles that JAX wrote up into the folder, as those of other live runs."""
    for profile in profile_files(folder):
        profile.rename(folder / profile.name)
    shutil.rmtree(folder / "plugins")
