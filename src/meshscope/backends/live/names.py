"""What the child process and its parent call the files that pass between them."""

from meshscope.events.enums import Phase

HLO, TRACE = "hlo", "trace"
REPORT = "report.json"

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
