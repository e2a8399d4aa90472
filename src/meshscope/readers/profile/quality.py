"""Checks a profile for faults that make measured numbers wrong: lost events, compilation, clocks.

Reports show these findings before any measured number. Nothing is repaired or guessed.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping

import polars as pl

from meshscope.readers.profile.ops import PS, Ops
from meshscope.readers.profile.steps import steps_of
from meshscope.readers.profile.xplane import Profile

Expected = Mapping[tuple[str, str], Mapping[int, int]]  # executions by device

# Names of compilation events in JAX, PJRT clients and their backends.
COMPILING = r"^backend_compile|Client::Compile|Compiler::Compile|Compiler::RunBackend"


def capture_faults(
    profile: Profile, ops: Ops, runs: pl.DataFrame, *, expected: Expected | None = None
) -> list[str]:
    """The faults of a profile; empty if its numbers can be trusted.

    `ops` are the ops of the profile with the facts of the HLO, `runs` their executions, at least of
    asynchronous ops. `expected` has the executions of each (module, instruction) in one run of its
    module on each device that executes it.
    """
    return [
        *_of_recording(profile, ops),
        *_truncated_planes(ops),
        *_unpaired(runs),
        *_lost(runs, expected or {}),
        *_unknown(runs, {module for module, _ in expected or {}}),
        *_compilations(profile, ops),
        *_of_clocks(profile, ops),
    ]


def _of_recording(profile: Profile, ops: Ops) -> Iterator[str]:
    for space in profile.spaces:
        for text in (*space.errors, *space.warnings):
            yield f"The profiler reported on host '{space.host}': {text[:500]}"
    if ops.events.is_empty():
        yield (
            "The profile contains no op of any device: nothing ran while it was recorded, or the "
            "profiler did not reach the devices. Wait for the result (block_until_ready) before "
            "stopping the profiler."
        )
    seen = set(ops.events.select("host", "plane").unique().iter_rows())
    for host, index, plane, _ in profile.planes():
        is_device = plane.name.startswith(("/device:TPU", "/device:GPU"))
        if is_device and (host, index) not in seen:
            yield (
                f"'{plane.name}' of host '{profile.spaces[host].host}' contains no op, "
                "although other planes do: sums over devices miss it."
            )


def _truncated_planes(ops: Ops) -> Iterator[str]:
    modules = ops.instructions.select("op", "module")
    runs = ops.events.drop_nulls("run_id").join(modules, on="op")
    counts = runs.group_by("module", "device").agg(pl.col("run_id").n_unique())
    most = counts.with_columns(most=pl.col("run_id").max().over("module"))
    short = most.filter(pl.col("run_id") < pl.col("most")).sort("module", "device")
    for module, device, n_runs, n_most in short.iter_rows():
        yield (
            f"Device {device} recorded {n_runs} runs of '{module}', another device {n_most}: its "
            "buffer was full, or the profile ended early. Profile fewer steps."
        )


def _unpaired(runs: pl.DataFrame) -> Iterator[str]:
    halves = runs.filter(~pl.col("is_paired"))
    counts = halves.group_by("module", "hlo_name", "opcode", maintain_order=True).len()
    counts = counts.sort("len", descending=True, maintain_order=True)
    for module, name, opcode, n in counts.iter_rows():
        missing = "start" if str(opcode).endswith("-done") else "done"
        yield (
            f"{n} executions of '{name}' in '{module}' lack their {missing}: the profile started "
            "or ended between the two, or events were lost. Their time covers one half."
        )


def _lost(runs: pl.DataFrame, expected: Expected) -> Iterator[str]:
    """Instructions that executed more or less often than their program says."""
    # GPU profiles have no run ids, so nothing can be expected of them.
    keys = runs.drop_nulls("run_id").select("module", "device", "run_id").unique()
    n_runs: dict[str, dict[int, int]] = defaultdict(dict)
    for module, device, n in keys.group_by("module", "device").len().iter_rows():
        n_runs[module][device] = n
    counted = runs.group_by("module", "hlo_name").len().iter_rows()
    n_executions = {(module, name): n for module, name, n in counted}
    for (module, name), n_each in expected.items():
        of_module = n_runs.get(module, {})
        n_expected = sum(n_each.get(device, 0) * n for device, n in of_module.items())
        n_recorded = n_executions.get((module, name), 0)
        if of_module and n_recorded != n_expected:
            yield (
                f"'{name}' of '{module}' was recorded {n_recorded} times; {sum(of_module.values())} "
                f"runs on all devices should give {n_expected}. Sums over it are off by the difference."
            )


def _unknown(runs: pl.DataFrame, modules: set[str]) -> Iterator[str]:
    is_known = pl.col("module").is_in(list(modules)).fill_null(value=False)
    unknown = runs.filter(~is_known)["module"]
    if modules and len(unknown):
        names = sorted(module or "(no module)" for module in unknown.unique())
        yield (
            f"{len(unknown)} ops belong to programs without HLO: {', '.join(names[:5])}"
            f"{' and others' if len(names) > 5 else ''}. They count only as busy time of the device."
        )


def _compilations(profile: Profile, ops: Ops) -> Iterator[str]:
    end_s = (pl.col("start_s") + pl.col("dur_s")).max()
    windows = ops.events.group_by("host").agg(pl.col("start_s").min(), end_s.alias("end_s"))
    by_host = {host: (start_s, end_s) for host, start_s, end_s in windows.iter_rows()}
    for host, _, plane, base_s in profile.planes():
        names = plane.kinds.filter(pl.col("name").str.contains(COMPILING))
        within = plane.events.filter(
            pl.col("kind").is_in(names["kind"].implode()),
            (pl.col("start_ps") * PS + base_s).is_between(*by_host.get(host, (0.0, -1.0))),
        )
        if len(within):
            first = str(plane.with_names(within.head(1))["name"][0])[:80]
            yield (
                f"Host '{profile.spaces[host].host}' compiled during the profile ({len(within)} events, "
                f"such as '{first}'), which inflates idle time and step "
                "times. Run every program once before starting the profiler."
            )


def _of_clocks(profile: Profile, ops: Ops) -> Iterator[str]:
    """Ops without steps or devices, clocks that are not known well, and impossible times."""
    n_unknown = ops.events["device"].null_count()
    if len(ops.events) and steps_of(profile)["step"].is_null().all():
        yield (
            "The profile has no step markers, so ops cannot be counted per step. Wrap each step in "
            "jax.profiler.StepTraceAnnotation(name, step_num=i)."
        )
    if n_unknown:
        yield (
            f"{n_unknown} ops have no device number (as with TorchXLA on CPU): load and waiting "
            "per device are not known."
        )
    for space, clock in list(zip(profile.spaces, profile.clocks, strict=True))[1:]:
        if not clock.method.startswith(("ends of", "Unix time of the one machine")):
            yield (
                f"The clock of host '{space.host}' is aligned by: {clock.method}. Lateness across hosts is "
                "not known to better than milliseconds."
            )
    for number, _, plane, _ in profile.planes():
        if n_bad := int((plane.events["dur_ps"] < 0).sum()):
            host_name = profile.spaces[number].host
            yield f"{n_bad} events of '{plane.name}' on host '{host_name}' end before they start."
