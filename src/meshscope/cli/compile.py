"""`meshscope compile`: the TPU or GPU compiler, without the hardware."""

from meshscope.api.compile import compile_request
from meshscope.api.request import CompileRequest
from meshscope.cli.options import OutputOptions, takes_request
from meshscope.cli.output import print_run
from meshscope.cli.progress import WorkProgress


def _command(request: CompileRequest, output: OutputOptions) -> None:
    """Compile for a TPU or GPU slice without the hardware.

    Prefill and decode compile in parallel. Saves a run; the tables show predicted beside compiled
    collectives.
    """
    with WorkProgress() as progress:
        run = compile_request(request, out=output.out, force=output.force, progress=progress)
    print_run(run, as_json=output.as_json, is_full=output.full)


command = takes_request(_command, CompileRequest)
