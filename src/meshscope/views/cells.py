"""Figures and names of columns in words: the unit that a column's name carries moves into its cells."""

from meshscope.units import format_bytes, format_seconds

_SUFFIXES = ("_bytes_per_s", "_bytes", "_frac", "_s")


def column_words(column: str) -> str:
    """A column's name in words, without the unit that its cells carry."""
    suffix = next((s for s in _SUFFIXES if column.endswith(s)), "")
    kept = column.removesuffix(suffix) or column
    return kept.replace("_", " ")


def figure_words(column: str, value: float) -> str:
    """The figure of a column with the unit that the column's name says."""
    if column.endswith("_bytes_per_s"):
        return f"{format_bytes(value)}/s"
    if column.endswith("_bytes"):
        return format_bytes(value)
    if column.endswith("_frac"):
        return f"{value:.1%}"
    if column.endswith("_s"):
        return format_seconds(value)
    if column == "flops" or column.endswith("_flops"):
        return format_flops(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def format_flops(flops: float) -> str:
    """Floating-point operations for people, by thousands as bytes are: `3.22 TFLOP`."""
    return f"{format_bytes(flops).removesuffix('B')}FLOP"
