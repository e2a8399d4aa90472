"""Published prefills and decode steps with two kernels of experts, beside the closed form: a table for docs/."""

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
from published_steps import closed_time, published_steps

from meshscope.plans.dispatch import DispatchForm
from meshscope.units import format_seconds


def table() -> None:
    """Print the steps of the fused kernel: published, by its price, and by that of a grouped matmul."""
    print("| step | published | predicted | | as a grouped matmul | |")
    print("| --- | --- | --- | --- | --- | --- |")
    for step in published_steps():
        if step.experiment.program.dispatch is not DispatchForm.FUSED:
            continue
        program = replace(step.experiment.program, dispatch=DispatchForm.AUTO)
        grouped = replace(step, experiment=replace(step.experiment, program=program))
        workload = step.experiment.workload
        published = [format_seconds(step.device_s)]
        if step.most_device_s > step.device_s:
            published.append(format_seconds(step.most_device_s))
        cells = [f"{step.phase} of {workload.batch} x {workload.prompt}", " to ".join(published)]
        for priced in (step, grouped):
            seconds = closed_time(priced).value_s
            error = step.error_of(seconds)
            cells += [format_seconds(seconds), f"{error:+.0%}"]
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    table()
