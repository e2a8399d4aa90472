"""The pytest fixture `meshscope_compile`, and the option `--meshscope-compiler`.

Imported by every pytest session of an environment with meshscope, so it loads no library before its use.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from meshscope.api.check import Communication


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option."""
    parser.getgroup("meshscope", "collectives of compiled functions").addoption(
        "--meshscope-compiler",
        metavar="NAME",
        help="compile with another version of JAX and libtpu, of meshscope compilers list",
    )


@pytest.fixture
def meshscope_compile(request: pytest.FixtureRequest) -> "Callable[..., Communication]":
    """Compiles a function as `meshscope.compile` does, and returns its collectives with assertions."""
    compiler = request.config.getoption("--meshscope-compiler")

    def compile_(function: Any, *arguments: Any, **options: Any) -> "Communication":
        from meshscope.api.check import Communication  # noqa: PLC0415
        from meshscope.api.compile import compile as compile_function  # noqa: PLC0415  slow to import

        options.setdefault("compiler", compiler)
        return Communication(run=compile_function(function, *arguments, **options))

    return compile_
