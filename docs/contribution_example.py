"""The output of `meshscope contribute` for the made-up run of its tests, for cog."""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "api"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "shared"))

from test_contribute import measured_record

from meshscope.api.contribute import contribution_lines, contribution_of
from meshscope.store.write import write_run


def example() -> None:
    """Prints the text of the contribution."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "measured"
        path.mkdir()
        write_run(path, measured_record(), metrics={})
        text = "\n".join([*contribution_lines(contribution_of(path)), ""])
    sys.stdout.write(f"```text\n{text}```\n")
