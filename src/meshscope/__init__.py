"""Predicts, compiles and measures the collectives and step times of LLM inference on TPU slices."""

# Ctrl-C during an import of this file would be a traceback, so it imports nothing.
__version__ = "0.1.0"


def _public() -> dict[str, str]:
    """The public names by their modules, as `__init__.pyi` imports them."""
    with open(f"{__file__}i", encoding="utf-8") as stub:  # noqa: PTH123  pathlib is slow to import
        imports = [line.split() for line in stub if line.startswith("from ")]
    return {words[3]: words[1] for words in imports}


def __getattr__(name: str) -> object:
    """A public name, whose module is imported now, as it loads NumPy and polars; or `__all__`."""
    from importlib import import_module  # noqa: PLC0415

    if name == "__all__":
        return sorted([*_public(), "__version__"])
    if name not in (modules := _public()):
        raise AttributeError(f"module 'meshscope' has no attribute '{name}'")
    return getattr(import_module(modules[name]), name)


def __dir__() -> list[str]:
    """The public names."""
    return sorted([*_public(), "__version__"])
