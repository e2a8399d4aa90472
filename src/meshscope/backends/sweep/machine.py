"""TPU slices of Google Cloud, from the request to the deletion, through gcloud.

Source: cloud.google.com/tpu/docs, pages "TPU configurations", "TPU software versions", "Manage queued
resources", "Request Cloud TPUs using Flex-start" and "Consume a reservation"; gcloud's reference of
`compute tpus queued-resources`, `compute tpus tpu-vm` and `alpha compute tpus queued-resources create`.
"""

import json
import re
import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.resources import as_file, files
from pathlib import Path
from subprocess import DEVNULL
from typing import Any, TypeVar

from meshscope.backends.sweep.folder import PlannedRun
from meshscope.backends.sweep.installation import Installation
from meshscope.backends.sweep.quota import Quota, check_quota, n_chips_in_use
from meshscope.errors import MissingToolError, RunError, SpecError
from meshscope.hardware.topology import Topology, parse_topology

T = TypeVar("T")

NOT_FOUND = "NOT_FOUND"
MAX_WORDS = 2_000  # of a message
POLL_S = 30.0
WAIT_S = 6 * 3600.0  # for a slice to become available
ASK_S = 60  # that a worker waits for the end of a run before it answers
LIMIT_S = 1800.0  # of a gcloud command that copies nothing; a lost connection may never end
N_TRIES = 10  # of a command while connections fail
N_SLICES = 10  # tried for one run before the sweep stops
INSTALL, RUN = "install_on_worker.sh", "run_on_worker.sh"
TPUS = ("compute", "tpus")
QUEUED = (*TPUS, "queued-resources")
VM = (*TPUS, "tpu-vm")
ALL = "all"

# States of a queued resource; MISSING if there is none. One that ended never becomes active.
MISSING, ACTIVE, DELETING, FAILED = "missing", "ACTIVE", "DELETING", "FAILED"
ENDED = ("SUSPENDING", "SUSPENDED", FAILED)

# What the script on a worker prints: an exit code of the command, or one of these.
ANSWER = re.compile(r"meshscope-job (\d+)")
RUNNING, NOT_INSTALLED = 75, 76
NO_SCRIPT = 127  # bash's exit code without the script
ALIVE = "-oServerAliveInterval=15"  # ssh notices a connection that is lost

GcloudEnd = subprocess.CompletedProcess[str]


