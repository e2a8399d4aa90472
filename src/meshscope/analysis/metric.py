"""A metric: a name, a unit and a pure function, whose docstring is the metric's definition."""

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
    """The reason why a run lacks a metric. A metric that cannot be computed is never 0."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A metric: `function` defines it on tables and peaks, `compute` applies it to a run.

    `unit` lists the units of the columns. Definition and source come from the docstring of `function`.
    """

    name: str
    title: str
    unit: str
    function: Callable[..., Any]
    compute: Callable[[MetricInputs], pl.DataFrame | Unavailable]

    @property
    def definition(self) -> str:
        """The docstring of the function, up to its sources."""
        return _unwrapped(_docstring(self.function).partition(_SOURCE)[0])

    @property
    def source(self) -> str:
        """The sources that the docstring cites."""
        return _unwrapped(_docstring(self.function).partition(_SOURCE)[2])


def _docstring(function: Callable[..., Any]) -> str:
    return inspect.cleandoc(function.__doc__ or "")


def _unwrapped(text: str) -> str:
    """The paragraphs, each on one line."""
    paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", text.strip())]
    return "\n\n".join(part for part in paragraphs if part)
