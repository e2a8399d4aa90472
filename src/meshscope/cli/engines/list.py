"""`meshscope engines list`: known releases of serving engines, and which are installed."""

from rich.table import Table

from meshscope.api.engines import list_engines
from meshscope.cli.options import JsonOption
from meshscope.cli.output import new_console, print_all, print_json
from meshscope.units import format_bytes

NOTE = "Installed: meshscope compile --frontend ENGINE --engine-version V uses it."


def command(*, as_json: JsonOption = False) -> None:
    """List known releases of serving engines, and which are installed."""
    engines = list_engines()
    if as_json:
        print_json(engines)
        return
    table = Table(box=None, pad_edge=False)
    for column in ("Engine", "Version", "Python", "Disk", "Installed in"):
        table.add_column(column, overflow="fold")
    for engine in engines:
        table.add_row(
            engine["engine"],
            engine["version"],
            f">={engine['least_python']}",
            format_bytes(engine["n_bytes"]),
            engine["folder"] or "-",
        )
    print_all(new_console(), [table, "", NOTE])