def accelerator_words(topology: Topology) -> list[str]:
    """The options of gcloud that name the slice, such as `--accelerator-type=v5litepod-16`; SpecError if it has none."""
    topology.check_tpu("Google Cloud has queued resources only of TPUs")
    accelerator, name = topology.chip.accelerator, topology.chip.name
    if accelerator is None:
        raise SpecError(
            f"{name} has no TPU VMs: Google Cloud offers it through Kubernetes alone. Use 'meshscope run' "
            "in a job of GKE (docs/tpu-pods.md)."
        )
    grid = "x".join(map(str, topology.grid))
    if topology.n_slices > 1:
        raise SpecError(
            f"'{topology.name}' has {topology.n_slices} slices, and meshscope asks for one at a time. "
            f"Use one, like {name}:{grid}."
        )
    n = topology.n_chips * (2 if topology.chip.name_counts_cores else 1)
    default = parse_topology(f"{name}-{n}")
    if default.grid == topology.grid:
        return [f"--accelerator-type={accelerator}-{n}"]
    if topology.chip.n_grid_dims == 3:
        return [f"--type={accelerator}", f"--topology={grid}"]
    raise SpecError(
        f"'{topology.name}' is not the default grid of {topology.n_chips} {name} chips, "
        f"which is all that {name} slices have. Use {default.name}."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceRequest:
    """A slice to ask for; with Flex-start it ends by itself after `max_hours`.

    Without a `quota`, it may be charged.
    """

    topology: Topology
    is_spot: bool = True
    quota: tuple[Quota, ...] | None = None
    runtime: str | None = None
    network: str | None = None
    subnetwork: str | None = None
    service_account: str | None = None
    reservation: str | None = None
    is_flex_start: bool = False
    max_hours: float | None = None

    @property
    def words(self) -> list[str]:
        """The options of gcloud that describe the slice."""
        named = {
            "runtime-version": self.runtime or self.topology.chip.runtime,
            "network": self.network,
            "subnetwork": self.subnetwork,
            "service-account": self.service_account,
            "reservation": self.reservation,
        }
        words = [f"--{name}={value}" for name, value in named.items() if value is not None]
        if self.is_flex_start and self.max_hours is not None:
            seconds = max(1, round(self.max_hours * 3600))
            words += ["--provisioning-model=flex-start", f"--max-run-duration={seconds}s"]
        elif self.is_spot and self.reservation is None:
            words.append("--spot")
        return [*accelerator_words(self.topology), *words]

    @property
    def track(self) -> tuple[str, ...]:
        """The release track of gcloud that has the options."""
        return ("alpha",) if self.is_flex_start or self.reservation is not None else ()


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

    def run(self, words: Sequence[str], *, limit_s: float | None = LIMIT_S) -> GcloudEnd:
        """Runs `gcloud WORDS` and ends it after a limit, or shows it; MissingToolError without gcloud."""
        command = ["gcloud", *words, *([f"--project={self.project}"] if self.project else [])]
        if self.show is not None:
            self.show(shlex.join(command))
            return GcloudEnd(command, 0, "", "")
        # Files, not pipes: an ssh that outlives its gcloud would keep a pipe open.
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as log:
            try:
                process = subprocess.Popen(command, stdin=DEVNULL, stdout=out, stderr=log)
            except FileNotFoundError as error:
                raise MissingToolError(
                    "gcloud is not installed. Install the Google Cloud CLI, then run 'gcloud auth login'."
                ) from error
            self.running.add(process)
            try:
                returncode = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                process.kill()
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

    def succeed(self, words: Sequence[str], *, limit_s: float | None = LIMIT_S) -> str:
        """Runs a command that must succeed, and returns its output; RunError with its message if it fails."""
        end = self.run(words, limit_s=limit_s)
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
        return self._state_and_reason()[0]

    def _state_and_reason(self) -> tuple[str, str]:
        document = self.gcloud.document([*QUEUED, "describe", self.name, self._zone])
        if document is None:
            return MISSING, ""
        state = document.get("state", {}) if isinstance(document, dict) else {}
        failure = state.get("failedData") or {}
        reason = (failure.get("error") or {}).get("message", "")
        return str(state.get("state", "unknown")), str(reason)

    def persistent_state(self) -> str:
        """The state, asked again while Google Cloud does not answer."""
        return self._tried_again(self.state, needs_slice=False)

    def create(self, asked: SliceRequest) -> None:
        """Requests the slice, at any price without a quota; SpecError if the quota does not cover it."""
        words = asked.words
        if asked.quota is not None:
            nodes = self.gcloud.document([*VM, "list", self._zone]) or []
            requests = self.gcloud.document([*QUEUED, "list", self._zone]) or []
            slice_, is_spot = asked.topology, asked.is_spot
            n_used = n_chips_in_use(nodes, requests, slice_.chip, is_spot=is_spot)
            check_quota(asked.quota, slice_, self.zone, is_spot=is_spot, n_used=n_used)
        create = (*asked.track, *QUEUED, "create", self.name, f"--node-id={self.name}", self._zone)
        self.gcloud.succeed([*create, *words, "--quiet"])

    def delete(self) -> None:
        """Deletes the slice and its queued resource, and waits until they are gone."""
        self.gcloud.succeed([*QUEUED, "delete", self.name, self._zone, "--force", "--quiet"])

    def remove(self) -> None:
        """Deletes the slice, again while that fails, until Google Cloud has none; RunError if it may still be there."""
        reason = "it is still being deleted"
        for _ in range(N_TRIES):
            try:
                if (state := self.state()) == MISSING:
                    return
                if state != DELETING:
                    self.delete()
                    continue
            except RunError as error:
                reason = str(error)
            self.pause()
        raise RunError(
            f"the slice '{self.name}' may still exist and be charged: {reason} Delete it with "
            f"'meshscope tpu delete {self.name} {self._zone}', and check with 'meshscope tpu status'."
        )

    def wait_until_active(self) -> bool:
        """Waits for the slice; False if it was suspended meanwhile, RunError if it failed or does not come in time."""
        if self.gcloud.show is not None:
            return True
        last, waited_s = None, 0.0
        while True:
            state, reason = self._tried_again(self._state_and_reason, needs_slice=False)
            if state == ACTIVE:
                return True
            if state in (MISSING, FAILED):
                why = f": {reason}" if reason else ""
                raise RunError(
                    f"the slice '{self.name}' is {state}{why}. Check the zone, the quota and the permissions of the "
                    "project; 'meshscope tpu delete' removes the request."
                )
            if state in (*ENDED, DELETING):
                return False
            if waited_s >= WAIT_S:
                raise RunError(
                    f"the slice '{self.name}' is still {state} after {waited_s / 3600:.1f} hours. Try another zone "
                    "or time, or on-demand VMs."
                )
            if state != last:
                self.note(f"{self.name}: {state}")
            last, waited_s = state, waited_s + POLL_S
            self.pause()

    def ensure_active(self, create: Callable[[], None]) -> bool:
        """Waits for the slice, and has it created first if there is none or it ended; whether it is new."""
        is_new = False
        for _ in range(N_SLICES):
            state = self.persistent_state()
            if state in (*ENDED, DELETING):
                self.note(f"{self.name}: {state}; deleting it and asking for another")
                self.remove()
                state = MISSING
            if state == MISSING:
                is_new = True
                try:
                    create()
                except RunError:  # the request may have arrived, and its answer been lost
                    if self.persistent_state() == MISSING:
                        raise
            if self.wait_until_active():
                return is_new
        raise RunError(f"{N_SLICES} slices were suspended in turn. Try another zone or time.")

    def install(self, installation: Installation) -> None:
        """Installs meshscope, and what its runs need, on every worker; RunError if that fails."""
        scripts = files("meshscope.backends.sweep")
        with as_file(scripts / INSTALL) as install, as_file(scripts / RUN) as run:
            for path in (install, run, installation.wheel):
                self._copy_to_workers(path, "")
        for path, folder in installation.copied.items():
            done = f"{folder}.copied"
            there = self.ssh(f"mkdir -p {shlex.quote(folder)} && test -e {shlex.quote(done)}")
            if there.returncode or self.gcloud.show is not None:
                self.note(f"{self.name}: copying '{path}'")
                self._copy_to_workers(path, folder)
                self._install_step(f"touch {shlex.quote(done)}")
        self._install_step(shlex.join(["bash", INSTALL, *installation.words]))

    def _copy_to_workers(self, path: Path, folder: str) -> None:
        recurse = ["--recurse"] if path.is_dir() else []
        words = [*VM, "scp", *recurse, str(path), f"{self.name}:{folder}"]
        words += [self._zone, f"--worker={ALL}", f"--scp-flag={ALIVE}"]
        self._tried_again(lambda: self.gcloud.succeed(words, limit_s=None))

    def _install_step(self, command: str) -> None:
        """Runs a command that may be repeated on every worker, until the connection lasts."""

        def step() -> GcloudEnd:
            end = self.ssh(command)
            if end.returncode == 255:
                raise RunError(f"no connection to '{self.name}': {last_words(end.stderr)}")
            return end

        end = self._tried_again(step)
        if end.returncode:
            raise RunError(f"installing on '{self.name}' failed: {last_words(end.stderr)}")

    def ssh(self, command: str, *, worker: str = ALL, limit_s: float | None = None) -> GcloudEnd:
        """Runs a shell command on a worker or on all."""
        where = (self.name, self._zone, f"--worker={worker}", f"--ssh-flag={ALIVE}")
        return self.gcloud.run([*VM, "ssh", *where, f"--command={command}"], limit_s=limit_s)

    def ask(self, planned: PlannedRun, words: Sequence[str], *, key: str) -> tuple[int | None, str]:
        """The exit code of the run on all workers, RUNNING or NOT_INSTALLED, and its log; None without connection.

        The first call starts the run, as one of several processes; others only wait for `ASK_S`.
        """
        command = ["bash", RUN, key, str(ASK_S), planned.name, planned.command.value, *words]
        end = self.ssh(shlex.join(command), limit_s=ASK_S + LIMIT_S)
        codes = [int(code) for code in ANSWER.findall(end.stdout)]
        if not codes:
            return (NOT_INSTALLED if end.returncode == NO_SCRIPT else None), end.stderr
        if NOT_INSTALLED in codes:
            return NOT_INSTALLED, ""
        failures = [code for code in codes if code not in (0, RUNNING)]
        if not failures and end.returncode:  # one of several workers did not answer
            return None, end.stderr
        return (failures or [max(codes)])[0], end.stderr

    def stop(self, planned: PlannedRun, *, key: str) -> None:
        """Ends the run on all workers, and forgets how it ended."""
        self.ssh(shlex.join(["bash", RUN, key, "stop", planned.name]), limit_s=LIMIT_S)

    def fetch(self, name: str, parent: Path) -> None:
        """Copies the run folder `name` from the first worker into `parent`."""
        source = f"{self.name}:meshscope/runs/{name}"
        words = [*VM, "scp", "--recurse", source, str(parent), self._zone, "--worker=0"]
        self.gcloud.succeed([*words, f"--scp-flag={ALIVE}"], limit_s=None)

    def pause(self) -> None:
        """Waits before the next question."""
        self.sleep(POLL_S)

    def _tried_again(self, work: Callable[[], T], *, needs_slice: bool = True) -> T:
        """The result of `work`, tried again while it raises RunError, and while the slice that it needs is active."""
        for _ in range(N_TRIES - 1):
            try:
                return work()
            except RunError:
                if needs_slice and self.persistent_state() != ACTIVE:
                    raise
                self.pause()
        return work()

    @property
    def _zone(self) -> str:
        return f"--zone={self.zone}"
