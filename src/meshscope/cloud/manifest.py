"""A Kubernetes manifest that runs experiments on a TPU slice of GKE."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from meshscope.cloud.accelerators import cloud_names, n_hosts
from meshscope.errors import SpecError
from meshscope.hardware.topology import Topology

PORT = 8476
RUNS = "/runs"


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestRequest:
    """A job named `name` whose pods have meshscope in `image` and share the volume of `claim`."""

    name: str
    topology: Topology
    image: str
    claim: str
    is_spot: bool


def manifest(request: ManifestRequest, commands: Sequence[Sequence[str]]) -> str:
    """A headless service and an indexed job, one pod a host, that runs the commands in turn.

    Each command is the words after `meshscope`, with its run folder. Source of the labels: GKE's page
    "Deploy TPU workloads in GKE Standard". Never applied to a real cluster.
    """
    if request.topology.n_slices > 1:
        raise SpecError(
            f"'{request.topology.name}' has several slices, which take a JobSet. Use one slice."
        )
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": request.name},
        "spec": {"clusterIP": "None", "selector": {"job-name": request.name}},
    }
    return yaml.safe_dump_all([service, _job(request, commands)], sort_keys=False)


def _job(request: ManifestRequest, commands: Sequence[Sequence[str]]) -> dict[str, Any]:
    n = n_hosts(request.topology)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": request.name},
        "spec": {
            "backoffLimit": 0,
            "completions": n,
            "parallelism": n,
            "completionMode": "Indexed",
            "template": {"spec": _pod(request, commands)},
        },
    }


def _pod(request: ManifestRequest, commands: Sequence[Sequence[str]]) -> dict[str, Any]:
    topology = request.topology
    n_chips = topology.n_chips // n_hosts(topology)
    selector = {
        "cloud.google.com/gke-tpu-accelerator": cloud_names(topology).kubernetes,
        "cloud.google.com/gke-tpu-topology": "x".join(map(str, topology.grid)),
        **({"cloud.google.com/gke-spot": "true"} if request.is_spot else {}),
    }
    return {
        "subdomain": request.name,
        "restartPolicy": "Never",
        "nodeSelector": selector,
        "containers": [
            {
                "name": "meshscope",
                "image": request.image,
                "command": ["bash", "-c", _script(request, commands)],
                "ports": [{"containerPort": PORT}],
                "resources": {"limits": {"google.com/tpu": n_chips}},
                "volumeMounts": [{"name": "runs", "mountPath": RUNS}],
            }
        ],
        "volumes": [{"name": "runs", "persistentVolumeClaim": {"claimName": request.claim}}],
    }


def _script(request: ManifestRequest, commands: Sequence[Sequence[str]]) -> str:
    """The commands; a failure does not stop those after it, and fails the job at the end."""
    n = n_hosts(request.topology)
    several = ""
    if n > 1:
        first = f"{request.name}-0.{request.name}:{PORT}"
        several = f" --coordinator {first} --n-processes {n} --process-id $JOB_COMPLETION_INDEX"
    lines = [f"meshscope {shlex.join(words)}{several} || failed=1" for words in commands]
    return "\n".join(["failed=0", *lines, "exit $failed", ""])
