"""Findings in programs: none that is false, and those that were planted."""

import gzip
import json
import lzma
from pathlib import Path

import pytest
from mutants import Mutant, mutants

import meshscope
from meshscope.api.import_ import import_
from meshscope.api.lint import command
from meshscope.errors import MeshscopeError
from meshscope.readers.hlo.module import HloModule
from meshscope.readers.hlo.parse import parse_hlo
from meshscope.readers.lint.findings import lint_module
from meshscope.readers.lint.log import WASTE

TESTS = Path(__file__).parents[1]
FAST = sorted([*(TESTS / "golden/hlo").glob("*.gz"), *(TESTS / "golden/gpu").glob("*.gz")])
SLOW = sorted(
    [
        *(TESTS / "golden/engines").rglob("*.hlo.txt.*z"),
        *(TESTS / "golden/torchxla").glob("*.gz"),
        *(TESTS / "golden/maxtext_training").glob("*.gz"),
        *(TESTS / "published/programs").glob("*.gz"),
    ]
)
# Programs for the readers that reduce or exchange an argument which every device has.
SUMS_ARGUMENTS = ("v6e_combined", "v6e_local_kernels", "v6e_several")
TP8 = TESTS / "golden/gpu/h100_tp8.decode.txt.gz"
HALVES = {"{{0,1,2,3},{4,5,6,7}}", "{{0,2,4,6},{1,3,5,7}}"}


def _module(path: Path) -> HloModule:
    opener = lzma.open if path.suffix == ".xz" else gzip.open
    with opener(path, "rt") as file:
        return parse_hlo(file.read(), path.name)


def _check_no_false_alarm(path: Path) -> None:
    findings = [one for one in lint_module(_module(path)).findings if one.kind not in WASTE]
    if path.name.startswith(SUMS_ARGUMENTS):
        assert {one.kind for one in findings} <= {"double_reduction", "gather_of_replicated"}
        assert not any(one.is_certain for one in findings)
    else:
        assert findings == []


@pytest.mark.parametrize("path", FAST, ids=lambda path: path.name)
def test_a_correct_program_raises_no_alarm(path: Path) -> None:
    _check_no_false_alarm(path)


@pytest.mark.slow
@pytest.mark.parametrize("path", SLOW, ids=lambda path: str(path.relative_to(TESTS)))
def test_a_correct_program_of_an_engine_raises_no_alarm(path: Path) -> None:
    _check_no_false_alarm(path)


PLANTED = [
    one
    for one in mutants(gzip.decompress(TP8.read_bytes()).decode(), (8,))
    if one.kind == "all-reduce"
    and one.change.removeprefix("over ") in {"removed", "doubled", *HALVES}
]


# Sums after attention with one head for each device, which may be parts.
ATTENTION = {"%all-reduce-start.1", "%all-reduce-start.3"}


@pytest.mark.parametrize("mutant", PLANTED, ids=lambda one: f"{one.name} {one.change}")
def test_a_planted_fault_is_reported(mutant: Mutant) -> None:
    (finding,) = lint_module(parse_hlo(mutant.text, "planted")).findings
    is_double = mutant.change == "doubled"
    assert finding.is_certain == (is_double or mutant.name not in ATTENTION)
    assert finding.kind == ("double_reduction" if is_double else "missing_reduction")
    assert finding.axis == {"removed": "devices", "doubled": "devices"}.get(
        mutant.change, "2 of 8 devices"
    )
    assert finding.part is not None


def test_the_place_of_a_missing_reduction_is_the_sum_that_lacks_it() -> None:
    removed = next(
        one for one in PLANTED if (one.name, one.change) == ("%all-reduce-start.2", "removed")
    )
    (finding,) = lint_module(parse_hlo(removed.text, "planted")).findings
    assert (finding.phase, finding.layers, finding.part) == ("decode", (0,), "mlp")
    assert finding.sentence.startswith("no reduction over devices completes the sum of ")


def test_a_certain_finding_ends_the_command_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "planted.hlo.txt"
    file.write_text(PLANTED[0].text)
    for is_sarif, as_json in ((False, False), (False, True), (True, False)):
        with pytest.raises(SystemExit, match="1"):
            command(program=file, mesh="tp=8", as_sarif=is_sarif).show(as_json=as_json)
    text, document, sarif = capsys.readouterr().out.rsplit("\n", 3)[:3]
    with pytest.raises(SystemExit, match="1"):
        command(program=file, mesh="tp=8", as_sarif=False).show(as_json=False, full=True)
    assert capsys.readouterr().out.startswith(text)
    assert "certain  missing reduction: no reduction over tp completes" in text
    assert json.loads(document)["n_certain"] == 1
    (result, *_) = json.loads(sarif)["runs"][0]["results"]
    assert (result["ruleId"], result["level"]) == ("missing_reduction", "error")


def test_a_text_without_shardings_says_what_it_did_not_follow() -> None:
    linted = meshscope.lint(TESTS / "golden/hlo/v6e_tp8_decode_unroll.jax-0.12.0.1.txt.gz")
    assert linted.n_certain == 0
    (program,) = linted.programs
    assert ("the text has no shardings of the arguments", 21) in program.unfollowed
    assert "21 values not" in repr(linted)


def test_a_mesh_of_other_devices_is_refused() -> None:
    with pytest.raises(MeshscopeError, match="Give the mesh for which it was compiled"):
        meshscope.lint(TP8, mesh="tp=6")


def test_compare_and_a_budget_say_what_changes_results(tmp_path: Path) -> None:
    texts = {"kept": gzip.decompress(TP8.read_bytes()).decode(), "broken": PLANTED[0].text}
    for name, text in texts.items():
        (tmp_path / f"{name}.hlo.txt").write_text(text)
        import_(tmp_path / f"{name}.hlo.txt", topology="h100:8", plan="tp=8", out=tmp_path / name)
    text = meshscope.compare(tmp_path / "kept", tmp_path / "broken").text().split("\n\n")[0]
    assert "- missing reduction, which changes results: no reduction over tp completes the" in text
    budget = tmp_path / "budget.toml"
    programs = [f'[[program]]\nrun = "{name}"\nlint = true\n' for name in texts]
    predicted = '[[program]]\nmodel = "Qwen/Qwen3-4B"\ntopology = "v6e-8"\nplan = "tp=8"\n'
    budget.write_text("\n".join([*programs, predicted + "predict = true\nlint = true\n"]))
    result = meshscope.check(budget)
    values = {one.name: one.checks[0].value for one in result.programs}
    assert values == {"kept": 0, "broken": 1, "Qwen/Qwen3-4B": None}
    assert [(p.name, check.limit.line) for p, check in result.broken] == [
        ("broken", 7),
        ("Qwen/Qwen3-4B", 14),
    ]
