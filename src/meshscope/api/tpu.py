"""TPU slices of Google Cloud: ask for one, run a sweep on it, copy the runs out, delete it.

Tested against a fake gcloud that checks every flag; never run against the real cloud.
"""

import sys
from collections.abc import Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from meshscope.api.console import WorkProgress, echo, note
from meshscope.api.options import option, request
from meshscope.api.request import ExperimentRequest
from meshscope.api.sweep import (
    FILE,
    FOLDER,
    SweepOptions,
    planned_runs,
    run_sweep,
    shown_results,
    sweep_folder,
)
from meshscope.backends.sweep.folder import PlannedRun, RunCommand
from meshscope.backends.sweep.machine import (
    MISSING,
    Gcloud,
    TpuMachine,
    TpuSlice,
    read_quota,
)
from meshscope.errors import SpecError, UsageError
from meshscope.hardware.topology import Topology, parse_topology
from meshscope.reports.model import plain


@request
class TpuOptions:
    """The slice to ask for: `quota` is a file; without one, `allow_charges` accepts what it costs."""

    topology: str = option(ExperimentRequest)
    spot: bool = option(
        "Spot VMs may be preempted at any time.", default=True, flags=("--spot/--on-demand",)
    )
    quota: Path | None = option(
        "FILE: TOML file of what may be used; the rest is refused.", default=None
    )
    allow_charges: bool = option("Request the slice without a quota file.", default=False)
    runtime: str | None = option(
        "VERSION: Software version of the VMs.", default=None, shown="the default of the chip"
    )

    def asked(self) -> dict[str, Any]:
        """The arguments of `create`; MeshscopeError for a bad slice or quota file, or without a limit on charges."""
        if self.quota is None and not self.allow_charges:
            raise SpecError(
                "a slice may be charged. Give --quota FILE with what your project may use, or --allow-charges."
            )
        quota = None if self.quota is None else read_quota(self.quota)
        topology = parse_topology(self.topology)
        return {"topology": topology, "is_spot": self.spot, "quota": quota, "runtime": self.runtime}


@request
class MachineRequest:
    """A slice of Google Cloud by its name."""

    name: str = option("NAME: Name of the slice.", kw_only=False)
    zone: str = option("ZONE: Zone, such as us-east1-d.")
    project: str | None = option(
        "ID: Project.", default=None, shown="the one that gcloud is set to"
    )
    dry_run: bool = option("Print each gcloud command and run none.", default=False, is_last=True)

    def machine(self) -> TpuMachine:
        """The machine; a dry run prints each gcloud command and runs none."""
        gcloud = Gcloud(project=self.project, show=echo if self.dry_run else None)
        return TpuMachine(name=self.name, zone=self.zone, gcloud=gcloud, note=note)


@request
class Installed:
    """What is installed on every worker."""

    wheel: Path = option("FILE: Wheel of meshscope: pip wheel --no-deps -w dist .")
    jax: str | None = option(
        "VERSION: JAX to install.", default=None, shown="the version installed here"
    )

    @property
    def jax_version(self) -> str:
        """The named version, else this environment's."""
        try:
            return self.jax or version("jax")
        except PackageNotFoundError as error:
            raise UsageError("JAX is not installed here. Name a version.") from error


def _check_runs_on(topology: Topology, runs: Sequence[PlannedRun]) -> None:
    """SpecError unless all runs are live on this slice, with models that the workers know."""
    for one in runs:
        if one.command is not RunCommand.RUN:
            raise SpecError(f"'{one}' needs no TPU. Run it here, with 'meshscope sweep'.")
        wanted = str(one.options["topology"])
        if parse_topology(wanted) != topology:
            raise SpecError(
                f"'{one}' runs on {wanted}, and the slice is {topology.name}. Use one file for each slice."
            )
        if Path(str(one.options["model"])).exists():
            raise SpecError(
                f"'{one}': the workers have no '{one.options['model']}'. Name a model of the catalog."
            )


def create(where: MachineRequest, options: TpuOptions) -> None:
    """Request a slice as a queued resource.

    Google Cloud provides it when capacity is free; 'meshscope tpu status' shows the state.
    """
    where.machine().create(**options.asked())


def status(where: MachineRequest) -> None:
    """Show the state of a slice."""
    state = where.machine().state()
    if not where.dry_run:
        echo(f"{plain(where.name)}: {state}")


def install(where: MachineRequest, installed: Installed) -> None:
    """Install meshscope and JAX on every worker of a slice."""
    jax_version = installed.jax_version
    machine = where.machine()
    machine.wait_until_active()
    machine.install(installed.wheel, jax_version=jax_version)


def ssh(
    where: MachineRequest,
    *,
    command: str = option("COMMAND: Shell command.", kw_only=False),
    worker: str = option("N: Number of a worker, or all.", default="all"),
) -> None:
    """Run a shell command on the workers of a slice."""
    end = where.machine().ssh(command, worker=worker)
    sys.stdout.write(end.stdout + end.stderr)
    raise SystemExit(end.returncode)


def sweep(
    *,
    where: MachineRequest,
    file: Path = option(FILE, kw_only=False),
    options: TpuOptions,
    installed: Installed,
    out: Path | None = option(FOLDER, default=None),
    retry_failed: bool = option(SweepOptions, default=False),
    force: bool = option(SweepOptions, default=False),
    keep: bool = option("Keep the slice at the end.", default=False),
) -> None:
    """Run experiments on a slice, and copy each run out.

    Requests the slice if there is none, replaces it if it is preempted, and deletes it at the end.
    """
    asked = options.asked()
    (runs, _), folder = planned_runs(file), sweep_folder(file, out)
    _check_runs_on(asked["topology"], runs)
    jax_version, machine = installed.jax_version, where.machine()
    ask = partial(machine.create, **asked)
    add = partial(machine.install, installed.wheel, jax_version=jax_version)
    if where.dry_run:  # every command, if no slice is lost
        machine.state()
        ask()
        add()
        for one in runs:
            machine.run(one)
            machine.fetch(one.name, folder)
        if not keep:
            machine.delete()
        return
    tpu = TpuSlice(machine=machine, create=ask, install=add)
    made = SweepOptions(force=force, retry_failed=retry_failed, tpu=tpu)
    try:
        with WorkProgress() as progress:
            result = run_sweep(runs, folder, made, file=file, note=note, progress=progress)
    finally:
        if keep:
            note(f"the slice '{machine.name}' stays; delete it with 'meshscope tpu delete'")
        elif machine.state() != MISSING:
            machine.delete()
    shown_results(result).show(as_json=False)


def delete(where: MachineRequest) -> None:
    """Delete a slice and its request."""
    where.machine().delete()
