"""What the child process and its parent call the files that pass between them."""

from meshscope.table.kinds import Phase

HLO, TRACE = "hlo", "trace"
REPORT = "report.json"


def hlo_name(phase: Phase) -> str:
    """The file of a phase's optimised HLO."""
    return f"{phase}.hlo.txt.gz"
