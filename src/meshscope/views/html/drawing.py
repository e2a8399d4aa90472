"""Numbers charts as they are made, and words what several sections share."""

from itertools import count
from typing import Any

from meshscope.analysis.catalog import METRICS
from meshscope.units import format_seconds
from meshscope.views.html.blocks import Chart


class Charts:
    """Numbers the charts of a page in the order in which they are made."""

    def __init__(self) -> None:
        """No chart yet."""
        self._numbers = count()

    def new(
        self, kind: str, title: str, data: dict[str, Any], *, about: str, note: str = ""
    ) -> Chart:
        """A chart of this kind; `about` says in words what it shows."""
        return Chart(
            number=next(self._numbers),
            kind=kind,
            title=title,
            description=about,
            data=data,
            note=note,
        )


def definition(name: str) -> str:
    """The first paragraph of a metric's definition."""
    found = next(metric for metric in METRICS if metric.name == name)
    return found.definition.partition("\n\n")[0].replace("`", "")


def between(low_s: float | None, high_s: float | None) -> str:
    """`10 ms to 20 ms`, or that it is not known."""
    if low_s is None or high_s is None:
        return "interval not known"
    return f"{format_seconds(low_s)} to {format_seconds(high_s)}"
