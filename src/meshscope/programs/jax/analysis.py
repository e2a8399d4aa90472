"""Reads the memory analysis of a compiled program."""

from typing import Any


def memory_analysis(compiled: Any) -> dict[str, int]:
    """The memory that a compiled program needs on one device, in bytes."""
    analysis = compiled.memory_analysis()
    return {
        "argument_bytes": analysis.argument_size_in_bytes,
        "output_bytes": analysis.output_size_in_bytes,
        "alias_bytes": analysis.alias_size_in_bytes,
        "temp_bytes": analysis.temp_size_in_bytes,
    }
