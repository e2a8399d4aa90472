"""TPU compilers by name: known pairs of JAX and libtpu, each in an environment of its own."""

import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from meshscope.errors import MissingToolError, SpecError, nearest
from meshscope.programs.environments import (
    Recipe,
    cached_folder,
    check_environment,
    installed_bytes,
    python_of,
)
from meshscope.units import format_bytes

GROUP = "compilers"
PACKAGES = ("jax", "jaxlib", "libtpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilerRelease:
    """A version of JAX and the libtpu that it requires.

    `others` are packages that its import needs and does not require. `least_python` is what JAX requires;
    `n_bytes` and `seconds` are what an installation took.
    """

    jax: str
    libtpu: str
    others: tuple[str, ...] = ()
    least_python: tuple[int, int]
    n_bytes: int
    seconds: int

    @property
    def name(self) -> str:
        """Such as `jax-0.9.2`."""
        return f"jax-{self.jax}"

    @property
    def pins(self) -> dict[str, str]:
        """The versions of its packages."""
        return dict(zip(PACKAGES, (self.jax, self.jax, self.libtpu), strict=True))

    @property
    def recipe(self) -> Recipe:
        """How to make its environment."""
        requirements = tuple(f"{name}=={version}" for name, version in self.pins.items())
        return Recipe(
            parent=cached_folder(GROUP),
            name=self.name,
            label=f"{self.name} with libtpu {self.libtpu}",
            group=GROUP,
            removal=f"meshscope compilers remove {self.name}",
            installations=((", ".join(requirements), (*requirements, *self.others)),),
            pins=self.pins,
            least_python=self.least_python,
            n_bytes=self.n_bytes,
        )


# libtpu versions are those of the extra `tpu` in the metadata of each JAX wheel.
RELEASES: tuple[CompilerRelease, ...] = (
    CompilerRelease(
        jax="0.8.3",
        libtpu="0.0.32.1",
        least_python=(3, 11),
        n_bytes=1_270_000_000,
        seconds=30,
    ),
    CompilerRelease(
        jax="0.9.2",
        libtpu="0.0.37",
        others=("absl-py",),
        least_python=(3, 11),
        n_bytes=1_370_000_000,
        seconds=30,
    ),
    CompilerRelease(
        jax="0.10.2",
        libtpu="0.0.42.1",
        least_python=(3, 11),
        n_bytes=1_270_000_000,
        seconds=30,
    ),
    CompilerRelease(
        jax="0.12.0.1",
        libtpu="0.0.50.1",
        least_python=(3, 12),
        n_bytes=1_270_000_000,
        seconds=30,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiler:
    """The interpreter of a release, and whether it is that of this process."""

    release: CompilerRelease
    python: str
    is_own: bool

    @property
    def versions(self) -> Mapping[str, str]:
        """The versions of its packages."""
        return self.release.pins


def compiler_release(name: str) -> CompilerRelease:
    """The release with this name; SpecError for an unknown one."""
    for release in RELEASES:
        if release.name == name:
            return release
    known = [release.name for release in RELEASES]
    raise SpecError(f"'{name}' is not a known compiler. {nearest(name, known)}")


def installed_compiler(release: CompilerRelease) -> Path | None:
    """The folder of the release's environment; None if it is not installed."""
    recipe = release.recipe
    return None if installed_bytes(recipe) is None else recipe.home


def is_own_compiler(release: CompilerRelease) -> bool:
    """Whether the packages beside meshscope are those of the release."""
    try:
        return all(version(name) == pin for name, pin in release.pins.items())
    except PackageNotFoundError:
        return False


_default = ContextVar[str | None]("_default", default=None)


@contextmanager
def default_compiler(name: str | None) -> Generator[None]:
    """Compiles with this compiler in the block, where none is named."""
    token = _default.set(name)
    try:
        yield
    finally:
        _default.reset(token)


def chosen_compiler(name: str | None) -> Compiler | None:
    """The compiler with this name, or the default of the block; None for that of this process."""
    chosen = _default.get() if name is None else name
    return None if chosen is None else compiler_of(chosen)


def compiler_of(name: str) -> Compiler:
    """The compiler with this name, of this process or of its environment.

    SpecError for an unknown name, MissingToolError if it is not installed or broken.
    """
    release = compiler_release(name)
    if is_own_compiler(release):
        return Compiler(release=release, python=sys.executable, is_own=True)
    folder = installed_compiler(release)
    if folder is None:
        raise MissingToolError(
            f"--compiler {name} is not installed ({format_bytes(release.n_bytes)}). "
            f"Install it: meshscope compilers install {name}"
        )
    check_environment(release.recipe, folder)
    return Compiler(release=release, python=python_of(folder), is_own=False)
