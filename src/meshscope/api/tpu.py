"""TPU slices of Google Cloud: ask for one, run a sweep on it, copy the runs out, delete it.

Tested against a stand-in for gcloud that checks every flag; never run against the real cloud.
"""

import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

from meshscope.api.console import echo, note
from meshscope.api.options import Option, option, request
from meshscope.api.request import TOPOLOGY
from meshscope.api.sweep import (
    FOLDER,
    REPLACE,
    RETRY,
    SweepOptions,
    SweepPlan,
    SweepResult,
    plan_sweep,
    run_sweep,
    sweep_folder,
)
from meshscope.api.sweep_shown import FileArgument, SweepProgress, print_results
from meshscope.cloud.gcloud import Gcloud
from meshscope.cloud.machine import MachineState, SliceRequest, TpuMachine
from meshscope.cloud.manifest import RUNS, ManifestRequest, manifest
from meshscope.cloud.quota import read_quota
from meshscope.errors import SpecError, UsageError
from meshscope.hardware.topology import Topology, parse_topology
from meshscope.reports.plain import plain
from meshscope.sweep.planned import PlannedRun, RunCommand
from meshscope.sweep.tpu_queue import TpuSlice


@request
class TpuOptions:
    """The slice to ask for: `quota` is a file; without one, `allow_charges` accepts what it costs."""

    topology: str = option(TOPOLOGY)
    spot: bool = option(
        "Spot VMs may be preempted at any time.", default=True, flags=("--spot/--on-demand",)
    )
    quota: Path | None = option(
        "TOML file of what may be used; the rest is refused.", default=None, metavar="FILE"
    )
    allow_charges: bool = option("Request the slice without a quota file.", default=False)
    runtime: str | None = option(
        "Software version of the VMs.",
        default=None,
        metavar="VERSION",
        shown="the default of the chip",
    )

    def request(self) -> SliceRequest:
        """The checked request; MeshscopeError for a bad slice or quota file, or without a limit on charges."""
        if self.quota is None and not self.allow_charges:
            raise SpecError(
                "a slice may be charged. Give --quota FILE with what your project may use, or --allow-charges."
            )
        return SliceRequest(
            topology=parse_topology(self.topology),
            is_spot=self.spot,
            quota=None if self.quota is None else read_quota(self.quota),
            runtime=self.runtime,
        )


@request
class MachineRequest:
    """A slice of Google Cloud by its name."""

    name: str = option("Name of the slice.", metavar="NAME", kw_only=False)
    zone: str = option("Zone, such as us-east1-d.", metavar="ZONE")
    project: str | None = option(
        "Project.", default=None, metavar="ID", shown="the one that gcloud is set to"
    )
    dry_run: bool = option("Print each gcloud command and run none.", default=False, is_last=True)

    def machine(self, note: Callable[[str], None], show: Callable[[str], None]) -> TpuMachine:
        """The machine; a dry run passes each gcloud command to `show` and runs none."""
        gcloud = Gcloud(project=self.project, show=show if self.dry_run else None)
        return TpuMachine(name=self.name, zone=self.zone, gcloud=gcloud, note=note)


@request
class Installed:
    """What is installed on every worker."""

    wheel: Path = option("Wheel of meshscope: pip wheel --no-deps -w dist .", metavar="FILE")
    jax: str | None = option(
        "JAX to install.", default=None, metavar="VERSION", shown="the version installed here"
    )

    @property
    def jax_version(self) -> str:
        """The version that is named, else that of this environment."""
        if self.jax is not None:
            return self.jax
        try:
            return version("jax")
        except PackageNotFoundError as error:
            raise UsageError("JAX is not installed here. Name a version.") from error


@request
class SweepPlace:
    """Where the runs of a sweep are stored, and what is replaced."""

    out: Path | None = option(FOLDER, default=None)
    retry_failed: bool = option(RETRY, default=False)
    force: bool = option(REPLACE, default=False)
    keep: bool = option("Keep the slice at the end.", default=False)


