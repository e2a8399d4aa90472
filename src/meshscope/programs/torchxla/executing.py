"""A traced program on live devices, run by torch_xla itself.

What torch_xla writes for manual regions it does not run: collectives of replicas, of which an SPMD
program has one. The program that was made ready for partitions (`lowering.py`) comes back to it as a
computation that it calls: one operation of a graph of its own, which its runtime compiles and runs.
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
OTHERS = "others"  # the name of graphs that are no steps


def open_devices(topology: Topology) -> list[dict[str, Any]]:
    """The devices that torch_xla opens, one for each of the slice; SpecError when there are others."""
    kind = topology.chip.kind.value
    try:
        xr.use_spmd()
        _XLAC._xla_set_enable_alias_with_buffer_donor_config(True)  # noqa: SLF001
        found = xr.global_runtime_device_attributes()
    except RuntimeError as error:
        raise SpecError(
            f"'{topology.name}' needs {kind} devices, and torch_xla opens none here ({str(error)[:200]}). "
            "Run it on such a machine, or use --topology cpu:8 for virtual CPU devices."
        ) from error
    if len(found) != topology.n_devices:
        raise SpecError(
            f"'{topology.name}' has {topology.n_devices} devices, and torch_xla opens {len(found)} here, all "
            f"of which take part in its programs. Use a topology of {len(found)}."
        )
    return [dict(device) for device in found]


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveProgram:
    """A traced program, ready to be called on tensors of torch_xla."""

    program: TracedProgram
    computation: Any
    mesh: Any

    def placed(self, name: str, value: Any) -> Any:
        """The value of an argument on the devices, as the plan lays it out."""
        argument = self.program.arguments[name]
        array = torch.as_tensor(value).to(TORCH_DTYPES[argument.dtype])
        tensor = array.reshape(argument.shape).to(torch_xla.device())
        xs.mark_sharding(tensor, self.mesh, partition(argument.spec))
        return tensor

    def zeros(self, name: str) -> Any:
        """An argument of zeros that the devices make."""
        argument = self.program.arguments[name]
        dtype = TORCH_DTYPES[argument.dtype]
        tensor = torch.zeros(argument.shape, dtype=dtype, device=torch_xla.device())
        return self._laid_out(tensor, argument.spec)

    def __call__(
        self, weights: Mapping[str, Any], tokens: Any, cache: Mapping[str, Any], position: Any
    ) -> tuple[Any, Any, dict[str, Any]]:
        """Next tokens [B], logits [B, 1, V] and the new cache by name, on the devices.

        `tokens` is [B, S], or the [B] of the step before.
        """
        if tokens.dim() == 1:
            tokens = self._laid_out(tokens[:, None], self.program.arguments[TOKENS].spec)
        given = {**weights, **cache, TOKENS: tokens, POSITION: position}
        phase = self.program.phase.value
        arguments = [given[name] for name in self.program.traced.parameters if name is not None]
        for array in cache.values():
            _XLAC._set_buffer_donation(array, True)  # noqa: SLF001  its memory is the new one's
        call = _XLAC._xla_user_computation  # noqa: SLF001
        results = call(f"xla::{phase}", arguments, self.computation)
        for result, spec in zip(results, self.program.result_specs, strict=True):
            self._laid_out(result, spec)
        _XLAC._set_current_graph_name(phase)  # noqa: SLF001  the module's, in HLO and profile
        under_way(results, is_waited_for=True)  # until then no part of a result can be asked for
        _XLAC._set_current_graph_name(OTHERS)  # noqa: SLF001
        next_tokens, logits, *kept = results
        return next_tokens, logits, dict(zip(self.program.cache, kept, strict=True))

    def _laid_out(self, tensor: Any, spec: Spec) -> Any:
        sharding = self.mesh.get_op_sharding(partition(spec))
        _XLAC._xla_annotate_custom_sharding(tensor, sharding)  # noqa: SLF001
        return tensor


def under_way(tensors: list[Any], *, is_waited_for: bool = False) -> None:
    """Has these tensors computed, and no others."""
    _XLAC._xla_sync_multi(tensors, [], is_waited_for, True)  # noqa: SLF001


def host_array(tensor: Any) -> np.ndarray:
    """The whole tensor, once every device has made its part of it.

    `tensor.cpu()` would compile a program to gather the parts, anew each time.
    """
    parts = _XLAC._get_local_shards([tensor])[0]  # noqa: SLF001
    places = _XLAC._get_local_shard_replica_and_indices([tensor])[0]  # noqa: SLF001
    whole = np.zeros(tuple(tensor.shape), parts[0][0].numpy().dtype)
    for (part, _), (_, index) in zip(parts, places, strict=True):
        at = index if index is Ellipsis else tuple(index)
        whole[at] = part.numpy()
    return whole


def live_program(program: TracedProgram) -> LiveProgram:
    """Hands the program to torch_xla; it is compiled when it first runs."""
    mesh = program.layouts.mesh
    return LiveProgram(
        program=program,
        computation=xb.computation_from_module_proto(program.phase.value, program.lower().proto()),
        mesh=xs.Mesh(np.arange(mesh.n_devices), mesh.sizes, mesh.names),
    )


def order_of_collectives() -> Any:
    """The zero that stands for torch_xla's token; nothing in a repaired program reads it."""
    return torch.zeros(()).to(torch_xla.device())


def forget_traces() -> None:
    """Lets go of what was traced without memory: torch_xla would compute it with the next graph."""
    _XLAC._set_all_reduce_token(str(torch_xla.device()), None)  # noqa: SLF001
    gc.collect()  # modules and their hooks hold each other
