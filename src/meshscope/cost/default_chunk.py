"""The chunk of `--prefill-chunk auto`: as long as fits, and under cp only if it is faster than whole prompts."""

from collections.abc import Iterator
from dataclasses import replace

from meshscope.cost.predicted import has_figures, predicted_times
from meshscope.plans.experiment import Experiment
from meshscope.prediction.memory import predicted_memory


def with_default_chunk(experiment: Experiment) -> Experiment:
    """The experiment with the default chunk; prompts that cp splits are cut only where that is faster.

    On a chip without published figures they are cut. A chunk of a prompt is shorter than the default if only a
    shorter one fits: plain attention writes its scores with all positions before the chunk.
    """
    whole = replace(experiment, workload=replace(experiment.workload, prefill_chunk=None))
    cut = _longest_that_fits(whole)
    is_cut = experiment.plan.cp > 1 and cut.has_cut_prompts
    if not is_cut or not has_figures(experiment.topology.chip):
        return cut
    whole_s, cut_s = (predicted_times(e)[0].step.value_s for e in (whole, cut))
    return cut if cut_s < whole_s else whole


def _longest_that_fits(whole: Experiment) -> Experiment:
    """The longest chunk that fits, else the longest that may fit, else the longest."""
    longest = whole.with_auto_chunk()
    if not longest.has_cut_prompts:
        return longest
    may_fit = None
    for choice in _ever_shorter(longest):
        fits = predicted_memory(choice).fits
        if fits:
            return choice
        if fits is None and may_fit is None:
            may_fit = choice
    return may_fit or longest


def _ever_shorter(cut: Experiment) -> Iterator[Experiment]:
    """The experiment, and those with each shorter chunk."""
    while cut.has_cut_prompts:
        yield cut
        cut = cut.with_auto_chunk(limit=cut.prefill_chunks.n_positions - 1)
