"""A note on the format of the weights where no option names one."""

from meshscope.api.request import ExperimentRequest
from meshscope.spec.experiment import Experiment
from meshscope.spec.quantization import quantization_of
from meshscope.units import DTYPE_BITS


def checkpoint_notes(request: ExperimentRequest, experiment: Experiment) -> tuple[str, ...]:
    """One sentence if the checkpoint stores weights in a format other than the common 16-bit ones.

    None if the option names the weight dtype.
    """
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
        return ()
    if request.has_program and model.default_weight_dtype != assumed:
        return (f"{stored}, which programs lack; {assumed} is assumed",)
    return (
        f"{stored}; {assumed} is assumed. Use --weight-dtype {model.stored_dtype} for its bytes",
    )
