"""What the child process and its parent call the files that pass between them."""

from meshscope.table.kinds import Phase

HLO, TRACE = "hlo", "trace"
TOLD = "meshscope: "  # begins the child's lines for its parent; libraries write others
LEFT = "\t"  # stands before the seconds that are left, where they are known
REPORT, ERROR = "report.json", "error.json"

# What a live run does, one after the other.
COMPILING, PLACING, WARMING_UP, TIMING, PROFILING = STAGES = (
    "compiling",
    "placing weights",
    "warming up",
    "timing",
    "profiling",
)


def stage_words(stage: str) -> str:
    """The stage, and which of all it is."""
    return f"{stage}, step {STAGES.index(stage) + 1} of {len(STAGES)}"


def hlo_name(phase: Phase) -> str:
    """The file of a phase's optimised HLO."""
    return f"{phase}.hlo.txt.gz"


def told_line(words: str, left_s: float | None = None) -> str:
    """The line with which the child tells what is being done, and the seconds that all of it has left."""
    return f"{TOLD}{words}" + ("" if left_s is None else f"{LEFT}{left_s:.3f}")


def heard_line(line: str) -> tuple[str, float | None] | None:
    """What a line of the child tells: words and the seconds left; None where a library wrote it."""
    if not line.startswith(TOLD):
        return None
    words, _, left = line.removeprefix(TOLD).partition(LEFT)
    return words, float(left) if left else None
