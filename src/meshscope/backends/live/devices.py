"""The devices that an experiment runs on, as JAX lists them."""

from typing import Any

import jax

from meshscope.errors import SpecError
from meshscope.spec.hardware.chips import ChipKind
from meshscope.spec.hardware.topology import Topology

PLATFORM = {ChipKind.TPU: "tpu", ChipKind.GPU: "gpu", ChipKind.CPU: "cpu"}


def live_devices(topology: Topology) -> list[Any]:
    """As many devices as the slice has; SpecError when JAX sees fewer, or others."""
    wanted, seen = PLATFORM[topology.chip.kind], jax.default_backend()
    if seen != wanted:
        raise SpecError(
            f"'{topology.name}' needs {wanted} devices, and JAX sees {seen} devices here. "
            "Run it on such a machine, or use --topology cpu:8 for virtual CPU devices."
        )
    devices = jax.devices()
    if len(devices) < topology.n_devices:
        raise SpecError(
            f"'{topology.name}' has {topology.n_devices} devices, and JAX sees {len(devices)} here. "
            f"Use a topology of {len(devices)}, or start a process on every host (--coordinator)."
        )
    return devices[: topology.n_devices]


def described(device: Any) -> dict[str, Any]:
    """What JAX calls a device, and where it sits."""
    coords = getattr(device, "coords", None)
    return {
        "id": device.id,
        "kind": device.device_kind,
        "platform": device.platform,
        "process_index": device.process_index,
        "coords": None if coords is None else list(coords),
    }
