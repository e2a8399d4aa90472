"""`meshscope tpu`: TPU slices of Google Cloud."""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer

from meshscope.api.request import request_of
from meshscope.api.tpu import (
    TpuOptions,
    create_tpu,
    install_on_tpu,
    ssh_to_tpu,
    sweep_on_tpu,
    tpu_machine,
    tpu_manifest,
)
from meshscope.cli.options import TOPOLOGY, ReplaceOption, RetryOption, RunsOption
from meshscope.cli.output import note
from meshscope.cli.sweep import print_results, show_progress
from meshscope.cloud.machine import TpuMachine
from meshscope.reports.plain import plain

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of the slice.")]
FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="Experiments, in YAML.")]
ZoneOption = Annotated[str, typer.Option(metavar="ZONE", help="Zone, such as us-east1-d.")]
ProjectOption = Annotated[
    str | None,
    typer.Option(metavar="ID", help="Project.", show_default="the one that gcloud is set to"),
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Print each gcloud command and run none.")
]
SpotOption = Annotated[
    bool, typer.Option("--spot/--on-demand", help="Spot VMs may be preempted at any time.")
]
QuotaOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="TOML file of what may be used; the rest is refused."),
]
ChargesOption = Annotated[
    bool, typer.Option("--allow-charges", help="Request the slice without a quota file.")
]
RuntimeOption = Annotated[
    str | None,
    typer.Option(
        metavar="VERSION",
        help="Software version of the VMs.",
        show_default="the default of the chip",
    ),
]
WheelOption = Annotated[
    Path,
    typer.Option(metavar="FILE", help="Wheel of meshscope: pip wheel --no-deps -w dist ."),
]
JaxOption = Annotated[
    str | None,
    typer.Option(
        "--jax",
        metavar="VERSION",
        help="JAX to install.",
        show_default="the version installed here",
    ),
]


def create(  # noqa: PLR0913  the options of the command
    name: NameArgument,
    *,
    topology: Annotated[str, TOPOLOGY],
    zone: ZoneOption,
    project: ProjectOption = None,
    spot: SpotOption = True,
    quota: QuotaOption = None,
    allow_charges: ChargesOption = False,
    runtime: RuntimeOption = None,
    dry_run: DryRunOption = False,
) -> None:
    """Request a slice as a queued resource.

    Google Cloud provides it when capacity is free; 'meshscope tpu status' shows the state.
    """
    options = request_of(TpuOptions, locals())
    create_tpu(_machine(name, zone, project, dry_run=dry_run), options)


def status(
    name: NameArgument,
    *,
    zone: ZoneOption,
    project: ProjectOption = None,
    dry_run: DryRunOption = False,
) -> None:
    """Show the state of a slice."""
    state = _machine(name, zone, project, dry_run=dry_run).state()
    if not dry_run:
        typer.echo(f"{plain(name)}: {state}")


def install(  # noqa: PLR0913  the options of the command
    name: NameArgument,
    *,
    zone: ZoneOption,
    wheel: WheelOption,
    jax: JaxOption = None,
    project: ProjectOption = None,
    dry_run: DryRunOption = False,
) -> None:
    """Install meshscope and JAX on every worker of a slice."""
    machine = _machine(name, zone, project, dry_run=dry_run)
    install_on_tpu(machine, wheel, jax_version=_jax_version(jax))


def ssh(  # noqa: PLR0913  the options of the command
    name: NameArgument,
    command: Annotated[str, typer.Argument(metavar="COMMAND", help="Shell command.")],
    *,
    zone: ZoneOption,
    worker: Annotated[str, typer.Option(metavar="N", help="Number of a worker, or all.")] = "all",
    project: ProjectOption = None,
    dry_run: DryRunOption = False,
) -> None:
    """Run a shell command on the workers of a slice."""
    machine = _machine(name, zone, project, dry_run=dry_run)
    returncode, text = ssh_to_tpu(machine, command, worker=worker)
    typer.echo(text, nl=False)
    raise typer.Exit(returncode)


def sweep(  # noqa: PLR0913  the options of the command
    name: NameArgument,
    file: FileArgument,
    *,
    topology: Annotated[str, TOPOLOGY],
    zone: ZoneOption,
    wheel: WheelOption,
    jax: JaxOption = None,
    project: ProjectOption = None,
    spot: SpotOption = True,
    quota: QuotaOption = None,
    allow_charges: ChargesOption = False,
    runtime: RuntimeOption = None,
    out: RunsOption = None,
    retry_failed: RetryOption = False,
    force: ReplaceOption = False,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the slice at the end.")] = False,
    dry_run: DryRunOption = False,
) -> None:
    """Run experiments on a slice, and copy each run out.

    Requests the slice if there is none, replaces it if it is preempted, and deletes it at the end.
    """
    options = request_of(TpuOptions, locals())
    result = sweep_on_tpu(
        _machine(name, zone, project, dry_run=dry_run),
        options,
        file,
        wheel=wheel,
        jax_version=_jax_version(jax),
        show=show_progress,
        out=out,
        retry_failed=retry_failed,
        force=force,
        keep=keep,
    )
    if result is not None:
        print_results(result)
        result.check()


def delete(
    name: NameArgument,
    *,
    zone: ZoneOption,
    project: ProjectOption = None,
    dry_run: DryRunOption = False,
) -> None:
    """Delete a slice and its request."""
    _machine(name, zone, project, dry_run=dry_run).delete()


def manifest(  # noqa: PLR0913  the options of the command
    file: FileArgument,
    *,
    topology: Annotated[str, TOPOLOGY],
    image: Annotated[str, typer.Option(metavar="IMAGE", help="Image that has meshscope and JAX.")],
    claim: Annotated[
        str, typer.Option(metavar="NAME", help="Persistent volume claim of the run folders.")
    ],
    name: Annotated[str, typer.Option(metavar="NAME", help="Name of the job.")] = "meshscope",
    spot: SpotOption = True,
) -> None:
    """Print a Kubernetes job that runs experiments on GKE."""
    typer.echo(
        tpu_manifest(file, topology=topology, name=name, image=image, claim=claim, spot=spot),
        nl=False,
    )


def _machine(name: str, zone: str, project: str | None, *, dry_run: bool) -> TpuMachine:
    show = typer.echo if dry_run else note
    return tpu_machine(name, zone=zone, project=project, note=show, dry_run=dry_run)


def _jax_version(asked: str | None) -> str:
    """The version to install: the one asked for, else that of this environment."""
    if asked is not None:
        return asked
    try:
        return version("jax")
    except PackageNotFoundError as error:
        raise typer.BadParameter("JAX is not installed here. Name a version.") from error
