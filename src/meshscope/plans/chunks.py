"""Chunked prefill: how many sequences and positions of a device one execution of prefill covers.

A chunk has as many whole sequences as fit, or a part of the positions of one sequence. A part attends
to the cached positions before it, so each part of a prompt has its own program.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from math import lcm

from meshscope.errors import SpecError
from meshscope.events.enums import Phase
from meshscope.model.model import Model
from meshscope.plans.caches import ContextForm
from meshscope.plans.plan import Plan
from meshscope.plans.program import Engine, Partitioner, Program
from meshscope.plans.workload import Workload
from meshscope.units import whole_number

# Tokens of one scheduler step with chunked prefill: vLLM on v6e as CCL-Bench ran it, and vLLM's default
# for servers with 80 GB of memory (arg_utils.py, get_batch_defaults). vLLM's defaults for TPUs are
# smaller, 1,024 (server) and 2,048 tokens on v6e; sglang-jax ran its nightly benchmarks with 2,048.
DEFAULT_CHUNK = 8192
POSITION_STEP = 128  # `auto` cuts prompts at multiples of the smallest block of splash attention


class ChunkRule(StrEnum):
    """How to choose the chunk if the request gives no number of tokens."""

    AUTO = "auto"  # up to DEFAULT_CHUNK tokens, if program and plan support chunks
    OFF = "off"  # the whole batch at once


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChunks:
    """The chunks of a device's prefill, which run sequence group by sequence group."""

    n_sequences: int
    n_positions: int
    n_sequence_chunks: int = 1
    n_position_chunks: int = 1

    @property
    def count(self) -> int:
        """Executions of prefill programs in a request."""
        return self.n_sequence_chunks * self.n_position_chunks

    @property
    def is_cut(self) -> bool:
        """Whether a chunk is a part of a prompt."""
        return self.n_position_chunks > 1

    @property
    def n_tokens(self) -> int:
        """Tokens of one chunk."""
        return self.n_sequences * self.n_positions

    @property
    def starts(self) -> tuple[int, ...]:
        """The first position of each chunk of a prompt: the cached positions that it attends to."""
        return tuple(number * self.n_positions for number in range(self.n_position_chunks))


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseProgram:
    """A program of a phase; `start` is the first position of its chunk of a prompt."""

    name: str  # of its function and its files
    phase: Phase
    start: int = 0


