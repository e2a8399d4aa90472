"""The outcome of a budget as text, JSON, SARIF and GitHub annotations."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from meshscope import __version__
from meshscope.analysis.budget import LIMITS, Check, Quantity, Value
from meshscope.analysis.totals import grouped
from meshscope.events.collective import Collective
from meshscope.reports.model import plain, wrapped
from meshscope.reports.words import array_text, short_source_line
from meshscope.serialize import picked
from meshscope.units import counted, format_bytes, format_seconds

MAX_ROWS = 5  # collectives named below a limit that is not kept
_SARIF = "https://json.schemastore.org/sarif-2.1.0.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramChecks:
    """The checks of one program, by its name."""

    name: str
    checks: Sequence[Check]


def check_lines(file: Path, programs: Sequence[ProgramChecks]) -> Iterator[str]:
    """The answer first: how many limits are not kept, those first, each with what makes up its value."""
    every = [check for program in programs for check in program.checks]
    n_broken = sum(not check.is_kept for check in every)
    limits = counted(len(every), "limit")
    yield f"{file}: {n_broken} of {limits} not kept" if n_broken else f"{file}: {limits} kept"
    pairs = [(program, check) for program in programs for check in program.checks]
    for program, check in sorted(pairs, key=lambda pair: pair[1].is_kept):
        mark = "ok  " if check.is_kept else "FAIL"
        lines = [*wrapped(f"{mark} {plain(program.name)}: {sentence(check)}")]
        for line in () if check.is_kept else row_lines(check.rows):
            lines += wrapped(line, indent=5)
        yield "\n".join(lines)


def sentence(check: Check) -> str:
    """`all_gather over dp: wire_bytes 117 MB, at most 100 MB`."""
    quantity = check.limit.quantity
    bound = {"max": "at most", "min": "at least", "equal": "exactly"}[check.limit.bound]
    value = amount(quantity, check.value)
    if check.others:
        value = f"{value} ({plain(', '.join(map(str, check.others)))})"
    what = f"{check.of}: " if check.rows or quantity in _ROW_QUANTITIES else ""
    return f"{what}{quantity} {value}, {bound} {amount(quantity, check.limit.value)}"


_ROW_QUANTITIES = Quantity.COUNT, Quantity.PAYLOAD_BYTES, Quantity.WIRE_BYTES, Quantity.EXPOSED_S


def amount(quantity: Quantity, value: Value) -> str:
    """The value in the unit of its quantity; `unknown` for None."""
    if value is None:
        return "unknown"
    if quantity.endswith("_bytes"):
        return format_bytes(value)
    if quantity.endswith("_s"):
        return format_seconds(float(value))
    return f"{float(value):.4g}" if quantity is Quantity.FLOPS else f"{int(value):,}"


def row_lines(rows: Sequence[Collective]) -> Iterator[str]:
    """The largest collectives, a line for equal layers: `2 x all_gather bf16[8,128] over dp, 1 MB each, model.py:7`."""
    groups = grouped(rows)
    yield from (row_line(group.row) for group in groups[:MAX_ROWS])
    if n_left := sum(group.row.count for group in groups[MAX_ROWS:]):
        yield f"... and {n_left:,} more"


def row_line(row: Collective) -> str:
    """Count, kind, array, axis, part, layer, wire bytes and the user's line of a collective."""
    axis = row.axis or f"an unknown axis ({row.axis_reason})"
    by = " by the partitioner" if row.inserted_by == "partitioner" else ""
    at = f" at {short_source_line(row.source_line)}" if row.source_line else ""
    phase = "" if row.phase is None else f"{row.phase}: "
    place = "" if row.part is None else f" in {row.part}"
    layer = "" if row.layer is None else f" of layer {row.layer}"
    text = f"{phase}{row.count} x {row.kind} {array_text(row)} over {axis}{place}{layer}"
    return plain(f"{text}, {format_bytes(row.wire_bytes)} sent each{by}{at}")


