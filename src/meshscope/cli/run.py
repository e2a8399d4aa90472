"""`meshscope run`: live devices, timed and profiled."""

from meshscope.api.live import run_request
from meshscope.api.request import LiveRequest
from meshscope.cli.options import OutputOptions, takes_request
from meshscope.cli.output import note, print_run
from meshscope.cli.progress import WorkProgress


def _command(request: LiveRequest, output: OutputOptions) -> None:
    """Run on live devices, timed and profiled.

    Uses the devices that JAX lists; cpu:8 makes virtual devices of this machine's CPU. Requests are
    timed after a warm-up, then one is profiled. Saves a run; the tables show predicted, compiled and
    measured side by side. With --speculate, the step that verifies drafted tokens and that of the draft
    are timed and profiled, too; their acceptance is the stated one, not measured.
    """
    with WorkProgress() as progress:
        run = run_request(request, out=output.out, force=output.force, progress=progress)
    if request.process_id:
        note(f"process {request.process_id} is done; process 0 writes the run")
        return
    print_run(run, as_json=output.as_json, is_full=output.full)


command = takes_request(_command, LiveRequest)
