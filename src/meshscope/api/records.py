"""Builds the record of a run from an experiment and its results, and saves it in a folder."""

import os
import platform
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from meshscope import __version__
from meshscope.api.request import ExperimentRequest
from meshscope.cost.efficiency import ModeledProgram
from meshscope.cost.predicted import predicted_times, timed_predictions
from meshscope.errors import SpecError
from meshscope.events.collective import Collective, OtherOperation
from meshscope.events.enums import Phase, Source
from meshscope.events.measured import Measured
from meshscope.events.step_time import StepTime, TimeEstimate
from meshscope.hardware.chips import Chip
from meshscope.interconnect.profile import ChipProfile, load_profile
from meshscope.model.catalog import BY_NAME
from meshscope.model.layers import ShallowLayers
from meshscope.model.quantization import activation_dtype_of, quantization_of
from meshscope.plans.checks import cut_weight
from meshscope.plans.experiment import Experiment
from meshscope.plans.experiment_record import ExperimentRecord
from meshscope.plans.memory import Memory
from meshscope.prediction import predict
from meshscope.prediction.memory import predicted_memory
from meshscope.store.folder import new_folder
from meshscope.store.run import SPECULATION, Manifest, RunRecord
from meshscope.units import DTYPE_BITS, format_dtype, format_seconds

# Environment variables that change the compiled program.
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_DEFAULT_MATMUL_PRECISION")


OTHER_PROGRAM_FRAC = 0.1  # the difference from which the time of another program is noted


class BackendResult(Protocol):
    """Results of the compiler or of live devices."""

    @property
    def rows(self) -> Sequence[Collective]: ...  # noqa: D102  compiled and measured
    @property
    def memory(self) -> Memory: ...  # noqa: D102  by the compiler's account
    @property
    def versions(self) -> Mapping[str, str]: ...  # noqa: D102
    @property
    def seconds(self) -> Mapping[str, float]: ...  # noqa: D102
    @property
    def flags(self) -> Mapping[str, str]: ...  # noqa: D102


def predicted_record(
    experiment: Experiment, command: Sequence[str], profile: ChipProfile | None = None
) -> RunRecord:
    """The prediction; its times use the measured profile if there is one, else published figures."""
    return RunRecord(
        path=None,
        manifest=new_manifest(
            Source.PREDICTED, experiment.record, command, phases=experiment.phases
        ),
        rows=tuple(timed_predictions(predict(experiment), experiment, profile)),
        memory={Source.PREDICTED: predicted_memory(experiment)},
        times=predicted_times(experiment, profile),
    )


def noting_own_program(
    predicted: RunRecord, experiment: Experiment, profile: ChipProfile | None = None
) -> RunRecord:
    """The prediction, with a note on steps in which meshscope's own program takes another time.

    The closed form follows published steps, whose programs spend more on the routing of experts.
    """
    compiled_ones = predicted_times(experiment, profile, program=ModeledProgram.OWN)
    times = (
        _noting(time, compiled.step)
        for time, compiled in zip(predicted.times, compiled_ones, strict=True)
    )
    return replace(predicted, times=tuple(times))


def _noting(time: StepTime, of_compiled: TimeEstimate) -> StepTime:
    if abs(of_compiled.value_s / time.step.value_s - 1) < OTHER_PROGRAM_FRAC:
        return time
    note = (
        f"{format_seconds(of_compiled.value_s)} for the compiled program by the same model: its small operations "
        "work on arrays in VMEM, those of published programs do not"
    )
    return replace(time, notes=(*time.notes, note))


def record_with_outcome(  # noqa: PLR0913  a prediction and all that came of it
    predicted: RunRecord,
    outcome: BackendResult,
    *,
    measured: Measured | None = None,
    times: Iterable[StepTime] = (),
    timed_layers: ShallowLayers | None = None,
    others: Iterable[OtherOperation] = (),
) -> RunRecord:
    """The prediction with the results beside it; `times` are those of the compiled steps.

    `timed_layers` are those of the unrolled programs behind the times, and `others` the operations of the
    compiled programs without rows.
    """
    manifest = new_manifest(
        Source.COMPILED if measured is None else Source.MEASURED,
        predicted.manifest.experiment,
        predicted.manifest.command,
        phases=predicted.manifest.phases,
        versions=outcome.versions,
        seconds=outcome.seconds,
        flags=outcome.flags,
        timed_layers=timed_layers,
        others=others,
    )
    return RunRecord(
        path=None,
        manifest=manifest,
        rows=(*predicted.rows, *outcome.rows),
        memory={**predicted.memory, Source.COMPILED: outcome.memory},
        measured=measured,
        times=(*predicted.times, *times),
    )