def check_document(file: Path, programs: Sequence[ProgramChecks]) -> dict[str, Any]:
    """The document of `check --json`."""
    return {
        "budget": str(file),
        "is_kept": all(check.is_kept for program in programs for check in program.checks),
        "checks": [
            {
                "program": program.name,
                **picked(check.of, "phase", "kind", "axis"),
                "limit": check.limit.name,
                "allowed": check.limit.value,
                "value": _number(check.value),
                "is_kept": check.is_kept,
                "line": check.limit.line,
                "collectives": [_row(row) for row in check.rows],
            }
            for program in programs
            for check in program.checks
        ],
    }


def _number(value: Value) -> float | int | None:
    return float(value) if isinstance(value, Fraction) else value


def _row(row: Collective) -> dict[str, Any]:
    names = ("phase", "kind", "axis", "dtype", "shape", "count", "payload_bytes", "source_line")
    wire_bytes = _number(row.wire_bytes)
    return {**picked(row, *names), "wire_bytes": wire_bytes, "inserted_by": row.inserted_by}


def github_lines(file: Path, programs: Sequence[ProgramChecks]) -> Iterator[str]:
    """GitHub Actions workflow commands that annotate the user's line, or the limit's."""
    for program in programs:
        for check in program.checks:
            if not check.is_kept:
                path, line = _place(file, check)
                lines = (f"{program.name}: {sentence(check)}", *row_lines(check.rows))
                message = "%0A".join(_escaped(text) for text in lines)
                title = _escaped(check.limit.name)
                file_name = _escaped(path).replace(":", "%3A").replace(",", "%2C")
                yield f"::error file={file_name},line={line},title={title}::{message}"


def _place(file: Path, check: Check) -> tuple[str, int]:
    """Where the largest collective is in the user's files here, else the limit."""
    lines = [row.source_line or "" for row in check.rows[:1]]
    return place_of(lines, (str(file), check.limit.line or 1))


def place_of(source_lines: Iterable[str], otherwise: tuple[str, int]) -> tuple[str, int]:
    """The first source line that is in the user's files here, as path and line; else `otherwise`."""
    for source_line in source_lines:
        path, _, line = short_source_line(source_line).rpartition(":")
        if path and not Path(path).is_absolute() and line.isdecimal() and Path(path).is_file():
            return path, int(line)
    return otherwise


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def sarif_document(file: Path, programs: Sequence[ProgramChecks]) -> dict[str, Any]:
    """The limits that are not kept, in SARIF 2.1.0."""
    broken = [(p.name, check) for p in programs for check in p.checks if not check.is_kept]
    return sarif(
        (
            check.limit.name,
            "error",
            "\n".join((f"{name}: {sentence(check)}", *row_lines(check.rows))),
            _place(file, check),
        )
        for name, check in broken
    )


def sarif(results: Iterable[tuple[str, str, str, tuple[str, int]]]) -> dict[str, Any]:
    """Results as rule, level, text and place, in SARIF 2.1.0 (OASIS, 2020)."""
    listed = list(results)
    named = sorted({rule for rule, *_ in listed})
    texts = (f"{rule} of a {'budget' if rule in LIMITS else 'program'}" for rule in named)
    pairs = zip(named, texts, strict=True)
    rules = [{"id": rule, "shortDescription": {"text": text}} for rule, text in pairs]
    driver = {"name": "meshscope", "version": __version__, "rules": rules}
    entries: list[dict[str, Any]] = []
    for rule, level, text, (path, line) in listed:
        place = {"artifactLocation": {"uri": path}, "region": {"startLine": line}}
        result = {"ruleId": rule, "level": level, "message": {"text": text}}
        entries.append({**result, "locations": [{"physicalLocation": place}]})
    runs = [{"tool": {"driver": driver}, "results": entries}]
    return {"$schema": _SARIF, "version": "2.1.0", "runs": runs}
