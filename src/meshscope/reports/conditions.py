"""What a run is: its label among others and what distinguishes it, and its conditions as a table."""

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from meshscope.events.enums import Phase, Source
from meshscope.hardware.chips import ChipKind
from meshscope.plans.chunks import DEFAULT_CHUNK, why_auto_is_whole
from meshscope.plans.experiment_record import ExperimentRecord
from meshscope.plans.placement import order_text
from meshscope.plans.program import DEFAULT_FRONTEND, Engine, Partitioner
from meshscope.plans.workload import Workload
from meshscope.reports.model import short
from meshscope.reports.tables import labeled
from meshscope.store.run import RunRecord
from meshscope.units import counted, format_dtype

IMPORTED = "imported"  # label of a run without a model
MAX_MODEL = 80  # characters of a model's name
N_REQUEST = 4  # words of a work that name the model, batch, prompt and output

# Program options that a label leaves out because they are the defaults.
_DEFAULTS = {"partitioner": Partitioner.MANUAL, "frontend": DEFAULT_FRONTEND}


def placed_layout(experiment: ExperimentRecord) -> str | None:
    """The plan as typed, and the device order of a run unless it is by id."""
    if experiment.device_order is None or experiment.imported is not None:
        return experiment.layout
    order = None
    if experiment.topology is not None:
        order = order_text(experiment.device_mesh, experiment.topology)
    is_placement = order is not None and ":" in order
    return f"{experiment.layout} on {order if is_placement else 'devices in another order'}"


def program_options(run: RunRecord) -> list[str]:
    """`auto partitioner` and `torchxla frontend`, where they are not the defaults."""
    return [f"{option} {name}" for name, option in _options(run).items() if option]


def _options(run: RunRecord) -> dict[str, str]:
    values = {n: getattr(run.manifest.experiment.program, n, None) for n in _DEFAULTS}
    return {n: "" if v in {None, _DEFAULTS[n]} else str(v) for n, v in values.items()}


def work_of(run: RunRecord) -> str | None:
    """`Qwen/Qwen3-32B, 64 layers, batch 8, prompt 1024, output 128`: runs of equal work can be ranked.

    None if the model or the request is unknown, which equals no other work.
    """
    experiment = run.manifest.experiment
    workload = experiment.workload
    if experiment.model_name is None or workload is None:
        return None
    layers = [] if experiment.n_layers is None else [counted(experiment.n_layers, "layer")]
    return ", ".join([short(experiment.model_name, MAX_MODEL), *layers, sizes_text(workload)])


def sizes_text(workload: Workload) -> str:
    """`batch 8, prompt 1024, output 128`."""
    return f"batch {workload.batch}, prompt {workload.prompt}, output {workload.output}"


def distinct_labels(runs: Sequence[RunRecord]) -> list[str]:
    """A label for each run made of the plan and the columns in which the runs differ.

    Request, precision and depth are added where labels would be equal; labels that still are get numbers.
    """
    sources = list(_differing([(run.manifest.source.value,) for run in runs]))
    experiments = [run.manifest.experiment for run in runs]
    layouts = [placed_layout(experiment) or "" for experiment in experiments]
    columns = [
        (
            _model_label(one),
            layout,
            "" if one.topology is None else one.topology.name,
            *_options(run).values(),
        )
        for run, one, layout in zip(runs, experiments, layouts, strict=True)
    ]
    names = list(_differing(columns)) or [tuple(layouts)]
    labels = _joined([*names, *sources])
    for column in _differing([tuple(_work_words(run)) for run in runs]):
        if len(set(labels)) < len(labels):
            names.append(column)
            labels = _joined([*names, *sources])
    return [
        label if labels.count(label) == 1 else f"{label} ({number})"
        for number, label in enumerate(labels, start=1)
    ]


def differing_work(runs: Sequence[RunRecord]) -> list[str]:
    """The model and the words of the request in which runs differ; of precision and depth while these are equal."""
    models = [short(_model_label(run.manifest.experiment), MAX_MODEL) for run in runs]
    words = [(model, *_work_words(run)) for model, run in zip(models, runs, strict=True)]
    request, others = [row[:N_REQUEST] for row in words], [row[N_REQUEST:] for row in words]
    columns = list(_differing(request))
    for column in _differing(others):
        if not columns or len(set(_joined(columns))) < len(runs):
            columns.append(column)
    return _joined(columns) if columns else [""] * len(runs)


def _model_label(experiment: ExperimentRecord) -> str:
    return (experiment.model_name or IMPORTED).rpartition("/")[2]


