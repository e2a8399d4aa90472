"""Rewrites a program traced by torch_xla for the XLA compiler of another target, and compiles it.

torch_xla emits an HLO proto; JAX's compiler client takes StableHLO. The rewrite shards arguments by
the plan, aliases results with the arguments they replace, turns cross-replica collectives into
cross-partition ones (an SPMD program has one replica), and replaces the token with which torch_xla
orders collectives by a constant.
"""

# pyright: reportPrivateImportUsage=false, reportPrivateUsage=false
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax._src.interpreters import mlir as jax_mlir
from jax._src.lib import _jax
from jax._src.lib import xla_client as xc
from jax._src.lib.mlir import ir

from meshscope.errors import ParseError
from meshscope.programs.jax.stablehlo import CompiledStableHlo
from meshscope.programs.torchxla.regions import mark_regions, outline_branches

_PARAMETER = re.compile(r"^\s+(?:ROOT )?%\S+ = \S+ parameter\((?P<number>\d+)\)")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
ORDER = "order"  # name of the zero argument with which torch_xla orders collectives
_OF_GROUPS = ("all_reduce", "all_gather", "reduce_scatter")
_OF_DEVICES = ("all_to_all", "collective_permute")
_PARTITIONS = 1  # channel type between devices of one program (xla_data.proto, ChannelType)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """A program as torch_xla traced it.

    `parameters` are the argument names by number, None if unnamed; () for imported programs, whose
    arguments are left unchanged. `shardings` has XLA's text per named argument, `result_shardings`
    per result, and `aliases` the argument whose memory a result reuses.
    """

    proto: bytes
    parameters: tuple[str | None, ...] = ()
    shardings: Mapping[str, str] = field(default_factory=dict)
    result_shardings: tuple[str | None, ...] = ()
    aliases: Mapping[int, str] = field(default_factory=dict)


def parameters_of(
    proto: bytes, prefix: str, *, origin: str = "the traced program"
) -> tuple[str | None, ...]:
    """Parameter names by number, from the scopes in which they were created."""
    text = hlo_text(proto, origin)
    names: dict[int, str | None] = {}
    for line in text[text.index("\nENTRY ") :].splitlines():
        if match := _PARAMETER.match(line):
            op_name = _OP_NAME.search(line)
            names[int(match["number"])] = _named(op_name[1] if op_name else "", prefix)
    return tuple(names[number] for number in range(len(names)))


def _named(op_name: str, prefix: str) -> str | None:
    """The part of an op_name component after the prefix, without the uniquifying suffix."""
    for component in op_name.split("/"):
        if component.startswith(prefix):
            return re.sub(r"\.\d+$", "", component.removeprefix(prefix))
    return None


def hlo_text(proto: bytes, origin: str) -> str:
    """The text of an HLO proto; ParseError if invalid."""
    try:
        module = xc.hlo.HloModule.from_serialized_hlo_module_proto(proto)
        return module.to_string()
    except (RuntimeError, ValueError, xc.XlaRuntimeError) as error:
        raise ParseError(
            f"{origin}: not an HLO proto ({str(error)[:200]}). Save one with "
            "torch_xla._XLAC._get_xla_tensors_hlo_proto([tensors])."
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowered:
    """A StableHLO program for these devices, with `n_channels` cross-partition collectives."""

    module: Any
    context: Any
    devices: list[Any]
    n_channels: int

    def compile(self) -> CompiledStableHlo:
        """Compile with the client of the devices."""
        options = _options(self.devices)
        client = self.devices[0].client
        with self.context:
            executable = client.compile(
                self.module,
                executable_devices=xc.DeviceList(tuple(self.devices)),
                compile_options=options,
            )
        return CompiledStableHlo(executable=executable)

    def proto(self) -> bytes:
        """The program as an HLO proto with its scopes, for another runtime."""
        with self.context:
            text = self.module.operation.get_asm(enable_debug_info=True)
            computation = _jax.mlir.mlir_module_to_xla_computation(
                text, use_tuple_args=False, return_tuple=False
            )
        return computation.as_serialized_hlo_module_proto()

    def load(self) -> Any:
        """Compile and load the program on attached devices."""
        options = _options(self.devices)
        with self.context:
            return self.devices[0].client.compile_and_load(
                self.module, xc.DeviceList(tuple(self.devices)), options
            )


def lowered(traced: Traced, devices: list[Any], *, name: str) -> Lowered:
    """Lower the traced program for these devices, in their order."""
    try:
        bytecode = _jax.mlir.hlo_to_stablehlo(traced.proto)
    except (RuntimeError, ValueError) as error:
        raise ParseError(
            f"the graph is not an HLO proto that this XLA can read ({str(error)[:200]}). Save one with "
            "torch_xla._XLAC._get_xla_tensors_hlo_proto([tensors])."
        ) from error
    context = jax_mlir.make_ir_context()
    with context, ir.Location.unknown():
        module = ir.Module.parse(bytecode)
        main = next(op for op in module.body if _symbol(op) == "main")
        module.operation.attributes["sym_name"] = ir.StringAttr.get(name)
        n_channels = _with_channels(module)
        if traced.parameters:
            _with_layouts(main, traced)
            _without_tokens(main, traced)
        mark_regions(main)
        outline_branches(main)
    return Lowered(module=module, context=context, devices=devices, n_channels=n_channels)


def _symbol(op: Any) -> str | None:
    attributes = op.attributes
    return ir.StringAttr(attributes["sym_name"]).value if "sym_name" in attributes else None


def _operations(op: Any) -> Iterator[Any]:
    for region in op.regions:
        for block in region:
            for inner in block:
                yield inner.operation
                yield from _operations(inner.operation)


def _with_channels(module: Any) -> int:
    """Give every collective a unique channel; returns the number of collectives."""
    n_channels = 0
    for op in _operations(module.operation):
        name = op.name.removeprefix("stablehlo.")
        if name not in (*_OF_GROUPS, *_OF_DEVICES):
            continue
        n_channels += 1
        op.attributes["channel_handle"] = ir.Attribute.parse(
            f"#stablehlo.channel_handle<handle = {n_channels}, type = {_PARTITIONS}>"
        )
        if name in _OF_GROUPS:
            op.attributes["use_global_device_ids"] = ir.UnitAttr.get()
    return n_channels


def _with_layouts(main: Any, traced: Traced) -> None:
    number_of = {name: number for number, name in enumerate(traced.parameters) if name is not None}
    arguments: list[dict[str, Any]] = [{} for _ in traced.parameters]
    for name, text in traced.shardings.items():
        if name in number_of:  # unused arguments are removed by the trace
            arguments[number_of[name]]["mhlo.sharding"] = ir.StringAttr.get(text)
    for result, name in traced.aliases.items():
        if name in number_of:
            index = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), result)
            arguments[number_of[name]]["tf.aliasing_output"] = index
    main.attributes["arg_attrs"] = ir.ArrayAttr.get([ir.DictAttr.get(a) for a in arguments])
    results: list[dict[str, Any]] = [
        {} if text is None else {"mhlo.sharding": ir.StringAttr.get(text)}
        for text in traced.result_shardings
    ]
    if results:
        main.attributes["res_attrs"] = ir.ArrayAttr.get([ir.DictAttr.get(a) for a in results])


def _without_tokens(main: Any, traced: Traced) -> None:
    """Replace ordering tokens by a constant zero; ParseError for other unnamed arguments."""
    block = main.regions[0].blocks[0]
    for number, name in enumerate(traced.parameters):
        argument = block.arguments[number]
        if name is None:
            raise ParseError(
                f"argument {number} of the traced program ({argument.type}) has no name: torch_xla "
                "transferred it to a device while tracing. Pass it as an argument."
            )
        if name != ORDER:
            continue
        kind = ir.RankedTensorType(argument.type)
        zero = ir.DenseElementsAttr.get_splat(kind, ir.FloatAttr.get(kind.element_type, 0.0))
        place = ir.InsertionPoint.at_block_begin(block)
        constant = ir.Operation.create(
            "stablehlo.constant", results=[kind], attributes={"value": zero}, ip=place
        )
        argument.replace_all_uses_with(constant.results[0])


def _options(devices: list[Any]) -> Any:
    """Options for one program partitioned over all devices by torch_xla's annotations (GSPMD)."""
    options = xc.CompileOptions()
    options.num_replicas, options.num_partitions = 1, len(devices)
    build = options.executable_build_options
    build.num_replicas, build.num_partitions = 1, len(devices)
    build.use_spmd_partitioning = True
    build.use_auto_spmd_partitioning = False
    build.use_shardy_partitioner = False
    assignment = xc.DeviceAssignment.create(np.array([[device.id for device in devices]]))
    options.device_assignment = build.device_assignment = assignment
    return options
