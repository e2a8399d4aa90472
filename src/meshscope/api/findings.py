"""What lint finds in the compiled programs of a run."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from meshscope.events.enums import Source
from meshscope.plans.mesh import Mesh
from meshscope.readers.hlo.parse import read_hlo
from meshscope.readers.lint.findings import Finding, LintedProgram, lint_module
from meshscope.readers.lint.log import WASTE
from meshscope.reports.model import plain
from meshscope.reports.words import short_source_line
from meshscope.store.run import RunRecord
from meshscope.store.write import HLO
from meshscope.units import format_bytes, format_seconds


def texts_of(run: RunRecord, hlo: Path | None = None) -> list[Path]:
    """The compiled programs of a run; `hlo` is the text of a run without a folder."""
    if run.path is None:
        return [] if hlo is None else [hlo]
    return sorted((run.path / HLO).glob("*.txt*"))


def linted(run: RunRecord, hlo: Path | None = None) -> Iterator[LintedProgram]:
    """The findings of each compiled program, with the times of their collectives."""
    mesh = Mesh(axes=run.manifest.experiment.device_mesh.axes)
    dur_s = {(row.phase, row.hlo_name): row.dur_s for row in run.rows_of(Source.COMPILED)}
    for text in texts_of(run, hlo):
        program = lint_module(read_hlo(text), mesh, name=text.name.split(".hlo")[0])
        timed = (
            replace(one, dur_s=dur_s.get((one.phase, one.hlo_name))) for one in program.findings
        )
        yield replace(program, findings=tuple(timed))


def faults(run: RunRecord, hlo: Path | None = None) -> list[Finding] | None:
    """What its programs certainly or possibly compute wrongly; None if none is compiled."""
    if not texts_of(run, hlo):
        return None
    findings = (one for program in linted(run, hlo) for one in program.findings)
    return [one for one in findings if one.kind not in WASTE]


def certain_findings(run: RunRecord, hlo: Path | None = None) -> int | None:
    """The number of certain findings in the programs of a run; None if none is compiled."""
    every = faults(run, hlo)
    return None if every is None else sum(one.is_certain for one in every)


def place(one: Finding) -> str:
    """`at model.py:12, layers 0 to 3, attn, 65 kB each, in fusion.3`."""
    words = [f"at {short_source_line(line)}" for line in one.source_lines[:1]]
    if one.layers:
        first, last = one.layers[0], one.layers[-1]
        words.append(f"layer {first}" if len(one.layers) == 1 else f"layers {first} to {last}")
    words += [one.part.value] if one.part is not None else []
    if one.payload_bytes:
        words.append(f"{format_bytes(one.payload_bytes)}{' each' if one.n > 1 else ''}")
    words += [f"{format_seconds(one.dur_s)} each"] if one.dur_s is not None else []
    words.append(f"in {one.hlo_name}" + (f" and {one.n - 1} more" if one.n > 1 else ""))
    return plain(", ".join(words))
