"""The experiment that options name: texts and numbers as users write them, read and checked."""

from typing import Any

from meshscope.hardware.topology import parse_topology
from meshscope.model.config import read_model
from meshscope.model.model import Model
from meshscope.model.quantization import (
    UNQUANTIZED_DTYPE,
    activation_dtype_of,
    values_dtype,
    wide_format,
)
from meshscope.model.stored_format import weight_dtype_of
from meshscope.plans.checks import check_has_program, has_program_format
from meshscope.plans.chunks import ChunkRule, chunk_option
from meshscope.plans.dispatch import DispatchForm
from meshscope.plans.experiment import Experiment, experiment_of
from meshscope.plans.placement import parse_device_order
from meshscope.plans.plan import Plan, parse_plan
from meshscope.plans.program import Engine, Partitioner, Program
from meshscope.plans.workload import ACTIVATION_DTYPES, CACHE_DTYPES, Workload
from meshscope.units import dtype_name

AUTO = "auto"  # weights in the format of the checkpoint, activations and KV cache in bf16


def asked_experiment(  # noqa: PLR0913  the options of an experiment
    *,
    model: str,
    topology: str,
    plan: str,
    dtype: str,
    weight_dtype: str | None,
    cache_dtype: str | None,
    prefill_chunk: str,
    device_order: str | None,
    layers: int | None,
    program: Program,
    engine: Engine,
    has_program: bool,
    **sizes: Any,
) -> Experiment:
    """The checked experiment, with whole prompts for `prefill_chunk` auto; a MeshscopeError for an impossible one.

    `has_program` is whether a program is built, which lacks some formats of weights; `sizes` are fields of the
    workload.
    """
    chunk = chunk_option(prefill_chunk)
    read = read_model(model)
    if has_program:
        check_has_program(read)
    slice_, parsed = parse_topology(topology), parse_plan(plan)
    filled = parsed.filled(slice_.n_devices)
    named = AUTO if (weight_dtype or dtype) == AUTO else weight_dtype or dtype
    wide = dtype_name(UNQUANTIZED_DTYPE if dtype == AUTO else dtype, ACTIVATION_DTYPES)
    is_wide = cache_dtype in {None, AUTO}
    return experiment_of(
        model=read,
        plan=parsed,
        topology=slice_,
        workload=Workload(
            **sizes,
            weight_dtype=_default_weights(read, filled, program, engine, has_program=has_program)
            if named == AUTO
            else weight_dtype_of(read, named),
            activation_dtype=wide,
            cache_dtype=wide if is_wide else dtype_name(str(cache_dtype), CACHE_DTYPES),
            prefill_chunk=None if isinstance(chunk, ChunkRule) else chunk,
        ),
        program=program,
        engine=engine,
        n_layers=layers,
        device_order=None
        if device_order is None
        else parse_device_order(device_order, filled.mesh, slice_),
    )


def _default_weights(
    model: Model, plan: Plan, program: Program, engine: Engine, *, has_program: bool
) -> str:
    """The weight dtype of the checkpoint, or of its program."""
    stored, frontend = model.default_weight_dtype, program.frontend
    is_manual = program.partitioner is Partitioner.MANUAL
    lacks_program = not has_program_format(model, plan, stored, program.partitioner)
    if frontend.is_traced or (has_program and lacks_program):
        return UNQUANTIZED_DTYPE
    is_narrow = activation_dtype_of(stored) is not None
    is_ours = frontend.is_own and engine is Engine.MESHSCOPE
    has_narrow = is_ours and is_manual and program.dispatch is not DispatchForm.FUSED
    assumed = wide_format(stored) if is_narrow and not has_narrow else stored
    is_of_layers = assumed == wide_format(assumed)
    return values_dtype(assumed) if frontend.is_served and is_of_layers else assumed
