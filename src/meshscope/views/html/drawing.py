"""Numbers the charts of a page, and shares texts between its sections."""

from itertools import count
from typing import Any

from meshscope.analysis.catalog import METRICS
from meshscope.views.html.blocks import Chart


class ChartFactory:
    """Makes the charts of a page and numbers them in order."""

    def __init__(self) -> None:
        """Starts at 0."""
        self._numbers = count()

    def chart(
        self, kind: str, title: str, data: dict[str, Any], *, description: str, note: str = ""
    ) -> Chart:
        """A chart of this kind; `description` is its text for screen readers."""
        return Chart(
            number=next(self._numbers),
            kind=kind,
            title=title,
            description=description,
            data=data,
            note=note,
        )


def definition(name: str) -> str:
    """The first paragraph of the definition of a metric."""
    metric = next(metric for metric in METRICS if metric.name == name)
    return metric.definition.partition("\n\n")[0].replace("`", "")
