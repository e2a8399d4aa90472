"""The files around the code agree and name only what exists, layers hold, and packages are whole."""

import hashlib
import os
import re
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
import yaml
from packaging.requirements import Requirement

import meshscope

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "meshscope"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))

# A path of the repository in a code span: from its top, or as in ARCHITECTURE.md from the package.
PATH = re.compile(r"`([\w.-]+(?:/[\w.-]+)*/?[\w-]*\.(?:py|md|json|csv|yaml|yml|toml|txt))`")
FOLDER = re.compile(r"`((?:src|tests|docs|benchmarks|experiments|tools)/[\w/-]*/?)`")

# Files that a command writes, or that another project has.
NOT_OURS = {
    *("card.yaml", "config.json", "cpu.json", "experiments.yaml", "failures.json"),
    *("manifest.json", "metrics.json", "metrics.jsonl", "points.csv", "tiny.json"),
    *(
        "meshscope/metrics.json",
        "generation_config.json",
        "tokenizer.json",
        "FOLDER/profile.json",
        "llms.txt",
        "RUN-tpu-ccl-bench.yaml",
        "steps.trace.json",
        "tools/main.py",
    ),
}


def prose_of(page: Path) -> str:
    """The page without its code blocks and generated blocks."""
    text = page.read_text(encoding="utf-8")
    text = re.sub(r"<!-- \[\[\[cog.*?\[\[\[end\]\]\] -->", "", text, flags=re.DOTALL)
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_name_files_that_exist(page: Path) -> None:
    prose = prose_of(page)
    names = set(PATH.findall(prose)) - NOT_OURS | set(FOLDER.findall(prose))
    homes = (ROOT, PACKAGE, ROOT / "docs", *(p for p in PACKAGE.iterdir() if p.is_dir()))
    missing = sorted(
        name
        for name in names
        if not any((home / name).exists() for home in homes) and not any(PACKAGE.rglob(name))
    )
    assert missing == []


def test_pages_name_make_targets_that_exist_and_invent_no_owner_of_the_repository() -> None:
    """Addresses of this repository have OWNER, as it is not published yet."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        named = set(re.findall(r"(?:`|\$ )make ([a-z][a-z-]+)", text))
        owners = set(re.findall(r"github\.com/(?:github/)?([\w.-]+)/meshscope\b", text))
        assert (page, named - TARGETS, owners - {"OWNER"}) == (page, set(), set())


def test_the_license_is_the_apache_license_whole() -> None:
    text = (ROOT / "LICENSE").read_bytes()
    standard = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
    assert hashlib.sha256(text).hexdigest() == standard


def test_citation_and_changelog_name_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert citation["version"] == meshscope.__version__
    assert citation["license"] == project["license"]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^## .*{re.escape(meshscope.__version__)}$", changelog, re.MULTILINE)


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_make_targets_that_exist(workflow: Path) -> None:
    jobs = yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert commands
    assert {command.removeprefix("make ") for command in commands} <= TARGETS


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.stem)
def test_issue_forms_have_what_a_form_needs(template: Path) -> None:
    form = yaml.safe_load(template.read_text(encoding="utf-8"))
    if template.stem == "config":
        assert form == {"blank_issues_enabled": True}
        return
    assert {"name", "description", "body"} <= set(form)
    assert all(
        field["type"] == "markdown" or field["attributes"]["label"] for field in form["body"]
    )


def test_pre_commit_hooks_are_local_and_valid() -> None:
    path = ROOT / ".pre-commit-config.yaml"
    repos = yaml.safe_load(path.read_text(encoding="utf-8"))["repos"]
    assert {repo["repo"] for repo in repos} == {"local"}
    command = [sys.executable, "-m", "pre_commit", "validate-config", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_checks_above_see_a_missing_name(tmp_path: Path) -> None:
    """Each pattern finds what it is for, so the tests of pages can fail."""
    page = tmp_path / "page.md"
    page.write_text("`src/meshscope/gone.py` and `docs/gone/`\n```\n`tools/code.py`\n```\n")
    assert PATH.findall(prose_of(page)) == ["src/meshscope/gone.py"]
    assert FOLDER.findall(prose_of(page)) == ["docs/gone/"]


def test_the_readme_fits_a_reader() -> None:
    """At most 120 lines, output included; longer output is on other pages."""
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def test_the_guide_fits_a_reader() -> None:
    """At most 25 pages and 45,000 words, about three hours; measured tables are in docs/evidence."""
    texts = [page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md")]
    assert 10 <= len(texts) <= 25
    assert sum(len(text.split()) for text in texts) <= 45_000


def test_each_first_step_fits_a_screen() -> None:
    page = (ROOT / "docs" / "first-steps.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(?:console|text)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 10
    assert max(len(block.splitlines()) for block in blocks) <= 40


def test_links_lead_to_files_of_the_repository() -> None:
    """As GitHub resolves them; the site's own links are checked when it is built."""
    link = re.compile(r"\]\(([^)#\s:]+)(?:#[^)\s]*)?\)")
    targets = [(page, target) for page in PAGES for target in link.findall(prose_of(page))]
    assert [one for one in targets if not (one[0].parent / one[1]).exists()] == []


