"""TPU slices of Google Cloud: what a project may use, a slice from its request to its deletion, and its sweeps.

Source: cloud.google.com/tpu/docs, pages "TPU configurations", "TPU software versions" and "Manage queued
resources".
"""

import json
import shlex
import shutil
import subprocess
import tempfile
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from meshscope.backends.sweep.folder import PlannedRun, SweepFolder
from meshscope.backends.sweep.queue import LOG_BYTES, CommandQueue, EndedCommand
from meshscope.errors import (
    MeshscopeError,
    MissingToolError,
    ParseError,
    RunError,
    SpecError,
    nearest,
)
from meshscope.files import read_text
from meshscope.hardware.chips import CHIPS
from meshscope.hardware.topology import Topology, parse_topology
from meshscope.serialize import FormatError, from_plain
from meshscope.store.folder import new_folder
from meshscope.store.read import read_run

NOT_FOUND = "NOT_FOUND"
MAX_WORDS = 2_000  # of a message
POLL_S = 30.0
WAIT_S = 6 * 3600.0  # for a slice to become available
N_SLICES = 10  # tried for one run before it fails
INSTALL, RUN = "install_on_worker.sh", "run_on_worker.sh"
QUEUED = ("compute", "tpus", "queued-resources")
VM = ("compute", "tpus", "tpu-vm")
ALL = "all"

# States of a queued resource; MISSING if there is none. One that ended never becomes active.
MISSING, ACTIVE, DELETING = "missing", "ACTIVE", "DELETING"
ENDED = ("SUSPENDING", "SUSPENDED", "FAILED")

GcloudEnd = subprocess.CompletedProcess[str]


