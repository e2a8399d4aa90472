"""The option --speculate: its text, the predicted step, and how both are shown."""

import math
from collections.abc import Iterator
from typing import Any

from meshscope.cost.speculation import (
    DraftMethod,
    Speculation,
    SpeculativeStep,
    speculative_step,
)
from meshscope.errors import SpecError, nearest
from meshscope.events.collective import Collective
from meshscope.events.step_time import TimeEstimate
from meshscope.interconnect.profile import ChipProfile
from meshscope.serialize import picked
from meshscope.spec.experiment import Experiment
from meshscope.spec.model.config import read_model
from meshscope.units import format_bytes, format_gib, format_seconds

FORM = "mtp:k=1,acceptance=0.85, eagle:k=3,acceptance=0.7 or draft:MODEL,k=4,acceptance=0.6"
MAX_DRAFTED = 64  # far above what a served model drafts


def parse_speculation(text: str) -> Speculation:
    """The speculation of `METHOD:k=N,acceptance=X`; SpecError for another form."""
    name, _, rest = text.partition(":")
    if name not in set(DraftMethod):
        raise SpecError(f"--speculate '{text}': {nearest(name, DraftMethod)} Write it as {FORM}.")
    words = [word.strip() for word in rest.split(",") if word.strip()]
    models = [word for word in words if "=" not in word]
    values = dict(word.split("=", 1) for word in words if "=" in word)
    if set(values) != {"k", "acceptance"} or len(models) != (name == DraftMethod.DRAFT):
        raise SpecError(f"--speculate '{text}' is not of the form {FORM}.")
    return Speculation(
        method=DraftMethod(name),
        n_drafted=_drafted(values["k"]),
        acceptance=_acceptance(values["acceptance"]),
        draft=read_model(models[0]) if models else None,
    )


def _drafted(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MAX_DRAFTED:
        raise SpecError(
            f"--speculate: k={text} is not a number of drafted tokens. Use 1 to {MAX_DRAFTED}."
        )
    return int(text)


def _acceptance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1:
        raise SpecError(
            f"--speculate: acceptance={text} is not the probability that a drafted token is accepted. "
            "Use 0 to 1."
        )
    return value


def predicted_speculation(
    experiment: Experiment, text: str, profile: ChipProfile | None
) -> SpeculativeStep:
    """The step that the option asks for."""
    if not experiment.workload.n_decode_steps:
        raise SpecError(
            "--speculate changes nothing: one output token needs no decode step. Drop it."
        )
    return speculative_step(experiment, parse_speculation(text), profile)


def speculation_lines(step: SpeculativeStep) -> Iterator[str]:
    """What a reader wants of it first: tokens a step, times, collectives, memory."""
    speculation = step.speculation
    drafted = f"{speculation.n_drafted} x {_time(step.draft)}"
    name = "" if speculation.draft is None else f" {speculation.draft.name}"
    yield (
        f"speculation    {speculation.method}{name}, k={speculation.n_drafted}, acceptance "
        f"{speculation.acceptance:g}: {speculation.tokens_per_step:.2f} tokens a step"
    )
    yield f"TPOT, decode   {format_seconds(step.tpot_s)}, {step.gain:.2f} x as fast as {_plain(step)}"
    yield f"verify         {_time(step.verify)}, {_sent(step.verify_rows)}"
    yield f"draft          {drafted}, {_sent(step.draft_rows)} each"
    fits = {True: "fits", False: "does NOT fit", None: "the chip's memory is unknown"}[step.fits]
    yield f"draft memory   {format_gib(step.memory_bytes)} a device: {fits}"


def _plain(step: SpeculativeStep) -> str:
    return f"without, {format_seconds(step.plain.value_s)}"


def _time(time: TimeEstimate) -> str:
    return format_seconds(time.value_s)


def _sent(rows: tuple[Collective, ...]) -> str:
    n_rows = sum(row.count for row in rows)
    return f"{n_rows} collectives, {format_bytes(_wire_bytes(rows))} on the wire"


def _wire_bytes(rows: tuple[Collective, ...]) -> float:
    return float(sum(row.wire_bytes * row.count for row in rows if row.wire_bytes is not None))


def speculation_document(step: SpeculativeStep) -> dict[str, Any]:
    """The entry `speculation` of the JSON document."""

    def part(time: TimeEstimate, rows: tuple[Collective, ...]) -> dict[str, Any]:
        return {
            "step_s": time.value_s,
            "low_s": time.low_s,
            "high_s": time.high_s,
            "n_collectives": sum(row.count for row in rows),
            "wire_bytes": _wire_bytes(rows),
        }

    speculation = step.speculation
    return {
        "method": speculation.method.value,
        "draft_model": None if speculation.draft is None else speculation.draft.name,
        **picked(speculation, "n_drafted", "acceptance", "tokens_per_step"),
        **picked(step, "step_s", "tpot_s", "gain"),
        "verify": part(step.verify, step.verify_rows),
        "draft": part(step.draft, step.draft_rows),
        "draft_memory_bytes": step.memory_bytes,
        "fits": step.fits,
    }
