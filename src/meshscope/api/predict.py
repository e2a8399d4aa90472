"""`meshscope.predict`: collectives, memory and times by formulas, on any machine."""

from meshscope.api.console import print_run
from meshscope.api.idle_options import check_prediction_options
from meshscope.api.options import RunOutput, takes
from meshscope.api.records import checkpoint_notes, chip_profile, predicted_record, saved
from meshscope.api.request import PredictRequest, command_line
from meshscope.api.run import Run
from meshscope.api.speculate import with_predicted_speculation


@takes(PredictRequest)
def predict(request: PredictRequest) -> Run:
    """Predicts the collectives, memory and times of a plan, without a compiler or JAX.

    Example:
        >>> run = meshscope.predict("Qwen/Qwen3-32B", topology="v6e-8", plan="tp=8")
        >>> run.time.tpot_s  # seconds

    Returns:
        A run with one source, `predicted`.

    Raises:
        MeshscopeError: An option, the model or the plan is impossible, or `out` cannot be written.
    """
    return predict_request(request)


def predict_request(request: PredictRequest) -> Run:
    """The run that the request asks for; saved if it names a folder."""
    check_prediction_options(request.loop)
    experiment = request.experiment()
    profile = chip_profile(request.profile, experiment.topology.chip)
    record = predicted_record(experiment, command_line("predict", request), profile)
    record = with_predicted_speculation(record, experiment, request.speculate, profile)
    if request.out is not None:
        record = saved(record, request.out, force=request.force)
    return Run(record=record, warnings=checkpoint_notes(request, experiment))


def command(request: PredictRequest, output: RunOutput) -> None:
    """Predict the collectives, memory and times of a plan.

    Needs no compiler, JAX or accelerator. Prints tables; --out also saves a run.
    """
    print_run(predict_request(request), as_json=output.as_json, is_full=output.full)
