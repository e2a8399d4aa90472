"""Short phrases for collectives and comparisons, shared by text, HTML and JSON."""

from fractions import Fraction
from pathlib import Path

from meshscope.analysis.join import Comparison, Match, Verdict, left_rows, right_rows
from meshscope.analysis.totals import Total, step_total
from meshscope.events.collective import Collective
from meshscope.events.enums import Kind, Phase
from meshscope.model.quantization import NVFP4, WITH_EXPERTS, activation_dtype_of, values_dtype
from meshscope.reports.model import UNKNOWN_PHASE_LABEL
from meshscope.units import counted, format_bytes, format_dtype, format_seconds, format_shape

UNKNOWN_TYPE = "?"  # an unknown dtype or dimension inside an array type such as `bf16[?]`

_VERDICT_LABELS = {Verdict.MORE_BYTES: "more bytes", Verdict.FEWER_BYTES: "fewer bytes"}


def verdict_label(verdict: Verdict) -> str:
    """The verdict as a reader sees it."""
    return _VERDICT_LABELS.get(verdict, verdict.value)


def phase_label(phase: Phase | None) -> str:
    """`prefill`, `decode` or `unknown phase`."""
    return UNKNOWN_PHASE_LABEL if phase is None else phase.value


def array_text(row: Collective) -> str:
    """`bf16[8,1024,5120]`."""
    shape = "[?]" if row.shape is None else format_shape(row.shape)
    return f"{row.dtype or UNKNOWN_TYPE}{shape}"


def group_text(row: Collective) -> str:
    """`2 x 4` for two groups of four devices; `DCN` marks groups that span slices."""
    if row.kind in (Kind.PERMUTE, Kind.SEND, Kind.RECV):
        text = counted(row.n_groups, "pair")
    else:
        text = f"{row.n_groups or UNKNOWN_TYPE} x {row.group_size or UNKNOWN_TYPE}"
    return f"{text} DCN" if row.crosses_slices else text


def unusual_opcode(row: Collective) -> str | None:
    """The opcode if it differs from the usual one of the kind."""
    if row.opcode is None or row.opcode.replace("-", "_") == row.kind.value:
        return None
    return None if row.opcode == "collective-permute" and row.kind is Kind.PERMUTE else row.opcode


def short_source_line(source_line: str) -> str:
    """The source line; paths start in this package, or in the working folder, if the file is there."""
    _, package, rest = source_line.rpartition("/meshscope/")
    if package:
        return f"{package.removeprefix('/')}{rest}"
    return source_line.removeprefix(f"{Path.cwd()}/")


def traffic_text(total: Total) -> str:
    """`130 collectives, 18.9 GB on the wire per step`."""
    sent = f"{format_bytes(total.wire_bytes)} on the wire" if total.is_sized else "bytes unknown"
    if total.is_sized and total.n_unsized:
        sent += f", and {total.n_unsized:,} of unknown bytes,"
    return f"{counted(total.count, 'collective')}, {sent} per step"


def verdict_sentence(
    comparison: Comparison, *, left: str, right: str, n_findings: int | None = None
) -> str:
    """The verdict on the collectives of two tables, with the bytes of every difference in one step.

    Clauses are separated by `; `: first the verdict, then one clause for each phase that differs.
    """
    tail = "" if n_findings is None else f", {counted(n_findings, 'finding')}"
    if comparison.is_exact:
        return f"collectives: {left} = {right}{tail}"
    findings = list[str]()
    for phase in comparison.phases:
        verdicts = {v: comparison.with_verdict(v, phase) for v in Verdict if v is not Verdict.EQUAL}
        phrases = [_finding(verdict, matches) for verdict, matches in verdicts.items() if matches]
        findings += [f"{phase_label(phase)}: {', '.join(phrases)}"] if phrases else []
    head = (
        f"{left} = {right} in meaning, but not in bytes"
        if comparison.is_same_meaning
        else f"{left} and {right} differ"
    )
    return f"collectives: {head}{tail}; {'; '.join(findings)}"


def _finding(verdict: Verdict, matches: list[Match]) -> str:
    """`3 with more bytes (+9.22 kB on the wire)`."""
    left, right = step_total(left_rows(matches)), step_total(right_rows(matches))
    count = f"{sum(match.count for match in matches):,}"
    if verdict in (Verdict.MISSING, Verdict.EXTRA):
        total = left if verdict is Verdict.MISSING else right
        payload, least = format_bytes(total.payload_bytes), "at least " if total.n_unsized else ""
        sent = f"{least}{payload} payload, {format_bytes(total.wire_bytes)} on the wire"
        return f"{count} {verdict} ({sent if total.is_sized else 'of unknown bytes'})"
    of_bytes = "with " if verdict in _VERDICT_LABELS else ""
    change = f"({signed_bytes(right.wire_bytes - left.wire_bytes)} on the wire)"
    return f"{count} {of_bytes}{verdict_label(verdict)} {change}"


def signed_seconds(seconds: float) -> str:
    """`+1.2 ms`, `-3.4 us`, `0 us`."""
    return f"+{format_seconds(seconds)}" if seconds > 0 else format_seconds(seconds or 0.0)


def signed_bytes(n_bytes: float | Fraction) -> str:
    """`+147 MB`, `-3.2 kB`, `0 B`."""
    return f"+{format_bytes(n_bytes)}" if n_bytes > 0 else format_bytes(n_bytes)


def short_dtype(dtype: str) -> str:
    """The format of weights as checkpoints are called, whatever it leaves out."""
    if dtype in WITH_EXPERTS:
        return "fp8+nvfp4" if WITH_EXPERTS[dtype][1] == NVFP4 else "fp8+mxfp4"
    if activation_dtype_of(dtype) is not None:
        return f"{format_dtype(values_dtype(dtype))} W8A8"
    return format_dtype(values_dtype(dtype))
