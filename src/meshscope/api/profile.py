"""`meshscope.profile`: a JAX function of the user on live devices, timed and profiled."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl

from meshscope.api.compile import function_record
from meshscope.api.records import new_record, write_record
from meshscope.api.run import Run
from meshscope.backends.compile.function import function_memory, function_rows
from meshscope.backends.live.measurement import ProfiledProgram, measured_of
from meshscope.backends.live.run import OPS
from meshscope.backends.live.worker import HLO, TRACE, flatten_trace, versions
from meshscope.errors import SpecError, public
from meshscope.events.enums import Phase, Source
from meshscope.events.measured import Measured, StepCost
from meshscope.events.step_time import TimeBasis
from meshscope.files import path_of, write_gzip
from meshscope.hardware.topology import parse_topology, slice_of_devices
from meshscope.plans.mesh import Mesh
from meshscope.programs.environments import check_can_run
from meshscope.programs.frontends import program_file
from meshscope.readers.hlo.communication import other_operations
from meshscope.readers.hlo.parse import read_hlo
from meshscope.readers.profile.xplane import read_profile
from meshscope.serialize import picked
from meshscope.store.folder import new_folder, scratch_folder
from meshscope.store.write import write_table


@public
def profile(
    function: Callable[..., Any],
    *arguments: Any,
    steps: int = 10,
    warmup: int = 2,
    profiled_steps: int = 4,
    keywords: Mapping[str, Any] | None = None,
    mesh: Any = None,
    topology: str | None = None,
    name: str | None = None,
    phase: Phase | str | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    force: bool = False,
) -> Run:
    """Runs a JAX function on the devices of this process, times its steps and profiles a few more.

    The function runs in this process, so a notebook can call it. Arrays that it donates are copied
    before each step, which is not timed. It was tried on CPU devices, not on TPUs.

    Example:
        >>> run = meshscope.profile(train_step, params, batch, mesh="dp=8")
        >>> run.time.step_s  # mean seconds of the timed steps
        >>> run.compare().verdict  # of compiled and measured collectives

    Args:
        function: A JAX function, jitted or not.
        arguments: Its arguments: arrays, or `jax.ShapeDtypeStruct`s, which become random data.
        steps: Timed steps.
        warmup: Untimed steps before them.
        profiled_steps: Steps in the profile, after the timed ones.
        keywords: Its keyword arguments.
        mesh: A JAX mesh, or axis sizes such as `dp=2,tp=4`; by default the mesh of the shardings.
        topology: The slice, such as `v6e-8`; by default what the devices say.
        name: Name of the function in tables.
        phase: `prefill` or `decode` if the function is one; by default what its scopes say, else `step`.
        seed: Seed of the random data.
        out: Folder of the run; without it the run stays in memory.
        force: Replace the run in this folder.

    Returns:
        A run with the sources `compiled` and `measured`.

    Raises:
        MeshscopeError: The function does not trace or run, devices are missing, or the folder exists.
    """
    for count, n in {"steps": steps, "warmup": warmup, "profiled_steps": profiled_steps}.items():
        if type(n) is not int or n < 1:
            raise SpecError(f"{count}={n!r} must be a whole number. Use 1 or more.")
    if phase is not None and phase not in set(Phase):
        raise SpecError(f"phase: '{phase}' is not one of {', '.join(Phase)}.")
    check_can_run()
    from meshscope.programs.jax.function import function_name  # JAX
    from meshscope.programs.jax.live_function import live_function, run_profiled

    name = name or function_name(function)
    live = live_function(function, arguments, keywords or {}, mesh=mesh, name=name, seed=seed)
    slice_ = slice_of_devices(live.devices) if topology is None else parse_topology(topology)
    if slice_.n_devices != live.program.n_devices:
        raise SpecError(
            f"'{topology}' has {slice_.n_devices} devices, and {live.program.name} runs on "
            f"{live.program.n_devices}. Omit topology, or give the slice of the devices."
        )
    for _ in range(warmup):
        live.execute()
    step_s = tuple(live.execute() for _ in range(steps))
    with scratch_folder() as scratch:
        folder = scratch / "run"
        text = folder / HLO / program_file(Phase.STEP)
        text.parent.mkdir(parents=True)
        write_gzip(text, live.text)
        run_profiled(live, folder / TRACE, profiled_steps, phase or Phase.STEP)
        flatten_trace(folder / TRACE)
        module, stated = read_hlo(text), None if phase is None else Phase(phase)
        layout = Mesh(axes=live.program.mesh)
        step, _, compiled = function_rows(module, mesh=layout, topology=slice_, phase=stated)
        positions = {device.id: position for position, device in enumerate(live.devices)}
        trace = read_profile(folder / TRACE, positions=positions)
        program = ProfiledProgram(phase=step, module=module, rows=compiled, n_runs=profiled_steps)
        timings = measured_of(trace, [program], n_steps={step: profiled_steps})
        # The measured rows have their mean duration over all executions and devices.
        collectives = timings.ops.filter(pl.col("kind").is_not_null())
        dur_s = dict(collectives.group_by("hlo_name").agg(pl.col("dur_s").mean()).iter_rows())
        measured = [
            replace(row, dur_s=dur_s.get(row.hlo_name), time_basis=TimeBasis.MEASURED.value)
            for row in timings.rows
        ]
        experiment = function_record(function, live.program, slice_, step)
        live_costs = {name: live.costs.get(name) for name in ("flops", "accessed_bytes")}
        record = new_record(
            Source.MEASURED,
            experiment,
            ("meshscope.profile", experiment.function or live.program.name, slice_.name),
            phases=[step],
            rows=(*compiled, *measured),
            memory={Source.COMPILED: function_memory(live.memory, slice_)},
            measured=Measured(
                requests=(),
                n_profiled_steps={step: profiled_steps},
                **picked(timings, "loads", "times", "findings"),
                costs=(StepCost(phase=step, **live_costs),),
                step_s={step: step_s},
            ),
            versions=versions(),
            other_operations=other_operations(module, step),
            seconds={f"{step}.{name}": seconds for name, seconds in live.seconds.items()},
        )
        if out is None:
            return Run(record=record)
        write_table(timings.ops, folder / TRACE / OPS)
        with new_folder(path_of(out), force=force) as partial:
            for part in (HLO, TRACE):
                (folder / part).rename(partial / part)
            write_record(record, partial)
    return Run(record=replace(record, path=Path(out)))
