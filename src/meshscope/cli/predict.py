"""`meshscope predict`: closed formulas, at once and on any machine."""

from importlib import import_module

from meshscope.cli.making import predicted_run
from meshscope.cli.options import ExperimentOptions, asked_experiment, takes_experiment
from meshscope.cli.output import new_console, print_all, print_json
from meshscope.cli.profiles import asked_profile
from meshscope.views.document import run_document
from meshscope.views.text import run_text


@takes_experiment
def command(options: ExperimentOptions) -> None:
    """Predict the collectives of a plan, without compiler or JAX.

    Prints the table; with --out it is kept as a run, too.
    """
    experiment = asked_experiment(options)
    run = predicted_run(experiment, asked_profile(options.profile, experiment.topology.chip))
    if options.out is not None:
        # Parquet needs polars, which takes longer to import than the prediction takes.
        run = import_module("meshscope.cli.keeping").kept(run, options.out, force=options.force)
    if options.as_json:
        print_json(run_document(run))
        return
    console = new_console()
    print_all(console, run_text(run, console))
