"""Google Cloud: its names of slices, the TPUs that a project may use, and a job on a slice of GKE.

Source: cloud.google.com/tpu/docs, pages "TPU configurations", "TPU software versions" and "Manage queued
resources"; cloud.google.com/kubernetes-engine/docs, pages "Plan TPUs in GKE" and "Deploy TPU workloads in
GKE Standard".
"""

import shlex
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from meshscope.errors import ParseError, SpecError, nearest
from meshscope.files import read_file
from meshscope.hardware.chips import CHIPS, CloudNames
from meshscope.hardware.topology import Topology, parse_topology

PORT = 8476
RUNS = "/runs"


def cloud_names(topology: Topology) -> CloudNames:
    """The names of a slice's chip; SpecError for CPUs and GPUs."""
    if topology.chip.cloud is None:
        raise SpecError(f"'{topology.name}' is no TPU slice. Give one, like v6e-8.")
    return topology.chip.cloud


def accelerator_type(topology: Topology) -> str:
    """The value of --accelerator-type, such as `v5litepod-16`; SpecError if the slice has none."""
    accelerator, name = cloud_names(topology).accelerator, topology.chip.name
    if accelerator is None:
        raise SpecError(
            f"{name} has no TPU VMs: Google Cloud offers it through Kubernetes alone. "
            f"Use 'meshscope tpu manifest FILE --topology {topology.name}'."
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


def n_hosts(topology: Topology) -> int:
    """The VMs of a slice, each a worker."""
    n_chips = topology.n_chips // topology.n_slices
    on_one_host = topology.chip.max_host_chips or topology.chip.chips_per_host
    return 1 if n_chips <= on_one_host else -(-n_chips // 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """Up to `chips` chips of one kind in a zone, as spot VMs or on demand."""

    chip: str
    zone: str
    chips: int
    spot: bool

    def __str__(self) -> str:
        kind = "spot" if self.spot else "on-demand"
        return f"{self.chips} {kind} {self.chip} chips in {self.zone}"


KEYS = tuple(Quota.__slots__)


def read_quota(path: Path) -> tuple[Quota, ...]:
    """The quota in a TOML file of `[[quota]]` tables with chip, zone, chips and spot; ParseError if malformed."""
    try:
        document = tomllib.loads(read_file(path).decode())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ParseError(
            f"cannot read the quota file '{path}': {reason}. Give TOML with [[quota]] tables."
        ) from error
    tables = document.get("quota")
    if not isinstance(tables, list) or not tables:
        raise ParseError(f"{path}: there is no [[quota]] table. Add one with {', '.join(KEYS)}.")
    for number, table in enumerate(tables, start=1):
        if fault := _fault(table):
            raise ParseError(f"{path}: [[quota]] number {number}{fault}")
    return tuple(Quota(**table) for table in tables)


def _fault(table: Any) -> str | None:
    if not isinstance(table, dict):
        return f" is no table. Give it {', '.join(KEYS)}."
    for key in table:
        if key not in KEYS:
            return f": unknown key '{key}'. {nearest(key, KEYS)}"
    for key, kind in get_type_hints(Quota).items():
        if type(table.get(key)) is not kind:
            return f": {key} is {table.get(key)!r}. Give it a {kind.__name__}."
    if table["chip"] not in CHIPS:
        return f": unknown chip '{table['chip']}'. {nearest(table['chip'], CHIPS)}"
    return None if table["chips"] >= 1 else f": chips is {table['chips']}. Give at least 1."


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


def manifest(  # noqa: PLR0913  what a job has
    commands: Sequence[Sequence[str]],
    topology: Topology,
    *,
    name: str,
    image: str,
    claim: str,
    is_spot: bool,
) -> str:
    """A Kubernetes manifest: a headless service and an indexed job, one pod a host, that runs the commands in turn.

    Each command is the words after `meshscope`, with its run folder. The pods have meshscope in `image` and
    share the volume of `claim`. Never applied to a real cluster.
    """
    if topology.n_slices > 1:
        raise SpecError(
            f"'{topology.name}' has several slices, which take a JobSet. Use one slice."
        )
    n = n_hosts(topology)
    several = ""
    if n > 1:
        several = f" --coordinator {name}-0.{name}:{PORT} --n-processes {n} --process-id $JOB_COMPLETION_INDEX"
    # A failure does not stop the commands after it, and fails the job at the end.
    lines = [f"meshscope {shlex.join(words)}{several} || failed=1" for words in commands]
    script = "\n".join(["failed=0", *lines, "exit $failed", ""])
    container = {
        "name": "meshscope",
        "image": image,
        "command": ["bash", "-c", script],
        "ports": [{"containerPort": PORT}],
        "resources": {"limits": {"google.com/tpu": topology.n_chips // n}},
        "volumeMounts": [{"name": "runs", "mountPath": RUNS}],
    }
    pod = {
        "subdomain": name,
        "restartPolicy": "Never",
        "nodeSelector": {
            "cloud.google.com/gke-tpu-accelerator": cloud_names(topology).kubernetes,
            "cloud.google.com/gke-tpu-topology": "x".join(map(str, topology.grid)),
            **({"cloud.google.com/gke-spot": "true"} if is_spot else {}),
        },
        "containers": [container],
        "volumes": [{"name": "runs", "persistentVolumeClaim": {"claimName": claim}}],
    }
    specs: dict[str, tuple[str, dict[str, Any]]] = {
        "Service": ("v1", {"clusterIP": "None", "selector": {"job-name": name}}),
        "Job": (
            "batch/v1",
            {
                "backoffLimit": 0,
                "completions": n,
                "parallelism": n,
                "completionMode": "Indexed",
                "template": {"spec": pod},
            },
        ),
    }
    documents = [
        {"apiVersion": version, "kind": kind, "metadata": {"name": name}, "spec": spec}
        for kind, (version, spec) in specs.items()
    ]
    return yaml.safe_dump_all(documents, sort_keys=False)
