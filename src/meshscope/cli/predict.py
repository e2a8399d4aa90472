"""`meshscope predict`: formulas, in a fraction of a second and on any machine."""

from meshscope.api.request import PredictRequest
from meshscope.cli.options import OutputOptions, takes_request


def _command(request: PredictRequest, output: OutputOptions) -> None:
    """Predict the collectives, memory and times of a plan.

    Needs no compiler, JAX or accelerator. Prints tables; --out also saves a run.
    """
    # NumPy and the tables are slow to import, and --help needs neither
    from meshscope.api.predict import predict_request  # noqa: PLC0415
    from meshscope.cli.output import print_run  # noqa: PLC0415

    run = predict_request(request, out=output.out, force=output.force)
    print_run(run, as_json=output.as_json, is_full=output.full)


command = takes_request(_command, PredictRequest)
