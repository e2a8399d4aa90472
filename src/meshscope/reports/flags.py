"""What each compiler flag changes, as text and JSON."""

from collections.abc import Iterator, Sequence
from typing import Any

from meshscope.events.measured import FlagEffect
from meshscope.reports.plain import plain
from meshscope.reports.wrapping import wrapped
from meshscope.serialize import to_plain
from meshscope.units import format_gib, format_seconds


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
    for effect in sorted(changed, key=lambda one: -abs(_change_s(one))):
        yield f"{effect.flag}"
        yield from wrapped(_what(effect), indent=2)
    unchanged = [flag for flag in by_flag if flag not in changing and flag not in refused]
    yield from _listed("no change", unchanged)
    yield from _listed("refused", list(refused))


def _listed(head: str, flags: Sequence[str]) -> Iterator[str]:
    if flags:
        yield f"{head}:"
        yield from (f"  {plain(flag)}" for flag in flags)


def _change_s(effect: FlagEffect) -> float:
    return (effect.step_s or 0.0) - (effect.base_step_s or 0.0)


def _what(effect: FlagEffect) -> str:
    """`decode: other collectives; step 1.2 ms, was 1.3 ms (-7.7%); memory 3.21 GiB, was 3.2 GiB`."""
    words = ["other collectives" if effect.is_other_collectives else "other code or schedule"]
    if effect.step_s is not None and effect.base_step_s:
        change = effect.step_s / effect.base_step_s - 1
        now, was = format_seconds(effect.step_s), format_seconds(effect.base_step_s)
        words.append(f"step {now}, was {was} ({change:+.1%})")
    if effect.total_bytes != effect.base_total_bytes:
        now, was = format_gib(effect.total_bytes), format_gib(effect.base_total_bytes)
        words.append(f"memory {now}, was {was}")
    return f"{effect.phase}: {'; '.join([*words, *effect.notes])}"


def flag_document(program: str, topology: str, effects: Sequence[FlagEffect]) -> dict[str, Any]:
    """The document of `flags --json`."""
    rows = [{**to_plain(effect), "flag": str(effect.flag)} for effect in effects]
    return {"program": program, "topology": topology, "effects": rows}
