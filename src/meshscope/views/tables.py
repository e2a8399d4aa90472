"""The one look of all tables: a rule below the names, no frame, long cells folded and never cut."""

from rich import box
from rich.table import Table
from rich.text import Text

from meshscope.views.model import ViewTable, format_cell
from meshscope.views.plain import plain, short


def new_table(*names: str, n_words: int = 1) -> Table:
    """An empty table whose first `n_words` columns hold words, the others figures."""
    table = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        header_style="bold",
    )
    for i, name in enumerate(names):
        add_column(table, name, is_figure=i >= n_words)
    return table


def add_column(table: Table, name: str, *, is_figure: bool = False) -> None:
    """A column, of words on the left or of figures on the right."""
    lines = [plain(line) for line in name.splitlines()]
    table.add_column(
        Text("\n".join(lines)), overflow="fold", justify="right" if is_figure else "left"
    )


def rich_table(view: ViewTable, *, max_rows: int | None = None) -> Table:
    """The table for a terminal, with the title over the first column if that has no label."""
    first, *others = view.columns
    table = new_table()
    add_column(table, first.label or view.title, is_figure=first.is_figure)
    for column in others:
        add_column(table, column.label, is_figure=column.is_figure)
    for row in view.rows[:max_rows]:
        cells = zip(view.columns, row, strict=True)
        table.add_row(*(Text(short(format_cell(value, c.unit))) for c, value in cells))
    return table
