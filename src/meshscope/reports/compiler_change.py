"""What another compiler changes in memory and in how collectives run, in sentences and as JSON."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from meshscope.analysis.comparison import CompilerChange, Form, FormChange
from meshscope.reports.model import joined
from meshscope.reports.plain import short
from meshscope.reports.words import phase_label, signed_bytes
from meshscope.serialize import to_plain
from meshscope.units import format_bytes


def compiler_sentences(change: CompilerChange, left: str, right: str) -> Iterator[str]:
    """Memory on one device, then how collectives run, by phase."""
    before, after = change.total_bytes
    if before is not None and after is not None:
        yield _memory_sentence(change, before, after, left, right)
    phases = dict.fromkeys(form.form.phase for form in change.forms)
    for phase in phases:
        forms = [form for form in change.forms if form.form.phase is phase]
        fewer = [_counted(f, f.left - f.right) for f in forms if f.left > f.right]
        more = [_counted(f, f.right - f.left) for f in forms if f.right > f.left]
        yield (
            f"{phase_label(phase)}: {joined(more) or 'none'} in {right} run as "
            f"{joined(fewer) or 'none'} in {left}."
            if more and fewer
            else f"{phase_label(phase)}: {joined(more or fewer)} only in {right if more else left}."
        )
    if not phases:
        yield "Collectives run alike: same operations, synchronous or not, same algorithms."


def _memory_sentence(change: CompilerChange, before: int, after: int, left: str, right: str) -> str:
    if before == after:
        return f"Memory: {format_bytes(after)} on a device, the same in {left} and {right}."
    temporaries = change.temp_bytes
    tail = ""
    if temporaries[0] is not None and temporaries[1] is not None:
        tail = f"; temporaries {signed_bytes(temporaries[1] - temporaries[0])}"
    return (
        f"Memory: {format_bytes(after)} on a device in {right} and {format_bytes(before)} in {left}, "
        f"{signed_bytes(after - before)}{tail}."
    )


def _counted(change: FormChange, n: int) -> str:
    form = change.form
    kind = f"{form.kind.replace('_', '-')}{'s' * (n != 1)}"
    over = "" if form.axis is None else f" over {short(form.axis)}"
    return f"{n:,} {kind}{over} ({_form(form)})"


def _form(form: Form) -> str:
    words = [] if form.opcode == form.kind.replace("_", "-") else [f"as {form.opcode}"]
    words += ["asynchronous"] if form.is_async else []
    words.append(form.algorithm or "algorithm not stated")
    return ", ".join(words)


def compiler_document(change: CompilerChange | None) -> dict[str, Any] | None:
    """The change as JSON; null unless only the versions of the compiler differ."""
    if change is None:
        return None
    sides = ("left", "right")
    return {
        "total_bytes": dict(zip(sides, change.total_bytes, strict=True)),
        "temp_bytes": dict(zip(sides, change.temp_bytes, strict=True)),
        "forms": [
            {**to_plain(asdict(form.form)), "left": form.left, "right": form.right}
            for form in change.forms
        ],
    }
