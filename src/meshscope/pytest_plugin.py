"""The pytest fixture `meshscope_compile`, and the options `--meshscope-update` and `--meshscope-compiler`.

Imported by every pytest session of an environment with meshscope, so it loads no library before its use.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from meshscope.api.communication import Communication

SNAPSHOTS = "__meshscope__"  # snapshot folder, next to the test file


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options."""
    group = parser.getgroup("meshscope", "collectives of compiled functions")
    group.addoption(
        "--meshscope-update",
        action="store_true",
        help="rewrite the snapshots of collectives that the tests compare",
    )
    group.addoption(
        "--meshscope-compiler",
        metavar="NAME",
        help="compile with another version of JAX and libtpu, of meshscope compilers list",
    )


@pytest.fixture
def meshscope_compile(request: pytest.FixtureRequest) -> "Callable[..., Communication]":
    """Compiles a function as `meshscope.compile` does, and returns its collectives with assertions.

    Each call in a test has a snapshot of its own.
    """
    is_updated = bool(request.config.getoption("--meshscope-update"))
    compiler = request.config.getoption("--meshscope-compiler")
    n_calls = 0

    def compile_(function: Any, *arguments: Any, **options: Any) -> "Communication":
        from meshscope.api.communication import Communication  # noqa: PLC0415
        from meshscope.api.compile import compile as compile_function  # noqa: PLC0415  slow to import

        nonlocal n_calls
        n_calls += 1
        options.setdefault("compiler", compiler)
        return Communication(
            run=compile_function(function, *arguments, **options),
            snapshot=_snapshot(request.path, request.node.name, n_calls),
            is_updated=is_updated,
        )

    return compile_


def _snapshot(file: Path, test: str, number: int) -> Path:
    """`__meshscope__/test_train-test_step.json` next to the test file; later calls have a number."""
    name = re.sub(r"[^\w.-]+", "-", f"{file.stem}-{test}").strip("-")
    return file.parent / SNAPSHOTS / f"{name}{'' if number == 1 else f'-{number}'}.json"
