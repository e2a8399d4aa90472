"""The step of speculative decoding, from the runs of its verification and of its draft."""

from collections.abc import Iterable
from dataclasses import dataclass

from meshscope.analysis.request import request_times
from meshscope.events.collective import Collective
from meshscope.events.enums import Phase, Source
from meshscope.events.step_time import TimeEstimate
from meshscope.plans.experiment import experiment_of_record
from meshscope.plans.speculation import Speculation, draft_memory_bytes
from meshscope.store.run import RunRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeStep:
    """One step of speculative decoding by one source: `n_drafted` steps of the draft and one that verifies.

    `plain` is the decode step without speculation. `memory_bytes` is what the draft adds on a device;
    `fits` is None if that is unknown. Rows are those of one step each.
    """

    source: Source
    speculation: Speculation
    verify: TimeEstimate
    draft: TimeEstimate
    plain: TimeEstimate
    verify_rows: tuple[Collective, ...]
    draft_rows: tuple[Collective, ...]
    memory_bytes: int
    fits: bool | None

    @property
    def step_s(self) -> float:
        """Seconds of a step: the drafts one after the other, then the verification."""
        return self.verify.value_s + self.speculation.n_drafted * self.draft.value_s

    @property
    def tpot_s(self) -> float:
        """Seconds per output token of a sequence."""
        return self.step_s / self.speculation.tokens_per_step

    @property
    def gain(self) -> float:
        """The plain time per token over that with speculation."""
        return self.plain.value_s / self.tpot_s


def speculative_steps(run: RunRecord) -> tuple[SpeculativeStep, ...]:
    """The step by each source that has its times, the weakest first; () for a run without speculation."""
    return tuple(step for source in Source if (step := _step(run, source)) is not None)


def _step(run: RunRecord, source: Source) -> SpeculativeStep | None:
    speculation, parts = run.manifest.speculation, run.speculative
    if speculation is None or parts is None:
        return None
    verify, draft, plain = (_decode_time(of, source) for of in (parts.verify, parts.draft, run))
    if verify is None or draft is None or plain is None:
        return None
    memory_bytes = draft_memory_bytes(experiment_of_record(parts.draft.manifest.experiment))
    return SpeculativeStep(
        source=source,
        speculation=speculation,
        verify=verify,
        draft=draft,
        plain=plain,
        verify_rows=_decode_rows(parts.verify.rows_of(source)),
        draft_rows=_decode_rows(parts.draft.rows_of(source)),
        memory_bytes=memory_bytes,
        fits=_fits((run, parts.verify), source, memory_bytes),
    )


def _decode_time(run: RunRecord, source: Source) -> TimeEstimate | None:
    times = request_times(run).get(source)
    return None if times is None else times.decode_step


def _decode_rows(rows: Iterable[Collective]) -> tuple[Collective, ...]:
    return tuple(row for row in rows if row.phase is Phase.DECODE)


def _fits(runs: Iterable[RunRecord], source: Source, more_bytes: int) -> bool | None:
    """Whether the draft has room beside the model and the step that needs most, by the compiler if it ran."""
    account = Source.COMPILED if source is Source.MEASURED else source
    memories = [run.memory[account] for run in runs if account in run.memory]
    totals = [memory.total_bytes for memory in memories if memory.total_bytes is not None]
    hbm_bytes = next((memory.hbm_bytes for memory in memories), None)
    return None if hbm_bytes is None or not totals else max(totals) + more_bytes <= hbm_bytes
