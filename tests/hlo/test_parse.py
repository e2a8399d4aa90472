"""The grammar of HLO text, and the errors for other text."""

import gzip
import random
from pathlib import Path

import pytest
from goldens import GOLDEN_DIR
from tables import stored, table

from meshscope.errors import ParseError
from meshscope.readers.hlo import parse
from meshscope.readers.hlo.module import ArrayShape, HloModule
from meshscope.readers.hlo.parse import parse_hlo, read_hlo

TEXTS = stored(Path(__file__).with_suffix(".yaml"))["texts"]
PLAIN = TEXTS["PLAIN"]


def _signature(module: HloModule) -> list[tuple[object, ...]]:
    return [
        (c.name, c.is_entry, i.name, i.opcode, i.shape, i.operands, i.is_root)
        for c in module.computations.values()
        for i in c.instructions
    ]


def test_header_tables_and_instructions_are_read() -> None:
    """Instructions are in schedule order; tuples are flattened and lose their layout."""
    module = parse_hlo(PLAIN, "plain.hlo")
    assert (module.name, module.is_scheduled, module.n_devices) == ("jit_f", True, 8)
    assert [i.name for i in module.entry.instructions] == ["param", "other", "all-reduce", "copy"]
    assert module.entry.root.name == "copy"
    reduction, other = module.entry.get("all-reduce"), module.entry.get("other")
    assert module.source_line(reduction) == "model.py:21"
    assert module.where(reduction) == "plain.hlo:25"
    assert reduction.estimated_cycles == 123
    assert reduction.called == {"to_apply": ("region",)}
    assert reduction.op_name == "jit(f)/decode/layer0/mlp/psum"
    assert reduction.arrays == (ArrayShape(dtype="f32", dims=(4,)),)
    assert other.shape == "(f32[2], s32[])"
    assert other.arrays == (ArrayShape(dtype="f32", dims=(2,)), ArrayShape(dtype="s32", dims=()))


TYPED = PLAIN.replace("copy(%all", "copy(f32[4]{0:T(256)S(1)} %all").replace(
    "add(%x, %y)", "add(f32[] %x, f32[] %y)"
)
FORMS = {
    "without percent signs": PLAIN.replace("%", ""),
    "typed operands": TYPED,
    "both": TYPED.replace("%", ""),
    "windows line ends": PLAIN.replace("\n", "\r\n"),
}


@pytest.mark.parametrize("form", FORMS)
def test_other_forms_of_the_text_read_alike(form: str) -> None:
    expected = _signature(parse_hlo(PLAIN, "plain.hlo"))
    assert _signature(parse_hlo(FORMS[form], "other.hlo")) == expected


def test_an_instruction_over_several_lines_keeps_its_attributes() -> None:
    """Kernel metadata contains line ends, and possibly a line with only a closing brace."""
    kernel = (
        '  %k = f32[4]{0} custom-call(%all-reduce), custom_call_target="tpu_custom_call", '
        'frontend_attributes={kernel_metadata={\n  {"block_q": 128,\n  "nested": {\n}\n}\n}}, '
        'metadata={op_name="jit(f)/decode/layer0/attn/pallas_call" stack_frame_id=1}\n'
    )
    text = PLAIN.replace("  ROOT %copy", kernel + "  ROOT %copy")

    entry = parse_hlo(text, "kernel.hlo").entry

    call = entry.get("k")
    assert call.op_name == "jit(f)/decode/layer0/attn/pallas_call"
    assert call.custom_call_target == "tpu_custom_call"
    assert [i.name for i in entry.instructions][-1] == "copy"


def test_source_file_of_older_text_is_read() -> None:
    text = PLAIN.replace("stack_frame_id=1", 'source_file="/app/model.py" source_line=134')
    module = parse_hlo(text, "old.hlo")
    reduction = module.entry.get("all-reduce")
    assert reduction is not None

    assert module.source_line(reduction) == "/app/model.py:134"


def test_gzipped_and_plain_files_read_alike(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(PLAIN)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(PLAIN.encode()))

    plain, zipped = (read_hlo(tmp_path / name) for name in ("a.txt", "a.txt.gz"))

    assert _signature(plain) == _signature(zipped)


