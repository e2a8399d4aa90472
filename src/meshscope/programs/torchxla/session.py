"""A session on live devices run by torch_xla: requests that are timed, and one that it profiles.

The same as `run/session.py` is for JAX's programs: the same requests, marks and folder.
"""

# pyright: reportMissingImports=false
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch_xla.debug.profiler as xp

from meshscope.errors import RunFailedError
from meshscope.events.enums import Phase
from meshscope.programs.torchxla.executing import (
    LiveProgram,
    forget_traces,
    host_array,
    live_program,
    order_of_collectives,
    under_way,
)
from meshscope.programs.torchxla.lowering import ORDER
from meshscope.programs.torchxla.program import POSITION, TOKENS, build_program
from meshscope.spec.experiment import Experiment

DEVIATION = 0.02  # of random weights, as transformers initialises them
DRAIN_S = 0.25  # a thread that ends an event later than the profiler stops would lose it
_ALLOCATION = re.compile(r"^allocation \d+: size (?P<size>\d+), (?P<what>.*):$", re.MULTILINE)


@dataclass(slots=True, kw_only=True)
class TorchSession:
    """What stays on the devices between requests.

    `dumps` is the folder into which XLA writes what it compiles; `positions` holds the position of
    each step's first token.
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
        seed: int,
        prompt: np.ndarray,
        dumps: Path,
        told: Callable[[str], None],
    ) -> "TorchSession":
        """Traces both phases, puts random weights and the prompt [B, S] on the devices, and compiles.

        torch_xla compiles what it runs first, so that the time of that step is in `compile`.
        """
        told("tracing")
        traced = {phase: build_program(experiment, phase, []) for phase in experiment.phases}
        programs = {phase: live_program(program) for phase, program in traced.items()}
        forget_traces()
        told("placing weights")
        before = time.perf_counter()
        first = programs[Phase.PREFILL]
        n_prompt = experiment.workload.prompt
        starts = [0, *range(n_prompt, n_prompt + experiment.workload.n_decode_steps)]
        session = cls(
            experiment=experiment,
            programs=programs,
            weights=_random_weights(first, seed),
            prompt=first.placed(TOKENS, prompt),
            positions=[first.placed(POSITION, at) for at in starts],
            dumps=dumps,
        )
        under_way([session.prompt, *session.positions], is_waited_for=True)
        session.seconds["weights"] = time.perf_counter() - before
        told("compiling")
        seconds, _ = session.request(n_decode_steps=1)
        compile_s = [seconds["prefill_s"], *seconds["decode_s"]]
        for phase, one_s in zip(programs, compile_s, strict=True):
            session.seconds[f"{phase}.compile"] = one_s
        return session

    def hlo_texts(self) -> dict[Phase, str]:
        """The optimised HLO of each phase, as XLA dumped it."""
        return {phase: self._dumped(phase, "after_optimizations.txt") for phase in self.programs}

    def memory(self) -> dict[str, dict[str, int]]:
        """The compiler's account of each phase's memory on one device, in bytes; {} where it dumps none."""
        found: dict[str, dict[str, int]] = {}
        for phase in self.programs:
            if not self._dumps_of(phase, "buffer-assignment.txt"):
                return {}
            found[phase.value] = _memory(self._dumped(phase, "buffer-assignment.txt"))
        return found

    def costs(self) -> dict[str, dict[str, float]]:
        """Nothing: torch_xla does not tell what the compiler says of flops and bytes."""
        return {}

    def request(self, *, n_decode_steps: int | None = None) -> tuple[dict[str, Any], list[Any]]:
        """One request with every step waited for: its seconds, and the tokens [B] of each step."""
        steps = self.positions[1:][:n_decode_steps]
        first = self.programs[Phase.PREFILL]
        cache = {name: first.zeros(name) for name in first.program.cache}
        under_way(list(cache.values()), is_waited_for=True)
        prefill_s, (tokens, told), cache = self._step(
            Phase.PREFILL, self.prompt, cache, self.positions[0], 0
        )
        made, decode_s = [told], list[float]()
        for number, position in enumerate(steps, start=1):
            step_s, (tokens, told), cache = self._step(
                Phase.DECODE, tokens, cache, position, number
            )
            decode_s.append(step_s)
            made.append(told)
        return {"prefill_s": prefill_s, "decode_s": decode_s}, made

    def _step(
        self, phase: Phase, tokens: Any, cache: Any, position: Any, number: int
    ) -> tuple[float, tuple[Any, np.ndarray], Any]:
        """One step, marked in the trace and waited for.

        Its seconds, next tokens [B] on the devices and here, and the cache.
        """
        before = time.perf_counter()
        with xp.StepTrace(phase.value, step_num=number):
            tokens, _, cache = self.programs[phase](self.weights, tokens, cache, position)
            told = host_array(tokens)  # torch_xla's own ways to wait let last events slip
        return time.perf_counter() - before, (tokens, told), cache

    def profiled(self, directory: Path, *, n_decode_steps: int) -> dict[str, Any]:
        """One more request, with torch_xla's profiler on; at most so many decode steps."""
        xp.start_trace(str(directory))
        try:
            seconds, _ = self.request(n_decode_steps=n_decode_steps)
            time.sleep(DRAIN_S)
        finally:
            xp.stop_trace()
        return seconds

    def _dumps_of(self, phase: Phase, ending: str) -> list[Path]:
        """Files of the module that is named after the phase; numbered in the order of compiling."""
        return sorted(self.dumps.glob(f"module_*.{phase.value}.*{ending}"))

    def _dumped(self, phase: Phase, ending: str) -> str:
        """The text of the newest one; RunFailedError where XLA wrote none."""
        found = self._dumps_of(phase, ending)
        if not found:
            raise RunFailedError(
                f"XLA dumped no '{ending}' of {phase.value}: torch_xla's runtime does not heed "
                "--xla_dump_to in XLA_FLAGS here, so that there is no compiled HLO to read."
            )
        return found[-1].read_text(encoding="utf-8")


def _memory(assignment: str) -> dict[str, int]:
    """Bytes of a device's buffers, from XLA's buffer assignment: an aliased one is in and out at once."""
    sizes = [(int(m["size"]), m["what"]) for m in _ALLOCATION.finditer(assignment)]
    into = [(size, what) for size, what in sizes if "parameter " in what]
    out = [(size, what) for size, what in sizes if "maybe-live-out" in what]
    return {
        "argument_bytes": sum(size for size, _ in into),
        "output_bytes": sum(size for size, _ in out),
        "alias_bytes": sum(size for size, what in out if "parameter " in what),
        "temp_bytes": sum(size for size, what in sizes if "preallocated-temp" in what),
    }


def _random_weights(live: LiveProgram, seed: int) -> dict[str, Any]:
    """Random matrices, norms of one, biases of zero, constants as they are, and the order of collectives."""
    program = live.program
    given = {TOKENS, POSITION, *program.cache}
    found: dict[str, Any] = {ORDER: order_of_collectives()}
    for number, (name, argument) in enumerate(program.arguments.items()):
        if name in given:
            continue
        value = program.constants.get(name)
        if value is None:
            value = _made(name, argument.shape, seed=seed + number)
        found[name] = live.placed(name, value)
    return found


def _made(name: str, shape: tuple[int, ...], *, seed: int) -> Any:
    if "norm" in name:
        return torch.ones(shape)
    if name.endswith("bias"):
        return torch.zeros(shape)
    return DEVIATION * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
