"""Names of the files that compile workers write and their parent reads."""

from meshscope.events.enums import Phase


def program_file(phase: Phase, name: str = "") -> str:
    """The HLO text of a phase's program; a step of several programs has a name for each."""
    return f"{phase}.{name}.hlo.txt.gz" if name else f"{phase}.hlo.txt.gz"
