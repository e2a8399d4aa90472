"""Engines whose code has no release are installed from the user's checkout."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from meshscope.api.environments import install_engine, list_engines
from meshscope.errors import SpecError
from meshscope.programs.environments import release_of

ENGINE = "sglang-jax"
PINS = release_of(ENGINE, "main").pins


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "meshscope" / "engines"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with the engine's package and files that pip need not build."""
    folder = tmp_path / "sglang-jax"
    (folder / "python" / "sgl_jax").mkdir(parents=True)
    (folder / "python" / "sgl_jax" / "__init__.py").write_text("", encoding="utf-8")
    return folder


def test_a_checkout_is_installed_from_a_copy(
    checkout: Path, fake_python: Callable[..., Path], cache: Path, tmp_path: Path
) -> None:
    before = sorted(checkout.rglob("*"))

    folder = install_engine(ENGINE, source=checkout, python=str(fake_python(versions=PINS)))

    assert folder == cache / "sglang-jax-main"
    asked = [json.loads(line) for line in (tmp_path / "asked.jsonl").read_text().splitlines()]
    (package,) = (arguments[-1] for arguments in asked if "--no-deps" in arguments)
    assert not Path(package).is_relative_to(checkout)
    assert sorted(checkout.rglob("*")) == before
    (listed,) = (entry for entry in list_engines() if entry["folder"] is not None)
    assert listed["version"] == "main"


def test_the_version_names_the_commit(
    checkout: Path, fake_python: Callable[..., Path], tmp_path: Path
) -> None:
    git = ["git", "-C", str(checkout), "-c", "user.name=a", "-c", "user.email=a@b.example"]
    subprocess.run(["git", "init", "-q", str(checkout)], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "Add the package"], check=True)
    known = subprocess.run(
        [*git, "rev-parse", "--short=8", "HEAD"], check=True, capture_output=True, text=True
    )
    python = fake_python(versions=PINS)

    install_engine(ENGINE, source=checkout, python=str(python))

    assert f'version = "0.dev0+g{known.stdout.strip()}"' in (tmp_path / "project.toml").read_text()


def test_a_release_that_cannot_be_downloaded_asks_for_a_checkout(cache: Path) -> None:
    with pytest.raises(SpecError, match=r"sgl-project/sglang-jax, which has no release.*--source"):
        install_engine(ENGINE, engine_version="main")
    assert not cache.exists()


def test_another_folder_than_a_checkout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="there is no folder python/sgl_jax"):
        install_engine(ENGINE, source=tmp_path)


def test_a_released_package_takes_no_checkout(checkout: Path) -> None:
    with pytest.raises(SpecError, match=r"sglang-jax 0\.0\.2 is a released package. Drop"):
        install_engine(ENGINE, engine_version="0.0.2", source=checkout)


def test_without_a_version_the_newest_released_package_is_meant() -> None:
    assert release_of(ENGINE, None).version == "0.0.2"
    assert release_of(ENGINE, None, is_checkout=True).version == "main"
    assert release_of("vllm-tpu", None).version == "0.32.0"
