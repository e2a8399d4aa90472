"""Compiles StableHLO for described devices as JAX would, and hashes it.

The hash of a program stays the same if the code that compiles it moves: JAX gives the end of a program the
source line of its caller. The lines of the function itself count, as tables show them.
"""

# pyright: reportPrivateImportUsage=false, reportPrivateUsage=false
import gzip
import hashlib
import inspect
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax._src import compiler
from jax._src.interpreters import mlir
from jax._src.lib import _jax
from jax._src.lib import xla_client as xc
from jax._src.lib.mlir import ir

from meshscope.errors import ParseError


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


MAX_PROGRAM_BYTES = 1 << 30
_PORTABLE = b"StableHLO_v"  # the producer of a portable artifact, as jax.export writes them
_PARTITIONS = "mhlo.num_partitions"
_MAIN = '"main"'
_SHARDINGS = ("sdy.sharding", "mhlo.sharding")


def saved_program(content: bytes, n_devices: int, *, origin: str) -> tuple[bytes, dict[str, Any]]:
    """The bytecode of StableHLO that a user saved, and the options of a request that compiles it as JAX would.

    Text, bytecode, or a portable artifact, also gzipped. ParseError if it is none of them, or is for another number
    of devices.
    """
    if content.startswith(b"\x1f\x8b"):
        with gzip.open(io.BytesIO(content)) as packed:
            content = packed.read(MAX_PROGRAM_BYTES)
    try:
        with mlir.make_ir_context(), ir.Location.unknown():
            is_portable = _PORTABLE in content[:256]
            read = _jax.mlir.deserialize_portable_artifact if is_portable else ir.Module.parse
            module = read(content)
            module.operation.verify()
            facts: Any = module.operation.attributes
            main: Any = next(op for op in module.body if str(getattr(op, "name", "")) == _MAIN)
            is_open = {
                name: [not any(key in fact for key in _SHARDINGS) for fact in main.attributes[name]]
                if name in main.attributes
                else [True]
                for name in ("arg_attrs", "res_attrs")
            }
            n_partitions = facts[_PARTITIONS].value if _PARTITIONS in facts else n_devices
            text, bytecode = str(module), mlir.module_to_bytecode(module)
    except (ir.MLIRError, RuntimeError, ValueError, StopIteration) as error:
        reason = (str(error) or "it has no function main").strip().splitlines()[0]
        raise ParseError(
            f"{origin}: not StableHLO that this JAX reads ({reason[:200]}). "
            "Save `jax.jit(f).lower(...).as_text()` with a JAX as new as this one, or export it."
        ) from error
    if n_partitions != n_devices:
        raise ParseError(
            f"{origin}: lowered for {n_partitions} devices, and the slice has {n_devices}. Name a slice of as many devices."
        )
    return bytecode, {
        "compiler_options": None,
        "is_tupled": False,
        "is_shardy": "sdy." in text,
        "propagates_to_parameters": tuple(is_open["arg_attrs"]),
        "propagates_to_outputs": tuple(is_open["res_attrs"]),
    }


def compile_stablehlo(
    module: bytes, devices: Sequence[Any], *, options: Mapping[str, Any], is_loaded: bool = False
) -> CompiledStableHlo:
    """The program, bytecode or text, for these devices in their order, described or loaded; `options` are a request's."""
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
        client = devices[0].client
        executable = (client.compile_and_load if is_loaded else client.compile)(
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
        "code_bytes": analysis.generated_code_size_in_bytes,
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
