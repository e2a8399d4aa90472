"""Timed requests and a profiled request on live devices with torch_xla.

The counterpart of `backends/live/session.py` for JAX: same requests, step marks and output folder.

torch_xla traces the collectives of manual regions for replicas, which an SPMD program cannot run.
The program rewritten for partitions (`lowering.py`) is passed back as a user computation: a single
operation of a graph that the torch_xla runtime compiles and runs.
"""

# pyright: reportMissingImports=false
import gc
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_builder as xb
import torch_xla.debug.profiler as xp
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr

from meshscope.errors import RunFailedError, SpecError
from meshscope.events.enums import Phase
from meshscope.hardware.topology import Topology
from meshscope.plans.experiment import Experiment
from meshscope.programs.torchxla.layouts import Spec, partition
from meshscope.programs.torchxla.lowering import ORDER
from meshscope.programs.torchxla.program import POSITION, TOKENS, TracedProgram, build_program
from meshscope.programs.torchxla.tensors import TORCH_DTYPES

DRAIN_S = 0.25  # events that end after the profiler stops are lost
_ALLOCATION = re.compile(r"^allocation \d+: size (?P<size>\d+), (?P<what>.*):$", re.MULTILINE)
_XLAC = torch_xla._XLAC  # computations and names of graphs have no public name
OTHERS = "others"  # name of graphs that are not steps
WeightValues = Callable[[TracedProgram], Iterable[tuple[str, Any]]]


def open_devices(topology: Topology) -> None:
    """Open the devices of the slice in torch_xla; SpecError if their number differs."""
    kind = topology.chip.kind.value
    try:
        xr.use_spmd()
        _XLAC._xla_set_enable_alias_with_buffer_donor_config(True)
        n_devices = len(xr.global_runtime_device_attributes())
    except RuntimeError as error:
        raise SpecError(
            f"'{topology.name}' needs {kind} devices, but torch_xla opens none ({str(error)[:200]}). "
            "Run on a machine with such devices, or use --topology cpu:8 for virtual CPU devices."
        ) from error
    if n_devices != topology.n_devices:
        raise SpecError(
            f"'{topology.name}' has {topology.n_devices} devices, but torch_xla opens {n_devices} and "
            f"runs programs on all of them. Use a topology with {n_devices} devices."
        )


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

    def __call__(
        self, weights: Mapping[str, Any], tokens: Any, cache: Mapping[str, Any], position: Any
    ) -> tuple[Any, Any, dict[str, Any]]:
        """Run one step: next tokens [B], logits [B, 1, V] and the new cache by name, on the devices.

        `tokens` is [B, S], or the next tokens [B] of the previous step.
        """
        if tokens.dim() == 1:
            tokens = self.laid_out(tokens[:, None], self.program.arguments[TOKENS].spec)
        given = {**weights, **cache, TOKENS: tokens, POSITION: position}
        phase = self.program.phase.value
        arguments = [given[name] for name in self.program.parameters if name is not None]
        for array in cache.values():
            _XLAC._set_buffer_donation(array, True)  # reuse its memory
        results = _XLAC._xla_user_computation(f"xla::{phase}", arguments, self.computation)
        for result, spec in zip(results, self.program.result_specs, strict=True):
            self.laid_out(result, spec)
        _XLAC._set_current_graph_name(phase)  # module name in HLO and profile
        wait_for(results)  # shards are not accessible before
        _XLAC._set_current_graph_name(OTHERS)
        next_tokens, logits, *kept = results
        return next_tokens, logits, dict(zip(self.program.cache, kept, strict=True))

    def laid_out(self, tensor: Any, spec: Spec) -> Any:
        """The tensor, sharded by this spec."""
        sharding = self.mesh.get_op_sharding(partition(spec))
        _XLAC._xla_annotate_custom_sharding(tensor, sharding)
        return tensor


def wait_for(tensors: list[Any]) -> None:
    """Compute exactly these tensors, and wait for them."""
    _XLAC._xla_sync_multi(tensors, [], True, True)


def host_array(tensor: Any) -> np.ndarray:
    """The whole tensor on the host, assembled from its shards.

    `tensor.cpu()` would compile a gather program on each call.
    """
    parts = _XLAC._get_local_shards([tensor])[0]
    places = _XLAC._get_local_shard_replica_and_indices([tensor])[0]
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
    _XLAC._set_all_reduce_token(str(torch_xla.device()), None)
    gc.collect()  # modules and their hooks reference each other


