"""The rows of minimal texts: each file of `rows` has cases of one subject.

A case has the lines of a text, computations, and the fields of its rows that are compared. `$name` stands for
a macro of the file, the case or one of its variants, and a line `WHILE l(x)` for a loop of `loops` from x.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

import pytest
from made_hlo import loop_text, module_text, rows_in, while_text
from tables import stored

from meshscope.analysis.totals import Unattributed, unattributed
from meshscope.errors import ParseError
from meshscope.events.collective import Collective, Groups
from meshscope.events.enums import Part, Phase
from meshscope.plans.mesh import parse_mesh
from meshscope.readers.hlo.collectives import module_collectives, reshardings
from meshscope.readers.hlo.communication import other_operations
from meshscope.readers.hlo.parse import parse_hlo


@dataclass(frozen=True)
class Case:
    """The fields of a case and of its file, and the macros of both."""

    name: str
    fields: Mapping[str, Any]
    macros: Mapping[str, str]

    def __getitem__(self, name: str) -> Any:
        return self._filled(self.fields[name])

    def _filled(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._filled(each) for each in value]
        if isinstance(value, dict):
            return {key: self._filled(each) for key, each in value.items()}
        for _ in range(6 if isinstance(value, str) else 0):  # macros of macros
            value = Template(value).safe_substitute(self.macros)
        return value

    def _lines(self, text: str) -> str:
        array = self.macros.get("array", "f32[8]")
        filled = re.sub(
            r"WHILE (\w+)\((\w+)\)",
            lambda m: while_text(m[1], m[2], array=array),
            self._filled(text),
        )
        lines = [line.strip() for line in filled.splitlines() if line.strip()]
        is_outer = [line == "}" or line.endswith(" {") for line in lines]
        return "".join(
            f"{'' if o else '  '}{line}\n" for line, o in zip(lines, is_outer, strict=True)
        )

    @property
    def text(self) -> str:
        of = self.fields.get
        loops = [
            loop_text(name, times, self._lines(body), out, *array)
            for name, times, out, body, *array in of("loops", ())
        ]
        entry = self._lines(of("entry", "") + of("body")) + of("end", "")
        header = of("header", f", num_partitions={of('n_devices', 2)}")
        return module_text(entry, self._lines(of("computations", "")), *loops, header=header)

    def crosses_slices(self, groups: Groups) -> bool | None:
        n = self.fields.get("per_slice")
        return n and any(len({device // n for device in group}) > 1 for group in groups)

    @property
    def rows(self) -> list[Collective]:
        phase = self.fields.get("default_phase")
        facts = {"n_steps_of": {Phase.DECODE: 9}, "crosses_slices": self.crosses_slices}
        return rows_in(self.text, self["mesh"], default_phase=phase and Phase(phase), **facts)


def _stored() -> Iterator[Case]:
    for path in sorted((Path(__file__).parent / "rows").glob("*.yaml")):
        of_file = stored(path)
        for name, case in of_file["cases"].items():
            for variant, changes in case.get("variants", {"": {}}).items():
                macros = {**of_file["macros"], **case.get("macros", {}), **changes}
                texts = {key: str(value) for key, value in macros.items()}
                where = f"{path.stem}: {name}{variant and f' ({variant})'}"
                yield Case(where, {**of_file, **case, **changes}, texts)


CASES = list(_stored())


def _with(field: str) -> pytest.MarkDecorator:
    chosen = [case for case in CASES if field in case.fields]
    return pytest.mark.parametrize("case", chosen, ids=lambda case: case.name)


def _plain(value: Any) -> Any:
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


@_with("rows")
def test_a_text_has_these_rows(case: Case) -> None:
    rows, expected = case.rows, case["rows"]
    assert len(rows) == len(expected)
    for row, facts in zip(rows, expected, strict=True):
        assert {name: _plain(getattr(row, name)) for name in facts} == facts


@_with("totals")
def test_executions_of_equal_rows_sum_to_these(case: Case) -> None:
    totals = Counter[str]()
    for row in case.rows:
        names = [row.stage, row.layer, f"{row.part}", f"{row.kind}", _plain(row.groups), row.axis]
        totals[repr([*names, row.axis_reason])] += row.count
    assert totals == {repr(place): n for *place, n in case["totals"]}


@_with("reasons")
def test_rows_of_the_first_stage_have_these_caveats(case: Case) -> None:
    of_mlp = [row for row in case.rows if row.part is Part.MLP and row.stage == 0]
    assert {row.axis_reason for row in of_mlp} == set(case["reasons"])


@_with("unattributed")
def test_a_text_has_these_unattributed_collectives(case: Case) -> None:
    count, payload_bytes, reason = case["unattributed"]
    facts = {"count": count, "payload_bytes": payload_bytes, "reasons": ((reason, count),)}
    assert unattributed(case.rows) == Unattributed(**facts)


@_with("others")
def test_a_text_has_these_other_operations(case: Case) -> None:
    module = parse_hlo(case.text, "m.hlo")
    assert [str(other) for other in other_operations(module, None)] == case["others"]


@_with("error")
def test_a_text_is_refused(case: Case) -> None:
    with pytest.raises(ParseError, match=case["error"]):
        _ = case.rows


@_with("moved")
def test_a_text_reshards_its_sum(case: Case) -> None:
    module, mesh = parse_hlo(case.text, "m.hlo"), parse_mesh(case["mesh"])
    collectives = module_collectives(module, mesh=mesh, crosses_slices=case.crosses_slices)
    if case["moved"] is None:
        assert reshardings(collectives) == {}
        return
    ((_, moved),) = reshardings(collectives).items()
    assert [moved.dropped_frac, moved.dropped_over, moved.is_returned] == case["moved"]
