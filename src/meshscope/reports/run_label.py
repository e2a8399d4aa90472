"""Short labels of runs for titles, legends and table rows."""

from collections.abc import Iterator, Sequence

from meshscope.interconnect.placement import order_text
from meshscope.plans.experiment_record import ExperimentRecord
from meshscope.plans.program import DEFAULT_FRONTEND, Partitioner
from meshscope.reports.plain import short
from meshscope.reports.words import counted
from meshscope.store.run import RunRecord
from meshscope.units import format_dtype

IMPORTED = "imported"  # label of a run without a model
MAX_MODEL = 80  # characters of a model's name

# Program options that a label leaves out because they are the defaults.
_DEFAULTS = {"partitioner": Partitioner.MANUAL, "frontend": DEFAULT_FRONTEND}


def placed_layout(experiment: ExperimentRecord) -> str | None:
    """The plan as typed, and the order of devices of a run that has another than their ids."""
    if experiment.device_order is None or experiment.imported is not None:
        return experiment.layout
    order = None
    if experiment.topology is not None:
        order = order_text(experiment.device_mesh, experiment.topology)
    is_placement = order is not None and ":" in order
    return f"{experiment.layout} on {order if is_placement else 'devices in another order'}"


def label_columns(run: RunRecord) -> tuple[str, ...]:
    """Model, plan, slice, and the program options that are not defaults; unknown ones are empty."""
    experiment = run.manifest.experiment
    model = (experiment.model_name or IMPORTED).rpartition("/")[2]
    slice_name = "" if experiment.topology is None else experiment.topology.name
    return (model, placed_layout(experiment) or "", slice_name, *_options(run))


def program_options(run: RunRecord) -> list[str]:
    """`auto partitioner` and `torchxla frontend`, where they are not the defaults."""
    options = zip(_options(run), _DEFAULTS, strict=True)
    return [f"{option} {name}" for option, name in options if option]


def _options(run: RunRecord) -> list[str]:
    program = run.manifest.experiment.program
    values = {name: getattr(program, name, None) for name in _DEFAULTS}
    return [
        "" if value in {None, _DEFAULTS[name]} else str(value) for name, value in values.items()
    ]


def work_of(run: RunRecord) -> str | None:
    """`Qwen/Qwen3-32B, 64 layers, batch 8, prompt 1024, output 128`: runs of equal work can be ranked.

    None if the model or the request is unknown, which equals no other work.
    """
    experiment = run.manifest.experiment
    workload = experiment.workload
    if experiment.model_name is None or workload is None:
        return None
    words = [short(experiment.model_name, MAX_MODEL)]
    if experiment.n_layers is not None:
        words.append(counted(experiment.n_layers, "layer"))
    words += [f"{name} {getattr(workload, name)}" for name in ("batch", "prompt", "output")]
    return ", ".join(words)


def distinct_labels(runs: Sequence[RunRecord]) -> list[str]:
    """A label for each run made of the plan and the columns in which the runs differ.

    Request, precision and depth are added where labels would be equal; labels that still are get numbers.
    """
    sources = list(_differing([(run.manifest.source.value,) for run in runs]))
    names = list(_differing([label_columns(run) for run in runs])) or [
        tuple(placed_layout(run.manifest.experiment) or "" for run in runs)
    ]
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
    """The model and the words of request, precision and depth in which runs differ."""
    rows = [
        (short(run.manifest.experiment.model_name or IMPORTED, MAX_MODEL), *_work_words(run))
        for run in runs
    ]
    columns = list(_differing(rows))
    return _joined(columns) if columns else [""] * len(runs)


def _differing(rows: Sequence[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """The columns with more than one value."""
    return (column for column in zip(*rows, strict=True) if len(set(column)) > 1)


def _joined(columns: Sequence[tuple[str, ...]]) -> list[str]:
    return [" ".join(filter(None, words)) for words in zip(*columns, strict=True)]


def _work_words(run: RunRecord) -> Iterator[str]:
    """Request, precision and depth; each is empty if unknown."""
    experiment = run.manifest.experiment
    workload, n_layers = experiment.workload, experiment.n_layers
    for name in ("batch", "prompt", "output"):
        yield "" if workload is None else f"{name} {getattr(workload, name)}"
    for name in ("weight", "activation", "cache"):
        yield (
            "" if workload is None else f"{name} {format_dtype(getattr(workload, f'{name}_dtype'))}"
        )
    yield "" if n_layers is None else counted(n_layers, "layer")
