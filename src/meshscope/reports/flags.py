"""What compiler flags, and another version of the compiler, change in the programs of a run."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from meshscope.analysis.comparison import CompilerChange, Form
from meshscope.events.measured import FlagEffect
from meshscope.reports.model import joined, plain, short, wrapped
from meshscope.reports.words import phase_label, signed_bytes
from meshscope.serialize import to_plain
from meshscope.units import format_bytes, format_gib, format_seconds


def flag_lines(program: str, topology: str, effects: Sequence[FlagEffect]) -> Iterator[str]:
    """How many flags change the program, then those by their effect on the step."""
    by_flag = dict.fromkeys(str(effect.flag) for effect in effects)
    changing = {str(effect.flag) for effect in effects if effect.is_changed}
    refused = {str(effect.flag): effect.refused for effect in effects if effect.refused}
    head = f"{len(changing)} of {len(by_flag)} flags change {plain(program)} on {topology}"
    yield from wrapped(
        f"{head}; {len(refused)} {'is' if len(refused) == 1 else 'are'} unknown to this compiler"
        if refused
        else head
    )
    changed = [effect for effect in effects if effect.is_changed]
    for effect in sorted(changed, key=lambda e: -abs((e.step_s or 0.0) - (e.base_step_s or 0.0))):
        yield f"{effect.flag}"
        words = ["other collectives" if effect.is_other_collectives else "other code or schedule"]
        if effect.step_s is not None and effect.base_step_s:
            change = effect.step_s / effect.base_step_s - 1
            now, was = format_seconds(effect.step_s), format_seconds(effect.base_step_s)
            words.append(f"step {now}, was {was} ({change:+.1%})")
        if effect.total_bytes != effect.base_total_bytes:
            now, was = format_gib(effect.total_bytes), format_gib(effect.base_total_bytes)
            words.append(f"memory {now}, was {was}")
        yield from wrapped(f"{effect.phase}: {'; '.join([*words, *effect.notes])}", indent=2)
    unchanged = [flag for flag in by_flag if flag not in changing and flag not in refused]
    for head, flags in {"no change": unchanged, "refused": list(refused)}.items():
        yield from [f"{head}:"] if flags else ()
        yield from (f"  {plain(flag)}" for flag in flags)


def flag_document(program: str, topology: str, effects: Sequence[FlagEffect]) -> dict[str, Any]:
    """The document of `flags --json`."""
    rows = [{**to_plain(effect), "flag": str(effect.flag)} for effect in effects]
    return {"program": program, "topology": topology, "effects": rows}


def compiler_sentences(change: CompilerChange, left: str, right: str) -> Iterator[str]:
    """Memory on one device, then how collectives run, by phase."""
    (before, after), (temp_before, temp_after) = change.total_bytes, change.temp_bytes
    if before is not None and before == after:
        yield f"Memory: {format_bytes(after)} on a device, the same in {left} and {right}."
    elif before is not None and after is not None:
        head = f"Memory: {format_bytes(after)} on a device in {right} and {format_bytes(before)} in"
        tail = f"{left}, {signed_bytes(after - before)}"
        if temp_before is not None and temp_after is not None:
            tail += f"; temporaries {signed_bytes(temp_after - temp_before)}"
        yield f"{head} {tail}."
    phases = dict.fromkeys(form.phase for form in change.forms)
    for phase in phases:
        forms = [(f, b - a) for f, (a, b) in change.forms.items() if f.phase is phase]
        fewer = [_counted(form, -n) for form, n in forms if n < 0]
        more = [_counted(form, n) for form, n in forms if n > 0]
        yield (
            f"{phase_label(phase)}: {joined(more) or 'none'} in {right} run as "
            f"{joined(fewer) or 'none'} in {left}."
            if more and fewer
            else f"{phase_label(phase)}: {joined(more or fewer)} only in {right if more else left}."
        )
    if not phases:
        yield "Collectives run alike: same operations, synchronous or not, same algorithms."


def _counted(form: Form, n: int) -> str:
    kind = form.kind.replace("_", "-")
    over = "" if form.axis is None else f" over {short(form.axis)}"
    words = [] if form.opcode == kind else [f"as {form.opcode}"]
    words += ["asynchronous"] if form.is_async else []
    words.append(form.algorithm or "algorithm not stated")
    return f"{n:,} {kind}{'s' * (n != 1)}{over} ({', '.join(words)})"


def compiler_document(change: CompilerChange | None) -> dict[str, Any] | None:
    """The change as JSON; null unless only the versions of the compiler differ."""
    if change is None:
        return None
    sides = ("left", "right")
    return {
        "total_bytes": dict(zip(sides, change.total_bytes, strict=True)),
        "temp_bytes": dict(zip(sides, change.temp_bytes, strict=True)),
        "forms": [
            {**to_plain(asdict(form)), **dict(zip(sides, n, strict=True))}
            for form, n in change.forms.items()
        ],
    }
