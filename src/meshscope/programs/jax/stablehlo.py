"""Compiles StableHLO for described devices as JAX would, and hashes it.

The hash of a program stays the same if the code that compiles it moves: JAX gives the end of a program the
source line of its caller. The lines of the function itself count, as tables show them.
"""

# pyright: reportPrivateImportUsage=false, reportPrivateUsage=false
import hashlib
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax._src import compiler
from jax._src.interpreters import mlir
from jax._src.lib import xla_client as xc
from jax._src.lib.mlir import ir


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledStableHlo:
    """A compiled program with the used part of the interface of `jax.stages.Compiled`."""

    executable: Any

    def as_text(self) -> str:
        """Optimized HLO text."""
        return self.executable.hlo_modules()[0].to_string()

    def memory_analysis(self) -> Any:
        """The compiler's memory statistics of one device."""
        return self.executable.get_compiled_memory_stats()


def portable_text(bytecode: bytes) -> bytes:
    """The program as text with its source lines, which other versions of MLIR read, unlike bytecode."""
    with mlir.make_ir_context():
        return str(ir.Module.parse(bytecode).operation.get_asm(enable_debug_info=True)).encode()


def compile_stablehlo(
    module: bytes, devices: Sequence[Any], *, options: Mapping[str, Any]
) -> CompiledStableHlo:
    """The program, bytecode or text, for these devices in their order; `options` are a request's."""
    build_options = compiler.get_compile_options(
        num_replicas=1,
        num_partitions=len(devices),
        device_assignment=np.array(devices, dtype=object).reshape(1, -1),
        env_options_overrides=options["compiler_options"],
    )
    build_options.parameter_is_tupled_arguments = options["is_tupled"]
    build = build_options.executable_build_options
    build.use_shardy_partitioner = options["is_shardy"]
    build.allow_spmd_sharding_propagation_to_parameters = options["propagates_to_parameters"]
    build.allow_spmd_sharding_propagation_to_output = options["propagates_to_outputs"]
    with mlir.make_ir_context(), ir.Location.unknown():
        executable = devices[0].client.compile(
            ir.Module.parse(module),
            executable_devices=xc.DeviceList(tuple(devices)),
            compile_options=build_options,
        )
    return CompiledStableHlo(executable=executable)


def memory_analysis(compiled: Any) -> dict[str, int]:
    """The memory that a compiled program needs on one device, in bytes."""
    analysis = compiled.memory_analysis()
    return {
        "argument_bytes": analysis.argument_size_in_bytes,
        "output_bytes": analysis.output_size_in_bytes,
        "alias_bytes": analysis.alias_size_in_bytes,
        "temp_bytes": analysis.temp_size_in_bytes,
    }


def cost_analysis(compiled: Any) -> dict[str, float]:
    """FLOPs and bytes of a compiled program on one device; loop bodies count once."""
    names = {"flops": "flops", "accessed_bytes": "bytes accessed"}
    analysis = compiled.cost_analysis() or {}
    return {name: float(analysis[key]) for name, key in names.items() if key in analysis}


_LOCATION = re.compile(r'"((?:[^"\\]|\\.)*)":(\d+):(\d+)')
_NOWHERE = '"":0:0'


def program_digest(module: Any) -> str:
    """The hash of a StableHLO module with its source locations, except in the current callers."""
    callers: set[tuple[str, int, int]] = set()
    frame = inspect.currentframe()
    while frame is not None:
        line, _, column, _ = list(frame.f_code.co_positions())[frame.f_lasti // 2]
        if line is not None and column is not None:
            callers.add((frame.f_code.co_filename, line, column))
        frame = frame.f_back

    def kept(match: re.Match[str]) -> str:
        place = (match[1], int(match[2]), int(match[3]))
        return _NOWHERE if place in callers else match[0]

    text = module.operation.get_asm(enable_debug_info=True)
    return hashlib.sha256(_LOCATION.sub(kept, text).encode()).hexdigest()
