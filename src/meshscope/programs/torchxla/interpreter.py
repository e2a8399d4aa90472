"""Selects and checks the Python interpreter that traces with torch_xla.

torch_xla is built for one release of torch, which may conflict with other packages. So this front
end traces in a separate process, with the interpreter named by an environment variable or, by
default, the one that runs meshscope.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import meshscope
from meshscope.errors import MissingToolError
from meshscope.workers.interpreter import installed_versions

VARIABLE = "MESHSCOPE_TORCHXLA_PYTHON"
LIBRARY_PATH = "TPU_LIBRARY_PATH"  # set by JAX when it loads libtpu
NEEDED = ("torch", "torch_xla", "transformers", "jax", "libtpu")
LEAST_TRANSFORMERS = 5  # first with registered experts and latent caches
EXTRA = "pip install -e '.[torchxla]' in your clone (Linux x86-64, Python 3.11)"


def torchxla_python() -> str:
    """The interpreter that traces."""
    return os.environ.get(VARIABLE) or sys.executable


def torchxla_environment() -> dict[str, str]:
    """Environment variables of the tracing process, with this meshscope first on PYTHONPATH.

    Another interpreter has a libtpu of its own, not that which this process loaded.
    """
    source = str(Path(meshscope.__file__).parents[1])
    others = os.environ.get("PYTHONPATH")
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (source, others)))}
    if torchxla_python() != sys.executable:
        variables.pop(LIBRARY_PATH, None)
    return variables


def tracing_environment(n_devices: int) -> dict[str, str]:
    """Environment variables that torch_xla reads on import; it traces for CPU devices."""
    return {
        "PJRT_DEVICE": "CPU",
        "CPU_NUM_DEVICES": str(n_devices),
        "XLA_HLO_DEBUG": "1",  # scopes become op_names
        "USE_TORCH_XLA": "0",  # used by transformers for trainers only
    }


def check_torchxla() -> Mapping[str, str]:
    """Versions of the required packages; MissingToolError if one is missing or incompatible."""
    python = torchxla_python()
    versions = _versions(python)
    missing = [name for name in NEEDED if name not in versions]
    if missing:
        raise MissingToolError(
            f"--frontend torchxla needs {', '.join(missing)}, not installed for {python} (Python "
            f"{versions['python']}). Install the extra, {EXTRA}; if another torch must stay, use a "
            f"separate environment and set {VARIABLE} to its Python."
        )
    _check_fit(python, versions)
    return versions


def _check_fit(python: str, versions: Mapping[str, str]) -> None:
    if _release(versions["torch"]) != _release(versions["torch_xla"]):
        raise MissingToolError(
            f"torch {versions['torch']} is not the one that torch_xla {versions['torch_xla']} was built for "
            f"({python}). Install torch=={'.'.join(map(str, _release(versions['torch_xla'])))}.*, or name a "
            f"Python that has both in {VARIABLE}: {EXTRA}."
        )
    if _release(versions["transformers"])[0] < LEAST_TRANSFORMERS:
        raise MissingToolError(
            f"transformers {versions['transformers']} ({python}) cannot register experts and latent "
            f"caches; {LEAST_TRANSFORMERS} and later can. Install the extra: {EXTRA}."
        )


def _release(version: str) -> tuple[int, int]:
    major, minor = version.split("+", maxsplit=1)[0].split(".")[:2]
    return int(major), int(minor)


def _versions(python: str) -> Mapping[str, str]:
    """Installed versions of the required packages, read without importing torch."""
    try:
        return installed_versions(python, NEEDED)
    except (OSError, subprocess.SubprocessError) as error:
        raise MissingToolError(
            f"the Python of {VARIABLE}, '{python}', does not run: {error}. Name one that does, or unset it."
        ) from error
