"""The devices and processes of a live run, as JAX sees them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from meshscope.errors import SpecError
from meshscope.hardware.chips import ChipKind
from meshscope.hardware.topology import Topology

PLATFORM = {ChipKind.TPU: "tpu", ChipKind.GPU: "gpu", ChipKind.CPU: "cpu"}


def live_devices(topology: Topology) -> list[Any]:
    """The devices of the slice; SpecError if JAX sees fewer devices or another platform."""
    platform, backend = PLATFORM[topology.chip.kind], jax.default_backend()
    if backend != platform:
        raise SpecError(
            f"'{topology.name}' needs {platform} devices, but JAX sees {backend} devices here. "
            "Run on such a machine, or use --topology cpu:8 for virtual CPU devices."
        )
    devices = jax.devices()
    if len(devices) < topology.n_devices:
        raise SpecError(
            f"'{topology.name}' has {topology.n_devices} devices, but JAX sees {len(devices)} here. "
            f"Use a topology of {len(devices)}, or start a process on every host (--coordinator)."
        )
    return devices[: topology.n_devices]


def device_record(device: Any) -> dict[str, Any]:
    """Id, kind, platform, process and coordinates of a device."""
    coords = getattr(device, "coords", None)
    names = ("id", "device_kind", "platform", "process_index")
    fields = {name.removeprefix("device_"): getattr(device, name) for name in names}
    return {**fields, "coords": None if coords is None else list(coords)}


def join_processes(options: Mapping[str, Any]) -> None:
    """Connects to the other processes of the run, if there are any."""
    if options["coordinator"] is not None:
        jax.distributed.initialize(
            coordinator_address=options["coordinator"],
            num_processes=options["n_processes"],
            process_id=options["process_id"],
        )


def gather_profiles(trace: Path, *, process_id: int) -> None:
    """Collects the profiles of all processes in the folder of process 0.

    They travel over the network of the devices, so hosts need no shared file system. Files are named
    by host and process.
    """
    (file,) = trace.glob("*.xplane.pb")
    content = np.frombuffer(file.read_bytes(), np.uint8)
    name = np.frombuffer(file.name.removesuffix(".xplane.pb").encode(), np.uint8)
    file.unlink()
    for process, (host, profile) in enumerate(
        zip(_gathered(name), _gathered(content), strict=True)
    ):
        if process_id == 0:
            path = trace / f"{host.tobytes().decode()}-{process}.xplane.pb"
            path.write_bytes(profile.tobytes())


def _gathered(content: np.ndarray) -> list[np.ndarray]:
    """The bytes of each process; shorter ones are padded for the transfer."""
    sizes = np.asarray(multihost_utils.process_allgather(np.array(content.size, np.int32)))
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: content.size] = content
    rows = np.asarray(multihost_utils.process_allgather(padded))
    return [rows[index, :size] for index, size in enumerate(sizes.tolist())]
