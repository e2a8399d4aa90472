"""Predicts, compiles and measures the collectives and step times of LLM inference on TPU slices."""

TYPE_CHECKING = False  # `typing` is not imported: Ctrl-C meanwhile would be a traceback
if TYPE_CHECKING:
    from typing import Any

    from meshscope.api.check import check
    from meshscope.api.compare import RunComparison, compare
    from meshscope.api.compile import compile  # noqa: A004
    from meshscope.api.flags import flags
    from meshscope.api.import_ import import_
    from meshscope.api.live import run
    from meshscope.api.plan import PlanResult, plan
    from meshscope.api.predict import predict
    from meshscope.api.profile import profile
    from meshscope.api.run import Run
    from meshscope.api.runs import RunSet, open  # noqa: A004
    from meshscope.api.serve import ServingRun, serve_sim
    from meshscope.errors import MeshscopeError

__version__ = "0.1.0"

# The public names by their modules, which are imported on first use: they load NumPy and polars.
_PUBLIC = {
    "MeshscopeError": "meshscope.errors",
    "PlanResult": "meshscope.api.plan",
    "Run": "meshscope.api.run",
    "RunComparison": "meshscope.api.compare",
    "RunSet": "meshscope.api.runs",
    "ServingRun": "meshscope.api.serve",
    "check": "meshscope.api.check",
    "compare": "meshscope.api.compare",
    "compile": "meshscope.api.compile",
    "flags": "meshscope.api.flags",
    "import_": "meshscope.api.import_",
    "open": "meshscope.api.runs",
    "plan": "meshscope.api.plan",
    "predict": "meshscope.api.predict",
    "profile": "meshscope.api.profile",
    "run": "meshscope.api.live",
    "serve_sim": "meshscope.api.serve",
}

__all__ = [
    "MeshscopeError",
    "PlanResult",
    "Run",
    "RunComparison",
    "RunSet",
    "ServingRun",
    "__version__",
    "check",
    "compare",
    "compile",
    "flags",
    "import_",
    "open",
    "plan",
    "predict",
    "profile",
    "run",
    "serve_sim",
]


def __getattr__(name: str) -> "Any":
    """A public name, imported now."""
    from importlib import import_module  # noqa: PLC0415

    if name not in _PUBLIC:
        raise AttributeError(f"module 'meshscope' has no attribute '{name}'")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    """The public names."""
    return __all__
