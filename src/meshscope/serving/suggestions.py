"""Single changes to an experiment with the largest predicted gain.

The gain compares the changed experiment with the original, both predicted by the closed form.
"""

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import islice
from math import inf
from typing import Any

from meshscope.cost.closed_form import plan_form
from meshscope.cost.memory import experiment_of_run, predicted_memory
from meshscope.cost.predicted import has_figures, step_time, steps_of, with_default_chunk
from meshscope.errors import MeshscopeError
from meshscope.events.enums import Phase
from meshscope.events.step_time import StepTime, TimeEstimate
from meshscope.hardware.topology import parse_topology
from meshscope.plans.chunks import DEFAULT_CHUNK, divisors
from meshscope.plans.experiment import Experiment, experiment_of
from meshscope.plans.kernel_choice import SPLASH_BLOCKS
from meshscope.plans.memory import Memory
from meshscope.plans.plan import Plan
from meshscope.plans.program import Engine
from meshscope.serialize import picked
from meshscope.store.run import RunRecord
from meshscope.units import DTYPE_BITS, counted, format_bytes, format_dtype, format_seconds

MIN_GAIN = 0.03  # of the request or of decode; the closed form does not resolve smaller ones
MIN_SURPRISE = 0.005  # of a step whose neighbor has more bytes of weights, or fewer chips
LOWER_PRECISION = "s8"
PLAIN_FP8 = "f8e4m3fn"
_WEIGHTS = "--weight-dtype"
WIDER_WEIGHTS = ("s8", PLAIN_FP8, "bf16")
SUBLANES = 8  # rows of a register: products with fewer rows fill a part of it
CONVERTS = "converts the checkpoint"  # weights in a format that is not its own
COMMANDS = ("predict", "compile", "run")


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The predicted steps and memory of an experiment; `tpot_s` is None for one output token."""

    experiment: Experiment
    times: tuple[StepTime, ...]  # without intervals
    memory: Memory
    ttft_s: float
    tpot_s: float | None
    e2e_s: float


def estimates_of(experiments: Sequence[Experiment]) -> tuple[Estimate, ...]:
    """The estimate of each experiment; SpecError for a chip without published figures."""
    pairs = [(one, phase) for one in experiments for phase in one.phases]
    forms = [plan_form(one, phase) for one, phase in pairs]
    steps = steps_of(forms, [one.workload for one, _ in pairs])
    seconds = (TimeEstimate(value_s=float(s), low_s=None, high_s=None) for s in steps.step_s)
    times = (step_time(forms[at], steps, one, at=at) for at, one in enumerate(seconds))
    estimates: list[Estimate] = []
    for experiment in experiments:
        of = tuple(islice(times, len(experiment.phases)))
        ttft_s, tpot_s = of[0].step.value_s, of[1].step.value_s if len(of) > 1 else None
        estimates.append(
            Estimate(
                experiment=experiment,
                times=of,
                memory=predicted_memory(experiment),
                ttft_s=ttft_s,
                tpot_s=tpot_s,
                e2e_s=ttft_s + experiment.workload.n_decode_steps * (tpot_s or 0.0),
            )
        )
    return tuple(estimates)


class Purpose(StrEnum):
    """What a change is good for."""

    FIT = "to fit"
    REQUEST = "for a shorter request"
    RATE = "for more decode tokens/s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """One change to an experiment, with its predicted gains; negative gains are losses.

    `request_s` are the seconds of the changed request. `tokens_per_s_frac` is the gain in output tokens per
    second of steady decode, as a fraction. `fits` is None if unknown. `command` is empty if the run was not
    made by a command that takes the option.
    """

    change: str
    command: str
    purposes: tuple[Purpose, ...]
    request_s: float
    request_gain_s: float
    ttft_gain_s: float
    tpot_gain_s: float | None
    tokens_per_s_frac: float | None
    fits: bool | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """A changed experiment, and the options that change it.

    `name` is the time that the change may shorten, for the `reason`.
    """

    experiment: Experiment
    options: Mapping[str, str]
    name: str = ""
    reason: str = ""

    @property
    def text(self) -> str:
        """The changed options, e.g. `--plan dp=2,tp=4`."""
        return " ".join(f"{option} {value}" for option, value in self.options.items())


def suggestions_of(run: RunRecord) -> tuple[Suggestion, ...]:
    """The best changes of plan or chunk, and of precision; () without a known request.

    For plan or chunk, and then for precision, it is the one with the shortest request; if that has not more
    tokens/s, too, the one with most tokens/s follows.
    """
    if (experiment := _changeable(run)) is None:
        return ()
    changes = [one for one in _changes(experiment) if one.experiment != experiment]
    base, *estimates = estimates_of([experiment, *(change.experiment for change in changes)])
    best: list[tuple[_Change, Estimate]] = []
    for keeps_precision in (True, False):
        able = [
            (change, estimate)
            for change, estimate in zip(changes, estimates, strict=True)
            if estimate.memory.fits is not False
            and _purposes(base, estimate)
            and keeps_precision is not any(one.endswith("dtype") for one in change.options)
        ]
        shortest = sorted(able, key=lambda pair: pair[1].e2e_s)[:1]
        best += shortest
        if shortest and _purposes(base, shortest[0][1]) == (Purpose.REQUEST,):
            faster = [pair for pair in able if Purpose.RATE in _purposes(base, pair[1])]
            best += sorted(faster, key=lambda pair: pair[1].tpot_s or 0.0)[:1]
    best.sort(key=lambda pair: Purpose.RATE in _purposes(base, pair[1])[:1])
    suggestions: list[Suggestion] = []
    for change, changed in best:
        tpot_gain_s = frac = None
        if base.tpot_s is not None and changed.tpot_s is not None:
            tpot_gain_s = base.tpot_s - changed.tpot_s
            frac = base.tpot_s / changed.tpot_s - 1
        suggestions.append(
            Suggestion(
                change=change.text,
                command=_command(run, change),
                purposes=_purposes(base, changed),
                request_s=changed.e2e_s,
                request_gain_s=base.e2e_s - changed.e2e_s,
                ttft_gain_s=base.ttft_s - changed.ttft_s,
                tpot_gain_s=tpot_gain_s,
                tokens_per_s_frac=frac,
                fits=changed.memory.fits,
                reason=_reason(base, changed),
            )
        )
    return tuple(suggestions)


def _changeable(run: RunRecord) -> Experiment | None:
    experiment = experiment_of_run(run)
    return experiment if experiment and has_figures(experiment.topology.chip) else None


def surprises_of(run: RunRecord) -> tuple[str, ...]:
    """What should take longer than the run and does not, with the reason; a sentence for each time, the largest gain first.

    `try --prompt 1024: TTFT -30.4 ms; servers pad to it, as attention over 1000 positions has no kernel`. Below
    MIN_GAIN, it says of wider weights and half of the slice that they take as long.
    """
    if (experiment := _changeable(run)) is None:
        return ()
    neighbors = tuple(_neighbors(experiment))
    estimates = estimates_of([experiment, *(neighbor.experiment for neighbor in neighbors)])
    fields = {"TTFT": "ttft_s", "TPOT": "tpot_s", "request": "e2e_s"}
    best: dict[str, tuple[float, str, float]] = {}  # its time, the sentence, and the gain
    for neighbor, estimate in zip(neighbors, estimates[1:], strict=True):
        name, fits = neighbor.name, estimate.memory.fits is not False
        n_bytes, n_run_bytes = (one.memory.weights_bytes or 0 for one in (estimate, estimates[0]))
        if n_bytes < (1 - MIN_GAIN) * n_run_bytes:  # more bits in layers, and fewer in the head
            continue
        if "request" in best and name != "request" and _WEIGHTS in neighbor.options:
            continue  # the sentence on the request names the dtype
        seconds = (getattr(one, fields[name]) for one in (estimates[0], estimate))
        old_s, new_s = (inf if s is None else s for s in seconds)
        is_said = {_WEIGHTS, "--topology"} & set(neighbor.options)  # even if it only takes as long
        least = MIN_SURPRISE if is_said else MIN_GAIN
        if fits and new_s < min((1 - least) * old_s, best.get(name, (inf,))[0]):
            change = f"{name} -{format_seconds(old_s - new_s)}"
            if new_s > (1 - MIN_GAIN) * old_s:
                change = f"the same {name} to within {MIN_GAIN:.0%}"
            sentence = f"try {neighbor.text}: {change}; {neighbor.reason}"
            best[name] = new_s, sentence, 1 - new_s / old_s
    ranked = sorted(best.values(), key=lambda one: -one[2])
    return tuple(dict.fromkeys(sentence for _, sentence, _ in ranked))


def _neighbors(experiment: Experiment) -> Iterator[_Change]:
    """What has more work: weights of more bits, the next prompt and chunk that a kernel takes, slightly larger batches.

    Also other chunks, and half of the devices.
    """
    workload, plan = experiment.workload, experiment.plan
    tile = SPLASH_BLOCKS[-1] * plan.cp
    padded = {"prompt": _next_multiple(workload.prompt, tile)}
    if workload.prefill_chunk and workload.prefill_chunk % workload.prompt == 0:
        n_sequences = workload.prefill_chunk // workload.prompt  # a chunk is of whole sequences
        padded["prefill_chunk"] = n_sequences * padded["prompt"]
    per_replica = workload.batch // plan.data_size
    batches = sorted({per_replica + 1, _next_multiple(per_replica + 1, SUBLANES)})
    n_bits = DTYPE_BITS[workload.weight_dtype]  # fp8 in blocks is not taken for plain fp8
    dtypes = [d for d in WIDER_WEIGHTS if DTYPE_BITS[d] >= n_bits + (d == PLAIN_FP8)]
    weights = format_dtype(workload.weight_dtype)
    late = "products of one sequence multiply a vector"
    if per_replica > 1:
        late = f"{per_replica} sequences per device leave rows of the matrix units empty"
    is_split = plan.sp and per_replica % plan.tp == 0
    whole = f"a step of {per_replica} sequences is split over tp, with more collectives"
    padding = f"servers pad to it, as attention over {workload.prompt} positions has no kernel"
    chunks = f"attention over chunks of {workload.prefill_chunk} positions has no kernel"
    chunk = _next_multiple(workload.prefill_chunk or tile, tile)
    sizes: list[tuple[str, dict[str, Any], str]] = [
        *(
            (name, {"weight_dtype": d}, f"{weights} gains nothing over {format_dtype(d)} here")
            for name in ("request", "TTFT", "TPOT")
            for d in dtypes
        ),
        ("TTFT", padded, padding),
        ("TTFT", {"prompt": workload.prompt + 1}, "longer prompts have a faster attention kernel"),
        ("TTFT", {"prefill_chunk": chunk}, chunks),
        *(
            ("TPOT", {"batch": n * plan.data_size}, whole if is_split and n % plan.tp else late)
            for n in batches
        ),
        *(("TTFT", *one) for one in _other_chunks(experiment, batches)),
    ]
    for name, change, reason in sizes:
        changed = _checked(experiment, None, **change)
        if changed is not None and changed.experiment != experiment:
            yield replace(changed, name=name, reason=reason)
    if (half := _on_half(experiment)) is not None:
        reason = f"collectives over {plan.tp} devices take at least what the smaller products save"
        yield from (replace(half, name=name, reason=reason) for name in ("TTFT", "TPOT"))


def _other_chunks(
    experiment: Experiment, batches: Iterable[int]
) -> Iterator[tuple[dict[str, int], str]]:
    """Other numbers of whole sequences in a chunk of this batch, and the largest chunk of `batches` per replica."""
    workload, data_size = experiment.workload, experiment.plan.data_size
    prompt, tokens = workload.prompt, workload.prefill_chunk
    if tokens is None or tokens % prompt:
        return
    n_now, per_replica = tokens // prompt, workload.batch // data_size
    taken = f"chunks of {counted(n_now, 'sequence')} take longer here"
    yield from (({"prefill_chunk": n * prompt}, taken) for n in divisors(per_replica) if n < n_now)
    for batch in batches:
        most = max(n for n in divisors(batch) if n * prompt <= max(DEFAULT_CHUNK, prompt))
        even = f"{per_replica} sequences per device run in equal chunks of {n_now}"
        if most != n_now:
            reason = even if most > n_now else taken
            yield {"batch": batch * data_size, "prefill_chunk": most * prompt}, reason


def _on_half(experiment: Experiment) -> _Change | None:
    """The experiment over half of tp, on half of the slice; None if there is none."""
    plan, topology = experiment.plan, experiment.topology
    sizes, largest = list(topology.grid), max(topology.grid)
    if plan.tp % 2 or largest % 2 or topology.n_slices > 1 or experiment.device_order is not None:
        return None
    sizes[len(sizes) - 1 - sizes[::-1].index(largest)] //= 2
    name = f"{topology.chip.name}:{'x'.join(map(str, sizes))}"
    ep = plan.ep // 2 if "tp" in plan.expert_axes else plan.ep
    kept = picked(experiment, "model", "workload", "program", "engine")
    try:
        half = replace(plan, tp=plan.tp // 2, ep=ep, sp=plan.sp and plan.tp > 2)
        changed = experiment_of(plan=half, topology=parse_topology(name), **kept)
    except MeshscopeError:  # a plan that does not divide the model, or a slice that does not exist
        return None
    return _Change(experiment=changed, options={"--topology": name, "--plan": str(half)})


def _next_multiple(n: int, of: int) -> int:
    return -(-n // of) * of


def _purposes(base: Estimate, changed: Estimate) -> tuple[Purpose, ...]:
    """Where the change gains at least MIN_GAIN; if the experiment does not fit, only fitting counts."""
    if base.memory.fits is False:
        return (Purpose.FIT,)
    seconds = {
        Purpose.REQUEST: (base.e2e_s, changed.e2e_s),
        Purpose.RATE: (base.tpot_s or 0.0, changed.tpot_s or 0.0),
    }
    return tuple(
        purpose for purpose, (old, new) in seconds.items() if old and new <= (1 - MIN_GAIN) * old
    )


def _changes(experiment: Experiment) -> Iterator[_Change]:
    """Other plans on the same devices, half and twice the chunk, and a lower precision."""
    workload, chunk = experiment.workload, experiment.workload.prefill_chunk
    plans = [plan for plan in dict.fromkeys(_plans(experiment)) if plan != experiment.plan]
    changes = [_checked(experiment, plan) for plan in plans]
    chunks = () if chunk is None else (chunk // 2, 2 * chunk)
    changes += [_checked(experiment, None, prefill_chunk=tokens) for tokens in chunks]
    changes += [
        _checked(experiment, None, **{dtype: LOWER_PRECISION})
        for dtype in ("weight_dtype", "cache_dtype")
        if DTYPE_BITS[getattr(workload, dtype)] > DTYPE_BITS[LOWER_PRECISION]
    ]
    return (change for change in changes if change is not None)


def _plans(experiment: Experiment) -> Iterator[Plan]:
    """Splits of the devices over the data axis and tp, with experts over all axes, and sp on or off; also without pp, cp and fsdp."""
    plan = experiment.plan
    for of in (plan, replace(plan, pp=1, cp=1, fsdp=1, ep=1)):
        n_devices = plan.n_devices // (of.pp * of.cp)
        for tp in divisors(n_devices):
            data = n_devices // tp
            resized = replace(of, **{of.data_axis: data}, tp=tp, ep=1, sp=of.sp and tp > 1)
            sizes = (1,) if experiment.model.moe is None else (1, tp, data, n_devices)
            yield from (replace(resized, ep=ep) for ep in sizes)
    if plan.tp > 1:
        yield replace(plan, sp=not plan.sp)


def _checked(experiment: Experiment, plan: Plan | None, **sizes: str | int) -> _Change | None:
    workload = replace(experiment.workload, **sizes)  # type: ignore[arg-type]  fields of a workload
    kept = picked(experiment, "model", "plan", "topology", "program", "engine", "device_order")
    options = {
        f"--{name.replace('_', '-')}": format_dtype(value) if isinstance(value, str) else str(value)
        for name, value in sizes.items()
    }
    if plan is not None:
        skew = workload.routing_skew if plan.ep > 1 else 1.0
        workload = replace(workload, prefill_chunk=None, routing_skew=skew)
        kept |= {"plan": plan, "device_order": None}
        options["--plan"] = str(plan)
    try:
        changed = experiment_of(workload=workload, **kept)
    except MeshscopeError:  # a plan that does not divide the model is no suggestion
        return None
    if plan is not None and experiment.engine is Engine.MESHSCOPE:
        changed = with_default_chunk(changed)
    return _Change(experiment=changed, options=options)


def _command(run: RunRecord, change: _Change) -> str:
    words = list(run.manifest.command)
    if len(words) < 2 or words[1] not in COMMANDS:
        return ""
    options, kept, values = {*change.options, "--out"}, list[str](), iter(words)
    if "--plan" in options:  # `_checked` leaves these to the new plan
        options |= {"--prefill-chunk", "--device-order"}
    if change.experiment.workload.routing_skew == 1:
        options.add("--routing-skew")
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
    experiment, old = changed.experiment, base.experiment.workload
    known_dtypes = {experiment.model.default_weight_dtype, old.weight_dtype}
    is_converted = experiment.workload.weight_dtype not in known_dtypes
    converts = f"; {CONVERTS}" if is_converted else ""
    prefill_gain_s = base.ttft_s - changed.ttft_s
    decode_gain_s = base.e2e_s - changed.e2e_s - prefill_gain_s
    is_decode = old.n_decode_steps > 0 and decode_gain_s >= prefill_gain_s
    phase = Phase.DECODE if is_decode else Phase.PREFILL
    before, after = base.times[is_decode], changed.times[is_decode]
    return f"{phase} {_largest_change(before, after)}{converts}"


def _largest_change(before: StepTime, after: StepTime) -> str:
    """What falls most between two steps, in seconds: compute with its bytes, or an axis of communication."""
    falls = {
        axis: (seconds, after.exposed_by_axis_s.get(axis, 0.0))
        for axis, seconds in before.exposed_by_axis_s.items()
    }
    axis = max(falls, key=lambda name: falls[name][0] - falls[name][1], default=None)
    if axis is not None and falls[axis][0] - falls[axis][1] >= before.compute_s - after.compute_s:
        figures = " to ".join(map(format_seconds, falls[axis]))
        return f"exposes less communication over {axis}: {figures}"
    seconds = f"{format_seconds(before.compute_s)} to {format_seconds(after.compute_s)}"
    if after.hbm_bytes < before.hbm_bytes:
        n_bytes = f"{format_bytes(before.hbm_bytes)} to {format_bytes(after.hbm_bytes)}"
        return f"reads and writes fewer bytes per device, {n_bytes}; compute takes {seconds}"
    return f"computes less on a device: {seconds}"