def accelerator_type(topology: Topology) -> str:
    """The value of --accelerator-type, such as `v5litepod-16`; SpecError if the slice has none."""
    topology.check_tpu("Google Cloud has queued resources only of TPUs")
    accelerator, name = topology.chip.accelerator, topology.chip.name
    if accelerator is None:
        raise SpecError(
            f"{name} has no TPU VMs: Google Cloud offers it through Kubernetes alone. Use 'meshscope run' "
            "in a job of GKE (docs/tpu-pods.md)."
        )
    if topology.n_slices > 1:
        raise SpecError(
            f"'{topology.name}' has {topology.n_slices} slices, and meshscope asks for one at a time. "
            f"Use one, like {name}:{'x'.join(map(str, topology.grid))}."
        )
    n = topology.n_chips * (2 if topology.chip.name_counts_cores else 1)
    default = parse_topology(f"{name}-{n}")
    if default.grid != topology.grid:
        raise SpecError(
            f"'{topology.name}' is not the default grid of {topology.n_chips} {name} chips, "
            f"which is all that an accelerator type can name. Use {default.name}."
        )
    return f"{accelerator}-{n}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """Up to `chips` chips of one kind in a zone, as spot VMs or on demand."""

    chip: str
    zone: str
    chips: int
    spot: bool

    def __post_init__(self) -> None:
        """FormatError for an unknown chip or no chips."""
        if self.chip not in CHIPS:
            raise FormatError(f"unknown chip '{self.chip}'. {nearest(self.chip, CHIPS)}")
        if self.chips < 1:
            raise FormatError(f"chips is {self.chips}. Give at least 1.")

    def __str__(self) -> str:
        kind = "spot" if self.spot else "on-demand"
        return f"{self.chips} {kind} {self.chip} chips in {self.zone}"


def read_quota(path: Path) -> tuple[Quota, ...]:
    """The quota in a TOML file of `[[quota]]` tables with chip, zone, chips and spot; ParseError if malformed."""
    remedy = f"Give TOML with [[quota]] tables of {', '.join(Quota.__slots__)}."
    try:
        document = tomllib.loads(read_text(path, remedy))
    except tomllib.TOMLDecodeError as error:
        raise ParseError(f"{path}: not TOML: {error}. {remedy}") from error
    try:
        return from_plain(tuple[Quota, ...], document.get("quota"), "quota")
    except FormatError as error:
        raise ParseError(f"{path}: {error}. {remedy}") from error


def check_quota(
    quotas: Sequence[Quota], topology: Topology, zone: str, *, is_spot: bool, n_used: int = 0
) -> None:
    """SpecError unless the quota covers the slice plus the `n_used` chips that the project already has."""
    chip = topology.chip.name
    granted = [q for q in quotas if (q.chip, q.zone, q.spot) == (chip, zone, is_spot)]
    n_granted = sum(quota.chips for quota in granted)
    if topology.n_chips + n_used <= n_granted:
        return
    if n_used and granted:
        raise SpecError(
            f"the quota has {n_granted - n_used} of {n_granted} {chip} chips in {zone} left, and "
            f"{topology.name} needs {topology.n_chips}. Delete another slice first."
        )
    same = [quota for quota in quotas if quota.chip == chip] or list(quotas)
    asked = Quota(chip=chip, zone=zone, chips=topology.n_chips, spot=is_spot)
    raise SpecError(
        f"the quota does not cover {asked}, which would be charged. "
        f"It covers {'; '.join(map(str, same))}."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Gcloud:
    """Runs `gcloud` commands in a project, None for the one that gcloud is set to.

    With `show`, nothing runs: it receives each command as a line of shell.
    """

    project: str | None = None
    show: Callable[[str], None] | None = None
    running: set[subprocess.Popen[bytes]] = field(
        default_factory=set[subprocess.Popen[bytes]], compare=False, repr=False
    )

    def run(self, words: Sequence[str]) -> GcloudEnd:
        """Runs `gcloud WORDS`, or shows it and succeeds; MissingToolError without gcloud."""
        command = ["gcloud", *words, *([f"--project={self.project}"] if self.project else [])]
        if self.show is not None:
            self.show(shlex.join(command))
            return GcloudEnd(command, 0, "", "")
        # Files, not pipes: an ssh that outlives its gcloud would keep a pipe open.
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as log:
            try:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=out, stderr=log
                )
            except FileNotFoundError as error:
                raise MissingToolError(
                    "gcloud is not installed. Install the Google Cloud CLI, then run 'gcloud auth login'."
                ) from error
            self.running.add(process)
            try:
                returncode = process.wait()
            except BaseException:
                process.kill()
                process.wait()
                raise
            finally:
                self.running.discard(process)
            texts: list[str] = []
            for file in (out, log):
                file.seek(0)
                texts.append(file.read().decode(errors="replace"))
        return GcloudEnd(command, returncode, *texts)

    def succeed(self, words: Sequence[str]) -> str:
        """Runs a command that must succeed, and returns its output; RunError with its message if it fails."""
        end = self.run(words)
        if end.returncode:
            raise RunError(f"'gcloud {shlex.join(words[:4])} ...' failed: {last_words(end.stderr)}")
        return end.stdout

    def document(self, words: Sequence[str]) -> Any:
        """The JSON that a command prints; None if what it asks for does not exist, or in a dry run."""
        end = self.run([*words, "--format=json"])
        if self.show is not None or (end.returncode and NOT_FOUND in end.stderr):
            return None
        reason = f"failed: {last_words(end.stderr)}"
        if not end.returncode:
            try:
                return json.loads(end.stdout)
            except (ValueError, RecursionError) as error:
                reason = f"printed no JSON: {error}."
        raise RunError(f"'gcloud {shlex.join(words[:4])} ...' {reason}")


def last_words(log: str) -> str:
    """The last lines of a log, without blank ones; `no message` if it is empty."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return " ".join(lines[-3:])[-MAX_WORDS:] or "no message"


