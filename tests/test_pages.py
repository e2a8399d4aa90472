"""Pages made from CSV files, from the model and from docstrings show what those say."""

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from meshscope.spec.model.model import Family
from meshscope.spec.quantization import PARTIAL_COVERAGES, WEIGHT_DTYPES, quantization_of
from meshscope.units import format_dtype

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "page",
    [
        "docs/moe.md",
        "docs/fsdp.md",
        "docs/torchxla.md",
        "docs/accuracy.md",
        "docs/metrics.md",
        "docs/best-plans.md",
        "docs/compilers.md",
        "docs/contribute.md",
        "docs/study.md",
        "docs/study-queries.md",
        "docs/study-data.md",
        "docs/sql.md",
        "docs/support.md",
        "docs/time.md",
    ],
)
def test_pages_show_what_they_are_made_of(page: str):
    command = [sys.executable, "-m", "cogapp", "-P", "--check", "--diff", page]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (
        f"run 'make readme' (or 'make accuracy') and read the difference:\n{done.stdout}"
    )


def test_the_page_of_formats_names_every_format_of_programs() -> None:
    page = (ROOT / "docs/formats.md").read_text("utf-8")
    formats = [dtype for dtype in WEIGHT_DTYPES if quantization_of(dtype) is not None]
    missing = [name for name in map(format_dtype, formats) if f"`{name}`" not in page]
    parts = [name.partition(f"_{of}") for name in missing for of in PARTIAL_COVERAGES if of in name]
    assert len(parts) == len(missing)
    assert [
        base
        for base, end, _ in parts
        if not {f"`{base}`", f"`{end}`"} <= {*re.findall(r"`.*?`", page)}
    ] == []


def test_the_support_table_has_every_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    support = import_module("support")
    assert {*support.FAMILY_NAMES, Family.MINISTRAL} == set(Family)  # one row with Mistral


def test_the_support_table_distinguishes_programs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A dense model has no experts to place, annotations no stages; TorchXLA splits DeepSeek-V4 as JAX does."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import_module("support").families()
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()]
    (dense,) = (row for row in rows if "Qwen2" in row[0])
    (gpt_oss,) = (row for row in rows if "gpt-oss" in row[0])
    assert "ep" not in dense[1]
    assert "ep" in gpt_oss[1]
    assert "pp" not in gpt_oss[2]
    (deepseek_v4,) = (row for row in rows if "DeepSeek-V4" in row[0])
    assert "pp" in deepseek_v4[1].split()
    assert "pp" not in deepseek_v4[2].split()
    assert deepseek_v4[3].removesuffix(" |") == deepseek_v4[1]
