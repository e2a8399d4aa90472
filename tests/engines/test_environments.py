"""Environments of engines are made whole or not at all, and checked before they are used."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from meshscope.api.engines import install_engine, list_engines, remove_engine
from meshscope.errors import MissingToolError, SpecError
from meshscope.programs.engines.environments import environment_of
from meshscope.programs.engines.releases import RELEASES, release_of
from meshscope.programs.environments import lone_variables

ENGINE, VERSION = "vllm-tpu", "0.32.0"
PINS = dict(
    pin.split("==")
    for pin in (*release_of(ENGINE, VERSION).requirements, release_of(ENGINE, VERSION).package)
    if "==" in pin
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "meshscope" / "engines"


def test_an_installed_release_is_listed_used_and_removed(
    fake_python: Callable[..., Path], cache: Path, tmp_path: Path
) -> None:
    steps: list[str] = []

    folder = install_engine(ENGINE, python=str(fake_python(versions=PINS)), report=steps.append)

    assert folder == cache / "vllm-tpu-0.32.0"
    assert [path.name for path in cache.iterdir()] == [folder.name]
    assert len(steps) == 3
    asked = [json.loads(line) for line in (tmp_path / "asked.jsonl").read_text().splitlines()]
    pip = [arguments for arguments in asked if arguments[:2] == ["-m", "pip"]]
    assert [arguments[-1] for arguments in pip] == ["sympy", "tpu-inference==0.32.0"]
    assert "--no-deps" in pip[1]
    assert "--no-deps" not in pip[0]
    (listed,) = (entry for entry in list_engines() if entry["folder"] is not None)
    assert (listed["version"], listed["folder"]) == (VERSION, str(folder))
    assert environment_of(ENGINE, None).release.version == VERSION
    assert remove_engine(ENGINE) == folder
    assert not folder.exists()


@pytest.mark.parametrize("failing", ["sympy", "tpu-inference==0.32.0"])
def test_a_failed_installation_leaves_nothing(
    failing: str, fake_python: Callable[..., Path], cache: Path
) -> None:
    python = fake_python(versions=PINS, failing=failing)

    with pytest.raises(MissingToolError, match=f"nothing of it was kept: .*found for {failing}"):
        install_engine(ENGINE, python=str(python))

    assert list(cache.iterdir()) == []


def test_other_versions_than_the_pins_are_not_kept(
    fake_python: Callable[..., Path], cache: Path
) -> None:
    with pytest.raises(MissingToolError, match=r"broken: jax 0\.9\.0 instead of jax 0\.11\.2"):
        install_engine(ENGINE, python=str(fake_python(versions=PINS | {"jax": "0.9.0"})))

    assert list(cache.iterdir()) == []


def test_leftovers_of_a_killed_installation_are_removed(
    fake_python: Callable[..., Path], cache: Path
) -> None:
    left = cache / ".vllm-tpu-0.32.0.partial-999999999"
    left.mkdir(parents=True)

    install_engine(ENGINE, python=str(fake_python(versions=PINS)))

    assert [path.name for path in cache.iterdir()] == ["vllm-tpu-0.32.0"]


def test_an_old_python_is_refused(fake_python: Callable[..., Path]) -> None:
    python = fake_python(python="3.11.9", versions={})

    with pytest.raises(MissingToolError, match=r"is 3\.11; vllm-tpu 0\.32\.0 needs 3\.12 or newer"):
        install_engine(ENGINE, python=str(python))


def test_without_a_new_python_the_release_for_this_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.version_info", (3, 11, 9, "final", 0))
    with pytest.raises(MissingToolError, match=r"or install --engine-version 0\.24\.0$"):
        install_engine(ENGINE)
    with pytest.raises(MissingToolError, match=r"--python /path/to/python3\.12$"):
        install_engine("maxtext")


def test_a_python_that_does_not_run_is_refused() -> None:
    with pytest.raises(MissingToolError, match="--python /no/python does not run"):
        install_engine(ENGINE, python="/no/python")


def test_a_full_disk_is_refused(
    fake_python: Callable[..., Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 10**9})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)

    with pytest.raises(MissingToolError, match=r"has 1 GB free.*XDG_CACHE_HOME to a larger disk"):
        install_engine(ENGINE, python=str(fake_python(versions=PINS)))

    assert list(cache.iterdir()) == []


def test_a_broken_environment_is_refused_and_can_be_removed(
    fake_python: Callable[..., Path],
) -> None:
    folder = install_engine(ENGINE, python=str(fake_python(versions=PINS)))
    (folder / "bin" / "python").unlink()

    with pytest.raises(
        MissingToolError, match=r"its Python does not run .* engines remove vllm-tpu"
    ):
        environment_of(ENGINE, VERSION)

    remove_engine(ENGINE, engine_version=VERSION)
    with pytest.raises(MissingToolError, match=r"are not installed .* meshscope engines install"):
        environment_of(ENGINE, VERSION)


def test_what_is_not_installed_cannot_be_removed() -> None:
    with pytest.raises(MissingToolError, match=r"is not installed in .* meshscope engines list"):
        remove_engine(ENGINE)


def test_unknown_engines_and_releases_are_refused() -> None:
    with pytest.raises(SpecError, match=r"'vllm' is not a known engine\. Did you mean 'vllm-tpu'"):
        install_engine("vllm")
    with pytest.raises(SpecError, match=r"--engine-version 1\.0: .* Use one of 0\.12\.0, "):
        install_engine(ENGINE, engine_version="1.0")
    with pytest.raises(MissingToolError, match=r"--engine-version 1\.0: .* Use one of 0\.12\.0, "):
        environment_of(ENGINE, "1.0")


def test_every_release_pins_what_decides_the_program() -> None:
    for release in RELEASES:
        names = {pin.partition("==")[0].partition("[")[0] for pin in release.requirements}
        assert {"jax", "flax"} <= names
        assert release.checkout is not None or release.package.endswith(f"=={release.version}")


def test_a_worker_sees_meshscope_and_none_of_its_neighbors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHOME", "/elsewhere")

    variables = lone_variables(tmp_path)

    visible = Path(variables["PYTHONPATH"])
    assert [path.name for path in visible.iterdir()] == ["meshscope"]
    assert (visible / "meshscope" / "errors.py").exists()
    assert "PYTHONHOME" not in variables
