"""Builds the record of a run from an experiment and its results, and saves it in a folder."""

import os
import platform
import shutil
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshscope import __version__
from meshscope.api.request import ExperimentRequest
from meshscope.cost.predicted import prediction
from meshscope.errors import SpecError
from meshscope.events.collective import Collective
from meshscope.events.enums import Phase, Source
from meshscope.events.measured import Measured
from meshscope.events.step_time import StepTime
from meshscope.hardware.chips import Chip
from meshscope.hardware.interconnect.profile import ChipProfile, load_profile
from meshscope.model.catalog import BY_NAME
from meshscope.model.quantization import activation_dtype_of, quantization_of
from meshscope.model.stored_format import IN_NO_LAYER
from meshscope.plans.checks import cut_block, cut_weight
from meshscope.plans.experiment import Experiment
from meshscope.plans.experiment_record import ExperimentRecord
from meshscope.plans.memory import Memory
from meshscope.serialize import picked
from meshscope.store.folder import new_folder
from meshscope.store.run import SPECULATION, Manifest, RunRecord
from meshscope.units import DTYPE_BITS, format_dtype

if TYPE_CHECKING:
    from meshscope.backends.compile.compile import CompileResult
    from meshscope.backends.live.run import RunResult
    from meshscope.cost.steps import TimedStep

# Environment variables that change the compiled program.
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_DEFAULT_MATMUL_PRECISION")


def predicted_record(
    experiment: Experiment,
    command: Sequence[str],
    profile: ChipProfile | None = None,
    *,
    is_compiled: bool = False,
) -> RunRecord:
    """The prediction; its times use the measured profile if there is one, else published figures."""
    rows, memory, times = prediction(experiment, profile, is_compiled=is_compiled)
    return new_record(
        Source.PREDICTED,
        experiment.record,
        command,
        phases=experiment.phases,
        rows=rows,
        memory={Source.PREDICTED: memory},
        times=times,
    )


def record_with_outcome(
    predicted: RunRecord,
    outcome: "CompileResult | RunResult",
    *,
    measured: Measured | None = None,
    times: Iterable[StepTime] = (),
    **compiled: Any,
) -> RunRecord:
    """The prediction with the results, the `times` of the compiled steps, and fields of the manifest."""
    return new_record(
        Source.COMPILED if measured is None else Source.MEASURED,
        **picked(predicted.manifest, "experiment", "command", "phases"),
        **picked(outcome, "versions", "seconds", "flags"),
        rows=(*predicted.rows, *outcome.rows),
        memory={**predicted.memory, Source.COMPILED: outcome.memory},
        measured=measured,
        times=(*predicted.times, *times),
        **compiled,
    )


