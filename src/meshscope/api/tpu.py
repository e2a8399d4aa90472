"""TPU slices of Google Cloud: ask for one, run a sweep on it, copy the runs out, delete it.

Tested against a fake gcloud that checks every flag; never run against the real cloud.
"""

import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

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
from meshscope.backends.sweep.folder import FolderInUseError, PlannedRun, RunCommand
from meshscope.backends.sweep.installation import BUCKET, Installation, installation_of
from meshscope.backends.sweep.machine import (
    Gcloud,
    SliceRequest,
    TpuMachine,
    accelerator_words,
    last_words,
)
from meshscope.backends.sweep.quota import read_quota
from meshscope.backends.sweep.tpu_queue import Limits, TpuSlice
from meshscope.errors import SpecError, UsageError
from meshscope.hardware.topology import Topology, parse_topology
from meshscope.model.config import read_model
from meshscope.reports.model import plain
from meshscope.serialize import picked
from meshscope.workers import signals_handled

MAX_FLEX_HOURS = 168  # 7 days: cloud.google.com/tpu/docs, "Request Cloud TPUs using Flex-start"
CONFIG = "config.json"
TPU_API = "tpu.googleapis.com"


@request
class TpuOptions:
    """The slice to ask for: `quota` is a file; without one, `allow_charges` accepts what it costs."""

    topology: str = option(ExperimentRequest)
    spot: bool = option(
        "Spot VMs may be preempted at any time.", default=True, flags=("--spot/--on-demand",)
    )
    flex_start: bool = option(
        "Flex-start VMs, which are charged, wait for capacity and end after --max-hours.",
        default=False,
    )
    reservation: str | None = option("NAME: Reservation to use, instead of spot VMs.", default=None)
    quota: Path | None = option(
        "FILE: TOML file of what may be used; the rest is refused.", default=None
    )
    allow_charges: bool = option("Request the slice without a quota file.", default=False)
    runtime: str | None = option(
        "VERSION: Software version of the VMs.", default=None, shown="the default of the chip"
    )
    network: str | None = option("NETWORK: Network of the VMs.", default=None, shown="default")
    subnetwork: str | None = option(
        "SUBNETWORK: Subnetwork of the VMs.", default=None, shown="the network's"
    )
    service_account: str | None = option(
        "EMAIL: Service account of the VMs, which reads buckets.",
        default=None,
        shown="Compute Engine's",
    )
    max_hours: float | None = option(
        "H: Hours of an active slice, after which a sweep stops and deletes it.", default=None
    )

    def __post_init__(self) -> None:
        """SpecError for options that contradict each other."""
        if self.max_hours is not None and not 0 < self.max_hours < float("inf"):
            raise SpecError(f"--max-hours is {self.max_hours}. Give hours above 0.")
        if self.flex_start and self.reservation is not None:
            raise SpecError("--flex-start needs no --reservation. Use one of the two.")
        if self.flex_start and not 0 < (self.max_hours or 0.0) <= MAX_FLEX_HOURS:
            raise SpecError(
                f"--flex-start needs --max-hours, after which Google Cloud deletes the slice: at most {MAX_FLEX_HOURS}."
            )
        charged = self.flex_start or self.reservation is not None
        if charged and not (self.allow_charges and self.quota is None):
            raise SpecError(
                "Flex-start and reservations are charged, and a quota file lists spot and on-demand chips alone. "
                "Give --allow-charges instead of --quota."
            )

    def asked(self) -> SliceRequest:
        """The slice; MeshscopeError for a bad slice or quota file, or without a limit on charges."""
        if self.quota is None and not self.allow_charges:
            raise SpecError(
                "a slice may be charged. Give --quota FILE with what your project may use, or --allow-charges."
            )
        names = ("runtime", "network", "subnetwork", "service_account", "reservation", "max_hours")
        asked = SliceRequest(
            topology=parse_topology(self.topology),
            is_spot=self.spot,
            is_flex_start=self.flex_start,
            quota=None if self.quota is None else read_quota(self.quota),
            **picked(self, *names),
        )
        accelerator_words(asked.topology)  # refuses a slice that has no name
        return asked


@request
class SpendingOptions:
    """What the chips cost, and how much of it the sweep may spend."""

    price: float | None = option(
        "PRICE: Price per chip hour, to state the cost of the sweep.", default=None
    )
    max_cost: float | None = option(
        "COST: Cost by --price at which the sweep stops and deletes the slice.", default=None
    )

    def limits(self, asked: SliceRequest) -> Limits:
        """The limits of the sweep on this slice; SpecError for values that limit nothing."""
        for name, value in {"--price": self.price, "--max-cost": self.max_cost}.items():
            if value is not None and not 0 < value < float("inf"):
                raise SpecError(f"{name} is {value}. Give a number above 0.")
        if self.max_cost is not None and self.price is None:
            raise SpecError("--max-cost needs the price of a chip hour. Give --price, too.")
        n_chips, max_hours = asked.topology.n_chips, asked.max_hours
        return Limits(n_chips=n_chips, max_hours=max_hours, **picked(self, "price", "max_cost"))


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
    for one in runs:
        if one.command is not RunCommand.RUN:
            raise SpecError(f"'{one}' needs no TPU. Run it here, with 'meshscope sweep'.")
        wanted = str(one.options["topology"])
        if parse_topology(wanted) != topology:
            raise SpecError(
                f"'{one}' runs on {wanted}, and the slice is {topology.name}. Use one file for each slice."
            )


