"""An experiment on live devices: its compiled programs, its weights, and requests that are timed."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshscope.plan.experiment import Experiment
from meshscope.programs.build import BuiltProgram, build_program
from meshscope.programs.values import random_weights, zeros_like
from meshscope.table.kinds import Phase


@dataclass(slots=True, kw_only=True)
class Session:
    """What stays on the devices between requests."""

    experiment: Experiment
    programs: dict[Phase, BuiltProgram]
    compiled: dict[Phase, Any]
    weights: Any
    prompt: Any
    seconds: dict[str, float] = field(default_factory=dict)

    @classmethod
    def started(cls, experiment: Experiment, devices: list[Any], *, seed: int) -> "Session":
        """Compiles both phases and puts random weights and a random prompt on the devices."""
        programs = {p: build_program(experiment, p, devices) for p in experiment.phases}
        seconds: dict[str, float] = {}
        compiled: dict[Phase, Any] = {}
        for phase, program in programs.items():
            before = time.perf_counter()
            compiled[phase] = program.lower().compile()
            seconds[f"{phase}.compile"] = time.perf_counter() - before
        prefill = programs[Phase.PREFILL]
        before = time.perf_counter()
        weights = random_weights(prefill, seed=seed)
        jax.block_until_ready(weights)
        seconds["weights"] = time.perf_counter() - before
        tokens = prefill.arguments[1]
        random = np.random.default_rng(seed)
        prompt = random.integers(0, experiment.model.vocab, tokens.shape, dtype=np.int32)
        return cls(
            experiment=experiment,
            programs=programs,
            compiled=compiled,
            weights=weights,
            prompt=jax.device_put(prompt, tokens.sharding),
            seconds=seconds,
        )

    def hlo_texts(self) -> dict[Phase, str]:
        """The optimised HLO of each phase."""
        return {phase: compiled.as_text() for phase, compiled in self.compiled.items()}

    def memory(self) -> dict[str, dict[str, int]]:
        """The compiler's account of each phase's memory on one device, in bytes."""
        found: dict[str, dict[str, int]] = {}
        for phase, compiled in self.compiled.items():
            analysis = compiled.memory_analysis()
            found[phase.value] = {
                "argument_bytes": analysis.argument_size_in_bytes,
                "output_bytes": analysis.output_size_in_bytes,
                "alias_bytes": analysis.alias_size_in_bytes,
                "temp_bytes": analysis.temp_size_in_bytes,
            }
        return found

    def request(self, *, n_decode_steps: int | None = None) -> dict[str, Any]:
        """One request with every step waited for: seconds of prefill and of each decode step.

        The first token is there when prefill is done; each decode step makes one more.
        """
        n_steps = self.experiment.workload.n_decode_steps
        n_steps = n_steps if n_decode_steps is None else min(n_steps, n_decode_steps)
        cache = zeros_like(self.programs[Phase.PREFILL].arguments[2])
        position = jax.device_put(np.int32(0), self.programs[Phase.PREFILL].arguments[3].sharding)
        jax.block_until_ready(cache)
        before = time.perf_counter()
        with jax.profiler.StepTraceAnnotation(Phase.PREFILL.value, step_num=0):
            tokens, _, cache = self.compiled[Phase.PREFILL](
                self.weights, self.prompt, cache, position
            )
            tokens = jax.block_until_ready(tokens)
        prefill_s = time.perf_counter() - before
        decode_s = [seconds for seconds, in self._decoded(tokens, cache, n_steps)]
        return {"prefill_s": prefill_s, "decode_s": decode_s}

    def _decoded(self, tokens: Any, cache: Any, n_steps: int) -> Any:
        """Decode steps one after the other; yields the seconds of each."""
        if not n_steps:
            return
        arguments = self.programs[Phase.DECODE].arguments
        first = self.experiment.workload.prompt
        for step in range(n_steps):
            before = time.perf_counter()
            with jax.profiler.StepTraceAnnotation(Phase.DECODE.value, step_num=1 + step):
                position = jax.device_put(np.int32(first + step), arguments[3].sharding)
                tokens, _, cache = self.compiled[Phase.DECODE](
                    self.weights,
                    jax.device_put(tokens[:, None], arguments[1].sharding),
                    cache,
                    position,
                )
                tokens = jax.block_until_ready(tokens)
            yield (time.perf_counter() - before,)

    def profiled(self, directory: Path, *, n_decode_steps: int) -> dict[str, Any]:
        """One more request, with the profiler on; at most so many decode steps."""
        with jax.profiler.trace(str(directory)):
            return self.request(n_decode_steps=n_decode_steps)
