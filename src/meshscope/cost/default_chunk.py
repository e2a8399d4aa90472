"""The chunk of `--prefill-chunk auto`: under cp, the closed form decides whether to cut prompts."""

from dataclasses import replace

from meshscope.cost.predicted import has_figures, predicted_times
from meshscope.spec.experiment import Experiment


def with_default_chunk(experiment: Experiment) -> Experiment:
    """The experiment with the default chunk; prompts that cp splits are cut only where that is faster.

    On a chip without published figures they are cut.
    """
    whole = replace(experiment, workload=replace(experiment.workload, prefill_chunk=None))
    cut = whole.with_auto_chunk()
    is_cut = experiment.plan.cp > 1 and cut.has_cut_prompts
    if not is_cut or not has_figures(experiment.topology.chip):
        return cut
    whole_s, cut_s = (predicted_times(e)[0].step.value_s for e in (whole, cut))
    return cut if cut_s < whole_s else whole
