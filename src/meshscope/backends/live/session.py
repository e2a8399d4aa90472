"""An experiment on JAX's live devices: compiled programs, weights, and timed requests with chunks of prefill."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from meshscope.backends.live.worker import stage_words
from meshscope.errors import SpecError
from meshscope.events.enums import Phase
from meshscope.hardware.chips import ChipKind
from meshscope.hardware.topology import Topology
from meshscope.plans.experiment import Experiment
from meshscope.programs.jax.live_function import profiling
from meshscope.programs.jax.stablehlo import cost_analysis, memory_analysis

MakeWeights = Callable[[Any], Any]  # from a built program
Build = Callable[..., Any]  # the program of a phase, and of a `chunk` of prefill


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRun:
    """One execution of a prefill program.

    `tokens` are its part of the prompt [B, S], `first_row` the first sequence on each device in the cache.
    The last chunk of a prompt produces the next tokens of its sequences.
    """

    program: str
    tokens: Any
    first_row: Any
    is_last: bool


def chunk_runs(experiment: Experiment, prompt: np.ndarray) -> Iterator[ChunkRun]:
    """The executions for a prompt [B, S], in order; each device has consecutive sequences."""
    chunks, programs = experiment.prefill_chunks, experiment.programs(Phase.PREFILL)
    shape = (experiment.plan.data_size, chunks.n_sequence_chunks, chunks.n_sequences, -1)
    by_chunk = prompt.reshape(shape)
    for number in range(chunks.n_sequence_chunks):
        rows = by_chunk[:, number].reshape(-1, prompt.shape[1])
        for program in programs:
            yield ChunkRun(
                program=program.name,
                tokens=rows[:, program.start : program.start + chunks.n_positions],
                first_row=np.int32(number * chunks.n_sequences),
                is_last=program is programs[-1],
            )


def merged_tokens(parts: Sequence[Any], *, data_size: int) -> Any:
    """The next tokens [B] in batch order, from the tokens of groups of sequences."""
    by_device = [part.reshape(data_size, -1) for part in parts]
    return jnp.concatenate(by_device, axis=1).reshape(-1)


class Session:
    """Programs, weights and inputs that stay on the devices between requests.

    A part of decode has no prefill: its steps follow an empty cache and `prompt`, the tokens of its first step.
    """

    def __init__(
        self,
        experiment: Experiment,
        build: Build,
        *,
        make_weights: MakeWeights,
        prompt: np.ndarray,
        report: Callable[[str], None],
    ) -> None:
        report(stage_words("compiling"))
        self.experiment = experiment
        self.seconds: dict[str, float] = {}
        self.compiled: dict[str, Any] = {}  # by the names of the programs
        programs = {
            program.name: build(phase, chunk=chunk)
            for phase in experiment.phases
            for chunk, program in enumerate(experiment.programs(phase))
        }
        for name, program in programs.items():
            before = time.perf_counter()
            self.compiled[name] = program.lower().compile()
            self.seconds[f"{name}.compile"] = time.perf_counter() - before
        report(stage_words("placing weights"))
        before = time.perf_counter()
        first, *_, last = (*programs.values(), *programs.values())
        self.weights = jax.block_until_ready(make_weights(first))
        self.seconds["weights"] = time.perf_counter() - before
        _, tokens, cache, position = first.arguments
        has_prefill = first.phase is Phase.PREFILL
        # The executions of prefill programs in order.
        self.chunks = [
            replace(
                run,
                tokens=on_devices(run.tokens, tokens.sharding),
                first_row=on_devices(run.first_row, position.sharding),
            )
            for run in (chunk_runs(experiment, prompt) if has_prefill else ())
        ]
        workload = experiment.workload
        n_tokens = workload.decode_tokens
        starts = (workload.prompt + step * n_tokens for step in range(workload.n_decode_steps))
        # The first token of each decode step; the last step ends within the cache.
        self.positions = [
            on_devices(np.int32(min(start, workload.context - n_tokens)), position.sharding)
            for start in starts
        ]
        # What the first step of a part of decode follows: these tokens and, for a draft, random hidden states.
        self.first_result: Any = None if has_prefill else prompt
        if not has_prefill and isinstance(tokens, dict):
            hidden = np.random.default_rng(0).standard_normal(tokens["hidden"].shape, np.float32)
            self.first_result = {"tokens": prompt, "hidden": hidden}
        # The format of the cache in decode, if prefill leaves another: found here, since steps are timed.
        self._cache_format: Any = None
        if Phase.DECODE in experiment.phases:
            wanted = self.compiled[Phase.DECODE.value].input_formats[0][2]
            left = self.compiled[self.chunks[-1].program].output_formats[2] if has_prefill else None
            self._cache_format = None if left == wanted else wanted
        step_input = last.arguments[1]

        def new_cache() -> Any:
            return jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype), cache)

        def as_input(result: Any) -> Any:
            return jax.tree.map(
                lambda value, like: value.reshape(like.shape).astype(like.dtype), result, step_input
            )

        self.new_cache: Any = jax.jit(new_cache, out_shardings=_shardings(cache)).lower().compile()
        # Turns the result of a step, tokens [B*S] and hidden states [B, D] of a draft, into the next input.
        self.as_input = jax.jit(as_input, out_shardings=_shardings(step_input))
        self._merged = jax.jit(partial(merged_tokens, data_size=experiment.plan.data_size))

    def as_cache(self, cache: Any) -> Any:
        """The cache in the layout of decode; the first decode step of a request includes the conversion."""
        if self._cache_format is None:
            return cache
        return jax.device_put(cache, self._cache_format, donate=True)

    def hlo_texts(self) -> dict[str, str]:
        """The optimized HLO of each program."""
        return {name: compiled.as_text() for name, compiled in self.compiled.items()}

    def memory(self) -> dict[str, dict[str, int]]:
        """Memory of each program on one device in bytes, by the compiler."""
        return {name: memory_analysis(compiled) for name, compiled in self.compiled.items()}

    def costs(self) -> dict[str, dict[str, float]]:
        """FLOPs and bytes of one step on one device, by the compiler; loop bodies count once."""
        costs: dict[str, dict[str, float]] = {}
        for phase in self.experiment.phases:
            is_prefill = phase is Phase.PREFILL
            runs = [chunk.program for chunk in self.chunks] if is_prefill else [phase.value]
            analyses = [cost_analysis(self.compiled[run]) for run in runs]
            costs[phase.value] = {
                name: sum(analysis[name] for analysis in analyses)
                for name in analyses[0]
                if all(name in analysis for analysis in analyses)
            }
        return costs

    def request(self, *, n_decode_steps: int | None = None) -> tuple[dict[str, Any], list[Any]]:
        """Runs one request, blocking after every step: seconds, and the tokens [B] of each step.

        Prefill produces the first token, each decode step one more, or several in a part of decode.
        """
        cache = jax.block_until_ready(self.new_cache())
        seconds: dict[str, Any] = {}
        result, outputs, decode_s = self.first_result, list[Any](), list[float]()
        if self.chunks:
            seconds["prefill_s"], result, cache = self._prefill(cache)
            outputs.append(result)
        for number, position in enumerate(self.positions[:n_decode_steps], start=1):
            step_s, result, cache = self._decode_step(result, cache, position, number)
            decode_s.append(step_s)
            outputs.append(result)
        return {**seconds, "decode_s": decode_s}, outputs

    def _prefill(self, cache: Any) -> tuple[float, Any, Any]:
        before = time.perf_counter()
        parts: list[Any] = []
        with jax.profiler.StepTraceAnnotation(Phase.PREFILL.value, step_num=0):
            for chunk in self.chunks:
                program = self.compiled[chunk.program]
                tokens, _, cache = program(self.weights, chunk.tokens, cache, chunk.first_row)
                parts += [tokens] if chunk.is_last else []
            tokens = jax.block_until_ready(parts[0] if len(parts) == 1 else self._merged(parts))
        return time.perf_counter() - before, tokens, cache

    def _decode_step(
        self, result: Any, cache: Any, position: Any, number: int
    ) -> tuple[float, Any, Any]:
        before = time.perf_counter()
        with jax.profiler.StepTraceAnnotation(Phase.DECODE.value, step_num=number):
            step_input, cache = self.as_input(result), self.as_cache(cache)
            program = self.compiled[Phase.DECODE.value]
            result, _, cache = program(self.weights, step_input, cache, position)
            jax.block_until_ready(result)
        return time.perf_counter() - before, result, cache

    def profiled(self, directory: Path, *, n_decode_steps: int) -> dict[str, Any]:
        """Profiles one request of at most `n_decode_steps` decode steps; returns its seconds."""
        with profiling(directory):
            return self.request(n_decode_steps=n_decode_steps)[0]


def on_devices(value: Any, sharding: Any) -> Any:
    """Places the shards of an array on the devices of this process."""
    array = np.asarray(value)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def host_tokens(outputs: list[Any]) -> list[list[int]]:
    """The tokens of each sequence, from the outputs [B] of each step, on every process."""
    gathered = [multihost_utils.process_allgather(tokens, tiled=True) for tokens in outputs]
    return np.stack(gathered, axis=1).tolist()


def _shardings(tree: Any) -> Any:
    return jax.tree.map(lambda array: array.sharding, tree)


PLATFORM = {ChipKind.TPU: "tpu", ChipKind.GPU: "gpu", ChipKind.CPU: "cpu"}


def live_devices(topology: Topology) -> list[Any]:
    """The devices of the slice; SpecError if JAX sees fewer devices or another platform."""
    platform, backend = PLATFORM[topology.chip.kind], jax.default_backend()
    if backend != platform:
        raise SpecError(
            f"'{topology.name}' needs {platform} devices, but JAX sees {backend} devices here. "
            "Run on such a machine, or use --topology cpu:8 for virtual CPU devices."
        )
    devices = jax.devices()
    if len(devices) < topology.n_devices:
        raise SpecError(
            f"'{topology.name}' has {topology.n_devices} devices, but JAX sees {len(devices)} here. "
            f"Use a topology of {len(devices)}, or start a process on every host (--coordinator)."
        )
    return devices[: topology.n_devices]


def gather_profiles(trace: Path, *, process_id: int) -> None:
    """Collects the profiles of all processes in the folder of process 0.

    They travel over the network of the devices, so hosts need no shared file system. Files are named
    by host and process.
    """
    (file,) = trace.glob("*.xplane.pb")
    content = np.frombuffer(file.read_bytes(), np.uint8)
    name = np.frombuffer(file.name.removesuffix(".xplane.pb").encode(), np.uint8)
    file.unlink()
    for process, (host, profile) in enumerate(
        zip(_gathered(name), _gathered(content), strict=True)
    ):
        if process_id == 0:
            path = trace / f"{host.tobytes().decode()}-{process}.xplane.pb"
            path.write_bytes(profile.tobytes())


def _gathered(content: np.ndarray) -> list[np.ndarray]:
    """The bytes of each process; shorter ones are padded for the transfer."""
    sizes = np.asarray(multihost_utils.process_allgather(np.array(content.size, np.int32)))
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: content.size] = content
    rows = np.asarray(multihost_utils.process_allgather(padded))
    return [rows[index, :size] for index, size in enumerate(sizes.tolist())]
