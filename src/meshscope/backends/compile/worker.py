"""Worker process that compiles one program of an experiment for a described TPU or GPU slice.

Started as `python -m meshscope.backends.compile.worker EXPERIMENT.json OUT_DIR PHASE CHUNK`; CHUNK is the
part of a prompt. It writes the scheduled HLO and a report, or an error report. A separate process lets
programs compile concurrently
and turns a compiler crash into an error message. It ends with its parent.
"""

import gzip
import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from meshscope.backends.compile.gpu import gpu_devices, plugin
from meshscope.events.enums import Phase
from meshscope.programs.jax.analysis import memory_analysis
from meshscope.programs.torchxla.interpreter import tracing_environment
from meshscope.spec.experiment import Experiment, experiment_from_dict
from meshscope.spec.hardware.chips import ChipKind
from meshscope.spec.hardware.compiler_facts import compiler_facts
from meshscope.spec.hardware.topology import Topology
from meshscope.spec.program import Frontend
from meshscope.workers.progress import error_report
from meshscope.workers.worker_main import end_with_parent, reported

# Makes the compiler report the memory of a program that does not fit, instead of failing.
LIBTPU_FLAGS = "--xla_tpu_no_crash_on_oom=true"

FLAGS = ("LIBTPU_INIT_ARGS", "XLA_FLAGS")
GZIP_LEVEL = 1  # compresses HLO text 15 times; higher levels take seconds for little gain


# What libtpu reads to describe a TPU on a machine without one.
DESCRIPTION = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # several processes compile concurrently
    "TPU_ACCELERATOR_TYPE": "v6e-8",  # this and the next only silence warnings
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}


def set_environment() -> None:
    """Sets the environment variables of libtpu and JAX. Call it before importing either."""
    os.environ.update(DESCRIPTION | {"JAX_PLATFORMS": "cpu"})  # the TPU is not used
    flags = os.environ.get("LIBTPU_INIT_ARGS", "")
    os.environ["LIBTPU_INIT_ARGS"] = f"{LIBTPU_FLAGS} {flags}".strip()


def set_gpu_environment() -> None:
    """Sets the environment variables of JAX for XLA's GPU compiler. Call it before importing JAX."""
    os.environ |= {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "2"}


# The flags that torch_xla adds on a TPU host (torch_xla 2.9 __init__.py, _setup_libtpu_flags).
TORCH_XLA_FLAGS = (
    "--xla_tpu_use_enhanced_launch_barrier=false --xla_latency_hiding_scheduler_rerun=1 "
    "--xla_tpu_prefer_async_allgather_to_allreduce=true --xla_tpu_enable_flash_attention=false"
)


def set_torchxla_environment(experiment: Experiment) -> None:
    """Sets the environment variables of torch_xla, and the libtpu flags that it would add."""
    chip_flags = compiler_facts(experiment.topology.chip.name).torch_xla_flags.value
    flags = f"{os.environ['LIBTPU_INIT_ARGS']} {TORCH_XLA_FLAGS} {chip_flags}".rstrip()
    os.environ["LIBTPU_INIT_ARGS"] = flags
    os.environ.update(tracing_environment(experiment.topology.n_devices))


def topology_devices(experiment: Experiment) -> list[Any]:
    """The devices of the experiment's slice."""
    return slice_devices(experiment.topology)


def slice_devices(topology: Topology) -> list[Any]:
    """The devices of the slice as the compiler describes them, in compiler order."""
    if topology.chip.kind is ChipKind.GPU:
        return gpu_devices(topology)
    from jax.experimental import topologies  # noqa: PLC0415  after set_environment

    options: dict[str, Any] = {}
    if topology.n_slices > 1:
        options["num_slices"] = topology.n_slices
    if topology.chip.compiler_config is not None:
        options["chip_config_name"] = topology.chip.compiler_config
    description = topologies.get_topology_desc(
        platform="tpu",
        topology_name=f"{topology.chip.name}:{'x'.join(map(str, topology.grid))}",
        chips_per_host_bounds=topology.host_bounds,
        **options,
    )
    return list(description.devices)


def compile_program(
    experiment: Experiment, phase: Phase, chunk: int, out_dir: Path
) -> dict[str, Any]:
    """Compiles a program, writes `PHASE.hlo.txt.gz`, and returns the report as JSON values."""
    started = time.perf_counter()
    if experiment.program.frontend is Frontend.TORCHXLA:
        from meshscope.programs.torchxla.program import build_program  # noqa: PLC0415  torch_xla before JAX
    else:
        from meshscope.programs.jax.build import build_program as build_jax_program  # noqa: PLC0415  imports JAX

        build_program = partial(build_jax_program, chunk=chunk)
    devices = topology_devices(experiment)
    described = time.perf_counter()
    program = build_program(experiment, phase, devices)
    lowered = program.lower()
    lowered_at = time.perf_counter()
    compiled = lowered.compile()
    compiled_at = time.perf_counter()
    with gzip.open(out_dir / f"{phase}.hlo.txt.gz", "wt", GZIP_LEVEL, encoding="utf-8") as file:
        file.write(compiled.as_text())
    written_at = time.perf_counter()
    return {
        "flags": {name: os.environ[name] for name in FLAGS if name in os.environ},
        "seconds": {
            "import": described - started,
            "lower": lowered_at - described,
            "compile": compiled_at - lowered_at,
            "write": written_at - compiled_at,
        },
        "memory": memory_analysis(compiled),
        "versions": _versions(experiment),
        "devices": [_device(device, experiment.topology.chip.kind) for device in devices],
    }


def _versions(experiment: Experiment) -> dict[str, str]:
    from importlib.metadata import version  # noqa: PLC0415

    is_gpu = experiment.topology.chip.kind is ChipKind.GPU
    names = ["jax", "jaxlib", plugin() if is_gpu else "libtpu"]
    if experiment.program.frontend is Frontend.TORCHXLA:
        names = ["torch", "torch_xla", "transformers", *names]
    return {name: version(name) for name in names if name is not None}


def _device(device: Any, kind: ChipKind) -> dict[str, Any]:
    """The placement of a device; HLO text refers to devices by their position in this list."""
    is_placed = kind is ChipKind.TPU  # described GPUs all have the same coordinates
    return {
        "id": device.id,
        "coords": list(device.coords) if is_placed else None,
        "core_on_chip": device.core_on_chip if is_placed else None,
        "slice_index": getattr(device, "slice_index", None),
        "process_index": device.process_index,
    }


def main(arguments: list[str]) -> int:
    """Compiles one program; writes `PHASE.json`, or an error report beside the experiment file."""
    experiment_file, out_dir, phase_name, chunk = arguments
    end_with_parent()
    directory, phase = Path(out_dir), Phase(phase_name)
    experiment = experiment_from_dict(json.loads(Path(experiment_file).read_text(encoding="utf-8")))
    if experiment.topology.chip.kind is ChipKind.GPU:
        set_gpu_environment()
    else:
        set_environment()
    if experiment.program.frontend is Frontend.TORCHXLA:
        set_torchxla_environment(experiment)
    return reported(
        lambda: compile_program(experiment, phase, int(chunk), directory),
        directory / f"{phase}.json",
        error_report(Path(experiment_file), phase),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
