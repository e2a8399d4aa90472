"""Single changes to an experiment with the largest predicted gain.

The gain is that of the closed form: the changed experiment against the same experiment, both predicted.
"""

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from meshscope.cost.default_chunk import with_default_chunk
from meshscope.cost.predicted import has_figures
from meshscope.errors import MeshscopeError
from meshscope.events.enums import Phase
from meshscope.events.step_time import StepTime
from meshscope.planner.estimate import Estimate, estimates_of, phase_of
from meshscope.spec.experiment import Experiment, experiment_of, experiment_of_record
from meshscope.spec.plan.chunks import divisors
from meshscope.spec.plan.plan import Plan
from meshscope.spec.program import Engine
from meshscope.store.run import RunRecord
from meshscope.units import DTYPE_BITS, format_bytes, format_dtype, format_seconds

MIN_GAIN = 0.03  # of the request; the closed form does not resolve smaller ones
MAX_FACTOR = 4  # between the tp of a plan and of its neighbors
LOWER_PRECISION = "s8"
COMMANDS = ("predict", "compile", "run")


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """One change to an experiment, with its predicted gains; negative gains are losses.

    `tokens_per_s_frac` is the gain in output tokens per second of steady decode, as a fraction. `fits` is
    None if unknown. `command` is empty if the run was not made by a command that takes the option.
    """

    change: str
    command: str
    ttft_gain_s: float
    tpot_gain_s: float | None
    tokens_per_s_frac: float | None
    fits: bool | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """A changed experiment, and the options that change it."""

    experiment: Experiment
    options: Mapping[str, str]
    keeps_results: bool  # a lower precision does not

    @property
    def text(self) -> str:
        """The changed options, e.g. `--plan dp=2,tp=4`."""
        return " ".join(f"{option} {value}" for option, value in self.options.items())


def suggestions_of(run: RunRecord) -> tuple[Suggestion, ...]:
    """The best change of plan or chunk, then the best change of precision; () without a known request."""
    try:
        experiment = experiment_of_record(run.manifest.experiment)
    except MeshscopeError:  # an imported run does not know all of its experiment
        return ()
    if not has_figures(experiment.topology.chip) or experiment.is_part_of_decode:
        return ()
    changes = list(_changes(experiment))
    base, *changed = estimates_of([experiment, *(change.experiment for change in changes)])
    pairs = list(zip(changes, changed, strict=True))
    best = (
        _best(base, [pair for pair in pairs if pair[0].keeps_results is keeps])
        for keeps in (True, False)
    )
    return tuple(_suggestion(run, base, *pair) for pair in best if pair is not None)


def _best(
    base: Estimate, changed: list[tuple[_Change, Estimate]]
) -> tuple[_Change, Estimate] | None:
    """The change with the shortest request among those that fit; None if none gains MIN_GAIN.

    If the experiment itself does not fit, any change that does is a gain.
    """
    fitting = [pair for pair in changed if pair[1].memory.fits is not False]
    best = min(fitting, key=lambda pair: pair[1].e2e_s, default=None)
    is_needed = base.memory.fits is False
    if best is None or is_needed or best[1].e2e_s <= (1 - MIN_GAIN) * base.e2e_s:
        return best
    return None


