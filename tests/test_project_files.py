"""The files around the code are whole, agree with each other, and name only what exists."""

import hashlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

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
    *("meshscope/metrics.json", "generation_config.json", "tokenizer.json", "FOLDER/profile.json"),
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_name_make_targets_that_exist(page: Path) -> None:
    named = set(re.findall(r"(?:`|\$ )make ([a-z][a-z-]+)", page.read_text(encoding="utf-8")))
    assert named - TARGETS == set()


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
    """At most 150 lines, output included; longer output is on other pages."""
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_each_first_step_fits_a_screen() -> None:
    page = (ROOT / "docs" / "first-steps.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(?:console|text)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 10
    assert max(len(block.splitlines()) for block in blocks) <= 40


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_of_the_repository(page: Path) -> None:
    """As GitHub resolves them; the site's own links are checked when it is built."""
    targets = re.findall(r"\]\(([^)#\s:]+)(?:#[^)\s]*)?\)", prose_of(page))
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_no_stored_file_names_the_folder_of_the_repository() -> None:
    """Cards, tables and pages are the same wherever they were made."""
    folders = ("benchmarks", "docs", "experiments", "src", "tests", "tools")
    kinds = {".csv", ".json", ".md", ".py", ".toml", ".yaml", ".yml"}
    files = [file for folder in folders for file in (ROOT / folder).rglob("*")]
    stored = [file for file in (*files, *ROOT.glob("*.md")) if file.suffix in kinds]
    assert len(stored) > 500
    name = str(ROOT).encode()
    assert [file for file in stored if file.is_file() and name in file.read_bytes()] == []
