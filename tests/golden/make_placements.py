"""The placement of each device as libtpu reports it, for a few slices of every chip.

Run: make golden. Writes placements.json; needs the extra tpu, but no TPU. Each device is
[slice, x, y, z, core, host], in mesh order.
"""

import json
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

SLICES = (
    *("v6e:1x2", "v6e:2x2", "v6e:2x4", "v6e:4x4", "v6e:4x8", "v6e:16x16", "2xv6e:2x4", "2xv6e:4x4"),
    *("v5e:1x1", "v5e:4x8", "v5e:8x16"),
    *("v5p:1x1x1", "v5p:2x2x1", "v5p:2x2x4", "v5p:4x4x4", "v5p:4x4x8"),
    *("v4:2x2x1", "v4:2x2x2", "v4:4x4x4"),
    *("tpu7x:1x1x1", "tpu7x:2x2x1", "tpu7x:2x2x4", "tpu7x:4x4x4", "2xtpu7x:2x2x1"),
)


def devices_of(name: str) -> list[Any]:
    """The devices of a slice as the compiler lists them."""
    from meshscope.backends.compile.worker import slice_devices  # noqa: PLC0415  after the environment is set
    from meshscope.hardware.topology import parse_topology  # noqa: PLC0415

    return slice_devices(parse_topology(name))


def place_of(device: Any) -> list[int]:
    """Slice, x, y, z, core, host."""
    return [
        getattr(device, "slice_index", None) or 0,
        *device.coords,
        device.core_on_chip,
        device.process_index,
    ]


def main() -> None:
    """Queries libtpu and writes the file."""
    from meshscope.backends.compile.worker import set_environment  # noqa: PLC0415

    set_environment()
    os.environ["TPU_ACCELERATOR_TYPE"] = "v6e-8"
    placements = {name: [place_of(device) for device in devices_of(name)] for name in SLICES}
    document = {"libtpu": version("libtpu"), "slices": placements}
    text = json.dumps(document, separators=(",", ":"))
    Path(__file__).with_name("placements.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
