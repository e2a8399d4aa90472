"""Several processes that run one experiment together: how they find each other, and share profiles."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


def join_processes(options: Mapping[str, Any]) -> None:
    """Joins the others, where there are any; returns when all are there."""
    if options["coordinator"] is not None:
        jax.distributed.initialize(
            coordinator_address=options["coordinator"],
            num_processes=options["n_processes"],
            process_id=options["process_id"],
        )


def gather_profiles(trace: Path, *, process_id: int) -> None:
    """The profiles of all processes in the folder of process 0, sent over the devices' own network.

    So hosts need no file system in common. A file is named by its host and its process.
    """
    (own,) = trace.glob("*.xplane.pb")
    content = np.frombuffer(own.read_bytes(), np.uint8)
    name = np.frombuffer(own.name.removesuffix(".xplane.pb").encode(), np.uint8)
    own.unlink()
    for process, (host, profile) in enumerate(
        zip(_gathered(name), _gathered(content), strict=True)
    ):
        if process_id == 0:
            path = trace / f"{host.tobytes().decode()}-{process}.xplane.pb"
            path.write_bytes(profile.tobytes())


def _gathered(content: np.ndarray) -> list[np.ndarray]:
    """The bytes of each process; shorter ones travel padded."""
    sizes = np.asarray(multihost_utils.process_allgather(np.array(content.size, np.int32)))
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: content.size] = content
    every = np.asarray(multihost_utils.process_allgather(padded))
    return [every[index, :size] for index, size in enumerate(sizes.tolist())]
