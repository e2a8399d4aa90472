"""Progress of a command, reported to a callback."""

import sys
from collections.abc import Mapping
from pathlib import Path

from meshscope.plans.experiment import Experiment
from meshscope.programs.environments import TORCHXLA_VARIABLE, torchxla_python
from meshscope.reports.plain import plain
from meshscope.store.history import earlier_compile
from meshscope.workers import Progress


class ReportedProgress:
    """Passes reports on to the caller's callback, with the time left if it is known.

    `expected_s` are the seconds that each part is expected to take, known from the run `earlier`.
    """

    def __init__(
        self,
        callback: Progress | None,
        expected_s: Mapping[str, float] | None = None,
        *,
        earlier: str = "",
    ) -> None:
        self._callback, self._expected_s = callback, dict(expected_s or {})
        self._earlier = f", as {earlier} took" if earlier else ""

    def __call__(self, part: str, step: str, left_s: float | None = None) -> None:
        """Reports a step of one part of the work."""
        if left_s is None and part in self._expected_s:
            left_s = self._expected_s.pop(part)
            step = f"{step}{self._earlier}"
        if self._callback is not None:
            self._callback(str(part), step, left_s)

    def of_part(self, name: str) -> "ReportedProgress":
        """Reports of a part of a run, such as `verify decode`."""
        callback = self._callback
        if callback is None:
            return self
        return ReportedProgress(lambda part, step, left: callback(f"{name} {part}", step, left))


def compile_progress(
    callback: Progress | None, experiment: Experiment, path: Path
) -> ReportedProgress:
    """Progress with expected times, if a run beside `path` compiled the same model."""
    earlier = earlier_compile(experiment.record, path.parent)
    if earlier is None:
        return ReportedProgress(callback)
    expected_s = {phase.value: seconds for phase, seconds in earlier.phase_s.items()}
    return ReportedProgress(callback, expected_s, earlier=plain(earlier.name))


def report_tracing_python(progress: ReportedProgress, experiment: Experiment) -> None:
    """Reports which Python traces with torch_xla, if it is not the running one."""
    if not experiment.program.frontend.is_traced:
        return
    python = torchxla_python()
    if python != sys.executable:
        progress("torch_xla", f"traces in processes of {python} ({TORCHXLA_VARIABLE})")
