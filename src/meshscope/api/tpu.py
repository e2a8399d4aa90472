"""TPU slices of Google Cloud: ask for one, run a sweep on it, copy the runs out, delete it.

Tested against a stand-in for gcloud that checks every flag; never run against the real cloud.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshscope.api.sweep import (
    ShowProgress,
    SweepOptions,
    SweepPlan,
    SweepResult,
    plan_sweep,
    run_sweep,
    sweep_folder,
)
from meshscope.cloud.gcloud import Gcloud
from meshscope.cloud.machine import ALL, MachineState, SliceRequest, TpuMachine
from meshscope.cloud.manifest import RUNS, ManifestRequest, manifest
from meshscope.cloud.quota import read_quota
from meshscope.errors import SpecError
from meshscope.hardware.topology import Topology, parse_topology
from meshscope.sweep.planned import PlannedRun, RunCommand
from meshscope.sweep.tpu_queue import TpuSlice


@dataclass(frozen=True, slots=True, kw_only=True)
class TpuOptions:
    """The slice to ask for: `quota` is a file; without one, `allow_charges` accepts what it costs."""

    topology: str
    spot: bool = True
    quota: Path | None = None
    allow_charges: bool = False
    runtime: str | None = None

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


def tpu_machine(
    name: str,
    *,
    zone: str,
    project: str | None = None,
    note: Callable[[str], None] = print,
    dry_run: bool = False,
) -> TpuMachine:
    """The machine `name`; a dry run passes each gcloud command to `note` and runs none."""
    gcloud = Gcloud(project=project, show=note if dry_run else None)
    return TpuMachine(name=name, zone=zone, gcloud=gcloud, note=note)


def create_tpu(machine: TpuMachine, options: TpuOptions) -> None:
    """Asks for the slice; it becomes active when Google Cloud has one."""
    machine.create(options.request())


def install_on_tpu(machine: TpuMachine, wheel: Path, *, jax_version: str) -> None:
    """Installs meshscope and JAX on every worker of the slice, once it is active."""
    machine.wait_until_active()
    machine.install(wheel, jax_version=jax_version)


def ssh_to_tpu(machine: TpuMachine, command: str, *, worker: str = ALL) -> tuple[int, str]:
    """Runs a shell command on a worker or on all: its exit status, and what it printed."""
    end = machine.ssh(command, worker=worker)
    return end.returncode, end.out + end.log


def sweep_on_tpu(  # noqa: PLR0913  the options of the command
    machine: TpuMachine,
    options: TpuOptions,
    file: Path,
    *,
    wheel: Path,
    jax_version: str,
    show: ShowProgress,
    out: Path | None = None,
    retry_failed: bool = False,
    force: bool = False,
    keep: bool = False,
) -> SweepResult | None:
    """Runs the experiments of a file on the slice, asking for it first if there is none.

    Each run is copied to this machine as soon as it is complete. A preempted slice is replaced, and the
    sweep goes on; rerunning the command resumes it. The slice is deleted at the end unless `keep`.

    Returns:
        The experiments with their states; None in a dry run.
    """
    request = options.request()
    plan = plan_sweep(file)
    _check_runs_on(request.topology, plan.runs)
    tpu = TpuSlice(machine=machine, request=request, wheel=wheel, jax_version=jax_version)
    if machine.gcloud.show is not None:
        _show_sweep(tpu, plan, sweep_folder(file, out), keep=keep)
        return None
    sweep = SweepOptions(force=force, retry_failed=retry_failed, tpu=tpu)
    try:
        return run_sweep(plan, sweep_folder(file, out), sweep, note=machine.note, show=show)
    finally:
        if keep:
            machine.note(f"the slice '{machine.name}' stays; delete it with 'meshscope tpu delete'")
        elif machine.state() is not MachineState.MISSING:
            machine.delete()


def tpu_manifest(  # noqa: PLR0913  the options of the command
    file: Path, *, topology: str, name: str, image: str, claim: str, spot: bool = True
) -> str:
    """A Kubernetes manifest that runs the experiments of a file on GKE; runs are kept in the volume of `claim`."""
    slice_ = parse_topology(topology)
    plan = plan_sweep(file)
    _check_runs_on(slice_, plan.runs)
    request = ManifestRequest(name=name, topology=slice_, image=image, claim=claim, is_spot=spot)
    words = [
        [one.command.value, *one.words, "--out", f"{RUNS}/{one.name}", "--force"]
        for one in plan.runs
    ]
    return manifest(request, words)


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
