"""One TPU slice of Google Cloud, from its queued resource to its deletion."""

import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from meshscope.cloud.accelerators import accelerator_type, runtime_version
from meshscope.cloud.gcloud import Gcloud, GcloudEnd, last_words
from meshscope.cloud.quota import Quota, check_quota
from meshscope.errors import RunError, SpecError
from meshscope.hardware.topology import Topology, parse_topology

POLL_S = 30.0
WAIT_S = 6 * 3600.0  # for a slice to become available
INSTALL, RUN = "install_on_worker.sh", "run_on_worker.sh"
QUEUED = ("compute", "tpus", "queued-resources")
VM = ("compute", "tpus", "tpu-vm")
ALL = "all"


class MachineState(StrEnum):
    """The state of a queued resource; MISSING if there is none."""

    MISSING = "missing"
    CREATING = "CREATING"
    ACCEPTED = "ACCEPTED"
    WAITING = "WAITING_FOR_RESOURCES"
    PROVISIONING = "PROVISIONING"
    ACTIVE = "ACTIVE"
    SUSPENDING = "SUSPENDING"
    SUSPENDED = "SUSPENDED"
    DELETING = "DELETING"
    FAILED = "FAILED"
    UNKNOWN = "STATE_UNSPECIFIED"


# A resource in one of these states never becomes active.
ENDED = (
    MachineState.SUSPENDING,
    MachineState.SUSPENDED,
    MachineState.FAILED,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceRequest:
    """A slice to ask for; `quota` None accepts whatever it costs, `runtime` None the usual software version."""

    topology: Topology
    is_spot: bool
    quota: tuple[Quota, ...] | None
    runtime: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TpuMachine:
    """The VMs of a slice in a zone; its queued resource and its node have one name."""

    name: str
    zone: str
    gcloud: Gcloud
    note: Callable[[str], None] = field(default=lambda _: None)
    sleep: Callable[[float], None] = time.sleep

    def state(self) -> MachineState:
        """The state of the queued resource."""
        document = self.gcloud.document([*QUEUED, "describe", self.name, self._zone])
        if document is None:
            return MachineState.MISSING
        name = document.get("state", {}).get("state") if isinstance(document, dict) else None
        return MachineState(name) if name in set(MachineState) else MachineState.UNKNOWN

    def create(self, request: SliceRequest) -> None:
        """Requests the slice; SpecError if the quota does not cover it."""
        topology, is_spot = request.topology, request.is_spot
        kind = accelerator_type(topology)
        if request.quota is not None:
            n_used = chips_in_use(self.gcloud, topology, self.zone, is_spot=is_spot)
            check_quota(request.quota, topology, self.zone, is_spot=is_spot, n_used=n_used)
        self.gcloud.succeed(
            [
                *(*QUEUED, "create", self.name, f"--node-id={self.name}", self._zone),
                f"--accelerator-type={kind}",
                f"--runtime-version={request.runtime or runtime_version(topology)}",
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
        while (state := self.state()) is not MachineState.ACTIVE:
            if state in (*ENDED, MachineState.MISSING, MachineState.DELETING):
                raise RunError(
                    f"the slice '{self.name}' is {state}. Delete it with 'meshscope tpu delete', then try again."
                )
            if waited_s >= wait_s:
                raise RunError(
                    f"the slice '{self.name}' is still {state} after {waited_s / 3600:.1f} hours. Its request stays "
                    "queued: rerun the command to wait on, or delete it with 'meshscope tpu delete'."
                )
            if state is not last:
                self.note(f"{self.name}: {state}")
            last, waited_s = state, waited_s + POLL_S
            self.sleep(POLL_S)

    def ensure_active(self, request: SliceRequest) -> bool:
        """Waits for the slice, and creates it first if there is none or it ended; whether it is new."""
        state = self.state()
        if state in (*ENDED, MachineState.DELETING):
            self.note(f"{self.name}: {state}; deleting it and asking for another")
            self.delete()
            state = MachineState.MISSING
        if state is MachineState.MISSING:
            self.create(request)
        self.wait_until_active()
        return state is not MachineState.ACTIVE

    def install(self, wheel: Path, *, jax_version: str) -> None:
        """Installs meshscope from a wheel, and JAX for TPU, on every worker."""
        if not wheel.is_file():
            raise SpecError(
                f"the wheel '{wheel}' does not exist. Make one in your clone: pip wheel --no-deps -w dist ."
            )
        folder = files("meshscope.cloud")
        for name in (INSTALL, RUN):
            with as_file(folder / name) as script:
                self._copy_to_all(script)
        self._copy_to_all(wheel)
        command = shlex.join(["bash", INSTALL, wheel.name, jax_version])
        end = self.ssh(command, worker=ALL)
        if end.returncode:
            raise RunError(f"installing on '{self.name}' failed: {last_words(end.log)}")

    def ssh(self, command: str, *, worker: str = ALL) -> GcloudEnd:
        """Runs a shell command on a worker or on all."""
        return self.gcloud.run(
            [*VM, "ssh", self.name, self._zone, f"--worker={worker}", f"--command={command}"]
        )

    def run(self, name: str, words: Sequence[str]) -> GcloudEnd:
        """Runs `meshscope WORDS` on all workers, as one run of several processes; its folder is `name`."""
        return self.ssh(shlex.join(["bash", RUN, name, *words]))

    def fetch(self, name: str, parent: Path) -> None:
        """Copies the run folder `name` from the first worker into `parent`."""
        source = f"{self.name}:meshscope/runs/{name}"
        self.gcloud.succeed(
            [*VM, "scp", "--recurse", source, str(parent), self._zone, "--worker=0"]
        )

    def _copy_to_all(self, path: Path) -> None:
        self.gcloud.succeed([*VM, "scp", str(path), f"{self.name}:", self._zone, f"--worker={ALL}"])

    @property
    def _zone(self) -> str:
        return f"--zone={self.zone}"


def chips_in_use(gcloud: Gcloud, topology: Topology, zone: str, *, is_spot: bool) -> int:
    """Chips of the same kind that the project's queued resources in the zone have or wait for."""
    listed = gcloud.document([*QUEUED, "list", f"--zone={zone}"]) or []
    return sum(_n_chips(one, topology.chip.name, is_spot=is_spot) for one in listed)


def _n_chips(resource: dict[str, Any], chip: str, *, is_spot: bool) -> int:
    """Chips of a queued resource, if they are of this kind."""
    state = resource.get("state", {}).get("state")
    if ("spot" in resource) is not is_spot or state in ENDED:
        return 0
    nodes = resource.get("tpu", {}).get("nodeSpec", [])
    kinds = [node.get("node", {}).get("acceleratorType", "") for node in nodes]
    names = [kind.replace("v5litepod-", "v5e-") for kind in kinds]
    return sum(parse_topology(name).n_chips for name in names if name.startswith(f"{chip}-"))