@table
def test_other_text_than_hlo_is_an_error_with_the_expected_form(content, message, tmp_path) -> None:
    """A character of the table is a byte."""
    path = tmp_path / "x.txt"
    path.write_bytes(content.encode("latin-1"))

    with pytest.raises(ParseError, match=message):
        read_hlo(path)


def test_a_missing_file_and_text_beyond_the_limit_are_errors(tmp_path, monkeypatch) -> None:
    with pytest.raises(ParseError, match=r"none\.txt: cannot be read .*Give a file"):
        read_hlo(tmp_path / "none.txt")
    monkeypatch.setattr(parse, "MAX_TEXT_BYTES", 1000)
    path = tmp_path / "bomb.txt.gz"
    path.write_bytes(gzip.compress(PLAIN.encode() * 10))
    with pytest.raises(ParseError, match=r"has more than 1000 bytes .*one module"):
        read_hlo(path)


class _Piece(bytes):
    """A piece of a file that counts the bytes copied where it is appended to others."""

    n_copied = 0

    def __radd__(self, before: bytes) -> bytes:
        type(self).n_copied += len(before)
        return before + bytes(self)


def test_many_pieces_of_a_gzip_file_are_copied_once(tmp_path, monkeypatch) -> None:
    text = PLAIN.encode() * 100
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(text))

    class Pieces(gzip.GzipFile):
        def read1(self, size: int = -1) -> bytes:
            return _Piece(super().read1(min(size, 1000)))

    monkeypatch.setattr(parse.gzip, "open", Pieces)

    with pytest.raises(ParseError, match=r"a\.txt\.gz:\d+: expected a computation"):
        read_hlo(path)  # the text of several modules is read whole before it is refused

    assert _Piece.n_copied <= len(text)


@pytest.mark.parametrize("n_lines", range(1, PLAIN.count("\n")))
def test_a_text_cut_at_any_line_is_an_error_with_the_line(n_lines: int) -> None:
    cut = "".join(PLAIN.splitlines(keepends=True)[:n_lines])
    message = r"cut\.hlo:\d+: the text is truncated: expected .*\. Give the whole "
    with pytest.raises(ParseError, match=message):
        parse_hlo(cut, "cut.hlo")


def _golden(name: str = "v6e_tp8_decode_scan.jax-0.10.2") -> str:
    return gzip.decompress((GOLDEN_DIR / f"{name}.txt.gz").read_bytes()).decode()


def test_a_text_cut_at_any_byte_is_an_error() -> None:
    """150 positions in a compiled text, of which only the last line end may be missing."""
    text, rng = _golden(), random.Random(3)
    for end in sorted(rng.sample(range(1, len(text.rstrip()) - 1), 150)):
        with pytest.raises(ParseError, match=r"cut\.hlo:\d+: "):
            parse_hlo(text[:end], "cut.hlo")


def test_a_gzip_file_cut_short_is_an_error(tmp_path: Path) -> None:
    content = (GOLDEN_DIR / "v6e_tp8_decode_scan.jax-0.10.2.txt.gz").read_bytes()
    path = tmp_path / "cut.txt.gz"
    path.write_bytes(content[: len(content) * 9 // 10])
    with pytest.raises(ParseError, match="the gzip file is damaged"):
        read_hlo(path)


def test_a_call_to_an_undefined_computation_is_an_error() -> None:
    module = parse_hlo(PLAIN.replace("to_apply=%region", "to_apply=%gone"), "x.hlo")
    caller = module.entry.get("all-reduce")
    assert caller is not None

    with pytest.raises(ParseError, match=r"x\.hlo:25: 'all-reduce' calls 'gone'.*whole text"):
        module.computation("gone", caller)


@pytest.mark.parametrize("line", ["%x = f32[] parameter(0)", "%y = f32[] parameter(1)"])
def test_a_line_without_an_instruction_is_an_error(line: str) -> None:
    """Also after a whole instruction: a damaged line must not become part of the one before."""
    text = PLAIN.replace(f"  {line}\n", "  %x f32[] damaged\n", 1)

    with pytest.raises(ParseError, match=r"x\.hlo:1[78]: expected an instruction .*'%x f32.. dam"):
        parse_hlo(text, "x.hlo")
