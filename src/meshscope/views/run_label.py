"""Short labels of runs for titles, legends and table rows."""

from collections.abc import Sequence

from meshscope.spec.program import Frontend, Partitioner
from meshscope.store.run import RunRecord

IMPORTED = "imported"  # label of a run without a model

# Program options that a label leaves out because they are the defaults.
_DEFAULTS = {"partitioner": Partitioner.MANUAL, "frontend": Frontend.JAX}


def label_columns(run: RunRecord) -> tuple[str, ...]:
    """Model, plan, slice, and the program options that are not defaults; unknown ones are empty."""
    experiment = run.manifest.experiment
    model = (experiment.model_name or IMPORTED).rpartition("/")[2]
    slice_name = "" if experiment.topology is None else experiment.topology.name
    return (model, str(experiment.plan or ""), slice_name, *_options(run))


def program_options(run: RunRecord) -> list[str]:
    """The partitioner and the front end, where they are not the defaults."""
    return [option for option in _options(run) if option]


def _options(run: RunRecord) -> list[str]:
    program = run.manifest.experiment.program
    values = {name: getattr(program, name, None) for name in _DEFAULTS}
    return [
        "" if value in {None, _DEFAULTS[name]} else str(value) for name, value in values.items()
    ]


def distinct_labels(runs: Sequence[RunRecord]) -> list[str]:
    """A label for each run made of the columns in which the runs differ; equal labels are numbered."""
    columns = list(zip(*(label_columns(run) for run in runs), strict=True))
    columns.append(tuple(run.manifest.source.value for run in runs))
    plans = columns[1]
    differing = [column for column in columns if len(set(column)) > 1] or [plans]
    labels = [" ".join(filter(None, words)) for words in zip(*differing, strict=True)]
    return [
        label if labels.count(label) == 1 else f"{label} ({number})"
        for number, label in enumerate(labels, start=1)
    ]
