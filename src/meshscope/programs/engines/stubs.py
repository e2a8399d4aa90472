"""Empty modules for engine dependencies that its model code imports but never uses.

The packages of an engine import vllm, torch and others at the top of their files: for types, base
classes and the server. A lowered program uses few of their functions, which `VALUES` defines.
"""

import importlib
import importlib.abc
import importlib.machinery
import logging
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any


class _Shell(type):
    """A class with any attribute, index and argument; used as a type, a decorator or a base class."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _shell(name)

    def __or__(cls, _: Any) -> Any:
        return cls

    __ror__ = __getitem__ = __or__

    def __iter__(cls) -> Any:
        return iter(())


def _shell(name: str) -> type:
    """An empty class. A call of an instance returns its first argument, as decorators do."""
    return _Shell(name, (_Anything,), {})


class _Anything:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __call__(self, *arguments: Any, **_: Any) -> Any:
        return arguments[0] if arguments else None


class _EmptyModule(ModuleType):
    """A package whose every attribute is an empty class, unless `VALUES` defines it."""

    __path__ = []  # noqa: RUF012  marks a package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        path = f"{self.__name__}.{name}"
        if path in VALUES:
            value = VALUES[path]
        elif any(known.startswith(f"{path}.") for known in VALUES):
            value = importlib.import_module(path)
        else:
            value = _shell(name)
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules at and below the given names."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = tuple(names)

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        if any(fullname == name or fullname.startswith(f"{name}.") for name in self._names):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _EmptyModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to execute."""


class _Logger(logging.Logger):
    """vLLM's logger has methods that log a message once."""

    def warning_once(self, message: str, *args: Any, **_: Any) -> None:
        self.warning(message, *args)

    def debug_once(self, *_: Any, **__: Any) -> None: ...

    info_once = debug_once


def _logger(name: str) -> logging.Logger:
    logger = _Logger(name)
    logger.addHandler(logging.StreamHandler())
    logger.setLevel(logging.WARNING)
    return logger


class _Activations(dict[str, Any]):
    """Activation functions by Hugging Face's names, which match `jax.nn`."""

    def __missing__(self, name: str) -> Any:
        import jax  # the stubs are installed before JAX is imported

        return getattr(jax.nn, name)


# What the model code and the runner's buckets use of these packages, with the packages' own results.
VALUES: dict[str, Any] = {
    "torchax.interop.jax_view": lambda array: array,  # both views are JAX's
    "torchax.interop.torch_view": lambda array: array,
    "transformers.modeling_flax_utils.ACT2FN": _Activations(),
    "vllm.logger.init_logger": _logger,
    "vllm.logger._VllmLogger": _Logger,
    "vllm.envs.VLLM_TPU_BUCKET_PADDING_GAP": 0,
}
for _package in ("vllm.utils", "vllm.utils.math_utils"):  # by release
    VALUES[f"{_package}.cdiv"] = lambda a, b: -(a // -b)
    VALUES[f"{_package}.next_power_of_2"] = lambda n: 1 << (n - 1).bit_length()
for _package in ("vllm.distributed", "vllm.distributed.utils"):
    VALUES[f"{_package}.get_pp_indices"] = lambda n_layers, *_: (0, n_layers)  # one stage


def install_stubs(missing: Iterable[str], *, replaced: Iterable[str] = ()) -> None:
    """Makes `missing` importable where they are not installed, and `replaced` empty although they are."""
    sys.meta_path.insert(0, _Finder(replaced))
    sys.meta_path.append(_Finder(missing))  # last, so that what is installed wins