def test_no_stored_file_names_the_folder_of_the_repository() -> None:
    """Cards, tables and pages are the same wherever they were made."""
    folders = ("benchmarks", "docs", "experiments", "src", "tests", "tools")
    kinds = {".csv", ".json", ".md", ".py", ".toml", ".yaml", ".yml"}
    files = [file for folder in folders for file in (ROOT / folder).rglob("*")]
    stored = [file for file in (*files, *ROOT.glob("*.md")) if file.suffix in kinds]
    assert len(stored) > 500
    name = str(ROOT).encode()
    assert [file for file in stored if file.is_file() and name in file.read_bytes()] == []


FRAMEWORKS = ("jax", "jaxlib", "torch", "torch_xla", "libtpu")
SLOW_TO_IMPORT = (*FRAMEWORKS, "polars", "duckdb", "numpy")


def imported_by(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after the statement."""
    program = f"{statement}\nimport sys\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "module",
    ["meshscope", "meshscope.cli", "meshscope.cost.collectives", "meshscope.plans.experiment"],
)
def test_import_loads_nothing_slow(module: str) -> None:
    assert imported_by(f"import {module}").isdisjoint(SLOW_TO_IMPORT)


def test_help_loads_only_the_modules_of_the_command_line() -> None:
    program = "import sys, meshscope.cli\nprint(*(n for n in sys.modules if 'meshscope' in n))"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    needed = ("", ".api", ".api.options", ".cli", ".errors", ".files")
    assert sorted(done.stdout.split()) == [f"meshscope{name}" for name in needed]


@pytest.mark.parametrize("module", ["meshscope.readers.hlo.collectives", "meshscope.analysis.join"])
def test_readers_and_metrics_load_no_framework(module: str) -> None:
    assert imported_by(f"import {module}").isdisjoint(FRAMEWORKS)


def test_only_the_tests_of_the_command_line_import_it() -> None:
    """Everything else uses the API; inside the package an import contract checks it."""
    files = [
        p
        for d in ("experiments", "benchmarks", "docs", "tools")
        for p in Path(ROOT, d).rglob("*")
        if p.suffix in {".py", ".md"}
    ]
    assert files
    assert [p.name for p in files if "meshscope.cli" in p.read_text(encoding="utf-8")] == []


def test_the_check_sees_an_import() -> None:
    """The two tests above can fail: a module that is imported is seen."""
    assert "numpy" in imported_by("import numpy")


def test_the_architecture_page_lists_the_layers_of_the_import_contract() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    table = page[page.index("<!-- layers -->") : page.index("<!-- end -->")]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    layers = contracts["tool"]["importlinter"]["contracts"][0]["layers"]
    assert [re.findall(r"`(\w+)`", row) for row in rows] == [
        [name.strip() for name in layer.split("|")] for layer in layers
    ]


SOURCES = {p: p.read_text(encoding="utf-8") for p in sorted(PACKAGE.rglob("*.py"))}


def files_with(pattern: str) -> list[str]:
    """The files of the package in which the pattern occurs."""
    return [str(p.relative_to(PACKAGE)) for p, text in SOURCES.items() if re.search(pattern, text)]


MECHANISMS = [
    name
    for path, text in SOURCES.items()
    if path.parent.name == "mechanisms"
    for name, base in re.findall(r"^class (\w+)(?:\((.*)\))?:", text, re.MULTILINE)
    if base != "StrEnum"
]
# The protocol, which others ask instead of a mechanism.
PROTOCOL = {"Attention", "AttentionStep", "ContextExchange", "Indexer", "LayerAttention"}
PROTOCOL |= {"PromptWork"}


@pytest.mark.parametrize("name", sorted({*MECHANISMS} - PROTOCOL))
def test_a_mechanism_has_one_home(name: str) -> None:
    """At most four files name its class: its own, the twin in JAX, and two more."""
    assert 1 <= len(files_with(rf"\b{name}\b")) <= 4


@pytest.mark.parametrize(
    ("pattern", "most"),
    [
        (r"isinstance\([a-z_.]*attention, ", 3),
        (r"\bFamily\.", 3),
        (r"\bFrontend\.[A-Z]|\bis_engine\b", 4),
        (r"\blocals\(\)", 0),
    ],
)
def test_few_files_ask_which_one_it_is(pattern: str, most: int) -> None:
    assert len(files_with(pattern)) <= most


def test_the_package_has_few_and_whole_files() -> None:
    n_lines = {path: text.count("\n") for path, text in SOURCES.items()}
    assert 200 <= len(SOURCES) <= 340
    assert len([path for path, n in n_lines.items() if n < 60]) <= 35
    assert sum(text.count("noqa") for text in SOURCES.values()) <= 130
    rooms = [path for path in PACKAGE.iterdir() if (path / "__init__.py").exists()]
    assert 5 <= len(rooms) <= 13


def test_the_checks_of_the_package_see_a_name() -> None:
    """The tests of one home can fail: a name that is there is found."""
    assert "model/mechanisms/latent.py" in files_with(r"\bLatentAttention\b")
    assert "LatentAttention" in MECHANISMS


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
    checked = run(packages, sys.executable, "-m", "twine", "check", "--strict", wheel, source)
    assert checked.returncode == 0, checked.stdout


def test_the_image_copies_files_that_exist_and_installs_known_extras() -> None:
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    copied = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
    assert {"pyproject.toml", "src"} <= set(copied)
    assert [name for name in copied if not (ROOT / name).exists()] == []
    (extras,) = re.findall(r"/opt/meshscope\[([a-z,]+)\]", "\n".join(lines))
    assert set(extras.split(",")) <= SETTINGS["project"]["optional-dependencies"].keys()
    assert "USER user" in lines


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
