"""Notes on the formats of weights and cache that a config states, where no option names one."""

from meshscope.api.request import ExperimentRequest
from meshscope.model.names import BY_NAME
from meshscope.model.quantization import activation_dtype_of, quantization_of
from meshscope.plans.experiment import Experiment
from meshscope.plans.program_formats import cut_weight
from meshscope.units import DTYPE_BITS, format_dtype


def checkpoint_notes(request: ExperimentRequest, experiment: Experiment) -> tuple[str, ...]:
    """Sentences on weights that are not in a common 16-bit format, and on a cache of 8 bits."""
    return (*_format_note(request, experiment), *_cache_note(request, experiment))


def _format_note(request: ExperimentRequest, experiment: Experiment) -> tuple[str, ...]:
    """Nothing if an option names the weight dtype."""
    model, assumed = experiment.model, experiment.workload.weight_dtype
    if model.stored_as is None or request.weight_dtype is not None:
        return ()
    stored = f"{model.name}: the checkpoint stores weights as {model.stored_as}"
    option = f"--weight-dtype {format_dtype(assumed)}"
    if model.stored_dtype is None:
        near = model.nearest_dtype
        taken = f"{format_dtype(assumed)} is assumed. Name a format, such as --weight-dtype int4"
        if near is not None:
            taken = f"{format_dtype(assumed)} is assumed. The nearest is --weight-dtype {format_dtype(near)}"
        if near == assumed:
            taken = f"the nearest is assumed ({option})"
        return (f"{stored}, which no --weight-dtype equals; {taken}",)
    if model.stored_dtype == assumed:
        is_plain = not request.has_default_weights or quantization_of(assumed) is None
        other = "Use --dtype bf16 for bf16 weights"
        if model.stored_as.endswith(BY_NAME):
            other = "Give its config.json for what it leaves out"
        return () if is_plain else (f"{stored} ({option}). {other}",)
    if DTYPE_BITS[model.stored_dtype] == DTYPE_BITS[assumed]:
        is_wide = activation_dtype_of(model.stored_dtype) is not None
        return (f"{stored}; here activations have 16 bits ({option})",) if is_wide else ()
    is_default = request.has_program and request.has_default_weights
    if is_default and model.default_weight_dtype != assumed:
        cut = cut_weight(model, experiment.plan, model.stored_dtype)
        lack = "which the program lacks" if cut is None else f"but the plan splits groups of {cut}"
        return (f"{stored}, {lack}; {format_dtype(assumed)} is assumed",)
    option = f"--weight-dtype {format_dtype(model.stored_dtype)}"
    return (
        f"{stored}; {format_dtype(assumed)} is assumed. Use {option} to count the checkpoint's bytes",
    )


def _cache_note(request: ExperimentRequest, experiment: Experiment) -> tuple[str, ...]:
    """Nothing if an option names the dtype of the cache."""
    model, assumed = experiment.model, experiment.workload.cache_dtype
    if model.stored_cache is None or request.cache_dtype is not None:
        return ()
    stored = f"{model.name}: the checkpoint has scales for a KV cache in {model.stored_cache}"
    option = f"--cache-dtype {model.stored_cache}"
    return (f"{stored}; {format_dtype(assumed)} is assumed. Use {option} to count such a cache",)
