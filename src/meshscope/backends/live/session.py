"""An experiment on live devices: compiled programs, weights, and timed requests."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from meshscope.backends.live.names import COMPILING, PLACING, stage_words
from meshscope.events.enums import Phase
from meshscope.programs.jax.analysis import memory_analysis
from meshscope.programs.jax.build import BuiltProgram, build_program
from meshscope.spec.experiment import Experiment

# Events are recorded when they end. On a busy machine, a thread may still be inside an event after
# its result is ready, and a profiler that stops immediately would lose that event.
DRAIN_S = 0.25

MakeWeights = Callable[[BuiltProgram], Any]


@dataclass(slots=True, kw_only=True)
class Session:
    """Programs, weights and inputs that stay on the devices between requests.

    `positions` has the position of the first token of each step. `new_cache` makes an empty cache,
    `as_input` turns the tokens of one step into the input of the next, and `as_cache` converts
    the cache to the layout of decode steps.
    """

    experiment: Experiment
    compiled: dict[Phase, Any]
    weights: Any
    prompt: Any
    positions: list[Any]
    new_cache: Any
    as_input: Any
    as_cache: Callable[[Any], Any]
    seconds: dict[str, float] = field(default_factory=dict)

    @classmethod
    def started(
        cls,
        experiment: Experiment,
        devices: list[Any],
        *,
        make_weights: MakeWeights,
        prompt: np.ndarray,
        report: Callable[[str], None],
    ) -> "Session":
        """Compiles both phases, then places weights and the prompt [B, S] on the devices."""
        report(stage_words(COMPILING))
        programs = {p: build_program(experiment, p, devices) for p in experiment.phases}
        seconds: dict[str, float] = {}
        compiled: dict[Phase, Any] = {}
        for phase, program in programs.items():
            before = time.perf_counter()
            compiled[phase] = program.lower().compile()
            seconds[f"{phase}.compile"] = time.perf_counter() - before
        report(stage_words(PLACING))
        before = time.perf_counter()
        prefill, last = programs[Phase.PREFILL], list(programs.values())[-1]
        weights = jax.block_until_ready(make_weights(prefill))
        seconds["weights"] = time.perf_counter() - before
        _, tokens, cache, position = prefill.arguments
        first = experiment.workload.prompt
        starts = [0, *range(first, first + experiment.workload.n_decode_steps)]
        return cls(
            experiment=experiment,
            compiled=compiled,
            weights=weights,
            prompt=on_devices(prompt, tokens.sharding),
            positions=[on_devices(np.int32(at), position.sharding) for at in starts],
            new_cache=_zeros_maker(cache),
            as_input=jax.jit(_next_tokens, out_shardings=last.arguments[1].sharding),
            as_cache=_cache_mover(compiled),
            seconds=seconds,
        )

    def hlo_texts(self) -> dict[Phase, str]:
        """The optimized HLO of each phase."""
        return {phase: compiled.as_text() for phase, compiled in self.compiled.items()}

    def memory(self) -> dict[str, dict[str, int]]:
        """Memory of each phase on one device in bytes, by the compiler."""
        return {p.value: memory_analysis(compiled) for p, compiled in self.compiled.items()}

    def costs(self) -> dict[str, dict[str, float]]:
        """FLOPs and bytes of one step on one device, by the compiler; loop bodies count once."""
        costs: dict[str, dict[str, float]] = {}
        for phase, compiled in self.compiled.items():
            analysis = compiled.cost_analysis() or {}
            names = {"flops": "flops", "accessed_bytes": "bytes accessed"}
            costs[phase.value] = {n: float(analysis[k]) for n, k in names.items() if k in analysis}
        return costs

    def request(self, *, n_decode_steps: int | None = None) -> tuple[dict[str, Any], list[Any]]:
        """Runs one request, blocking after every step: seconds, and the tokens [B] of each step.

        Prefill produces the first token, each decode step one more.
        """
        steps = self.positions[1:][:n_decode_steps]
        cache = jax.block_until_ready(self.new_cache())
        prefill_s, tokens, cache = self._step(
            Phase.PREFILL, self.prompt, cache, self.positions[0], 0
        )
        outputs, decode_s = [tokens], list[float]()
        for number, position in enumerate(steps, start=1):
            step_s, tokens, cache = self._step(Phase.DECODE, tokens, cache, position, number)
            decode_s.append(step_s)
            outputs.append(tokens)
        return {"prefill_s": prefill_s, "decode_s": decode_s}, outputs

    def _step(
        self, phase: Phase, tokens: Any, cache: Any, position: Any, number: int
    ) -> tuple[float, Any, Any]:
        """Runs one step, annotated in the trace: its seconds, next tokens and cache."""
        before = time.perf_counter()
        with jax.profiler.StepTraceAnnotation(phase.value, step_num=number):
            if phase is Phase.DECODE:
                tokens, cache = self.as_input(tokens), self.as_cache(cache)
            tokens, _, cache = self.compiled[phase](self.weights, tokens, cache, position)
            jax.block_until_ready(tokens)
        return time.perf_counter() - before, tokens, cache

    def profiled(self, directory: Path, *, n_decode_steps: int) -> dict[str, Any]:
        """Profiles one request of at most `n_decode_steps` decode steps; returns its seconds."""
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # Python calls would be most of the events
        jax.profiler.start_trace(str(directory), profiler_options=options)
        try:
            seconds, _ = self.request(n_decode_steps=n_decode_steps)
            time.sleep(DRAIN_S)
        finally:
            jax.profiler.stop_trace()
        return seconds


def on_devices(value: Any, sharding: Any) -> Any:
    """Places the shards of an array on the devices of this process."""
    array = np.asarray(value)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def host_tokens(outputs: list[Any]) -> list[list[int]]:
    """The tokens of each sequence, from the outputs [B] of each step, on every process."""
    gathered = [multihost_utils.process_allgather(tokens, tiled=True) for tokens in outputs]
    return np.stack(gathered, axis=1).tolist()


def _zeros_maker(abstract: Any) -> Any:
    """A compiled function that makes zeros with these shapes and shardings."""
    leaves, structure = jax.tree.flatten(abstract)

    def new_cache() -> Any:
        return jax.tree.unflatten(structure, [jnp.zeros(a.shape, a.dtype) for a in leaves])

    shardings = jax.tree.unflatten(structure, [leaf.sharding for leaf in leaves])
    return jax.jit(new_cache, out_shardings=shardings).lower().compile()


def _cache_mover(compiled: dict[Phase, Any]) -> Callable[[Any], Any]:
    """Converts the cache from the layout of prefill to that of decode; the identity if they agree.

    The first decode step of a request includes the conversion.
    """
    if Phase.DECODE not in compiled:
        return _same
    target = compiled[Phase.DECODE].input_formats[0][2]
    if compiled[Phase.PREFILL].output_formats[2] == target:
        return _same

    return lambda cache: jax.device_put(cache, target, donate=True)


def _same(value: Any) -> Any:
    return value


def _next_tokens(tokens: Any) -> Any:
    """[B] -> [B, 1]."""
    return tokens[:, None]