def new_record(
    source: Source,
    experiment: ExperimentRecord,
    command: Sequence[str],
    *,
    phases: Iterable[Phase],
    rows: Iterable[Collective],
    memory: Mapping[Source, Memory],
    measured: Measured | None = None,
    times: Iterable[StepTime] = (),
    versions: Mapping[str, str] | None = None,
    flags: Mapping[str, str] | None = None,
    **known: Any,
) -> RunRecord:
    """A run made now by this process; `versions` and `flags` are the compiler's, `known` fields of the manifest."""
    here = {"meshscope": __version__, "python": platform.python_version()}
    manifest = Manifest(
        source=source,
        experiment=experiment,
        phases=tuple(phases),
        command=tuple(command),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        versions={**here, **(versions or {})},
        flags={name: os.environ[name] for name in FLAGS if name in os.environ} | dict(flags or {}),
        **known,
    )
    return RunRecord(
        path=None,
        manifest=manifest,
        rows=tuple(rows),
        memory=memory,
        measured=measured,
        times=tuple(times),
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


def saved(
    record: RunRecord,
    path: Path,
    *,
    force: bool,
    files: Mapping[str, Path] | None = None,
    steps: "Sequence[TimedStep]" = (),
) -> RunRecord:
    """The record in the folder `path`, whole or not at all; `files` are copied to their places in it."""
    with new_folder(path, force=force) as partial:
        for place, file in (files or {}).items():
            (partial / place).parent.mkdir(exist_ok=True)
            shutil.copyfile(file, partial / place)
        if steps:
            from meshscope.cost.steps import write_timeline  # polars is slow to import

            write_timeline(partial, steps)
        write_record(record, partial)
    return record.placed(path)


def write_record(record: RunRecord, partial: Path) -> None:
    """Writes the run and its workload card into a folder that may hold HLO and traces already; parts first."""
    # polars and yaml take longer to import than a prediction takes
    from meshscope.reports.document import metrics_document
    from meshscope.reports.export.card import CARD, card_of, yaml_of
    from meshscope.store.write import write_run

    for name, part in ({} if record.speculative is None else record.speculative.by_name).items():
        folder = partial / SPECULATION / name
        folder.mkdir(parents=True, exist_ok=True)
        write_record(part, folder)
    metrics = metrics_document(record)
    if record.manifest.experiment.topology is not None:  # a card names the hardware
        (partial / CARD).write_text(yaml_of(card_of(record)), encoding="utf-8")
    write_run(partial, record, metrics=metrics)


def checkpoint_notes(request: ExperimentRequest, experiment: Experiment) -> tuple[str, ...]:
    """Sentences on weights that are not in a common 16-bit format, and on a cache of 8 bits.

    An option that names the format suppresses it.
    """
    model, workload = experiment.model, experiment.workload
    notes: list[str] = []
    is_named = model.stored_as is None or request.weight_dtype is not None
    if not is_named and (note := _format_note(request, experiment)) is not None:
        notes.append(f"{model.name}: the checkpoint stores weights as {model.stored_as}{note}")
    if model.stored_cache is not None and request.cache_dtype is None:
        notes.append(
            f"{model.name}: the checkpoint has scales for a KV cache in {model.stored_cache}; "
            f"{format_dtype(workload.cache_dtype)} is assumed. Use --cache-dtype {model.stored_cache} to count "
            "such a cache"
        )
    return tuple(notes)


def _format_note(request: ExperimentRequest, experiment: Experiment) -> str | None:
    """The consequence of the checkpoint's format; None if the format is common."""
    model, assumed = experiment.model, experiment.workload.weight_dtype
    stored, name = model.stored_dtype, format_dtype(assumed)
    option = f"(--weight-dtype {name})"
    if model.stored_as is not None and model.stored_as.endswith(IN_NO_LAYER):
        return f"; {name} is counted. If it stores others, name them with --weight-dtype"
    if stored is None:
        near = model.nearest_dtype
        taken = f"{name} is assumed. Name a format, such as --weight-dtype int4"
        if near == assumed:
            taken = f"the nearest is assumed {option}"
        elif near is not None:
            taken = f"{name} is assumed. The nearest is --weight-dtype {format_dtype(near)}"
        return f", which no --weight-dtype equals; {taken}"
    if stored == assumed:
        is_plain = not request.has_default_weights or quantization_of(assumed) is None
        other = "Use --dtype bf16 for bf16 weights"
        if model.stored_as is not None and model.stored_as.endswith(BY_NAME):
            other = "Give its config.json for what it leaves out"
        return None if is_plain else f" {option}. {other}"
    if DTYPE_BITS[stored] == DTYPE_BITS[assumed]:
        is_wide = activation_dtype_of(stored) is not None
        return f"; here activations have 16 bits {option}" if is_wide else None
    has_program = request.has_program or request.frontend.is_traced
    is_default = has_program and request.has_default_weights
    if is_default and model.default_weight_dtype != assumed:
        blocks = cut_block(experiment.plan, model, stored)
        cut = cut_weight(model, experiment.plan, stored) if blocks is None else blocks[0]
        lack = "which the program lacks" if cut is None else f"but the plan splits groups of {cut}"
        return f", {lack}; {name} is assumed"
    use = f"Use --weight-dtype {format_dtype(stored)} to count the checkpoint's bytes"
    return f"; {name} is assumed. {use}"
