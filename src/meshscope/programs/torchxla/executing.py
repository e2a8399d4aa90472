"""Runs a traced program on live devices with the torch_xla runtime.

torch_xla traces the collectives of manual regions for replicas, which an SPMD program cannot run.
The program rewritten for partitions (`lowering.py`) is passed back as a user computation: a single
operation of a graph that the torch_xla runtime compiles and runs.
"""

# pyright: reportMissingImports=false
import gc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_builder as xb
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr

from meshscope.errors import SpecError
from meshscope.programs.torchxla.layouts import Spec
from meshscope.programs.torchxla.program import POSITION, TOKENS, TracedProgram
from meshscope.programs.torchxla.tensors import TORCH_DTYPES, partition
from meshscope.spec.hardware.topology import Topology

_XLAC = torch_xla._XLAC  # noqa: SLF001  computations and names of graphs have no public name
OTHERS = "others"  # name of graphs that are not steps


def open_devices(topology: Topology) -> list[dict[str, Any]]:
    """Open the devices of the slice in torch_xla; SpecError if their number differs."""
    kind = topology.chip.kind.value
    try:
        xr.use_spmd()
        _XLAC._xla_set_enable_alias_with_buffer_donor_config(True)  # noqa: SLF001
        devices = xr.global_runtime_device_attributes()
    except RuntimeError as error:
        raise SpecError(
            f"'{topology.name}' needs {kind} devices, but torch_xla opens none ({str(error)[:200]}). "
            "Run on a machine with such devices, or use --topology cpu:8 for virtual CPU devices."
        ) from error
    if len(devices) != topology.n_devices:
        raise SpecError(
            f"'{topology.name}' has {topology.n_devices} devices, but torch_xla opens {len(devices)} and "
            f"runs programs on all of them. Use a topology with {len(devices)} devices."
        )
    return [dict(device) for device in devices]


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveProgram:
    """A traced program that is callable on torch_xla tensors."""

    program: TracedProgram
    computation: Any
    mesh: Any

    def placed(self, name: str, value: Any) -> Any:
        """An argument's value on the devices, sharded by the plan."""
        argument = self.program.arguments[name]
        array = torch.as_tensor(value).to(TORCH_DTYPES[argument.dtype])
        tensor = array.reshape(argument.shape).to(torch_xla.device())
        xs.mark_sharding(tensor, self.mesh, partition(argument.spec))
        return tensor

    def zeros(self, name: str) -> Any:
        """An argument filled with zeros on the devices."""
        argument = self.program.arguments[name]
        dtype = TORCH_DTYPES[argument.dtype]
        tensor = torch.zeros(argument.shape, dtype=dtype, device=torch_xla.device())
        return self._laid_out(tensor, argument.spec)

    def __call__(
        self, weights: Mapping[str, Any], tokens: Any, cache: Mapping[str, Any], position: Any
    ) -> tuple[Any, Any, dict[str, Any]]:
        """Run one step: next tokens [B], logits [B, 1, V] and the new cache by name, on the devices.

        `tokens` is [B, S], or the next tokens [B] of the previous step.
        """
        if tokens.dim() == 1:
            tokens = self._laid_out(tokens[:, None], self.program.arguments[TOKENS].spec)
        given = {**weights, **cache, TOKENS: tokens, POSITION: position}
        phase = self.program.phase.value
        arguments = [given[name] for name in self.program.traced.parameters if name is not None]
        for array in cache.values():
            _XLAC._set_buffer_donation(array, True)  # noqa: SLF001  reuse its memory
        call = _XLAC._xla_user_computation  # noqa: SLF001
        results = call(f"xla::{phase}", arguments, self.computation)
        for result, spec in zip(results, self.program.result_specs, strict=True):
            self._laid_out(result, spec)
        _XLAC._set_current_graph_name(phase)  # noqa: SLF001  module name in HLO and profile
        under_way(results, is_waited_for=True)  # shards are not accessible before
        _XLAC._set_current_graph_name(OTHERS)  # noqa: SLF001
        next_tokens, logits, *kept = results
        return next_tokens, logits, dict(zip(self.program.cache, kept, strict=True))

    def _laid_out(self, tensor: Any, spec: Spec) -> Any:
        sharding = self.mesh.get_op_sharding(partition(spec))
        _XLAC._xla_annotate_custom_sharding(tensor, sharding)  # noqa: SLF001
        return tensor


def under_way(tensors: list[Any], *, is_waited_for: bool = False) -> None:
    """Start the computation of exactly these tensors; wait for it if `is_waited_for`."""
    _XLAC._xla_sync_multi(tensors, [], is_waited_for, True)  # noqa: SLF001


def host_array(tensor: Any) -> np.ndarray:
    """The whole tensor on the host, assembled from its shards.

    `tensor.cpu()` would compile a gather program on each call.
    """
    parts = _XLAC._get_local_shards([tensor])[0]  # noqa: SLF001
    places = _XLAC._get_local_shard_replica_and_indices([tensor])[0]  # noqa: SLF001
    whole = np.zeros(tuple(tensor.shape), parts[0][0].numpy().dtype)
    for (part, _), (_, index) in zip(parts, places, strict=True):
        at = index if index is Ellipsis else tuple(index)
        whole[at] = part.numpy()
    return whole


def live_program(program: TracedProgram) -> LiveProgram:
    """Pass the program to torch_xla, which compiles it on the first call."""
    mesh = program.layouts.mesh
    return LiveProgram(
        program=program,
        computation=xb.computation_from_module_proto(program.phase.value, program.lower().proto()),
        mesh=xs.Mesh(np.arange(mesh.n_devices), mesh.sizes, mesh.names),
    )


def order_of_collectives() -> Any:
    """A zero for torch_xla's ordering token, which the rewritten program does not read."""
    return torch.zeros(()).to(torch_xla.device())


def forget_traces() -> None:
    """Free traced placeholder tensors, which torch_xla would compute with the next graph."""
    _XLAC._set_all_reduce_token(str(torch_xla.device()), None)  # noqa: SLF001
    gc.collect()  # modules and their hooks reference each other
