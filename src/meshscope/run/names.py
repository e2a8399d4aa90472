"""What the child process and its parent call the files that pass between them."""

from meshscope.table.kinds import Phase

HLO, TRACE = "hlo", "trace"
TOLD = "meshscope: "  # begins the child's lines for its parent; libraries write others
REPORT, ERROR = "report.json", "error.json"


def hlo_name(phase: Phase) -> str:
    """The file of a phase's optimised HLO."""
    return f"{phase}.hlo.txt.gz"
