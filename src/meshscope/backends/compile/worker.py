"""The work of processes that compile programs for a described TPU slice, without the hardware.

A separate process lets programs compile concurrently and turns a compiler crash into an error message.
Each function takes a request (`meshscope.workers`), writes the scheduled HLO and returns a report.
"""

import os
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from meshscope.events.enums import Phase
from meshscope.files import write_gzip
from meshscope.hardware.topology import Topology, parse_topology
from meshscope.plans.experiment import Experiment, experiment_from_dict
from meshscope.programs.frontends import frontend_of, program_file

# Makes the compiler report the memory of a program that does not fit, instead of failing.
LIBTPU_FLAGS = "--xla_tpu_no_crash_on_oom=true"

FLAGS = ("LIBTPU_INIT_ARGS", "XLA_FLAGS")
PACKAGES = ("jax", "jaxlib", "libtpu")

# What libtpu reads to describe a TPU on a machine without one.
DESCRIPTION = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # several processes compile concurrently
    "TPU_ACCELERATOR_TYPE": "v6e-8",  # this and the next only silence warnings
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}


def set_environment() -> None:
    """Sets the environment variables of JAX and libtpu. Call it before importing either."""
    flags = os.environ.get("LIBTPU_INIT_ARGS", "").removeprefix(LIBTPU_FLAGS)
    flags = f"{LIBTPU_FLAGS} {flags.strip()}".strip()
    os.environ |= DESCRIPTION | {
        "JAX_PLATFORMS": "cpu",
        "LIBTPU_INIT_ARGS": flags,
    }  # no TPU is used


def slice_devices(topology: Topology) -> list[Any]:
    """The devices of the slice as the compiler describes them, in compiler order."""
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


def compile_phase(request: Mapping[str, Any]) -> dict[str, Any]:
    """Compiles a program of an experiment."""
    experiment = experiment_from_dict(request["experiment"])
    set_environment()
    phase, folder = Phase(request["phase"]), Path(request["folder"])
    return compile_program(experiment, phase, request["chunk"], folder)


def compile_program(
    experiment: Experiment, phase: Phase, chunk: int, out_dir: Path
) -> dict[str, Any]:
    """Compiles the programs of a step, writes their HLO texts, and returns the report as JSON values."""
    topology, frontend = experiment.topology, frontend_of(experiment)
    started = time.perf_counter()
    build = frontend.builder(experiment, chunk)
    devices = slice_devices(topology)
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
        write_gzip(out_dir / program_file(phase, name), compiled.as_text())
        analyses.append(memory_analysis(compiled))
        seconds["lower"] += lowered_at - lowering_since
        seconds["compile"] += compiled_at - lowered_at
        lowering_since = time.perf_counter()
        seconds["write"] += lowering_since - compiled_at
    return {
        "flags": {name: os.environ[name] for name in FLAGS if name in os.environ},
        "seconds": seconds,
        "memory": step_memory(analyses, step.resident_bytes),
        "versions": {name: version(name) for name in (*frontend.packages, *PACKAGES)},
        "programs": list(step.programs),
        "order": [devices.index(device) for device in step.devices],
        # HLO text refers to devices by their position in this list.
        "devices": [
            {
                "id": device.id,
                "coords": list(device.coords),
                "core_on_chip": device.core_on_chip,
                "slice_index": getattr(device, "slice_index", None),
                "process_index": device.process_index,
            }
            for device in step.devices
        ],
    }


def step_memory(
    analyses: Sequence[Mapping[str, int]], resident_bytes: int | None
) -> dict[str, int]:
    """The memory of the largest program, with the weights and caches that only others read, and the code of all.

    `resident_bytes` counts all weights and caches, without the padding of their layouts.
    """

    def peak_bytes(analysis: Mapping[str, int]) -> int:
        written = analysis["output_bytes"] - analysis["alias_bytes"]
        return analysis["argument_bytes"] + analysis["temp_bytes"] + written

    memory = dict(max(analyses, key=peak_bytes))
    memory["code_bytes"] = sum(analysis["code_bytes"] for analysis in analyses)
    if resident_bytes is not None:
        memory["argument_bytes"] = max(memory["argument_bytes"], resident_bytes)
        memory["temp_bytes"] = max(analysis["temp_bytes"] for analysis in analyses)
    return memory


def compile_function(request: Mapping[str, Any]) -> dict[str, Any]:
    """Compiles StableHLO; without options, a saved program, which says by itself how it is to be compiled."""
    set_environment()
    from meshscope.programs.jax.stablehlo import compile_stablehlo, memory_analysis, saved_program

    started = time.perf_counter()
    program, options = Path(request["program"]).read_bytes(), request["options"]
    devices = slice_devices(parse_topology(request["topology"]))
    if not options:
        program, options = saved_program(program, len(devices), origin=request["program"])
    compiled = compile_stablehlo(program, devices, options=options)
    compiled_at = time.perf_counter()
    write_gzip(Path(request["text"]), compiled.as_text())
    return {
        "seconds": {"compile": compiled_at - started},
        "memory": memory_analysis(compiled),
        "versions": {name: version(name) for name in PACKAGES},
    }
