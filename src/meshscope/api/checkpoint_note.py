"""A note on weights that are assumed in another format than the config says."""

from meshscope.api.request import ExperimentRequest
from meshscope.errors import SpecError
from meshscope.spec.experiment import Experiment
from meshscope.units import DTYPE_BITS, dtype_name

# Quantization methods of Hugging Face configs -> the dtype that counts their bytes.
_METHODS: dict[str, str] = {
    "fp8": "fp8",
    "fp8 with scales of 128 x 128 blocks": "fp8_block128",
    "mxfp4": "mxfp4",
    "gptq": "int4",
    "awq": "int4",
    "gptq of 4 bits": "int4",
    "awq of 4 bits": "int4",
    "gptq of 8 bits": "int8",
}


def checkpoint_notes(request: ExperimentRequest, experiment: Experiment) -> tuple[str, ...]:
    """One sentence if no option names a weight dtype and the assumed one has another width; else ()."""
    stored, assumed = experiment.model.stored_as, experiment.workload.weight_dtype
    if stored is None or request.weight_dtype is not None:
        return ()
    option = _METHODS.get(stored, stored)
    try:
        is_same = DTYPE_BITS[dtype_name(option)] == DTYPE_BITS[assumed]
    except SpecError:
        return (f"{_stored(experiment)}; {assumed} is assumed, and no --weight-dtype is its equal",)
    if is_same:
        return ()
    return (
        f"{_stored(experiment)}; {assumed} is assumed. Use --weight-dtype {option} for its bytes",
    )


def _stored(experiment: Experiment) -> str:
    return f"{experiment.model.name}: the config stores weights as {experiment.model.stored_as}"
