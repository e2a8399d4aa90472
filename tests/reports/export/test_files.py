"""Exports are there whole or not at all, and replace nothing unasked."""

from pathlib import Path

import pytest

from meshscope.errors import RunError
from meshscope.reports.export.files import new_directory, new_file


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    for maker in (new_file, new_directory):
        with pytest.raises(RunError), maker(tmp_path / "x", force=False) as partial:
            (partial / "half" if maker is new_directory else partial).read_text()
    assert left(tmp_path) == []


def test_a_folder_that_is_no_export_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "mine").write_text("")
    with pytest.raises(RunError, match="never replaced"), new_directory(tmp_path / "x", force=True):
        pass
    assert left(tmp_path / "x") == ["mine"]


def test_a_folder_in_the_way_of_a_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    with pytest.raises(RunError, match="is a folder"), new_file(tmp_path / "x", force=True):
        pass
