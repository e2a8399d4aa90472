"""What an installation that is not this checkout needs is declared, packed, and enough."""

import os
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_every_file_that_is_not_python_is_package_data() -> None:
    declared = SETTINGS["tool"]["setuptools"]["package-data"]
    package = ROOT / "src" / "meshscope"
    data = {
        path for path in package.rglob("*") if path.is_file() and path.suffix not in {".py", ".pyc"}
    }
    packaged = {
        path
        for name, patterns in declared.items()
        for pattern in patterns
        for path in (ROOT / "src" / Path(*name.split("."))).glob(pattern)
    }
    assert data
    left_out = sorted(str(path.relative_to(package)) for path in data - packaged)
    assert left_out == []


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    run(folder, *command).check_returncode()
    return folder


@pytest.fixture(scope="module")
def installed(packages: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment with the wheel and its declared dependencies, and nothing else."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python3*/site-packages")
    for entry in entries_of_dependencies():
        (site / entry.name).symlink_to(entry)
    (wheel,) = packages.glob("*.whl")
    pip = (sys.executable, "-m", "pip", "--python", folder / "bin" / "python")
    run(folder, *pip, "install", "--no-deps", "--no-index", wheel).check_returncode()
    return folder / "bin"


def entries_of_dependencies() -> set[Path]:
    """The files and folders in site-packages of everything that meshscope requires, directly or not."""
    pending = [Requirement(text) for text in SETTINGS["project"]["dependencies"]]
    seen: dict[str, Distribution] = {}
    while pending:
        requirement = pending.pop()
        if requirement.name in seen:
            continue
        seen[requirement.name] = package = distribution(requirement.name)
        pending += required_by(package)
    return {entry for package in seen.values() for entry in entries_of(package)}


def required_by(package: Distribution) -> list[Requirement]:
    requirements = [Requirement(text) for text in package.requires or ()]
    return [r for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]


def entries_of(package: Distribution) -> Iterator[Path]:
    for file in package.files or ():
        if file.parts[0] not in {"..", "__pycache__"}:
            yield Path(str(package.locate_file(file.parts[0])))


def run(folder: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs a command in `folder`, without this checkout and its environment."""
    kept = {k: v for k, v in os.environ.items() if k in {"HOME", "LANG", "PATH"}}
    return subprocess.run(
        command, cwd=folder, env=kept, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_the_packages_hold_the_license_and_no_tests(packages: Path) -> None:
    (wheel,) = packages.glob("*.whl")
    (source,) = packages.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = archive.namelist()
        (metadata,) = (name for name in in_wheel if name.endswith(".dist-info/METADATA"))
        described = archive.read(metadata).decode()
    with tarfile.open(source) as archive:
        in_source = archive.getnames()

    tops = {name.split("/")[0].split("-")[0] for name in in_wheel}
    assert tops == {"meshscope"}
    assert [name for name in in_wheel if name.endswith("/licenses/LICENSE")] != []
    assert [name for name in in_source if name.endswith("/LICENSE")] != []
    assert [name for name in (*in_wheel, *in_source) if "/tests/" in name] == []
    assert "License-Expression: Apache-2.0" in described


@pytest.mark.slow
def test_the_wheel_works_with_its_declared_dependencies_only(installed, tmp_path) -> None:
    meshscope = installed / "meshscope"
    request = ("--topology", "v6e-8", "--plan", "tp=8", "--layers", "2")
    commands: list[tuple[str | Path, ...]] = [
        (meshscope, "--help"),
        (meshscope, "predict", "Qwen/Qwen3-4B", *request, "--out", "a"),
        (meshscope, "show", "a"),
        (meshscope, "sql", "a", "select count(*) from collectives"),
        (meshscope, "report", "a", "--out", "report.html"),
        (meshscope, "export", "a", "--to", "csv", "--out", "a.csv"),
    ]
    for command in commands:
        done = run(tmp_path, *command)
        assert done.returncode == 0, (command, done.stderr)
    assert "</html>" in (tmp_path / "report.html").read_text(encoding="utf-8")
    where = run(tmp_path, installed / "python", "-c", "import meshscope; print(meshscope.__file__)")
    assert Path(where.stdout.strip()).is_relative_to(installed.parent)


@pytest.mark.slow
def test_without_its_extra_compile_says_how_to_install_it(installed: Path, tmp_path: Path) -> None:
    request = ("--topology", "v6e-8", "--plan", "tp=8", "--layers", "2")
    done = run(tmp_path, installed / "meshscope", "compile", "Qwen/Qwen3-4B", *request)
    assert done.returncode == 1
    assert "[tpu]" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_metadata_is_complete_and_invents_no_address() -> None:
    project = SETTINGS["project"]
    assert project["license"] == "Apache-2.0"
    assert project["license-files"] == ["LICENSE"]
    assert {"description", "readme", "requires-python", "authors", "keywords"} <= set(project)
    assert "Typing :: Typed" in project["classifiers"]
    assert "urls" not in project


def test_every_extra_is_explained() -> None:
    """Users install extras by name: each has a comment, or the README names it."""
    lines = (ROOT / "pyproject.toml").read_text(encoding="utf-8").splitlines()
    starts = {line.split(" = ")[0]: i for i, line in enumerate(lines) if " = [" in line}
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    unexplained = [
        name
        for name in SETTINGS["project"]["optional-dependencies"]
        if f"[{name}]" not in readme and not lines[starts[name] - 1].startswith("#")
    ]
    assert unexplained == ["dev"]
