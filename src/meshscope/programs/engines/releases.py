"""Known releases of serving engines: the packages that their model code needs, and their sizes."""

from dataclasses import dataclass

from meshscope.errors import SpecError, nearest
from meshscope.plans.program import Frontend


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """One release of an engine.

    `package` has the engine's model code; it is installed without its dependencies. `requirements`
    are those of them that a lowered program needs, at the versions that the package itself requires.
    Imports of the others, such as torch, get empty modules. `least_python` is what JAX requires.
    `checkout` is the repository and commit of code that has no release: the user's checkout is
    installed, and that commit was tried.
    """

    engine: Frontend
    version: str
    package: str
    requirements: tuple[str, ...]
    least_python: tuple[int, int]
    n_bytes: int  # what an environment takes, measured
    seconds: int  # to download and install, on 2 busy cores
    checkout: str | None = None

    @property
    def name(self) -> str:
        """The engine and its version, e.g. `vllm-tpu-0.32.0`."""
        return f"{self.engine}-{self.version}"


# Requirements as in the metadata of each wheel. `vllm-tpu==0.32.0`, the whole engine, has 9.8 GB and
# compiles to the same HLO: only paths of source files differ.
RELEASES: tuple[Release, ...] = (
    Release(
        engine=Frontend.VLLM_TPU,
        version="0.12.0",
        package="tpu-inference==0.12.0",
        requirements=("jax[tpu]==0.8.0", "flax==0.11.1", "qwix==0.1.1"),
        least_python=(3, 11),
        n_bytes=1_120_000_000,
        seconds=180,
    ),
    Release(
        engine=Frontend.VLLM_TPU,
        version="0.24.0",
        package="tpu-inference==0.24.0",
        requirements=(
            "jax==0.10.2",
            "libtpu==0.0.42.1",
            "flax==0.12.4",
            "qwix==0.1.2",
            "sympy",
        ),
        least_python=(3, 11),
        n_bytes=1_550_000_000,
        seconds=180,
    ),
    Release(
        engine=Frontend.VLLM_TPU,
        version="0.32.0",
        package="tpu-inference==0.32.0",
        requirements=(
            "jax==0.11.2",
            "libtpu==0.0.48",
            "flax==0.12.10",
            "qwix==0.1.2",
            "tokamax==0.0.17.dev20261015",
            "sympy",
        ),
        least_python=(3, 12),
        n_bytes=1_840_000_000,
        seconds=180,
    ),
    Release(
        engine=Frontend.SGLANG_JAX,
        version="0.0.2",
        package="sglang-jax==0.0.2",
        requirements=("jax[tpu]==0.8.1", "flax==0.12.6"),
        least_python=(3, 12),
        n_bytes=1_410_000_000,
        seconds=180,
    ),
    Release(
        engine=Frontend.SGLANG_JAX,
        version="main",
        package="sglang-jax",
        requirements=("jax==0.10.2", "libtpu==0.0.42.1", "flax==0.12.4"),
        least_python=(3, 12),
        n_bytes=1_500_000_000,
        seconds=180,
        checkout="sgl-project/sglang-jax@cddbf6f1",
    ),
    Release(
        engine=Frontend.MAXTEXT,
        version="0.2.5",
        package="maxtext==0.2.5",
        requirements=(
            "jax==0.11.2",
            "libtpu==0.0.48",
            "flax==0.12.10",
            "qwix==0.1.8",
            "tokamax==0.0.17",
            "aqtp==0.9.0",
            "optax==0.2.8",
            "orbax-checkpoint==0.12.4",
            "omegaconf==2.4.0",
            "packaging",
        ),
        least_python=(3, 12),
        n_bytes=1_830_000_000,
        seconds=120,
    ),
)
ENGINES = tuple(dict.fromkeys(release.engine for release in RELEASES))


def releases_of(engine: str) -> tuple[Release, ...]:
    """The known releases of an engine, oldest first; SpecError for an unknown engine."""
    releases = tuple(release for release in RELEASES if release.engine == engine)
    if not releases:
        raise SpecError(f"'{engine}' is not a known engine. {nearest(engine, list(ENGINES))}")
    return releases


def release_of(engine: str, version: str | None, *, is_checkout: bool = False) -> Release:
    """The release with this version, or the newest; SpecError for an unknown one.

    Without a version, `is_checkout` chooses the code that has no release, if the engine has such.
    """
    releases = releases_of(engine)
    if version is None:
        kinds = [release for release in releases if (release.checkout is not None) is is_checkout]
        return (kinds or releases)[-1]
    for release in releases:
        if release.version == version:
            return release
    known = ", ".join(release.version for release in releases)
    raise SpecError(
        f"--engine-version {version}: {engine} has no such known release. Use one of {known}."
    )
