"""Says which Python traces, where it is not this one."""

import sys

from meshscope.cli.output import note
from meshscope.programs.torchxla.interpreter import VARIABLE, torchxla_python
from meshscope.spec.experiment import Experiment
from meshscope.spec.program import Frontend


def tell_python(experiment: Experiment) -> None:
    """A line about the Python of the extra torchxla, if that is another one."""
    python = torchxla_python()
    if experiment.program.frontend is Frontend.TORCHXLA and python != sys.executable:
        note(f"torch_xla traces in processes of {python} ({VARIABLE})")
