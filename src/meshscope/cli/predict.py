"""`meshscope predict`: formulas, in a fraction of a second and on any machine."""

from meshscope.api.predict import predict_request
from meshscope.api.request import PredictRequest
from meshscope.cli.options import OutputOptions, takes_request
from meshscope.cli.output import print_run


def _command(request: PredictRequest, output: OutputOptions) -> None:
    """Predict the collectives, memory and times of a plan.

    Needs no compiler, JAX or accelerator. Prints tables; --out saves a run, too.
    """
    run = predict_request(request, out=output.out, force=output.force)
    print_run(run, as_json=output.as_json, is_full=output.full)


command = takes_request(_command, PredictRequest)
