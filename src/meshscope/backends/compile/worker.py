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
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from meshscope.events.enums import Phase
from meshscope.hardware.chips import ChipKind
from meshscope.hardware.topology import Topology
from meshscope.plans.experiment import Experiment, experiment_from_dict
from meshscope.programs.frontends import frontend_of
from meshscope.programs.gpu import gpu_devices, plugin
from meshscope.programs.step_programs import program_file
from meshscope.workers import end_with_parent, error_report, reported

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


def topology_devices(experiment: Experiment) -> list[Any]:
    """The devices of the experiment's slice."""
    return slice_devices(experiment.topology)


def slice_devices(topology: Topology) -> list[Any]:
    """The devices of the slice as the compiler describes them, in compiler order."""
    if topology.chip.kind is ChipKind.GPU:
        return gpu_devices(topology)
    from jax.experimental import topologies  # after set_environment

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
    """Compiles the programs of a step, writes their HLO texts, and returns the report as JSON values."""
    started = time.perf_counter()
    build = frontend_of(experiment).builder(experiment, chunk)
    devices = topology_devices(experiment)
    described = time.perf_counter()
    step = build(experiment, phase, devices)
    from meshscope.programs.jax.stablehlo import memory_analysis  # JAX after torch_xla

    seconds = {"import": described - started, "lower": 0.0, "compile": 0.0, "write": 0.0}
    analyses: list[dict[str, int]] = []
    lowering_since = described
    for name, program in step.programs.items():
        lowered = program.lower()
        lowered_at = time.perf_counter()
        compiled = lowered.compile()
        compiled_at = time.perf_counter()
        path = out_dir / program_file(phase, name)
        with gzip.open(path, "wt", GZIP_LEVEL, encoding="utf-8") as file:
            file.write(compiled.as_text())
        analyses.append(memory_analysis(compiled))
        seconds["lower"] += lowered_at - lowering_since
        seconds["compile"] += compiled_at - lowered_at
        lowering_since = time.perf_counter()
        seconds["write"] += lowering_since - compiled_at
    return {
        "flags": {name: os.environ[name] for name in FLAGS if name in os.environ},
        "seconds": seconds,
        "memory": _memory(analyses, step.resident_bytes),
        "versions": _versions(experiment),
        "programs": list(step.programs),
        "order": [devices.index(device) for device in step.devices],
        "devices": [_device(device, experiment.topology.chip.kind) for device in step.devices],
    }


def _memory(analyses: Sequence[Mapping[str, int]], resident_bytes: int | None) -> dict[str, int]:
    """The memory of the largest program, with the weights and caches that only others read.

    `resident_bytes` are those of all weights and caches, without the padding of their layouts.
    """
    memory = dict(max(analyses, key=_peak_bytes))
    if resident_bytes is not None:
        memory["argument_bytes"] = max(memory["argument_bytes"], resident_bytes)
        memory["temp_bytes"] = max(analysis["temp_bytes"] for analysis in analyses)
    return memory


def _peak_bytes(analysis: Mapping[str, int]) -> int:
    written = analysis["output_bytes"] - analysis["alias_bytes"]
    return analysis["argument_bytes"] + analysis["temp_bytes"] + written


def _versions(experiment: Experiment) -> dict[str, str]:
    is_gpu = experiment.topology.chip.kind is ChipKind.GPU
    names = ["jax", "jaxlib", plugin() if is_gpu else "libtpu"]
    names = [*frontend_of(experiment).packages, *names]
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
    return reported(
        lambda: compile_program(experiment, phase, int(chunk), directory),
        directory / f"{phase}.json",
        error_report(Path(experiment_file), phase),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
