"""What a metric is: a name, a unit, a pure function, and its definition, which is the function's docstring."""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import polars as pl

from meshscope.analysis.metric_inputs import MetricInputs

_SOURCE = "Source:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unavailable:
    """A metric that a run cannot have, and why; never a 0."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A metric: `function` computes it from tables and peaks, `of` takes what it needs from a run.

    `unit` names the units of the columns. Definition and source are those of the docstring of `function`.
    """

    name: str
    title: str
    unit: str
    function: Callable[..., Any]
    of: Callable[[MetricInputs], pl.DataFrame | Unavailable]

    @property
    def definition(self) -> str:
        """What the metric is, in the words of its function."""
        return _flowing(_docstring(self.function).partition(_SOURCE)[0])

    @property
    def source(self) -> str:
        """Where the definition comes from."""
        return _flowing(_docstring(self.function).partition(_SOURCE)[2])


def _docstring(function: Callable[..., Any]) -> str:
    return inspect.cleandoc(function.__doc__ or "")


def _flowing(text: str) -> str:
    """Paragraphs, each on one line."""
    paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", text.strip())]
    return "\n\n".join(part for part in paragraphs if part)
