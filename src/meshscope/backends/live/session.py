"""An experiment on live devices: its compiled programs, its weights, and requests that are timed."""

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

# An event is recorded when it ends. A thread that has handed its result on may still be inside one,
# where the machine is busy, and a profiler that stops at once would lose it.
DRAIN_S = 0.25

MakeWeights = Callable[[BuiltProgram], Any]


@dataclass(slots=True, kw_only=True)
class Session:
    """What stays on the devices between requests.

    `positions` holds the position of each step's first token; `new_cache` makes an empty cache,
    `as_input` what a step takes of the tokens that the step before returned, `as_cache` the cache as
    decode steps take it.
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
        told: Callable[[str], None],
    ) -> "Session":
        """Compiles both phases, then puts weights and the prompt [B, S] on the devices."""
        told(stage_words(COMPILING))
        programs = {p: build_program(experiment, p, devices) for p in experiment.phases}
        seconds: dict[str, float] = {}
        compiled: dict[Phase, Any] = {}
        for phase, program in programs.items():
            before = time.perf_counter()
            compiled[phase] = program.lower().compile()
            seconds[f"{phase}.compile"] = time.perf_counter() - before
        told(stage_words(PLACING))
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
        """The optimised HLO of each phase."""
        return {phase: compiled.as_text() for phase, compiled in self.compiled.items()}

    def memory(self) -> dict[str, dict[str, int]]:
        """The compiler's account of each phase's memory on one device, in bytes."""
        return {p.value: memory_analysis(compiled) for p, compiled in self.compiled.items()}

    def costs(self) -> dict[str, dict[str, float]]:
        """Flops and bytes that one step asks of one device; a loop's body counts once in them."""
        found: dict[str, dict[str, float]] = {}
        for phase, compiled in self.compiled.items():
            analysis = compiled.cost_analysis() or {}
            names = {"flops": "flops", "accessed_bytes": "bytes accessed"}
            found[phase.value] = {n: float(analysis[k]) for n, k in names.items() if k in analysis}
        return found

    def request(self, *, n_decode_steps: int | None = None) -> tuple[dict[str, Any], list[Any]]:
        """One request with every step waited for: its seconds, and the tokens [B] of each step.

        The first token is there when prefill is done; each decode step makes one more.
        """
        steps = self.positions[1:][:n_decode_steps]
        cache = jax.block_until_ready(self.new_cache())
        prefill_s, tokens, cache = self._step(
            Phase.PREFILL, self.prompt, cache, self.positions[0], 0
        )
        made, decode_s = [tokens], list[float]()
        for number, position in enumerate(steps, start=1):
            step_s, tokens, cache = self._step(Phase.DECODE, tokens, cache, position, number)
            decode_s.append(step_s)
            made.append(tokens)
        return {"prefill_s": prefill_s, "decode_s": decode_s}, made

    def _step(
        self, phase: Phase, tokens: Any, cache: Any, position: Any, number: int
    ) -> tuple[float, Any, Any]:
        """One step, marked in the trace and waited for; its seconds, next tokens and cache."""
        before = time.perf_counter()
        with jax.profiler.StepTraceAnnotation(phase.value, step_num=number):
            if phase is Phase.DECODE:
                tokens, cache = self.as_input(tokens), self.as_cache(cache)
            tokens, _, cache = self.compiled[phase](self.weights, tokens, cache, position)
            jax.block_until_ready(tokens)
        return time.perf_counter() - before, tokens, cache

    def profiled(self, directory: Path, *, n_decode_steps: int) -> dict[str, Any]:
        """One more request, with the profiler on; at most so many decode steps."""
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # calls of Python would be most of the events
        jax.profiler.start_trace(str(directory), profiler_options=options)
        try:
            seconds, _ = self.request(n_decode_steps=n_decode_steps)
            time.sleep(DRAIN_S)
        finally:
            jax.profiler.stop_trace()
        return seconds


def on_devices(value: Any, sharding: Any) -> Any:
    """The array on the devices of this process that the sharding gives a part of it."""
    array = np.asarray(value)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def host_tokens(made: list[Any]) -> list[list[int]]:
    """The tokens [B] of each step as lists, one for each sequence, on every process."""
    gathered = [multihost_utils.process_allgather(tokens, tiled=True) for tokens in made]
    return np.stack(gathered, axis=1).tolist()


def _zeros_maker(abstract: Any) -> Any:
    """A compiled function that makes zeros of these shapes on their devices."""
    leaves, structure = jax.tree.flatten(abstract)

    def new_cache() -> Any:
        return jax.tree.unflatten(structure, [jnp.zeros(a.shape, a.dtype) for a in leaves])

    shardings = jax.tree.unflatten(structure, [leaf.sharding for leaf in leaves])
    return jax.jit(new_cache, out_shardings=shardings).lower().compile()


def _cache_mover(compiled: dict[Phase, Any]) -> Callable[[Any], Any]:
    """What lays a cache out as decode takes it, where that is another way than prefill leaves it.

    A cache that lies right is not touched, so that the first decode step of a request pays for it.
    """
    if Phase.DECODE not in compiled:
        return _same
    wanted = compiled[Phase.DECODE].input_formats[0][2]
    if compiled[Phase.PREFILL].output_formats[2] == wanted:
        return _same

    def moved(cache: Any) -> Any:
        return jax.device_put(cache, wanted, donate=True)

    return moved


def _same(value: Any) -> Any:
    return value


def _next_tokens(tokens: Any) -> Any:
    """[B] -> [B, 1]."""
    return tokens[:, None]
