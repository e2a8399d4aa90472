"""The option --speculate: its text, and the runs of a verification and its draft."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from meshscope.api.records import predicted_record
from meshscope.cost.predicted import has_figures
from meshscope.errors import SpecError, nearest
from meshscope.interconnect.profile import ChipProfile
from meshscope.plans.experiment import Experiment
from meshscope.plans.speculation import (
    DraftMethod,
    Speculation,
    check_verification_program,
    drafting,
    verification,
)
from meshscope.store.run import DRAFT, VERIFY, RunRecord, SpeculativeRuns
from meshscope.units import decimal_number, whole_number

FORM = "mtp:k=1,acceptance=0.85, eagle:k=3,acceptance=0.7 or draft:MODEL,k=4,acceptance=0.6"
MAX_DRAFTED = 63  # far above what a served model drafts


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
        draft_model=models[0] if models else None,
    )


def _drafted(text: str) -> int:
    try:
        n_drafted = whole_number(text)
    except ValueError:
        n_drafted = 0
    if not 1 <= n_drafted <= MAX_DRAFTED:
        raise SpecError(
            f"--speculate: k={text} is not a number of drafted tokens. Use 1 to {MAX_DRAFTED}."
        )
    return n_drafted


def _acceptance(text: str) -> float:
    try:
        value = decimal_number(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1:
        raise SpecError(
            f"--speculate: acceptance={text} is not the probability that a drafted token is accepted. "
            "Use 0 to 1."
        )
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeParts:
    """What the option asks for, and the experiments of its verification and its draft."""

    speculation: Speculation
    verify: Experiment
    draft: Experiment

    @property
    def by_name(self) -> Mapping[str, Experiment]:
        """The experiments by the names of their folders."""
        return {VERIFY: self.verify, DRAFT: self.draft}

    def added_to(
        self, record: RunRecord, make: Callable[[str, Experiment], RunRecord]
    ) -> RunRecord:
        """The run with its parts, which `make(name, experiment)` makes one after the other."""
        parts = {name: make(name, experiment) for name, experiment in self.by_name.items()}
        return replace(
            record,
            manifest=replace(record.manifest, speculation=self.speculation),
            speculative=SpeculativeRuns(**parts),
        )


def speculative_parts(
    experiment: Experiment, text: str | None, *, has_program: bool = False
) -> SpeculativeParts | None:
    """The parts that the option asks for, None without it; for programs with `has_program`."""
    if text is None:
        return None
    if not experiment.workload.n_decode_steps:
        raise SpecError(
            "--speculate changes nothing: one output token needs no decode step. Drop it."
        )
    speculation = parse_speculation(text)
    if has_program:
        check_verification_program(experiment)
    return SpeculativeParts(
        speculation=speculation,
        verify=verification(experiment, speculation),
        draft=drafting(experiment, speculation, has_program=has_program),
    )


def with_predicted_speculation(
    record: RunRecord, experiment: Experiment, text: str | None, profile: ChipProfile | None
) -> RunRecord:
    """The predicted run with those of its verification and its draft, if the option asks for them."""
    if text is not None and not has_figures(experiment.topology.chip, profile):
        raise SpecError(
            f"--speculate compares times, which {experiment.topology.chip.name} has no published rates for. "
            "Give a --profile, or drop the option."
        )
    parts = speculative_parts(experiment, text)
    if parts is None:
        return record
    command = record.manifest.command
    return parts.added_to(record, lambda _, part: predicted_record(part, command, profile))
