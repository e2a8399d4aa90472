"""Which compiler flags change a program: the same text is no change, whatever the names in it."""

import gzip
import json
from pathlib import Path

import pytest
from programs import SLICE, SPLIT, data_parallel
from tables import table

import meshscope
from meshscope.api.flags import flag_document, flag_lines, parse_flag, read_flags
from meshscope.readers.hlo.parse import canonical_hash, canonical_text

TEXT = """\
HloModule jit_f, is_scheduled=true

FileNames
1 "/home/me/train.py"

ENTRY %main.7 (x.1: f32[8]) -> f32[8] {
  %x.1 = f32[8]{0} parameter(0), metadata={op_name="x"}
  ROOT %add.2 = f32[8]{0} add(%x.1, %x.1), metadata={op_name="jit(f)/{add}" stack_frame_id=3}
}
"""


def hash_of(text: str, tmp_path: Path) -> str:
    path = tmp_path / "step.hlo.txt.gz"
    with gzip.open(path, "wt") as file:
        file.write(text)
    return canonical_hash(path)


@table
def test_a_program_is_the_same_whatever_its_names_and_lines(old, new, is_same, tmp_path) -> None:
    assert (hash_of(TEXT, tmp_path) == hash_of(TEXT.replace(old, new), tmp_path)) is is_same


def test_the_canonical_text_has_no_metadata() -> None:
    assert "metadata" not in canonical_text(TEXT)
    assert "op_name" not in canonical_text(TEXT)


@pytest.mark.slow
@pytest.mark.tpu
def test_flags_change_a_program_or_not_or_are_refused() -> None:
    flags = [
        "--xla_tpu_dot_dot_fusion=true",
        "--xla_jf_conv_output_fusion=false",
        "--xla_tpu_nonsense=1",
    ]
    sweep = meshscope.flags(data_parallel, *SPLIT, flags=flags, topology=SLICE, mesh="dp=4")
    same, changed, refused = sweep.effects
    assert not same.is_changed
    assert same.step_s == same.base_step_s
    assert changed.is_changed
    assert [effect.flag.name for effect in sweep.changing] == ["xla_jf_conv_output_fusion"]
    assert "No such compile option" in (refused.refused or "")
    text = "\n".join(flag_lines(sweep.program, sweep.topology, sweep.effects))
    assert "1 of 3 flags change data_parallel on v6e:2x2; 1 is unknown" in text
    document = flag_document(sweep.program, sweep.topology, sweep.effects)
    assert [effect["is_changed"] for effect in document["effects"]] == [False, True, False]


@pytest.mark.parametrize("text", ["--xla_tpu_x", "=1", "--xla_tpu_x="])
def test_a_flag_needs_a_value(text: str) -> None:
    with pytest.raises(meshscope.MeshscopeError, match=r"has no value\. Use --name=value"):
        parse_flag(text)


def test_a_file_of_flags_has_comments(tmp_path: Path) -> None:
    path = tmp_path / "flags.txt"
    path.write_text("# all\n--a=1 # the first\n\n--b=2\n")
    assert read_flags(path) == ["--a=1", "--b=2"]
    with pytest.raises(meshscope.MeshscopeError, match="Give a file of flags"):
        read_flags(tmp_path / "none.txt")


def test_the_stored_sweep_has_every_flag_of_its_file_for_both_steps() -> None:
    folder = Path(__file__).parents[2] / "docs" / "evidence" / "flags"
    flags = read_flags(folder / "flags.txt")
    effects = json.loads((folder / "qwen3-4b.json").read_text())["effects"]
    assert len(flags) >= 50
    assert [(e["phase"], e["flag"]) for e in effects] == [
        (phase, flag) for phase in ("prefill", "decode") for flag in flags
    ]
    for effect in effects:
        if not effect["is_changed"] and not effect["refused"]:
            assert effect["step_s"] == effect["base_step_s"]


def test_a_sweep_needs_flags() -> None:
    with pytest.raises(meshscope.MeshscopeError, match="0 flags were given"):
        meshscope.flags(data_parallel, flags=[], topology=SLICE)
