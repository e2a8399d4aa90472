"""The answer of a run, typed: how fast, does it fit, what binds, do its sources agree, what to try.

Terminal text, the HTML report, notebooks and `--json` render this one model.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from meshscope.analysis.comparison import compare_sources, runs_on_cpu
from meshscope.analysis.join import Agreement
from meshscope.analysis.request import (
    TimeAgreement,
    request_times,
    speculative_steps,
    throughput_of,
    time_agreements,
)
from meshscope.analysis.roofline import BETWEEN_PARTS, why_sentences
from meshscope.analysis.totals import step_total, unattributed
from meshscope.cost.memory import Capacity, capacity_of_run, experiment_of_run
from meshscope.cost.predicted import has_figures
from meshscope.events.enums import Phase, Source
from meshscope.events.step_time import StepTime, TimeBasis
from meshscope.hardware.chips import Chip, ChipKind
from meshscope.plans.caches import CacheLayout, whole_windows
from meshscope.plans.memory import FitState, Memory
from meshscope.plans.program import Engine
from meshscope.plans.weights import tables_notes
from meshscope.plans.workload import Workload
from meshscope.reports.conditions import placed_layout, program_options, sizes_text
from meshscope.reports.model import Figure, Unit, joined
from meshscope.reports.times import time_figure
from meshscope.reports.words import phase_label, signed_seconds, verdict_sentence
from meshscope.serving.suggestions import Purpose, Suggestion, suggestions_of, surprises_of
from meshscope.store.run import RunRecord, ServedFigures
from meshscope.units import counted, format_bytes, format_dtype, format_gib, format_seconds

_RATES = {
    "decode_tokens_per_s": Unit.TOKENS_PER_S,
    "decode_tokens_per_s_per_chip": Unit.TOKENS_PER_S,
    "output_tokens_per_s": Unit.TOKENS_PER_S,
    "requests_per_s": Unit.REQUESTS_PER_S,
}
UNTIMED = "times are unknown: "  # starts the note on a run without times
SHARED_CORES = (
    "virtual devices share the cores of this machine: durations show that the run works, "
    "not what a plan costs"
)
# What the time of a step was obtained from, in short.
BASES = {
    TimeBasis.COMPILER_CYCLES.value: "compiler cycles",
    TimeBasis.KERNEL_MODEL.value: "kernel models",
    TimeBasis.KERNEL_STATED.value: "kernel models",
    TimeBasis.ROOFLINE.value: "roofline",
    TimeBasis.INTERCONNECT_MODEL.value: "link model",
}
NAMED_FRAC = 0.05  # share of the steps from which a basis is named
FITTED = "compute by roofline: "  # starts the note on what a predicted step was fitted to
LARGE_WINDOWS_FRAC = 0.01  # fraction of the HBM that one sequence keeps beyond windows
LARGE_FRAC = 0.5  # fraction of a step from which one part is named as its largest cost


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The memory of one device by one source, and how much more fits, if that is known."""

    memory: Memory
    capacity: Capacity | None = None
    padding: str = ""  # what the largest context asks of prompts, if this one may not fit

    @property
    def known_bytes(self) -> int:
        """The total, or the part that is known."""
        known_bytes, total_bytes = self.memory.known_bytes, self.memory.total_bytes
        return known_bytes if total_bytes is None else total_bytes

    @property
    def text(self) -> str:
        """`yes: 8.19 of 31.25 GiB`, `NO: 70.57 of 31.25 GiB`, `unknown: at least 7.91 of 31.25 GiB`.

        An estimate that is close to the limit has its interval: `close: 30.80 (30.51 to 31.40) of 31.25 GiB`.
        """
        return f"{self.memory.fit.label}: {self.amount}"

    @property
    def amount(self) -> str:
        """`8.19 of 31.25 GiB`, `needs 8.19 GiB` where the limit is unknown."""
        memory = self.memory
        known, low, high = (
            format_gib(n).removesuffix(" GiB")
            for n in (self.known_bytes, memory.total_low_bytes, memory.total_high_bytes)
        )
        is_least = memory.total_bytes is None and not memory.has_assumed_weights
        known = f"at least {known}" if is_least else known
        if memory.hbm_bytes is None:
            return f"needs {known} GiB"
        interval = f" ({low} to {high})" if memory.fit is FitState.CLOSE else ""
        return f"{known}{interval} of {format_gib(memory.hbm_bytes)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceAnswer:
    """The figures of one source; a figure without a value is unknown.

    Times come from `RequestTime`, rates from `Throughput`.
    """

    source: Source
    phases: tuple[Phase, ...]  # of the request; without decode if it makes one token
    decode: Figure
    ttft: Figure
    tpot: Figure
    e2e: Figure
    step: Figure
    decode_tokens_per_s: Figure
    decode_tokens_per_s_per_chip: Figure
    output_tokens_per_s: Figure
    requests_per_s: Figure
    basis: str | None
    fit: Fit | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceAgreement:
    """Collectives and times of two sources of a run, judged apart.

    `collectives` is one sentence; `times` has the figures of the `time_sentences`.
    """

    left: Source
    right: Source
    agreement: Agreement
    collectives: str
    times: tuple[TimeAgreement, ...]
    time_sentences: tuple[str, ...]

    @property
    def is_time_within(self) -> bool | None:
        """Whether all step times agree within their intervals; None if no step has both times."""
        return all(time.is_within for time in self.times) if self.times else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a reader wants to know first; `why` has a sentence for each phase with a modeled step."""

    title: str  # model, slice and plan
    request: str  # batch, prompt, output, dtypes and options that are not defaults
    sources: tuple[SourceAnswer, ...]
    why: Mapping[Phase, str]
    agreements: tuple[SourceAgreement, ...]
    suggestions: tuple[Suggestion, ...]
    capacity: Capacity | None = None  # predicted; None for an unknown experiment or without HBM
    notes: tuple[str, ...] = ()  # what is not counted or not known, and what may communicate
    served: ServedFigures | None = None
    traffic: str = ""  # collectives and bytes of each phase
    # What the figures of the strongest source rest on, the first in short.
    basis: tuple[str, ...] = ()
    folder: str = ""  # of a saved run

    @property
    def suggestion_sentences(self) -> tuple[str, ...]:
        """`try --plan tp=4,dp=2: TPOT -1.25 ms, decode tokens/s +30%`, one for each suggestion."""
        source = self.strongest.source
        basis = "" if source is Source.PREDICTED else f"{Source.PREDICTED} "
        return tuple(
            f"try {change_with_purpose(one) if Purpose.FIT in one.purposes else one.change}: {basis}{gains_text(one)}"
            for one in self.suggestions
        )

    @property
    def strongest(self) -> SourceAnswer:
        """The figures of the strongest source."""
        return self.sources[-1]


def answer_of(
    run: RunRecord,
    *,
    has_suggestions: bool = True,
    n_findings: int | None = None,
    faults: Sequence[str] = (),
) -> Answer:
    """The answer of a run from what its record contains; the search for suggestions can be left out.

    `n_findings` of lint are in the verdict on the collectives, and `faults` come before the notes.
    """
    capacity = capacity_of_run(run)
    return Answer(
        title=title_of(run),
        request=request_of(run),
        sources=tuple(source_answer(run, source, capacity) for source in run.sources),
        why=why_sentences(run),
        agreements=agreements_of(run, n_findings),
        suggestions=suggestions_of(run) if has_suggestions else (),
        capacity=capacity,
        notes=(*faults, *_notes(run)),
        served=run.manifest.served,
        traffic=traffic_of(run),
        basis=tuple(rests_on(run)),
        folder="" if run.path is None else str(run.path),
    )


def traffic_of(run: RunRecord) -> str:
    """`wire per step: prefill 18.9 GB in 130 collectives, decode 20.6 MB in 130`, by the strongest source."""
    rows, words = run.rows_of(run.manifest.source), list[str]()
    if not rows:
        return "no collective is known" if run.open_operations else "no collectives"
    for phase in dict.fromkeys((*run.manifest.phases, *(row.phase for row in rows))):
        total = step_total([row for row in rows if row.phase is phase])
        known = f"{format_bytes(total.wire_bytes)} in" if total.is_sized else "unknown bytes in"
        least = "at least " if total.is_sized and total.n_unsized else ""
        count = f"{total.count:,}" if words else counted(total.count, "collective")
        of_phase = "" if phase is Phase.STEP else f"{phase_label(phase)} "
        words.append(f"{of_phase}{least}{known} {count}" if total.count else f"{of_phase}none")
    return f"wire per step: {', '.join(words)}"


def fitted_to(times: Iterable[StepTime]) -> Iterator[str]:
    """What predicted steps were fitted to: `constants fitted to 31 published steps`, then what widens intervals."""
    fitted = [n.removeprefix(FITTED) for t in times for n in t.notes if n.startswith(FITTED)]
    yield from dict.fromkeys(note.partition("; ")[0] for note in fitted)
    yield from filter(None, dict.fromkeys(note.partition("; ")[2] for note in fitted))


def rests_on(run: RunRecord) -> Iterator[str]:
    """What the figures rest on in short, then what widens intervals of predicted steps."""
    source, times = run.manifest.source, run.times_of(run.manifest.source)
    if source is Source.MEASURED and run.measured is not None:
        profiled = run.measured.n_profiled_steps.items()
        steps = [counted(n, f"{phase} step".removeprefix("step ")) for phase, n in profiled]
        yield f"profile of {joined(steps)}" if steps else "profile without known steps"
    elif not times:
        yield "the collectives of each program, without times"
    elif source is Source.COMPILED or not any(fitted_to(times)):
        seconds = Counter[str]()
        for time in times:
            seconds.update(time.by_basis_s)
        named = (BASES[n] for n, s in seconds.most_common() if s >= NAMED_FRAC * seconds.total())
        yield from filter(None, [", ".join(dict.fromkeys(named))])
    yield from fitted_to(times)


def _notes(run: RunRecord) -> Iterator[str]:
    model = run.manifest.experiment.architecture
    for step in speculative_steps(run)[-1:]:
        tpot, plain = map(format_seconds, (step.tpot_s, step.plain.value_s))
        times = f"TPOT {tpot}, without it {plain}, {step.gain:.2f} x as long"
        yield f"speculation {step.speculation}; {times}"
    if run.measured is not None and run.measured.trace is None:
        if findings := run.measured.findings:
            yield f"{counted(len(findings), 'finding')} about the quality of the profile, with --rows"
        if runs_on_cpu(run):
            yield SHARED_CORES
    if (lost := unattributed(run.rows_of(run.manifest.source))).count:
        yield f"{counted(lost.count, 'collective')} of the table could not be attributed to a part"
    yield from _beyond_windows(run)
    if model is not None:
        yield from model.notes
        yield from tables_notes(model, run.manifest.experiment.plan)
        if any(memory.has_assumed_weights for memory in run.memory.values()):
            yield (
                f"the checkpoint stores weights as {model.stored_as}, counted here as "
                f"{format_dtype(model.default_weight_dtype)}"
            )
    chip = run.manifest.experiment.chip
    is_timed = bool(run.times) or run.measured is not None
    if not is_timed and chip is not None and not has_figures(chip):
        yield f"{UNTIMED}{chip.name} has no published rates; a --profile supplies them"
    elif not is_timed and chip is not None and run.manifest.experiment.imported is not None:
        yield f"{UNTIMED}{_untimed_import(run, chip)}"
    why = {
        f"{t.source} times have no interval: {t.no_interval}" for t in run.times if t.no_interval
    }
    yield from sorted(why, reverse=True)  # predicted first
    yield from map(str, run.manifest.other_operations)
    yield from surprises_of(run)


def _beyond_windows(run: RunRecord) -> Iterator[str]:
    """What the cache keeps beyond the windows of layers, where the memory of a device may not suffice."""
    experiment = experiment_of_run(run)
    memory = run.memory.get(Source.PREDICTED)
    if experiment is None or memory is None or memory.fit is FitState.YES:
        return
    layout, workload = experiment.cache_layout, experiment.workload
    kept = whole_windows(experiment.model, experiment.plan, workload, layout)
    if kept is not None and kept.n_bytes >= LARGE_WINDOWS_FRAC * (memory.hbm_bytes or 0):
        owner = "the program" if layout is CacheLayout.OWN else layout.value
        beyond, whole = format_gib(kept.n_bytes).removesuffix(" GiB"), format_gib(kept.cache_bytes)
        yield f"{owner} keeps {beyond} of {whole} per sequence beyond windows of {kept.window:,} tokens"


def _untimed_import(run: RunRecord, chip: Chip) -> str:
    if chip.kind is not ChipKind.TPU:
        return f"imported programs get times on TPUs only, and this one is for {chip.name}"
    if any(row.phase is None for row in run.rows) or not run.manifest.phases:
        return "the program does not state its phase; import it with --phase"
    if run.rows and not any(row.wire_bytes for row in run.rows):
        sent = "its collectives send nothing"
        if any(row.wire_bytes is None for row in run.rows):
            sent = "the bytes of its collectives are unknown"
        return f"{sent}, and nothing else in it takes time"
    needed = "they need the whole scheduled program of a phase"
    return f"{needed}; decode=FILE names the modules of a step"


def title_of(run: RunRecord) -> str:
    """`Qwen/Qwen3-32B (64 layers) on v6e:2x4 (8 chips), tp=8`."""
    experiment = run.manifest.experiment
    model = experiment.model_name or ("Imported trace" if run.is_trace else "imported program")
    if experiment.n_layers is not None:
        model += f" ({counted(experiment.n_layers, 'layer')})"
    if experiment.topology is not None:
        chips = "" if experiment.n_chips is None else f" ({counted(experiment.n_chips, 'chip')})"
        model += f" on {experiment.topology.name}{chips}"
    layout = placed_layout(experiment)
    return model if layout is None else f"{model}, {layout}"


def request_of(run: RunRecord) -> str:
    """`batch 8, prompt 1024, output 128, bf16`, and the options of the program."""
    experiment, words = run.manifest.experiment, list[str]()
    if (workload := experiment.workload) is not None:
        words.append(sizes_text(workload))
        if workload.routing_skew > 1:
            words.append(f"routing skew {workload.routing_skew:g}")
        if workload.decode_tokens > 1:
            words.append(f"{workload.decode_tokens} tokens of a sequence in a decode step")
        words.append(format_dtype(workload.activation_dtype))
        others = {"weights": workload.weight_dtype, "cache": workload.cache_dtype}
        for name, dtype in others.items():
            if dtype != workload.activation_dtype:
                words.append(f"{name} {format_dtype(dtype)}")
    if experiment.engine is Engine.VLLM:
        words.append(f"{experiment.engine}'s conventions")
    return ", ".join([*words, *program_options(run)])


def source_answer(run: RunRecord, source: Source, capacity: Capacity | None = None) -> SourceAnswer:
    """The figures of one source; the predicted `capacity` is the room of the prediction."""
    request = request_times(run).get(source)
    rates = None if request is None else throughput_of(request, run)
    memory = run.memory.get(source)
    times = {"decode": "decode_step"} | {n: n for n in ("ttft", "tpot", "e2e", "step")}
    if source is not Source.PREDICTED:
        capacity = None
    return SourceAnswer(
        source=source,
        phases=run.manifest.phases,
        **{n: time_figure(getattr(request, field, None)) for n, field in times.items()},
        **{n: Figure(value=getattr(rates, n, None), unit=unit) for n, unit in _RATES.items()},
        basis=None if request is None else request.basis,
        fit=None if memory is None else fit_of(memory, capacity, run.manifest.experiment.workload),
    )


def fit_of(
    memory: Memory, capacity: Capacity | None = None, workload: Workload | None = None
) -> Fit:
    """Whether a device has room for the step, with the bytes that are known, and how much more fits."""
    is_padded = capacity and workload and capacity.largest_context > workload.context
    padding = ""
    if capacity and is_padded and memory.fit is not FitState.YES:
        padding = f" with prompts padded to {capacity.context_step}"
    return Fit(memory=memory, capacity=capacity, padding=padding)


def agreements_of(run: RunRecord, n_findings: int | None = None) -> tuple[SourceAgreement, ...]:
    """The prediction against every stronger source; a measured run also compiled against measured."""
    strongest, verdicts = run.manifest.source, list[SourceAgreement]()
    for left in (Source.PREDICTED, Source.COMPILED):
        is_pair = left is not strongest and {left, strongest} <= set(run.sources)
        comparison = compare_sources(run, left=left) if is_pair else None
        if comparison is not None:
            times = time_agreements(run, left, strongest)
            within = [time.phase.value for time in times if time.is_within]
            sentences = [f"{joined(within)} agree within their intervals"] if within else []
            sentences += [_difference(t, left, strongest) for t in times if not t.is_within]
            verdicts.append(
                SourceAgreement(
                    left=left,
                    right=strongest,
                    agreement=comparison.agreement,
                    collectives=verdict_sentence(
                        comparison, left=left, right=strongest, n_findings=n_findings
                    ),
                    times=times,
                    time_sentences=tuple(sentences),
                )
            )
    return tuple(verdicts)


def _difference(time: TimeAgreement, left: Source, right: Source) -> str:
    """`compiled decode takes 4.6 x the prediction: 500 of 524 ms are outside the parts of the model`."""
    ratio = f"{time.ratio:.1f} x" if time.ratio >= 0.1 else f"{time.ratio:.1%} of"
    than = "the prediction" if left is Source.PREDICTED else f"the {left} time"
    head = f"{right} {time.phase} takes {ratio} {than}"
    if not time.changes:
        return head
    largest = max(time.changes, key=lambda change: change.right_s)
    is_most = largest.right_s >= LARGE_FRAC * time.right.value_s
    change = largest if is_most else time.changes[0]
    between = "copies and other work outside the parts of the model"
    share = between if change.share == BETWEEN_PARTS else change.share
    if not is_most:
        return f"{head}: {signed_seconds(change.change_s)} in {share}"
    part, whole = format_seconds(largest.right_s), format_seconds(time.right.value_s)
    return f"{head}: {part.removesuffix(whole[whole.rindex(' ') :])} of {whole} are {share}"


def change_with_purpose(suggestion: Suggestion) -> str:
    """`--plan dp=8,ep=8 for a shorter request and more decode tokens/s`."""
    purposes = joined(list(map(str, suggestion.purposes))).replace("and for ", "and ")
    unknown = ", as far as known" if suggestion.fits is None else ""
    return f"{suggestion.change} {purposes}{unknown if Purpose.FIT in suggestion.purposes else ''}"


def gains_text(suggestion: Suggestion) -> str:
    """`TTFT +12 ms, TPOT -1.25 ms, decode tokens/s +30%`."""
    changes = [f"TTFT {signed_seconds(-suggestion.ttft_gain_s)}"]
    if suggestion.tpot_gain_s and suggestion.tokens_per_s_frac is not None:
        changes.append(f"TPOT {signed_seconds(-suggestion.tpot_gain_s)}")
        change = f"{suggestion.tokens_per_s_frac:+.0%}"
        changes.append(f"decode tokens/s {'equal' if change in {'+0%', '-0%'} else change}")
    return ", ".join(changes)