def prefill_chunks(chunk: int | None, *, n_sequences: int, prompt: int) -> PrefillChunks:
    """The chunks of `n_sequences` prompts on a device; a checked `chunk` divides them evenly."""
    n_tokens = n_sequences * prompt if chunk is None else chunk
    n_each = min(n_sequences, max(1, n_tokens // prompt))
    n_positions = min(prompt, n_tokens)
    return PrefillChunks(
        n_sequences=n_each,
        n_positions=n_positions,
        n_sequence_chunks=n_sequences // n_each,
        n_position_chunks=prompt // n_positions,
    )


def chunk_option(value: str | int) -> int | ChunkRule:
    """The value of `--prefill-chunk`: a number of tokens, `auto` or `off`."""
    text = str(value)
    if text in set(ChunkRule):
        return ChunkRule(text)
    try:
        n_tokens = whole_number(text)
    except ValueError as error:
        raise SpecError(
            f"--prefill-chunk '{text}' is not a number of tokens. Use a number, "
            f"{ChunkRule.AUTO} or {ChunkRule.OFF}."
        ) from error
    if n_tokens < 1:
        raise SpecError(
            f"--prefill-chunk {n_tokens} is too small. Use at least 1 token, or {ChunkRule.OFF}."
        )
    return n_tokens


def why_no_chunks(plan: Plan, program: Program, engine: Engine) -> str | None:
    """The reason why prefill cannot run in chunks; None if it can."""
    reasons = {
        f"--engine {engine} prefills all sequences in one step": engine is not Engine.MESHSCOPE,
        f"--frontend {program.frontend} traces a whole prompt": program.frontend.is_traced,
        f"--partitioner {program.partitioner} has no rows of one device": (
            program.partitioner is not Partitioner.MANUAL
        ),
        "the micro-batches of a pipeline are its chunks (--microbatches)": plan.pp > 1,
    }
    return next((reason for reason, is_so in reasons.items() if is_so), None)


def why_auto_is_whole(plan: Plan, program: Program, engine: Engine) -> str | None:
    """The reason why `auto` leaves a prefill of many tokens in one chunk; None if it never does."""
    if plan.cp > 1 and program.context is not ContextForm.AUTO:
        return f"--context {program.context} brings keys to whole prompts"
    if plan.cp > 1:
        return (
            f"under cp, {ChunkRule.AUTO} cuts only prompts of more than {DEFAULT_CHUNK:,} tokens, where "
            "that is faster"
        )
    return why_no_chunks(plan, program, engine)


def why_no_position_chunks(model: Model, plan: Plan) -> str | None:
    """The reason why a prompt cannot be cut; None if it can."""
    return None if plan.cp == 1 else model.attention.why_whole_prompts(model.name)


def check_chunks(
    model: Model, plan: Plan, workload: Workload, program: Program, engine: Engine
) -> None:
    """Raise SpecError unless program and plan support the chunk and it divides the work evenly."""
    chunk, prompt = workload.prefill_chunk, workload.prompt
    if chunk is None:
        return
    option = f"--prefill-chunk {chunk}"
    if reason := why_no_chunks(plan, program, engine):
        raise SpecError(f"{option} is not supported: {reason}. Drop it, or use {ChunkRule.OFF}.")
    n_sequences = workload.batch // plan.data_size
    if n_sequences * prompt <= chunk:
        return
    if prompt <= chunk:
        if n_sequences % (chunk // prompt):
            sizes = _nearest((n * prompt for n in divisors(n_sequences)), chunk)
            raise SpecError(
                f"{option}: chunks of {chunk // prompt} prompts of {prompt} tokens do not divide the "
                f"{n_sequences} sequences of a device. Use {sizes}."
            )
        return
    if reason := why_no_position_chunks(model, plan):
        raise SpecError(f"{option} is shorter than prompt={prompt}, and {reason}. Use {prompt}.")
    least = (model.n_replayed or 0) + 1
    if chunk < least:
        raise SpecError(
            f"{option} has not more than the last {least - 1} tokens of a prompt, which pass through all layers of "
            f"{model.name} together. Use at least {least}."
        )
    window = model.attention.joint_positions
    step = lcm(window, plan.cp * (plan.tp if plan.sp else 1))
    if prompt % chunk or chunk % step:
        splits = {f"cp={plan.cp}": plan.cp > 1, f"tp={plan.tp}": plan.sp}
        sizes_of = [size for size, is_split in splits.items() if is_split]
        if not sizes_of and window > 1:
            sizes_of = [f"a window of {window} compressed positions"]
        reason = " (sp)" if plan.sp else ""
        split = f", or {' x '.join(sizes_of)} does not divide it{reason}" if sizes_of else ""
        fitting = (n for n in divisors(prompt) if n % step == 0 and n >= least)
        sizes = _nearest(fitting, chunk) or prompt
        raise SpecError(f"{option} does not divide prompt={prompt}{split}. Use {sizes}.")


def with_auto_chunk(  # noqa: PLR0913  the parts of an experiment
    model: Model,
    plan: Plan,
    workload: Workload,
    program: Program,
    engine: Engine,
    *,
    limit: int = DEFAULT_CHUNK,
) -> Workload:
    """The workload with the largest chunk up to `limit`; unchanged if prefill has one chunk.

    Under cp, only prompts of more than `limit` tokens are cut, if `cost.predicted` finds that faster.
    """
    n_sequences, prompt = workload.batch // plan.data_size, workload.prompt
    whole = workload if n_sequences == 1 else replace(workload, prefill_chunk=prompt)
    if program.frontend.has_whole_prompts:
        return whole
    is_split, n_rows = plan.cp > 1, plan.tp if plan.sp else 1
    is_short = (prompt if is_split else n_sequences * prompt) <= limit
    is_chosen = is_split and program.context is not ContextForm.AUTO
    if is_short or is_chosen or why_no_chunks(plan, program, engine) is not None:
        return workload
    if prompt <= limit:
        n_each = max(n for n in divisors(n_sequences) if n * prompt <= limit)
        return replace(workload, prefill_chunk=n_each * prompt)
    step = lcm(POSITION_STEP, model.attention.joint_positions, n_rows)
    step = plan.cp * POSITION_STEP * n_rows if is_split else step
    least = (model.n_replayed or 0) + 1
    sizes = [n for n in divisors(prompt) if least <= n <= limit and n % step == 0]
    if not sizes or why_no_position_chunks(model, plan) is not None:
        return workload if is_split else whole
    return replace(workload, prefill_chunk=max(sizes))


def divisors(number: int) -> list[int]:
    """All divisors, smallest first."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


def _nearest(sizes: Iterable[int], wanted: int) -> str:
    ordered = list(sizes)
    smaller = [size for size in ordered if size < wanted][-1:]
    larger = [size for size in ordered if size > wanted][:1]
    return " or ".join(map(str, smaller + larger))
