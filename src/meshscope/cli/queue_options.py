"""Options of the commands that make several runs: where they are made."""

from typing import Annotated

import typer

from meshscope.sweep.queue import Queue

QueueOption = Annotated[
    Queue,
    typer.Option(
        help="Where to make the runs: on this machine, or on a Ray cluster, which needs the extra ray."
    ),
]
AddressOption = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Address of the Ray cluster.",
        show_default="a running one, else one on this machine",
    ),
]