@dataclass(frozen=True, slots=True, kw_only=True)
class TpuMachine:
    """The VMs of a slice in a zone; its queued resource and its node have one name."""

    name: str
    zone: str
    gcloud: Gcloud
    note: Callable[[str], None] = field(default=lambda _: None)
    sleep: Callable[[float], None] = time.sleep

    def state(self) -> str:
        """The state of the queued resource, as Google Cloud names it."""
        document = self.gcloud.document([*QUEUED, "describe", self.name, self._zone])
        if document is None:
            return MISSING
        state = document.get("state", {}).get("state") if isinstance(document, dict) else None
        return state if isinstance(state, str) else "unknown"

    def create(
        self,
        topology: Topology,
        *,
        is_spot: bool,
        quota: tuple[Quota, ...] | None,
        runtime: str | None,
    ) -> None:
        """Requests the slice, at any price without a quota; SpecError if the quota does not cover it."""
        kind = accelerator_type(topology)
        if quota is not None:
            n_used = self._n_chips_in_use(topology.chip.name, is_spot=is_spot)
            check_quota(quota, topology, self.zone, is_spot=is_spot, n_used=n_used)
        self.gcloud.succeed(
            [
                *(*QUEUED, "create", self.name, f"--node-id={self.name}", self._zone),
                f"--accelerator-type={kind}",
                f"--runtime-version={runtime or topology.chip.runtime}",
                *(["--spot"] if is_spot else []),
                "--quiet",
            ]
        )

    def delete(self) -> None:
        """Deletes the slice and its queued resource, and waits until they are gone."""
        self.gcloud.succeed([*QUEUED, "delete", self.name, self._zone, "--force", "--quiet"])

    def wait_until_active(self, wait_s: float = WAIT_S) -> None:
        """Waits for the slice; RunError if it cannot become active, or does not in time."""
        if self.gcloud.show is not None:
            return
        last, waited_s = None, 0.0
        while (state := self.state()) != ACTIVE:
            if state in (*ENDED, MISSING, DELETING):
                raise RunError(
                    f"the slice '{self.name}' is {state}. Delete it with 'meshscope tpu delete', then try again."
                )
            if waited_s >= wait_s:
                raise RunError(
                    f"the slice '{self.name}' is still {state} after {waited_s / 3600:.1f} hours. Its request stays "
                    "queued: rerun the command to wait on, or delete it with 'meshscope tpu delete'."
                )
            if state != last:
                self.note(f"{self.name}: {state}")
            last, waited_s = state, waited_s + POLL_S
            self.sleep(POLL_S)

    def ensure_active(self, create: Callable[[], None]) -> bool:
        """Waits for the slice, and lets it be created first if there is none or it ended; whether it is new."""
        state = self.state()
        if state in (*ENDED, DELETING):
            self.note(f"{self.name}: {state}; deleting it and asking for another")
            self.delete()
            state = MISSING
        if state == MISSING:
            create()
        self.wait_until_active()
        return state != ACTIVE

    def install(self, wheel: Path, *, jax_version: str) -> None:
        """Installs meshscope from a wheel, and JAX for TPU, on every worker."""
        if not wheel.is_file():
            raise SpecError(
                f"the wheel '{wheel}' does not exist. Make one in your clone: pip wheel --no-deps -w dist ."
            )
        scripts = files("meshscope.backends.sweep")
        with as_file(scripts / INSTALL) as install, as_file(scripts / RUN) as run:
            for path in (install, run, wheel):
                self.gcloud.succeed(
                    [*VM, "scp", str(path), f"{self.name}:", self._zone, f"--worker={ALL}"]
                )
        end = self.ssh(shlex.join(["bash", INSTALL, wheel.name, jax_version]))
        if end.returncode:
            raise RunError(f"installing on '{self.name}' failed: {last_words(end.stderr)}")

    def ssh(self, command: str, *, worker: str = ALL) -> GcloudEnd:
        """Runs a shell command on a worker or on all."""
        return self.gcloud.run(
            [*VM, "ssh", self.name, self._zone, f"--worker={worker}", f"--command={command}"]
        )

    def run(self, planned: PlannedRun) -> GcloudEnd:
        """Runs the command on all workers, as one run of several processes."""
        words = [RUN, planned.name, planned.command.value, *planned.words]
        return self.ssh(shlex.join(["bash", *words]))

    def fetch(self, name: str, parent: Path) -> None:
        """Copies the run folder `name` from the first worker into `parent`."""
        source = f"{self.name}:meshscope/runs/{name}"
        self.gcloud.succeed(
            [*VM, "scp", "--recurse", source, str(parent), self._zone, "--worker=0"]
        )

    def _n_chips_in_use(self, chip: str, *, is_spot: bool) -> int:
        """Chips of this kind that the project's queued resources in the zone have or wait for."""
        names = [
            node.get("node", {}).get("acceleratorType", "").replace("v5litepod-", "v5e-")
            for one in self.gcloud.document([*QUEUED, "list", self._zone]) or []
            if ("spot" in one) is is_spot and one.get("state", {}).get("state") not in ENDED
            for node in one.get("tpu", {}).get("nodeSpec", [])
        ]
        return sum(parse_topology(name).n_chips for name in names if name.startswith(f"{chip}-"))

    @property
    def _zone(self) -> str:
        return f"--zone={self.zone}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TpuSlice:
    """A machine, what asks for its slice if there is none, and what installs meshscope on a new one."""

    machine: TpuMachine
    create: Callable[[], None]
    install: Callable[[], None]

    def ready(self) -> None:
        """Waits for the slice, and installs meshscope on it if it is new."""
        if self.machine.ensure_active(self.create):
            self.machine.note(f"{self.machine.name}: installing")
            self.install()