def sweep_on_tpu(
    machine: TpuMachine, options: TpuOptions, file: Path, installed: Installed, place: SweepPlace
) -> SweepResult | None:
    """The experiments of a file after they ran on the slice; None in a dry run.

    Each run is copied to this machine as soon as it is complete. A preempted slice is replaced, and the
    sweep goes on; rerunning the command resumes it. The slice is deleted at the end unless it is kept.
    """
    request = options.request()
    plan = plan_sweep(file)
    _check_runs_on(request.topology, plan.runs)
    tpu = TpuSlice(
        machine=machine, request=request, wheel=installed.wheel, jax_version=installed.jax_version
    )
    if machine.gcloud.show is not None:
        _show_sweep(tpu, plan, sweep_folder(file, place.out), keep=place.keep)
        return None
    sweep = SweepOptions(force=place.force, retry_failed=place.retry_failed, tpu=tpu)
    try:
        return run_sweep(
            plan, sweep_folder(file, place.out), sweep, note=machine.note, show=SweepProgress
        )
    finally:
        if place.keep:
            machine.note(f"the slice '{machine.name}' stays; delete it with 'meshscope tpu delete'")
        elif machine.state() is not MachineState.MISSING:
            machine.delete()


@request
class JobOptions:
    """A Kubernetes job on a slice."""

    topology: str = option(TOPOLOGY)
    image: str = option("Image that has meshscope and JAX.", metavar="IMAGE")
    claim: str = option("Persistent volume claim of the run folders.", metavar="NAME")
    name: str = option("Name of the job.", default="meshscope", metavar="NAME")
    spot: bool = option(
        "Spot VMs may be preempted at any time.", default=True, flags=("--spot/--on-demand",)
    )


def _check_runs_on(topology: Topology, runs: Sequence[PlannedRun]) -> None:
    """SpecError unless all runs are live ones on this slice, of models that the workers know, too."""
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


def _show_sweep(tpu: TpuSlice, plan: SweepPlan, folder: Path, *, keep: bool) -> None:
    """Every gcloud command of the sweep, if no slice is lost."""
    machine = tpu.machine
    machine.state()
    machine.create(tpu.request)
    machine.install(tpu.wheel, jax_version=tpu.jax_version)
    for one in plan.runs:
        machine.run(one.name, [one.command.value, *one.words])
        machine.fetch(one.name, folder)
    if not keep:
        machine.delete()


def create(where: MachineRequest, options: TpuOptions) -> None:
    """Request a slice as a queued resource.

    Google Cloud provides it when capacity is free; 'meshscope tpu status' shows the state.
    """
    where.machine(note, echo).create(options.request())


def status(where: MachineRequest) -> None:
    """Show the state of a slice."""
    state = where.machine(note, echo).state()
    if not where.dry_run:
        echo(f"{plain(where.name)}: {state}")


def install(where: MachineRequest, installed: Installed) -> None:
    """Install meshscope and JAX on every worker of a slice."""
    jax_version = installed.jax_version
    machine = where.machine(note, echo)
    machine.wait_until_active()
    machine.install(installed.wheel, jax_version=jax_version)


def ssh(
    where: MachineRequest,
    command: Annotated[str, Option(help="Shell command.", metavar="COMMAND", is_argument=True)],
    *,
    worker: Annotated[str, Option(help="Number of a worker, or all.", metavar="N")] = "all",
) -> None:
    """Run a shell command on the workers of a slice."""
    end = where.machine(note, echo).ssh(command, worker=worker)
    sys.stdout.write(end.out + end.log)
    raise SystemExit(end.returncode)


def sweep(
    where: MachineRequest,
    file: FileArgument,
    options: TpuOptions,
    installed: Installed,
    place: SweepPlace,
) -> None:
    """Run experiments on a slice, and copy each run out.

    Requests the slice if there is none, replaces it if it is preempted, and deletes it at the end.
    """
    machine = where.machine(echo if where.dry_run else note, echo)
    result = sweep_on_tpu(machine, options, file, installed, place)
    if result is not None:
        print_results(result)
        result.check()


def delete(where: MachineRequest) -> None:
    """Delete a slice and its request."""
    where.machine(note, echo).delete()


def print_manifest(file: FileArgument, options: JobOptions) -> None:
    """Print a Kubernetes job that runs experiments on GKE."""
    slice_ = parse_topology(options.topology)
    plan = plan_sweep(file)
    _check_runs_on(slice_, plan.runs)
    request = ManifestRequest(
        name=options.name,
        topology=slice_,
        image=options.image,
        claim=options.claim,
        is_spot=options.spot,
    )
    words = [
        [one.command.value, *one.words, "--out", f"{RUNS}/{one.name}", "--force"]
        for one in plan.runs
    ]
    sys.stdout.write(manifest(request, words))