def _check_buckets(gcloud: Gcloud, runs: Sequence[PlannedRun]) -> None:
    given = {(str(one.options["model"]), str(one.options.get("checkpoint"))) for one in runs}
    for name, checkpoint in sorted(one for one in given if one[1].startswith(BUCKET)):
        config = f"{checkpoint.rstrip('/')}/{CONFIG}"
        end = gcloud.run(["storage", "cat", config])
        if gcloud.show is not None:
            continue
        if end.returncode:
            raise SpecError(
                f"'{config}' cannot be read: {last_words(end.stderr)} Give the folder of a checkpoint, "
                "gs://BUCKET/FOLDER, that your account and the VMs' service account may read."
            )
        with tempfile.TemporaryDirectory(prefix="meshscope-tpu-") as scratch:
            path = Path(scratch, CONFIG)
            path.write_text(end.stdout)
            stored, model = read_model(str(path)), read_model(name)
        if replace(stored, name=model.name, source=model.source) != model:
            raise SpecError(f"checkpoint '{checkpoint}' belongs to another model than {name}.")


def setup(
    project: str = option("ID: Project.", kw_only=False),
    *,
    dry_run: bool = option(MachineRequest, default=False),
) -> None:
    """Prepare a project of Google Cloud for TPUs.

    Makes it gcloud's project, enables the TPU API, and creates the service identity of Cloud TPU.
    """
    gcloud = Gcloud(show=echo if dry_run else None)
    project_word = f"--project={project}"
    gcloud.succeed(["config", "set", "project", project])
    gcloud.succeed(["services", "enable", TPU_API, project_word])
    gcloud.succeed(["beta", "services", "identity", "create", f"--service={TPU_API}", project_word])


def create(where: MachineRequest, options: TpuOptions) -> None:
    """Request a slice as a queued resource.

    Google Cloud provides it when capacity is free; 'meshscope tpu status' shows the state.
    """
    if options.max_hours is not None and not options.flex_start:
        raise SpecError("--max-hours limits sweeps and Flex-start slices. Drop it.")
    where.machine().create(options.asked())


def status(where: MachineRequest) -> None:
    """Show the state of a slice."""
    state = where.machine().state()
    if not where.dry_run:
        echo(f"{plain(where.name)}: {state}")


def install(where: MachineRequest, installed: Installed) -> None:
    """Install meshscope and JAX on every worker of a slice."""
    installation = Installation(wheel=installed.wheel, jax_version=installed.jax_version)
    machine = where.machine()
    machine.wait_until_active()
    machine.install(installation)


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
    spending: SpendingOptions,
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
    limits = spending.limits(asked)
    (runs, _), folder = planned_runs(file, has_buckets=True), sweep_folder(file, out)
    _check_runs_on(asked.topology, runs)
    installation = installation_of(runs, wheel=installed.wheel, jax_version=installed.jax_version)
    machine = where.machine()
    _check_buckets(machine.gcloud, runs)
    ask = partial(machine.create, asked)
    if where.dry_run:  # every command, if no slice is lost
        machine.state()
        ask()
        machine.install(installation)
        for one in runs:
            machine.ask(one, installation.words_there(one), key=installation.key)
            machine.fetch(one.name, folder)
        if not keep:
            machine.delete()
        return
    tpu = TpuSlice(machine=machine, create=ask, installation=installation, limits=limits)
    made = SweepOptions(force=force, retry_failed=retry_failed, tpu=tpu)
    is_ours = True
    # The command ends as by SIGTERM when its terminal closes, unless nohup lets it go on.
    is_kept = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    handlers = {} if is_kept else {signal.SIGHUP: signal.getsignal(signal.SIGTERM)}
    try:
        with signals_handled(handlers), WorkProgress() as progress:
            result = run_sweep(runs, folder, made, file=file, note=note, progress=progress)
    except FolderInUseError:
        is_ours = False  # the slice is the other sweep's
        raise
    finally:
        if keep:
            note(f"the slice '{machine.name}' stays; delete it with 'meshscope tpu delete'")
        elif is_ours:
            numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            with signals_handled(dict.fromkeys(numbers, signal.SIG_IGN)):
                machine.remove()  # none is left behind
    shown_results(result).show(as_json=False)


def delete(where: MachineRequest) -> None:
    """Delete a slice and its request."""
    where.machine().delete()