def _changes(experiment: Experiment) -> Iterator[_Change]:
    """The experiments that differ in one option, without those that are impossible."""
    for plan in dict.fromkeys(_plans(experiment)):
        if plan != experiment.plan:
            yield from _checked(experiment, plan)
    workload = experiment.workload
    if workload.prefill_chunk is not None:
        for chunk in (workload.prefill_chunk // 2, 2 * workload.prefill_chunk):
            yield from _checked(experiment, None, prefill_chunk=chunk)
    for dtype in ("weight_dtype", "cache_dtype"):
        if DTYPE_BITS[getattr(workload, dtype)] > DTYPE_BITS[LOWER_PRECISION]:
            yield from _checked(experiment, None, **{dtype: LOWER_PRECISION})


def _plans(experiment: Experiment) -> Iterator[Plan]:
    """Near splits of the same devices over the data axis and tp, other sizes of ep, and sp on or off."""
    plan = experiment.plan
    n_devices = plan.data_size * plan.tp
    for tp in divisors(n_devices):
        if plan.tp <= MAX_FACTOR * tp and tp <= MAX_FACTOR * plan.tp:
            yield _resized(plan, tp)
    if experiment.model.moe is not None:
        for ep in (1, plan.tp, plan.data_size, n_devices):
            yield replace(plan, ep=ep)
    if plan.tp > 1:
        yield replace(plan, sp=not plan.sp)


def _resized(plan: Plan, tp: int) -> Plan:
    """The plan with another tp on the same devices; ep stays over the same axes."""
    axes = plan.expert_axes
    data = plan.data_size * plan.tp // tp
    ep = (tp if "tp" in axes else 1) * (data if plan.data_axis in axes else 1)
    return replace(plan, **{plan.data_axis: data}, tp=tp, ep=ep, sp=plan.sp and tp > 1)


def _checked(experiment: Experiment, plan: Plan | None, **sizes: str | int) -> Iterator[_Change]:
    """The changed experiment, with its default chunk if the plan changes; nothing if it is impossible."""
    workload = replace(experiment.workload, **sizes)  # type: ignore[arg-type]  fields of a workload
    if plan is not None:
        workload = replace(workload, prefill_chunk=None)
    try:
        changed = experiment_of(
            model=experiment.model,
            plan=plan or experiment.plan,
            topology=experiment.topology,
            workload=workload,
            program=experiment.program,
            engine=experiment.engine,
            device_order=experiment.device_order if plan is None else None,
        )
    except MeshscopeError:  # a plan that does not divide the model is no suggestion
        return
    if plan is not None and experiment.engine is Engine.MESHSCOPE:
        changed = with_default_chunk(changed)
    options = {
        f"--{name.replace('_', '-')}": format_dtype(value) if isinstance(value, str) else str(value)
        for name, value in sizes.items()
    }
    if plan is not None:
        options["--plan"] = str(plan)
    keeps_results = not any(name.endswith("dtype") for name in sizes)
    yield _Change(experiment=changed, options=options, keeps_results=keeps_results)


def _suggestion(run: RunRecord, base: Estimate, change: _Change, changed: Estimate) -> Suggestion:
    tpot_gain_s = frac = None
    if base.tpot_s is not None and changed.tpot_s is not None:
        tpot_gain_s = base.tpot_s - changed.tpot_s
        frac = base.tpot_s / changed.tpot_s - 1
    return Suggestion(
        change=change.text,
        command=_command(run, change),
        ttft_gain_s=base.ttft_s - changed.ttft_s,
        tpot_gain_s=tpot_gain_s,
        tokens_per_s_frac=frac,
        fits=changed.memory.fits,
        reason=_reason(base, changed),
    )


def _command(run: RunRecord, change: _Change) -> str:
    """The command of the run with the changed options, and without its output folder."""
    words = list(run.manifest.command)
    if len(words) < 2 or words[1] not in COMMANDS:
        return ""
    options = {**change.options, "--out": None}
    kept: list[str] = []
    values = iter(words)
    for word in values:
        if word in options:
            next(values, None)
        elif word.partition("=")[0] not in options and word != "--force":
            kept.append(word)
    changed = (word for pair in change.options.items() for word in pair)
    return shlex.join([*kept, *changed])


def _reason(base: Estimate, changed: Estimate) -> str:
    """The change of the phase that gains most of the request: bytes, compute or communication."""
    if base.memory.fits is False:
        known = "" if changed.memory.fits else " as far as known"
        return f"it fits in the memory of a device{known}"
    n_steps = base.experiment.workload.n_decode_steps
    prefill_gain_s = base.ttft_s - changed.ttft_s
    decode_gain_s = base.e2e_s - changed.e2e_s - prefill_gain_s
    is_decode = n_steps > 0 and decode_gain_s >= prefill_gain_s
    phase = Phase.DECODE if is_decode else Phase.PREFILL
    before, after = phase_of(base, phase), phase_of(changed, phase)
    assert before is not None
    assert after is not None
    return f"{phase} {_largest_change(before, after)}"


def _largest_change(before: StepTime, after: StepTime) -> str:
    """What falls most between two steps, in seconds: compute with its bytes, or an axis of communication."""
    falls = {
        axis: seconds - after.exposed_by_axis_s.get(axis, 0.0)
        for axis, seconds in before.exposed_by_axis_s.items()
    }
    axis = max(falls, key=lambda name: falls[name], default=None)
    compute_s = before.compute_s - after.compute_s
    if axis is not None and falls[axis] >= compute_s:
        left_s = after.exposed_by_axis_s.get(axis, 0.0)
        figures = f"{format_seconds(before.exposed_by_axis_s[axis])} to {format_seconds(left_s)}"
        return f"exposes less communication over {axis}: {figures}"
    seconds = f"{format_seconds(before.compute_s)} to {format_seconds(after.compute_s)}"
    if after.hbm_bytes < before.hbm_bytes:
        n_bytes = f"{format_bytes(before.hbm_bytes)} to {format_bytes(after.hbm_bytes)}"
        return f"reads and writes fewer bytes a device, {n_bytes}; compute takes {seconds}"
    return f"computes less on a device: {seconds}"