def new_manifest(  # noqa: PLR0913  the fields of a manifest
    source: Source,
    experiment: ExperimentRecord,
    command: Sequence[str],
    *,
    phases: Iterable[Phase],
    versions: Mapping[str, str] | None = None,
    seconds: Mapping[str, float] | None = None,
    flags: Mapping[str, str] | None = None,
    timed_layers: ShallowLayers | None = None,
    others: Iterable[OtherOperation] = (),
) -> Manifest:
    """The manifest of a run made now by this process; `versions` and `flags` are the compiler's."""
    return Manifest(
        source=source,
        experiment=experiment,
        phases=tuple(phases),
        command=tuple(command),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        versions={
            "meshscope": __version__,
            "python": platform.python_version(),
            **(versions or {}),
        },
        flags={name: os.environ[name] for name in FLAGS if name in os.environ} | dict(flags or {}),
        seconds=seconds or {},
        timed_layers=timed_layers,
        other_operations=tuple(others),
    )


def chip_profile(path: Path | None, chip: Chip | None) -> ChipProfile | None:
    """The profile in the file; SpecError if it belongs to another chip."""
    if path is None:
        return None
    profile = load_profile(path)
    if chip is not None and profile.chip != chip.name:
        raise SpecError(
            f"--profile {path} is a profile of '{profile.chip}', and the topology has '{chip.name}'. "
            f"Give a profile of '{chip.name}', or another --topology."
        )
    return profile


def saved(record: RunRecord, path: Path, *, force: bool, hlo: Path | None = None) -> RunRecord:
    """The record in the folder `path`, with its HLO text, written whole or not at all."""
    with new_folder(path, force=force) as partial:
        if hlo is not None:
            from meshscope.store.write import HLO  # noqa: PLC0415  polars is slow to import

            (partial / HLO).mkdir()
            shutil.copyfile(hlo, partial / HLO / hlo.name)
        write_record(record, partial)
    return record.placed(path)


def write_record(record: RunRecord, partial: Path) -> None:
    """Writes the run and its workload card into a folder that may hold HLO and traces already; parts first."""
    # polars and yaml take longer to import than a prediction takes
    from meshscope.reports.document import metrics_document  # noqa: PLC0415
    from meshscope.reports.export.card import CARD, card_text  # noqa: PLC0415
    from meshscope.store.write import write_run  # noqa: PLC0415

    for name, part in ({} if record.speculative is None else record.speculative.by_name).items():
        folder = partial / SPECULATION / name
        folder.mkdir(parents=True, exist_ok=True)
        write_record(part, folder)
    if record.manifest.experiment.topology is not None:  # a card names the hardware
        (partial / CARD).write_text(card_text(record), encoding="utf-8")
    write_run(partial, record, metrics=metrics_document(record))


def checkpoint_notes(request: ExperimentRequest, experiment: Experiment) -> tuple[str, ...]:
    """Sentences on weights that are not in a common 16-bit format, and on a cache of 8 bits."""
    return (*_format_note(request, experiment), *_cache_note(request, experiment))


def _format_note(request: ExperimentRequest, experiment: Experiment) -> tuple[str, ...]:
    """Nothing if an option names the weight dtype."""
    model, assumed = experiment.model, experiment.workload.weight_dtype
    if model.stored_as is None or request.weight_dtype is not None:
        return ()
    stored = f"{model.name}: the checkpoint stores weights as {model.stored_as}"
    option = f"--weight-dtype {format_dtype(assumed)}"
    if model.stored_dtype is None:
        near = model.nearest_dtype
        taken = f"{format_dtype(assumed)} is assumed. Name a format, such as --weight-dtype int4"
        if near is not None:
            taken = f"{format_dtype(assumed)} is assumed. The nearest is --weight-dtype {format_dtype(near)}"
        if near == assumed:
            taken = f"the nearest is assumed ({option})"
        return (f"{stored}, which no --weight-dtype equals; {taken}",)
    if model.stored_dtype == assumed:
        is_plain = not request.has_default_weights or quantization_of(assumed) is None
        other = "Use --dtype bf16 for bf16 weights"
        if model.stored_as.endswith(BY_NAME):
            other = "Give its config.json for what it leaves out"
        return () if is_plain else (f"{stored} ({option}). {other}",)
    if DTYPE_BITS[model.stored_dtype] == DTYPE_BITS[assumed]:
        is_wide = activation_dtype_of(model.stored_dtype) is not None
        return (f"{stored}; here activations have 16 bits ({option})",) if is_wide else ()
    is_default = request.has_program and request.has_default_weights
    if is_default and model.default_weight_dtype != assumed:
        cut = cut_weight(model, experiment.plan, model.stored_dtype)
        lack = "which the program lacks" if cut is None else f"but the plan splits groups of {cut}"
        return (f"{stored}, {lack}; {format_dtype(assumed)} is assumed",)
    option = f"--weight-dtype {format_dtype(model.stored_dtype)}"
    return (
        f"{stored}; {format_dtype(assumed)} is assumed. Use {option} to count the checkpoint's bytes",
    )


def _cache_note(request: ExperimentRequest, experiment: Experiment) -> tuple[str, ...]:
    """Nothing if an option names the dtype of the cache."""
    model, assumed = experiment.model, experiment.workload.cache_dtype
    if model.stored_cache is None or request.cache_dtype is not None:
        return ()
    stored = f"{model.name}: the checkpoint has scales for a KV cache in {model.stored_cache}"
    option = f"--cache-dtype {model.stored_cache}"
    return (f"{stored}; {format_dtype(assumed)} is assumed. Use {option} to count such a cache",)
