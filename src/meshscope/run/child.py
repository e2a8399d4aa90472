"""The child process: runs an experiment on the devices that JAX sees, times it and profiles it.

Started as `python -m meshscope.run.child REQUEST.json OUT_DIR`; writes the compiled HLO of each
phase, a profile, and a report, or an error report. It is a process of its own because JAX reads its
platform from the environment, and so that a crash is a message.
"""

import gzip
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshscope.errors import MeshscopeError
from meshscope.hardware.chips import ChipKind
from meshscope.plan.experiment import Experiment, experiment_from_dict

GZIP_LEVEL = 1  # HLO text shrinks 15 times at level 1; higher levels cost seconds for little
HLO, TRACE = "hlo", "trace"


def set_environment(experiment: Experiment) -> None:
    """What JAX reads when it is imported; to be called before it is.

    Virtual CPU devices are asked for by number; for others JAX's own choice of platform stands.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if experiment.topology.chip.kind is ChipKind.CPU:
        os.environ["JAX_PLATFORMS"] = "cpu"
        flag = f"--xla_force_host_platform_device_count={experiment.topology.n_devices}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()


def told(words: str) -> None:
    """Tells the parent what is being done, on a line of standard output."""
    print(words, flush=True)


def run_request(experiment: Experiment, options: Mapping[str, Any], out: Path) -> dict[str, Any]:
    """Builds, compiles, runs, times and profiles; returns the report."""
    from meshscope.run.devices import live_devices  # noqa: PLC0415  imports JAX
    from meshscope.run.session import Session  # noqa: PLC0415

    started = time.perf_counter()
    devices = live_devices(experiment)
    told("compiling")
    session = Session.started(experiment, devices, seed=options["seed"])
    for phase, text in session.hlo_texts().items():
        with gzip.open(
            out / HLO / f"{phase}.hlo.txt.gz", "wt", GZIP_LEVEL, encoding="utf-8"
        ) as file:
            file.write(text)
    told("warming up")
    compiled_s = time.perf_counter() - started
    session.request()
    requests = []
    for index in range(options["repeats"]):
        told(f"request {index + 1} of {options['repeats']}")
        requests.append(session.request())
    told("profiling")
    profiled = session.profiled(out / TRACE, n_decode_steps=options["profiled_steps"])
    return {
        "requests": requests,
        "profiled": profiled,
        "seconds": {"compile": compiled_s, **session.seconds},
        "memory": session.memory(),
        "versions": versions(),
        "devices": [described(device) for device in devices],
    }


def versions() -> dict[str, str]:
    """Versions of what compiled and ran the programs."""
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415

    found = {name: version(name) for name in ("jax", "jaxlib")}
    try:
        return found | {"libtpu": version("libtpu")}
    except PackageNotFoundError:
        return found


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


def main(arguments: list[str]) -> int:
    """Runs one request; every failure that Python sees becomes `error.json`."""
    request_file, out_dir = arguments
    directory = Path(out_dir)
    request = json.loads(Path(request_file).read_text(encoding="utf-8"))
    experiment = experiment_from_dict(request["experiment"])
    set_environment(experiment)
    try:
        report = run_request(experiment, request["options"], directory)
    except Exception as error:  # noqa: BLE001  told to the parent, which words the message
        is_ours = isinstance(error, MeshscopeError)
        said = {"type": type(error).__name__, "message": str(error), "is_ours": is_ours}
        (directory / "error.json").write_text(json.dumps(said), encoding="utf-8")
        return 1
    (directory / "report.json").write_text(json.dumps(report), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