class TpuQueue(CommandQueue):
    """Runs one command at a time on a slice; each run is copied out as soon as it is complete.

    A slice that was preempted is replaced by another one, and the command starts again there.
    """

    def __init__(self, folder: SweepFolder, tpu: TpuSlice, *, force: bool) -> None:
        super().__init__(folder, force=force)
        self._tpu = replace(tpu, machine=replace(tpu.machine, sleep=self._sleep))
        tpu.ready()

    def n_jobs(self, planned: Sequence[PlannedRun]) -> int:
        """One: a live run has the slice to itself."""
        return min(1, len(planned))

    def made(self, planned: PlannedRun) -> EndedCommand:
        """Runs the command on all workers of the slice, and copies its run."""
        try:
            end = self._tried(planned)
        except (MeshscopeError, OSError) as error:
            return EndedCommand(returncode=1, failure=str(error))
        return EndedCommand(returncode=end.returncode, log=end.stderr[-LOG_BYTES:])

    def end_commands(self, *, kill: bool) -> None:
        """Ends gcloud; the slice stays, and its next command replaces the run there."""
        for process in tuple(self._tpu.machine.gcloud.running):
            (process.kill if kill else process.terminate)()

    def _tried(self, planned: PlannedRun) -> GcloudEnd:
        """Runs the command until a slice lives long enough; RunError if none does."""
        machine = self._tpu.machine
        for _ in range(N_SLICES):
            self._tpu.ready()
            end = machine.run(planned)
            self._sleep(0.0)
            try:
                if not end.returncode:
                    self._fetch(planned)
                    return end
            except RunError:
                if machine.state() == ACTIVE:
                    raise
            if machine.state() == ACTIVE:
                return end
            machine.note(f"{machine.name}: lost while it made '{planned}'")
        raise RunError(f"{N_SLICES} slices were lost while they made it. Try another zone or time.")

    def _sleep(self, seconds: float) -> None:
        if self.is_ending.wait(seconds):
            raise RunError("the sweep was interrupted.")

    def _fetch(self, planned: PlannedRun) -> None:
        with tempfile.TemporaryDirectory(prefix="meshscope-tpu-") as scratch:
            self._tpu.machine.fetch(planned.name, Path(scratch))
            fetched = Path(scratch, planned.name)
            read_run(fetched)  # raises if it is damaged
            with new_folder(self.folder.path / planned.name, force=self.force) as partial:
                shutil.copytree(fetched, partial, symlinks=True, dirs_exist_ok=True)
