"""`meshscope engines`: environments of serving engines."""

from typing import Annotated

import typer

EngineArgument = Annotated[str, typer.Argument(metavar="ENGINE", help="Such as vllm-tpu.")]
VersionOption = Annotated[
    str | None,
    typer.Option("--engine-version", metavar="V", help="A known release; by default the newest."),
]