@dataclass(slots=True, kw_only=True)
class TorchSession:
    """State on the devices between requests.

    `dumps` is XLA's dump folder; `positions` holds the position of each step's first token.
    """

    experiment: Experiment
    programs: dict[Phase, LiveProgram]
    weights: dict[str, Any]
    prompt: Any
    positions: list[Any]
    dumps: Path
    seconds: dict[str, float] = field(default_factory=dict)

    @classmethod
    def started(
        cls,
        experiment: Experiment,
        *,
        values: WeightValues,
        prompt: np.ndarray,
        dumps: Path,
        report: Callable[[str], None],
    ) -> "TorchSession":
        """Trace both phases, place the weights, read or random, and the prompt [B, S], and compile.

        torch_xla compiles on the first run, so `compile` includes the time of that step.
        """
        report("tracing")
        traced = {phase: build_program(experiment, phase, []) for phase in experiment.phases}
        programs = {phase: live_program(program) for phase, program in traced.items()}
        forget_traces()
        report("placing weights")
        before = time.perf_counter()
        first = programs[Phase.PREFILL]
        n_prompt = experiment.workload.prompt
        starts = [0, *range(n_prompt, n_prompt + experiment.workload.n_decode_steps)]
        session = cls(
            experiment=experiment,
            programs=programs,
            weights={ORDER: order_of_collectives()}
            | {name: first.placed(name, value) for name, value in values(first.program)},
            prompt=first.placed(TOKENS, prompt),
            positions=[first.placed(POSITION, at) for at in starts],
            dumps=dumps,
        )
        wait_for([session.prompt, *session.positions])
        session.seconds["weights"] = time.perf_counter() - before
        report("compiling")
        seconds, _ = session.request(n_decode_steps=1)
        compile_s = [seconds["prefill_s"], *seconds["decode_s"]]
        for phase, one_s in zip(programs, compile_s, strict=True):
            session.seconds[f"{phase}.compile"] = one_s
        return session

    def hlo_texts(self) -> dict[Phase, str]:
        """The optimized HLO of each phase, as dumped by XLA."""
        return {phase: self._dumped(phase, "after_optimizations.txt") for phase in self.programs}

    def memory(self) -> dict[str, dict[str, int]]:
        """The compiler's memory analysis of each phase on one device, in bytes; {} if not dumped."""
        ending = "buffer-assignment.txt"
        if not all(self._dumps_of(phase, ending) for phase in self.programs):
            return {}
        return {phase.value: _memory(self._dumped(phase, ending)) for phase in self.programs}

    def costs(self) -> dict[str, dict[str, float]]:
        """Empty: torch_xla does not expose the compiler's cost analysis."""
        return {}

    def request(self, *, n_decode_steps: int | None = None) -> tuple[dict[str, Any], list[Any]]:
        """Run one request, waiting for each step; returns seconds and the tokens [B] of each step."""
        first = self.programs[Phase.PREFILL]
        cache: dict[str, Any] = {}
        for name in first.program.cache:
            argument = first.program.arguments[name]
            dtype = TORCH_DTYPES[argument.dtype]
            zeros = torch.zeros(argument.shape, dtype=dtype, device=torch_xla.device())
            cache[name] = first.laid_out(zeros, argument.spec)
        wait_for(list(cache.values()))
        seconds, generated, tokens = list[float](), list[Any](), self.prompt
        for number, position in enumerate(self.positions):
            if n_decode_steps is not None and number > n_decode_steps:
                break
            phase = Phase.DECODE if number else Phase.PREFILL
            before = time.perf_counter()
            with xp.StepTrace(phase.value, step_num=number):
                tokens, _, cache = self.programs[phase](self.weights, tokens, cache, position)
                # torch_xla's waits return before the last events end.
                generated.append(host_array(tokens))
            seconds.append(time.perf_counter() - before)
        return {"prefill_s": seconds[0], "decode_s": seconds[1:]}, generated

    def profiled(self, directory: Path, *, n_decode_steps: int) -> dict[str, Any]:
        """Profile another request of at most `n_decode_steps` decode steps; returns its seconds."""
        xp.start_trace(str(directory))
        try:
            seconds, _ = self.request(n_decode_steps=n_decode_steps)
            time.sleep(DRAIN_S)
        finally:
            xp.stop_trace()
        return seconds

    def _dumps_of(self, phase: Phase, ending: str) -> list[Path]:
        return sorted(self.dumps.glob(f"module_*.{phase.value}.*{ending}"))

    def _dumped(self, phase: Phase, ending: str) -> str:
        """The text of the newest dump; RunFailedError if XLA wrote none."""
        paths = self._dumps_of(phase, ending)
        if not paths:
            raise RunFailedError(
                f"XLA dumped no '{ending}' for {phase.value}: this torch_xla runtime ignores "
                "--xla_dump_to in XLA_FLAGS, so there is no compiled HLO to read."
            )
        return paths[-1].read_text(encoding="utf-8")


def _memory(assignment: str) -> dict[str, int]:
    """Buffer bytes of a device from XLA's buffer assignment; aliased buffers are input and output."""
    sizes = [(int(m["size"]), m["what"]) for m in _ALLOCATION.finditer(assignment)]
    into = [(size, what) for size, what in sizes if "parameter " in what]
    out = [(size, what) for size, what in sizes if "maybe-live-out" in what]
    return {
        "argument_bytes": sum(size for size, _ in into),
        "output_bytes": sum(size for size, _ in out),
        "alias_bytes": sum(size for size, what in out if "parameter " in what),
        "temp_bytes": sum(size for size, what in sizes if "preallocated-temp" in what),
    }
