"""Names of the files and stages that a worker process and its parent share."""

HLO, TRACE = "hlo", "trace"
REPORT = "report.json"

# Stages of a live run, in order.
COMPILING, PLACING, WARMING_UP, TIMING, PROFILING = STAGES = (
    "compiling",
    "placing weights",
    "warming up",
    "timing",
    "profiling",
)


def stage_words(stage: str) -> str:
    """The stage and its number."""
    return f"{stage}, step {STAGES.index(stage) + 1} of {len(STAGES)}"


def hlo_name(program: str) -> str:
    """Name of the file with the optimized HLO of a program."""
    return f"{program}.hlo.txt.gz"
