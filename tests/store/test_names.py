"""Names of run folders from whatever a model is called."""

from pathlib import Path

import pytest
from tables import table

from meshscope.api.options import request_of
from meshscope.api.request import CompileRequest, run_folder
from meshscope.store.folder import MAX_NAME, default_folder, safe_name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Qwen3-32B", "Qwen3-32B"),
        ("2xv6e:4x4", "2xv6e-4x4"),
        ("../../etc/passwd", "etc-passwd"),
        ("..", "run"),
        (".hidden", "hidden"),
        ("/", "run"),
        ("", "run"),
        ("a\x1b[31m\nb\0c", "a-31m-b-c"),
        ("modèle/名", "mod-le"),
        ("-rf", "rf"),
        ("\udcff", "run"),
        ("con. ", "con"),
    ],
)
def test_a_name_is_one_harmless_component(text: str, name: str) -> None:
    assert safe_name(text) == name
    assert Path(name).parts == (name,)


def test_long_names_are_cut() -> None:
    assert safe_name("x" * 1000) == "x" * MAX_NAME


def test_default_folder_leaves_out_what_is_empty() -> None:
    folder = default_folder("Qwen3-32B", "v6e:2x4", "dp2,tp4", "", "scan")
    assert folder == Path("runs/Qwen3-32B-v6e-2x4-dp2-tp4-scan")


DENSE = {"model": "Qwen/Qwen3-4B", "topology": "v6e-8", "plan": "tp=8"}


@table
def test_a_default_name_has_the_options_that_are_not_defaults(options, end) -> None:
    request = request_of(CompileRequest, DENSE | options)
    folder = run_folder(request, request.experiment())
    assert folder == Path(f"runs/Qwen3-4B-v6e-2x4-tp8{end}")
