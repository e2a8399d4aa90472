"""`meshscope.predict`: collectives, memory and times by formulas, on any machine; and the option --speculate."""

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from meshscope.api.console import Shown, shown_run
from meshscope.api.options import RunOutput, takes
from meshscope.api.records import (
    checkpoint_notes,
    chip_profile,
    predicted_record,
    saved,
    write_record,
)
from meshscope.api.request import PredictRequest, check_prediction_options, command_line
from meshscope.api.run import Run
from meshscope.cost.predicted import has_figures
from meshscope.errors import SpecError, nearest
from meshscope.plans.experiment import Experiment
from meshscope.plans.experiment_record import LayerForm
from meshscope.plans.speculation import (
    DraftMethod,
    Speculation,
    check_verification_program,
    drafting,
    verification,
)
from meshscope.store.folder import new_folder
from meshscope.store.run import DRAFT, SPECULATION, VERIFY, RunRecord, SpeculativeRuns
from meshscope.units import decimal_number, whole_number

FORM = "mtp:k=1,acceptance=0.85, eagle:k=3,acceptance=0.7 or draft:MODEL,k=4,acceptance=0.6"
MAX_DRAFTED = 63  # far above what a served model drafts


def predict_request(request: PredictRequest) -> Run:
    """Predicts the collectives, memory and times of a plan, without a compiler or JAX.

    Example:
        >>> run = meshscope.predict("Qwen/Qwen3-32B", topology="v6e-8", plan="tp=8")
        >>> run.time.tpot_s  # seconds

    Returns:
        A run with one source, `predicted`.

    Raises:
        MeshscopeError: An option, the model or the plan is impossible, or `out` cannot be written.
    """
    check_prediction_options(request.loop)
    experiment = request.experiment()
    profile = chip_profile(request.profile, experiment.topology.chip)
    command = command_line("predict", request)

    def record_of(part: Experiment) -> RunRecord:
        """The prediction, which is of unrolled layers."""
        record = predicted_record(part, command, profile)
        unrolled = replace(record.manifest.experiment, layers_are=LayerForm.UNROLLED)
        return replace(record, manifest=replace(record.manifest, experiment=unrolled))

    record = record_of(experiment)
    if request.server is not None:
        from meshscope.serving.loads import served_figures  # an ideal prediction needs no engine

        served = served_figures(experiment, request.server, profile)
        record = replace(record, manifest=replace(record.manifest, served=served))
    chip, speculate = experiment.topology.chip, request.speculate
    if speculate is not None and not has_figures(chip, profile):
        raise SpecError(
            f"--speculate compares times, which {chip.name} has no published rates for. Give a --profile, "
            "or drop the option."
        )
    parts = speculative_parts(experiment, speculate)
    if parts is not None:
        record = parts.added_to(record, lambda _, part: record_of(part))
    if request.out is not None:
        record = saved(record, request.out, force=request.force)
    return Run(record=record, warnings=checkpoint_notes(request, experiment))


predict = takes("predict", PredictRequest, predict_request)


def command(request: PredictRequest, output: RunOutput) -> Shown:
    """Predict the collectives, memory and times of a plan.

    Needs no compiler, JAX or accelerator. Prints tables; --out also saves a run.
    """
    return shown_run(predict_request(request), rows=output.rows)


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
    n_drafted, acceptance = 0, math.nan
    with suppress(ValueError):
        n_drafted = whole_number(values["k"])
    with suppress(ValueError):
        acceptance = decimal_number(values["acceptance"])
    if not 1 <= n_drafted <= MAX_DRAFTED:
        raise SpecError(
            f"--speculate: k={values['k']} is not a number of drafted tokens. Use 1 to {MAX_DRAFTED}."
        )
    if not 0 <= acceptance <= 1:
        raise SpecError(
            f"--speculate: acceptance={values['acceptance']} is not the probability that a drafted token "
            "is accepted. Use 0 to 1."
        )
    return Speculation(
        method=DraftMethod(name),
        n_drafted=n_drafted,
        acceptance=acceptance,
        draft_model=models[0] if models else None,
    )


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


def made_run(
    path: Path,
    experiment: Experiment,
    parts: SpeculativeParts | None,
    make: Callable[[Experiment, Path, str], RunRecord],
    *,
    force: bool,
) -> RunRecord:
    """The run in the folder `path`, whole or not at all; `make(experiment, folder, name)` makes it and its parts."""
    with new_folder(path, force=force) as partial:
        record = make(experiment, partial, "")
        if parts is not None:
            home = partial / SPECULATION
            record = parts.added_to(record, lambda name, part: make(part, home / name, name))
        write_record(record, partial)
    return record.placed(path)
