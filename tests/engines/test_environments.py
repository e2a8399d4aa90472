"""Environments of engines, and stubs of what an engine imports and does not need."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tables import table

import meshscope
from meshscope.api.environments import list_engines
from meshscope.errors import MissingToolError, SpecError
from meshscope.programs.environments import (
    ENGINES,
    installed_release,
    known_releases,
    lone_variables,
    release_of,
)

ENGINE, VERSION = "vllm-tpu", "0.32.0"


def install_engine(engine: str, *, engine_version: str | None = None, **how: Any) -> Path:
    return release_of(engine, engine_version).install(**({"report": lambda _: None} | how))


@pytest.mark.slow
def test_an_installed_release_is_listed_and_used(fake_python, cache, tmp_path) -> None:
    steps: list[str] = []

    folder = install_engine(ENGINE, python=str(fake_python()), report=steps.append)

    assert folder == cache / "engines" / "vllm-tpu-0.32.0"
    assert [path.name for path in (cache / "engines").iterdir()] == [folder.name]
    assert len(steps) == 3
    asked = [json.loads(line) for line in (tmp_path / "asked.jsonl").read_text().splitlines()]
    pip = [arguments for arguments in asked if arguments[:2] == ["pip", "install"]]
    assert [arguments[-1] for arguments in pip] == ["sympy", "tpu-inference==0.32.0"]
    assert "--no-deps" in pip[1]
    assert "--no-deps" not in pip[0]
    (listed,) = (entry for entry in list_engines() if entry["folder"] is not None)
    assert (listed["version"], listed["folder"]) == (VERSION, str(folder))
    assert installed_release(ENGINE, None).version == VERSION


@pytest.mark.slow
@pytest.mark.parametrize("failing", ["sympy", "tpu-inference==0.32.0"])
def test_a_failed_installation_leaves_nothing(failing, fake_python, cache) -> None:
    python = fake_python(failing=failing)
    with pytest.raises(MissingToolError, match=f"nothing of it was kept: .*found for {failing}"):
        install_engine(ENGINE, python=str(python))
    assert list((cache / "engines").iterdir()) == []


@pytest.mark.slow
def test_leftovers_of_a_killed_installation_are_removed(fake_python, cache) -> None:
    left = cache / "engines" / "vllm-tpu-0.32.0" / "bin" / "left"
    left.mkdir(parents=True)
    with pytest.raises(MissingToolError, match="are not installed"):
        installed_release(ENGINE, VERSION)
    install_engine(ENGINE, python=str(fake_python()))
    assert not left.exists()


@pytest.mark.slow
def test_without_a_new_python_the_remedy_names_one(fake_python, monkeypatch) -> None:
    fake_python(failing=">=3.12")
    monkeypatch.setattr("sys.version_info", (3, 11, 9, "final", 0))
    with pytest.raises(MissingToolError, match=r"needs Python 3\.12 or newer: .* --python PATH$"):
        install_engine(ENGINE)


@pytest.mark.slow
def test_an_environment_without_its_python_is_not_installed(fake_python) -> None:
    folder = install_engine(ENGINE, python=str(fake_python()))
    (folder / "bin" / "python").unlink()
    with pytest.raises(MissingToolError, match=r"are not installed .* meshscope engines install"):
        installed_release(ENGINE, VERSION)


def test_every_release_pins_what_decides_the_program() -> None:
    for release in known_releases(ENGINES):
        names = {pin.partition("==")[0].partition("[")[0] for pin in release.requirements}
        assert {"jax", "flax"} <= names
        pin = "@cddbf6f1#" if release.version == "main" else f"=={release.version}"
        assert pin in (release.package or "")


def test_without_uv_the_remedy_is_its_installation(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    with pytest.raises(MissingToolError, match="Install it: pip install uv"):
        install_engine(ENGINE, engine_version="0.24.0")


@pytest.mark.slow
def test_uv_takes_the_index_of_pip(fake_python, tmp_path, monkeypatch) -> None:
    config = tmp_path / "pip.conf"
    config.write_text(
        "[global]\nindex-url = https://index.example/simple\nextra-index-url =\n"
        "    https://a.example\n    https://b.example\n",
        encoding="utf-8",
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX"):
        monkeypatch.delenv(name, raising=False)
    install_engine(ENGINE, python=str(fake_python()))
    (settings,) = set((tmp_path / "settings").read_text().splitlines())
    assert settings == "https://index.example/simple https://a.example https://b.example"


def test_a_worker_sees_meshscope_and_none_of_its_neighbors(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONHOME", "/elsewhere")
    variables = lone_variables(tmp_path)
    visible = Path(variables["PYTHONPATH"])
    assert [path.name for path in visible.iterdir()] == ["meshscope"]
    assert (visible / "meshscope" / "errors.py").exists()
    assert "PYTHONHOME" not in variables


UNKNOWN = r"--engine-version 1\.0: .* Use one of 0\.24\.0, "


@table
def test_what_cannot_be_installed_is_refused(cache, engine, options, message) -> None:
    with pytest.raises((SpecError, MissingToolError), match=message):
        install_engine(engine, **options)
    assert not list(cache.glob("*"))


def test_what_is_not_installed_is_not_used() -> None:
    with pytest.raises(SpecError, match=UNKNOWN):
        installed_release(ENGINE, "1.0")


PROGRAM = """
from meshscope.programs.engines.stubs import install_stubs
install_stubs(["vllm", "json"], replaced=["wave"])
import json, wave
from vllm.config import VllmConfig
from vllm.distributed.utils import get_pp_indices
from vllm import envs
import vllm.logger
assert json.loads("[1]") == [1], "what is installed wins"
assert not hasattr(wave, "__file__"), "unless it is to be replaced"
class Config(VllmConfig[int]): pass
assert isinstance(Config(1, a=2), VllmConfig)
assert VllmConfig | None is VllmConfig
@VllmConfig("decorator")
def decorated(): return 7
assert decorated() == 7
assert get_pp_indices(12, 0, 1) == (0, 12)
assert envs.VLLM_TPU_BUCKET_PADDING_GAP == 0
vllm.logger.init_logger("x").info_once("nothing")
try:
    import vllmx
except ModuleNotFoundError:
    print("passed")
"""


def test_imports_work_and_known_values_are_those_of_the_package() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(Path(meshscope.__file__).parents[1])},
    )
    assert (done.stdout, done.stderr) == ("passed\n", "")
