"""Notes on what a config says: its text part, and the format of weights where no option names one."""

from meshscope.api.request import ExperimentRequest
from meshscope.spec.experiment import Experiment
from meshscope.spec.program_formats import cut_weight
from meshscope.spec.quantization import activation_dtype_of, quantization_of
from meshscope.units import DTYPE_BITS


def checkpoint_notes(request: ExperimentRequest, experiment: Experiment) -> tuple[str, ...]:
    """A sentence on a text part, and one on weights that are not in a common 16-bit format."""
    return (*_text_note(experiment), *_format_note(request, experiment))


def _text_note(experiment: Experiment) -> tuple[str, ...]:
    model = experiment.model
    if model.text_part_of is None:
        return ()
    return (f"{model.name}: only the text part of the multimodal {model.text_part_of} counts",)


def _format_note(request: ExperimentRequest, experiment: Experiment) -> tuple[str, ...]:
    """Nothing if an option names the weight dtype."""
    model, assumed = experiment.model, experiment.workload.weight_dtype
    if model.stored_as is None or request.weight_dtype is not None:
        return ()
    stored = f"{model.name}: the config stores weights as {model.stored_as}"
    if model.stored_dtype is None:
        return (f"{stored}; {assumed} is assumed, and no --weight-dtype is its equal",)
    if model.stored_dtype == assumed:
        is_plain = not request.has_default_weights or quantization_of(assumed) is None
        return () if is_plain else (f"{stored}, here {assumed}. Use --dtype bf16 for wide ones",)
    if DTYPE_BITS[model.stored_dtype] == DTYPE_BITS[assumed]:
        is_wide = activation_dtype_of(model.stored_dtype) is not None
        return (f"{stored}, here {assumed} with activations of 16 bits",) if is_wide else ()
    if request.has_program and model.default_weight_dtype != assumed:
        cut = cut_weight(model, experiment.plan, model.stored_dtype)
        lack = "which programs lack" if cut is None else f"but the plan cuts groups of {cut}"
        return (f"{stored}, {lack}; {assumed} is assumed",)
    return (
        f"{stored}; {assumed} is assumed. Use --weight-dtype {model.stored_dtype} for its bytes",
    )
