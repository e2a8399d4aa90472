"""The extra that plots need."""

from collections.abc import Generator
from contextlib import contextmanager

from meshscope.errors import MissingToolError


@contextmanager
def plot_tools() -> Generator[None]:
    """Around an import of plots: MissingToolError without vl-convert."""
    try:
        yield
    except ImportError as error:
        raise MissingToolError(
            "plots need vl-convert-python, which is not installed. "
            "Install the extra in your clone: pip install -e '.[plots]'."
        ) from error
