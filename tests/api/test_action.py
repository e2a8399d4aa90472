"""The GitHub action: its steps, run on a repository with a pull request."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import meshscope

ACTION = Path(__file__).parents[2] / ".github" / "actions" / "meshscope-check"
BUDGET = """
[[program]]
name = "serve: Qwen"
model = "Qwen/Qwen3-0.6B"
topology = "v6e-8"
plan = "{plan}"
predict = true
batch = 8

[[program.budget]]
phase = "decode"
kind = "all_reduce"
max_count = {count}

[[program]]
run = "saved"
budget = [{{max_count = 1000}}]
"""
PREPARE = "meshscope predict Qwen/Qwen3-0.6B --topology v6e-8 --plan tp=8 --out saved --force"


def repository(folder: Path) -> str:
    """A repository whose last commit is the base of a pull request."""
    folder.mkdir()
    for words in (
        ("init", "--quiet"),
        ("add", "."),
        ("commit", "--quiet", "--message", "base"),
    ):
        if words[0] == "add":
            (folder / "budget.toml").write_text(BUDGET.format(plan="tp=8", count=60))
        git(folder, *words)
    return git(folder, "rev-parse", "HEAD").strip()


def git(folder: Path, *words: str) -> str:
    named = ("-c", "user.name=A", "-c", "user.email=a@example.com")
    done = subprocess.run(
        ["git", *named, *words], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout


def checked(folder: Path, base: str) -> tuple[int, str, str]:
    """The status, the output and the comment."""
    source = str(Path(meshscope.__file__).parents[1])
    bin_ = folder.parent / "bin"
    bin_.mkdir()
    command = bin_ / "meshscope"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m meshscope "$@"\n')
    command.chmod(0o755)
    environment = os.environ | {"PYTHONPATH": source, "PATH": f"{bin_}:{os.environ['PATH']}"}
    results = folder.parent / "results"
    words = [ACTION / "check.sh", "budget.toml", base, results, PREPARE]
    done = subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout, (results / "comment.md").read_text()


@pytest.mark.slow
def test_a_pull_request_learns_which_collectives_came_and_went(tmp_path: Path) -> None:
    base = repository(tmp_path / "repository")
    (tmp_path / "repository" / "budget.toml").write_text(BUDGET.format(plan="dp=2,tp=4", count=50))
    status, out, comment = checked(tmp_path / "repository", base)
    assert status == 1
    assert out.startswith("::error file=budget.toml,line=")
    assert "**A limit is not kept.**" in comment
    assert "all_reduce in decode: count 57, at most 50" in comment
    saved, _, served = comment.partition("**serve-Qwen**")
    assert "collectives: A = B" in saved
    assert "all_reduce" in served
    assert git(tmp_path / "repository", "worktree", "list").count("\n") == 1


@pytest.mark.slow
def test_without_a_base_it_checks_alone(tmp_path: Path) -> None:
    repository(tmp_path / "repository")
    status, _, comment = checked(tmp_path / "repository", "")
    assert status == 0
    assert "All limits are kept." in comment
    assert "New, or not compiled at the base" in comment


def test_the_steps_are_those_of_a_composite_action() -> None:
    action = yaml.safe_load((ACTION / "action.yml").read_text(encoding="utf-8"))
    steps = action["runs"]["steps"]
    assert action["runs"]["using"] == "composite"
    assert all(step.get("shell") == "bash" for step in steps if "run" in step)
    # Inputs reach scripts as variables, never as text of the script.
    assert not any("${{" in step["run"] for step in steps if "run" in step)
    (check,) = (step for step in steps if step.get("id") == "check")
    assert "check.sh" in check["run"]