def _differing(rows: Sequence[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    return (column for column in zip(*rows, strict=True) if len(set(column)) > 1)


def _joined(columns: Sequence[tuple[str, ...]]) -> list[str]:
    return [" ".join(filter(None, words)) for words in zip(*columns, strict=True)]


def _work_words(run: RunRecord) -> Iterator[str]:
    experiment = run.manifest.experiment
    workload, n_layers = experiment.workload, experiment.n_layers
    if workload is None:
        yield from [""] * 6
    else:
        yield from (f"{name} {getattr(workload, name)}" for name in ("batch", "prompt", "output"))
        for name in ("weight", "activation", "cache"):
            yield f"{name} {format_dtype(getattr(workload, f'{name}_dtype'))}"
    yield "" if n_layers is None else counted(n_layers, "layer")


MAX_VALUE = 4000  # characters of a condition, such as compiler flags


def conditions(run: RunRecord, names: Container[str] | None = None) -> Table:
    """One line per condition, by default of all names."""
    lines = [line for line in condition_lines(run) if names is None or line[0] in names]
    return labeled((name, Text(short(value, MAX_VALUE))) for name, value in lines)


def condition_lines(run: RunRecord) -> list[tuple[str, str]]:
    """Names and values of the conditions that the run knows."""
    experiment = run.manifest.experiment
    is_own = experiment.program is not None and experiment.engine is Engine.MESHSCOPE
    kernels = experiment.kernels if is_own else {}  # by part; or the reason for none
    named = (f"{part.replace('_', ' ')}: {choice}" for part, choice in kernels.items())
    n_layers, topology, workload = experiment.n_layers, experiment.topology, experiment.workload
    model = [] if experiment.model is None else [str(experiment.model_name)]
    slice_ = [] if topology is None else [topology.name]
    if model and n_layers is not None:
        model.append(counted(n_layers, "layer"))
    for noun, n in {"chip": experiment.n_chips, "device": experiment.n_devices}.items():
        slice_ += [counted(n, noun)] if slice_ and n is not None else []
    request = ""
    if workload is not None:
        names = {"weights": "weight", "activations": "activation", "cache": "cache"}
        dtypes = {n: format_dtype(getattr(workload, f"{of}_dtype")) for n, of in names.items()}
        n, said = workload.decode_tokens, sizes_text(workload)
        said += f", {n} tokens of a sequence in a decode step" if n > 1 else ""
        request = f"{said}; {_pairs(dtypes, separator=' ')}"
    lines = [
        ("model", ", ".join(model)),
        ("slice", ", ".join(slice_)),
        ("plan", _plan(experiment)),
        ("request", request),
        ("program", _program(run)),
        ("kernels", "; ".join(named)),
        ("versions", _pairs(run.manifest.versions, separator=" ")),
        ("flags", _pairs(run.manifest.flags)),
        ("run", "" if run.path is None else str(run.path)),
    ]
    return [(name, value) for name, value in lines if value]


def _pairs(values: Mapping[str, Any], separator: str = "=") -> str:
    return ", ".join(f"{name}{separator}{value}" for name, value in values.items())


def _plan(experiment: ExperimentRecord) -> str:
    """The plan on its mesh, with the placement on the torus of its device order, else their ids."""
    if not experiment.mesh:
        return ""
    mesh = f"the mesh ({_pairs(experiment.mesh)})"
    if experiment.device_order is not None:
        order = ",".join(map(str, experiment.device_order))
        if experiment.topology is not None:
            order = order_text(experiment.device_mesh, experiment.topology) or ""
        mesh += f" of devices {order}"
    return mesh if experiment.plan is None else f"{experiment.plan} on {mesh}"


def _program(run: RunRecord) -> str:
    experiment, is_predicted = run.manifest.experiment, run.sources == (Source.PREDICTED,)
    if experiment.imported is not None:
        n_layers, lengths = experiment.extended_layers, experiment.lengths
        depth = "" if n_layers is None else f"; extended to {counted(n_layers, 'layer')}"
        sequences = "" if lengths is None else f"; a device's sequences: {lengths}"
        return f"imported from {', '.join(experiment.imported)}{depth}{sequences}"
    program = experiment.program
    if experiment.engine is Engine.VLLM:
        topology = experiment.topology
        is_tpu = topology is not None and topology.chip.kind is ChipKind.TPU
        pages = ", cache in the pages of tpu-inference" if is_tpu else ""
        return f"{experiment.engine}'s conventions{pages}"
    if program is None:
        return ""
    if program.frontend.is_served:
        name = " ".join(filter(None, (program.frontend, program.engine_version)))
        return f"the model code of {name}, layers unrolled{_chunks(experiment)}"
    frontend = f"{program.frontend}, {program.partitioner} partitioner"
    layers = "" if experiment.layers_are is None else f", layers {experiment.layers_are}"
    layers += ", timed unrolled" if run.manifest.timed_layers is not None else ""
    layers += f" (--loop {program.loop})"
    if is_predicted:
        layers = ", timed with layers unrolled, as servers run them"
    context = ""
    if "cp" in experiment.mesh:
        is_cut = experiment.prefill_chunks is not None and experiment.prefill_chunks.is_cut
        context = f", {'queries' if is_cut else experiment.context or program.context} over cp"
    n, batches = experiment.microbatches.get(Phase.PREFILL), ""
    if experiment.mesh.get("pp", 1) > 1 and n is not None:
        batches = f"; {n} micro-batch{'es' if n > 1 else ''} in prefill"
    return f"{frontend}{layers}{context}{batches}{_chunks(experiment)}"


def _chunks(experiment: ExperimentRecord) -> str:
    chunks, workload = experiment.prefill_chunks, experiment.workload
    if chunks is None or workload is None:
        return ""
    if chunks.count > 1:
        sequences = counted(chunks.n_sequences, "sequence")
        return f"; prefill in {chunks.count} chunks of {sequences} x {chunks.n_positions} tokens"
    if workload.prefill_chunk is not None:
        return (
            f"; prefill in one chunk, as --prefill-chunk {workload.prefill_chunk} is not shorter than the "
            f"{chunks.n_tokens} tokens of a device"
        )
    plan, program, engine = experiment.plan, experiment.program, experiment.engine
    if chunks.n_tokens <= DEFAULT_CHUNK or plan is None or program is None or engine is None:
        return ""
    reason = why_auto_is_whole(plan, program, engine)
    return f"; prefill in one chunk{'' if reason is None else f', as {reason}'}"
