"""`meshscope.predict`: collectives, memory and times by formulas, on any machine."""

from pathlib import Path

from meshscope.api.checkpoint_note import checkpoint_notes
from meshscope.api.idle_options import check_prediction_options
from meshscope.api.records import chip_profile, predicted_record, saved
from meshscope.api.request import PredictRequest, command_line, request_of
from meshscope.api.run import Run
from meshscope.api.speculate import with_predicted_speculation
from meshscope.errors import public
from meshscope.files import path_of
from meshscope.plans.context_form import ContextForm
from meshscope.plans.dispatch import DispatchForm
from meshscope.plans.kernel_choice import Kernels
from meshscope.plans.program import DEFAULT_FRONTEND, Engine, Frontend, Loop, Partitioner


@public
def predict(  # noqa: PLR0913  the options of the command
    model: str | Path,
    *,
    topology: str,
    plan: str,
    batch: int = 1,
    prompt: int = 128,
    output: int = 128,
    dtype: str = "auto",
    weight_dtype: str | None = None,
    cache_dtype: str | None = None,
    layers: int | None = None,
    engine: Engine | str = Engine.MESHSCOPE,
    partitioner: Partitioner | str = Partitioner.MANUAL,
    frontend: Frontend | str = DEFAULT_FRONTEND,
    loop: Loop | str = Loop.AUTO,
    context: ContextForm | str = ContextForm.AUTO,
    kernels: Kernels | str = Kernels.AUTO,
    dispatch: DispatchForm | str = DispatchForm.AUTO,
    capacity_factor: float | None = None,
    microbatches: int | None = None,
    prefill_chunk: int | str = "auto",
    routing_skew: float = 1.0,
    device_order: str | None = None,
    profile: str | Path | None = None,
    speculate: str | None = None,
    out: str | Path | None = None,
    force: bool = False,
) -> Run:
    """Predicts the collectives, memory and times of a plan, without a compiler or JAX.

    Example:
        >>> run = meshscope.predict("Qwen/Qwen3-32B", topology="v6e-8", plan="tp=8")
        >>> run.time.tpot_s  # seconds

    Args:
        model: A model id, a config.json, or a folder with one.
        topology: The slice: `v6e-8`, a chip grid `v6e:2x4`, or slices `2xv6e:4x4`.
        plan: Axis sizes, such as `tp=8` or `dp=2,tp=4`; -1 fills the slice.
        batch: Sequences over all devices.
        prompt: Input tokens of a sequence.
        output: Output tokens of a sequence.
        dtype: Number format of weights, activations and KV cache; `auto` is that of the checkpoint
            for the weights, and bf16 for the others.
        weight_dtype: Weight dtype, if different from `dtype`; vLLM's names of quantizations, too.
        cache_dtype: KV cache dtype, if different from `dtype`.
        layers: Only the first N layers of the model.
        engine: Whose collectives to predict: `meshscope` or `vllm`.
        partitioner: Who inserts the collectives: the program (`manual`) or the compiler (`auto`).
        frontend: What writes the program: `jax` or `torchxla`.
        loop: Layers `unroll`ed, or one body in a `scan`, in compiled programs; predictions are of
            unrolled layers (`auto`).
        context: How cp brings keys to queries in prefill.
        kernels: Kernels where shapes allow (`auto`), or an error (`on`), or none (`off`).
        dispatch: How tokens reach experts on other devices.
        capacity_factor: Expert capacity over the mean load; tokens beyond it are dropped.
        microbatches: Micro-batches that prefill sends through the pipeline (pp).
        prefill_chunk: Prompt tokens that prefill processes at a time on a data-parallel rank, `auto`
            (up to 8,192) or `off`.
        routing_skew: Load of the most loaded device's experts over the mean.
        device_order: Which axes of the plan have which dimension of the torus, such as
            `y:dp=2,x:tp=4`, or the device ids in the order of the mesh; by default 0, 1, 2, ...
        profile: A chip profile that `meshscope calibrate` wrote, for times.
        speculate: Speculative decoding: `mtp:k=1,acceptance=0.85`, `eagle:...` or `draft:MODEL,...`;
            the result is `Run.speculation`.
        out: Folder to save the run in; without it the run stays in memory.
        force: Replace the run in `out`.

    Returns:
        A run with one source, `predicted`.

    Raises:
        MeshscopeError: An option, the model or the plan is impossible, or `out` cannot be written.
    """
    request = request_of(PredictRequest, locals())
    return predict_request(request, out=None if out is None else path_of(out), force=force)


def predict_request(request: PredictRequest, *, out: Path | None, force: bool) -> Run:
    """The run that the request asks for; saved if `out` is given."""
    check_prediction_options(request.loop)
    experiment = request.experiment()
    profile = chip_profile(request.profile, experiment.topology.chip)
    record = predicted_record(experiment, command_line("predict", request, out=out), profile)
    record = with_predicted_speculation(record, experiment, request.speculate, profile)
    return Run(
        record=record if out is None else saved(record, out, force=force),
        warnings=checkpoint_notes(request, experiment),
    )
