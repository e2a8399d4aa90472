"""Single executions of the collectives of a run."""

import polars as pl

from meshscope.analysis.metric_inputs import MetricInputs
from meshscope.analysis.overlap import timed
from meshscope.analysis.timeline import last_step
from meshscope.analysis.volume import WHERE, collectives


def executions(inputs: MetricInputs) -> pl.DataFrame:
    """The collectives of the last step in the timeline; rows of the event table for other phases."""
    rows = collectives(inputs.events)
    if inputs.timeline is None:
        return rows
    single = collectives(last_step(timed(inputs.timeline))).drop("step")
    phases = single.select(WHERE).unique()
    return pl.concat([rows.join(phases, on=WHERE, how="anti", nulls_equal=True), single])
