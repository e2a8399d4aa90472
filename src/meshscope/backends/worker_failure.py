"""Turns the failure of a worker process into one error message."""

from dataclasses import dataclass

from meshscope.errors import CompileError, MeshscopeError, ParseError, RunFailedError, SpecError
from meshscope.workers.failure import ExitKind, Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTask:
    """What a worker process does, as its error messages say it.

    `process` and `activity` fill "PROCESS crashed while ACTIVITY"; `rejection` introduces the
    message of a library that raised.
    """

    process: str
    activity: str
    rejection: str
    memory_remedy: str
    crash_remedy: str
    error: type[CompileError] | type[RunFailedError]


def worker_error(task: WorkerTask, failure: Failure) -> MeshscopeError:
    """The error to raise for a failed worker."""
    match failure.how:
        case ExitKind.OURS:
            is_unreadable = failure.kind == ParseError.__name__
            return (ParseError if is_unreadable else SpecError)(failure.words)
        case ExitKind.REFUSED:
            return task.error(f"{task.rejection}: {failure.words}")
        case ExitKind.KILLED:
            return task.error(
                f"{task.process} was killed while {task.activity}, probably because the machine ran "
                f"out of memory. {task.memory_remedy}"
            )
        case ExitKind.INTERRUPTED:
            return task.error(
                f"{task.process} was interrupted ({failure.kind}) while {task.activity}. "
                "Run the command again."
            )
        case ExitKind.CRASHED:
            return task.error(
                f"{task.process} crashed ({failure.kind}) while {task.activity}. "
                f"{task.crash_remedy} Last line of its log: {failure.words}"
            )
