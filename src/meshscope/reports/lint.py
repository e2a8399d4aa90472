"""The findings of `lint` as text, JSON and SARIF."""

from collections.abc import Iterator, Sequence
from typing import Any

from meshscope.readers.lint.findings import Finding, LintedProgram, n_certain
from meshscope.reports.budget import place_of, sarif
from meshscope.reports.model import plain, wrapped
from meshscope.reports.tables import with_first_block
from meshscope.reports.words import short_source_line
from meshscope.serialize import to_plain
from meshscope.units import counted, format_bytes

_MAX_REASONS = 3


def lint_lines(programs: Sequence[LintedProgram], *, is_full: bool = False) -> Iterator[str]:
    """The number of findings first, then each with its place, then what could not be followed."""
    yield from with_first_block(_lint_parts(programs, is_full=is_full), "")


def _lint_parts(programs: Sequence[LintedProgram], *, is_full: bool) -> Iterator[str]:
    findings = [one for program in programs for one in program.findings]
    certain, unknown = n_certain(programs), sum(n for p in programs for _, n in p.unfollowed)
    head = f"{certain} certain and {len(findings) - certain} possible findings"
    if not findings:
        head = "no finding"
    names = ", ".join(f"{plain(p.name)} over {plain(p.mesh)}" for p in programs)
    tail = (
        "every value was followed" if not unknown else f"{counted(unknown, 'value')} not followed"
    )
    yield _paragraph(f"{names}: {head}; {tail}")
    for one in findings:
        mark = "certain " if one.is_certain else "possible"
        said = _paragraph(f"{mark} {one.kind.replace('_', ' ')}: {plain(one.sentence)}")
        yield f"{said}\n{_paragraph(place(one), indent=9)}"
    for program in programs:
        shown = program.unfollowed if is_full else program.unfollowed[:_MAX_REASONS]
        for reason, n in shown:
            yield _paragraph(f"not followed in {plain(program.name)}: {n} x {plain(reason)}")
        if rest := sum(n for _, n in program.unfollowed[len(shown) :]):
            yield f"not followed in {plain(program.name)}: {rest} more"


def _paragraph(text: str, *, indent: int = 0) -> str:
    return "\n".join(wrapped(text, indent=indent))


def place(one: Finding) -> str:
    """`at model.py:12, layers 0 to 3, attn, 65 kB each, in fusion.3`."""
    words = [f"at {short_source_line(line)}" for line in one.source_lines[:1]]
    if one.layers:
        first, last = one.layers[0], one.layers[-1]
        words.append(f"layer {first}" if len(one.layers) == 1 else f"layers {first} to {last}")
    words += [one.part.value] if one.part is not None else []
    if one.payload_bytes:
        words.append(f"{format_bytes(one.payload_bytes)}{' each' if one.n > 1 else ''}")
    words.append(f"in {one.hlo_name}" + (f" and {one.n - 1} more" if one.n > 1 else ""))
    return plain(", ".join(words))


def lint_document(programs: Sequence[LintedProgram]) -> dict[str, Any]:
    """The document of `lint --json`."""
    return {
        "n_certain": n_certain(programs),
        "programs": [
            {
                "name": program.name,
                "mesh": program.mesh,
                "findings": [to_plain(one) for one in program.findings],
                "unfollowed": [{"reason": r, "count": n} for r, n in program.unfollowed],
            }
            for program in programs
        ],
    }


def lint_sarif(file: str, programs: Sequence[LintedProgram]) -> dict[str, Any]:
    """The findings in SARIF 2.1.0: certain ones as errors, possible ones as warnings."""
    findings = [one for program in programs for one in program.findings]
    return sarif(
        (
            one.kind.value,
            "error" if one.is_certain else "warning",
            f"{one.program}: {one.sentence}; {place(one)}",
            place_of(one.source_lines, (file, 1)),
        )
        for one in findings
    )
