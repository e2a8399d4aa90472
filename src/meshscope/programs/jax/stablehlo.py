"""Compiles StableHLO for described devices, with the options that JAX would give."""

# pyright: reportPrivateImportUsage=false, reportPrivateUsage=false
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
    """The program, bytecode or text, for these devices in their order; `options` are those of a request."""
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
