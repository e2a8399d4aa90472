"""Python environments of serving engines, other compilers and torch_xla: pinned, and made by uv.

`environments.toml` has the known releases. An environment is a folder in the user's cache, with a record once it
is whole. torch_xla is built for one release of torch, which may conflict with other packages, so its programs are
traced by the interpreter that an environment variable names.
"""

import ast
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import meshscope
from meshscope.errors import MissingToolError, SpecError, nearest
from meshscope.files import own_table
from meshscope.units import format_bytes

RECORD = "environment.json"  # in a whole environment
ASK_TIMEOUT_S = 60.0
ENGINES, COMPILERS = "engines", "compilers"  # folders of environments, and words of the commands

LIBRARY_PATH = "TPU_LIBRARY_PATH"  # JAX sets it when it loads libtpu
NOT_INHERITED = ("PYTHONHOME", "PYTHONPATH", LIBRARY_PATH)

# uv reads none of pip's settings, so a user's index would be ignored.
UV_OF_PIP: Mapping[str, str] = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "constraint": "UV_CONSTRAINT",
    "cert": "SSL_CERT_FILE",
}


TORCHXLA_VARIABLE = "MESHSCOPE_TORCHXLA_PYTHON"
TORCHXLA_PACKAGES = ("torch", "torch_xla", "transformers", "jax", "libtpu")
LEAST_TRANSFORMERS = 5  # first with registered experts and latent caches
TORCHXLA_EXTRA = "pip install 'meshscope[torchxla]' (Linux x86-64, Python 3.11)"

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """A release of a serving engine or of a compiler (JAX and libtpu), as `environments.toml` has it."""

    group: str
    product: str
    version: str
    requirements: tuple[str, ...]
    least_python: tuple[int, int]
    n_bytes: int
    seconds: int
    package: str | None = None

    @property
    def name(self) -> str:
        """Product and version, such as `vllm-tpu-0.32.0` or `jax-0.9.2`."""
        return f"{self.product}-{self.version}"

    @property
    def label(self) -> str:
        """The release in messages."""
        if self.group == COMPILERS:
            return f"{self.name} with libtpu {self.pins['libtpu']}"
        return f"{self.product} {self.version}"

    @property
    def pins(self) -> dict[str, str]:
        """The versions that its environment must have."""
        every = (*self.requirements, self.package or "")
        pinned = (pin.split("==") for pin in every if "==" in pin)
        return {name.partition("[")[0]: version for name, version in pinned}

    @property
    def folder(self) -> Path:
        """Its environment: `$XDG_CACHE_HOME/meshscope/GROUP/NAME`."""
        home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        return Path(home) / "meshscope" / self.group / self.name

    @property
    def python(self) -> str:
        """The interpreter of its environment, or of this process for a compiler that it has."""
        if self.group == COMPILERS and self.is_own:
            return sys.executable
        return str(self.folder / "bin" / "python")

    @property
    def is_installed(self) -> bool:
        """Whether its environment is whole, and the Python that it links to is still there."""
        return (self.folder / RECORD).exists() and (self.folder / "bin" / "python").exists()

    @property
    def is_own(self) -> bool:
        """Whether the packages installed with meshscope match the release."""
        try:
            return all(version(name) == pin for name, pin in self.pins.items())
        except PackageNotFoundError:
            return False

    def install(self, *, python: str | None = None, report: Report) -> Path:
        """Makes the environment and returns its folder; one that fails half-way is removed.

        `python` makes it; by default, this one if it is new enough, or one that uv finds. MissingToolError if uv fails.
        """
        if self.is_installed:
            return self.folder
        least = ".".join(map(str, self.least_python))
        is_new = sys.version_info[:2] >= self.least_python
        maker = python or (sys.executable if is_new else f">={least}")
        failed = f"{self.label} was not installed, and nothing of it was kept: {{end}}"
        needs = f"{self.label} needs Python {least} or newer: {{end}} Name one: --python PATH"
        shutil.rmtree(self.folder, ignore_errors=True)  # left by a killed installation
        try:
            report(f"making an environment with {maker}")
            _uv(needs, "venv", "--quiet", "--no-project", "--python", maker, str(self.folder))
            install = ("pip", "install", "--quiet", "--compile-bytecode", "--python")
            install = (*install, str(self.folder / "bin" / "python"))
            report(f"installing {', '.join(self.requirements)}")
            _uv(failed, *install, *self.requirements)
            if self.package is not None:
                report(f"installing {self.package} without its other dependencies")
                _uv(failed, *install, "--no-deps", self.package)
            (self.folder / RECORD).write_text(json.dumps({"name": self.name}), encoding="utf-8")
        finally:
            if not self.is_installed:
                shutil.rmtree(self.folder, ignore_errors=True)
        return self.folder


def listed(group: str) -> dict[str, Any]:
    """A table of `environments.toml`."""
    return own_table("programs/environments.toml")[group]


@cache
def known_releases(group: str) -> tuple[Release, ...]:
    """All known releases of a group, oldest first for each product."""
    return tuple(
        Release(
            group=group,
            product=product,
            requirements=tuple(entry.pop("requirements")),
            least_python=tuple(entry.pop("least_python")),
            **entry,
        )
        for product, entries in listed(group).items()
        for entry in entries
    )


def releases_of(engine: str) -> tuple[Release, ...]:
    """The known releases of an engine, oldest first; SpecError for an unknown engine."""
    releases = tuple(r for r in known_releases(ENGINES) if r.product == engine)
    if not releases:
        known = list(dict.fromkeys(release.product for release in known_releases(ENGINES)))
        raise SpecError(f"'{engine}' is not a known engine. {nearest(engine, known)}")
    return releases


def release_of(engine: str, version: str | None) -> Release:
    """The engine's release with this version, or the newest; SpecError for an unknown one."""
    releases = {release.version: release for release in releases_of(engine)}
    if version is None:
        return [*releases.values()][-1]
    if version not in releases:
        raise SpecError(
            f"--engine-version {version}: {engine} has no such known release. Use one of {', '.join(releases)}."
        )
    return releases[version]


def installed_release(engine: str, version: str | None) -> Release:
    """The engine's release with this version, or the newest installed one; MissingToolError if it is not installed."""
    releases = releases_of(engine) if version is None else (release_of(engine, version),)
    installed = [release for release in releases if release.is_installed]
    if not installed:
        release = releases[-1]
        raise MissingToolError(
            f"--frontend {engine} needs the packages of {release.label}, which are not installed "
            f"({format_bytes(release.n_bytes)}). Install them: meshscope engines install {engine} "
            f"--engine-version {release.version}"
        )
    return installed[-1]


def compiler_release(name: str) -> Release:
    """The compiler with this name; SpecError for an unknown one."""
    known = {release.name: release for release in known_releases(COMPILERS)}
    if name not in known:
        raise SpecError(f"'{name}' is not a known compiler. {nearest(name, list(known))}")
    return known[name]


def compiler_of(name: str | None) -> Release | None:
    """The compiler with this name, of this process or of its environment; None for this process's without a name.

    SpecError for an unknown name, MissingToolError if it is not installed.
    """
    if name is None:
        return None
    release = compiler_release(name)
    if not release.is_own and not release.is_installed:
        raise MissingToolError(
            f"--compiler {name} is not installed ({format_bytes(release.n_bytes)}). "
            f"Install it: meshscope compilers install {name}"
        )
    return release


def check_can_run(work: str = "run") -> None:
    """Raises MissingToolError if JAX is not installed."""
    _check_installed(work, ("jax",), ", or JAX for your GPU (docs.jax.dev)")


def check_tpu_compiler(work: str = "compile") -> None:
    """MissingToolError if JAX or libtpu is not installed."""
    _check_installed(work, ("jax", "libtpu"), " (Linux x86-64)")


def _check_installed(work: str, names: Sequence[str], advice: str) -> None:
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingToolError.of_extra(
            f"{work} needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed "
            f"({platform.system()} {platform.machine()})",
            *("tpu", advice),
        )


def lone_variables(folder: Path) -> dict[str, str]:
    """Environment variables of a worker that sees meshscope but not its neighbors.

    PYTHONPATH is a folder below `folder` with a link to meshscope alone: the packages installed with
    it, such as another JAX, would hide the environment's. So would the libtpu that this process
    loaded, whose path JAX leaves in TPU_LIBRARY_PATH.
    """
    visible = folder / "python"
    visible.mkdir(exist_ok=True)
    link = visible / meshscope.__name__
    if not link.exists():
        link.symlink_to(Path(meshscope.__file__).parent)
    kept = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
    return kept | {"PYTHONPATH": str(visible), "PYTHONDONTWRITEBYTECODE": "1"}


def torchxla_python() -> str:
    """The interpreter that traces with torch_xla."""
    return os.environ.get(TORCHXLA_VARIABLE) or sys.executable


def torchxla_variables() -> dict[str, str]:
    """Environment variables of the tracing process, with this meshscope first on PYTHONPATH.

    Another interpreter has its own libtpu, not the one that this process loaded.
    """
    source = str(Path(meshscope.__file__).parents[1])
    others = os.environ.get("PYTHONPATH")
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (source, others)))}
    if torchxla_python() != sys.executable:
        variables.pop(LIBRARY_PATH, None)
    return variables


def tracing_variables(n_devices: int) -> dict[str, str]:
    """Environment variables that torch_xla reads on import; it traces for CPU devices."""
    return {
        "PJRT_DEVICE": "CPU",
        "CPU_NUM_DEVICES": str(n_devices),
        "XLA_HLO_DEBUG": "1",  # scopes become op_names
        "USE_TORCH_XLA": "0",  # used by transformers for trainers only
    }


def cpu_variables(n_devices: int) -> dict[str, str]:
    """Environment variables that JAX reads on import, for virtual CPU devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={n_devices}"
    return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags.strip()}


def check_torchxla() -> Mapping[str, str]:
    """Versions of torch_xla's packages; MissingToolError if one is missing or incompatible."""
    python = torchxla_python()
    failed = f"the Python of {TORCHXLA_VARIABLE}, '{python}', does not run: {{error}}. Name one that does, or unset it."
    versions = installed_versions(python, TORCHXLA_PACKAGES, failed)
    if missing := [name for name in TORCHXLA_PACKAGES if name not in versions]:
        raise MissingToolError(
            f"--frontend torchxla needs {', '.join(missing)}, not installed for {python} (Python "
            f"{versions['python']}). Install the extra, {TORCHXLA_EXTRA}; if another torch must stay, use a "
            f"separate environment and set {TORCHXLA_VARIABLE} to its Python."
        )
    torch, torch_xla = _minor(versions["torch"]), _minor(versions["torch_xla"])
    if torch != torch_xla:
        raise MissingToolError(
            f"torch {versions['torch']} is not the one that torch_xla {versions['torch_xla']} was built "
            f"for ({python}). Install torch=={'.'.join(map(str, torch_xla))}.*, or name a Python that has "
            f"both in {TORCHXLA_VARIABLE}: {TORCHXLA_EXTRA}."
        )
    if _minor(versions["transformers"])[0] < LEAST_TRANSFORMERS:
        raise MissingToolError(
            f"transformers {versions['transformers']} ({python}) cannot register experts and latent "
            f"caches; {LEAST_TRANSFORMERS} and later can. Install the extra: {TORCHXLA_EXTRA}."
        )
    return versions


def _minor(version: str) -> tuple[int, int]:
    major, minor = version.split("+", maxsplit=1)[0].split(".")[:2]
    return int(major), int(minor)


_ASK = """
import json, sys
from importlib.metadata import PackageNotFoundError, version
versions = {"python": sys.version.split()[0]}
for name in sys.argv[1:]:
    try:
        versions[name] = version(name)
    except PackageNotFoundError:
        pass
print(json.dumps(versions))
"""


def installed_versions(python: str, names: Sequence[str], failed: str) -> Mapping[str, str]:
    """Versions of the interpreter (`python`) and of the named packages that it has, without importing them.

    MissingToolError with the message `failed`, in which `{error}` is the reason, if it does not run.
    """
    command = [python, "-c", _ASK, *names]
    try:
        done = subprocess.run(command, capture_output=True, timeout=ASK_TIMEOUT_S, check=True)
        return json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise MissingToolError(failed.replace("{error}", str(error))) from error


def _uv(failed: str, *arguments: str) -> None:
    """Runs uv with pip's settings and its own variables; MissingToolError if it is not installed or fails.

    `{end}` of the message `failed` is the end of what it printed.
    """
    folders = (os.environ.get("PATH", ""), str(Path(sys.executable).parent))
    if (uv := shutil.which("uv", path=os.pathsep.join(folders))) is None:
        raise MissingToolError(
            "uv, which makes environments, is neither on PATH nor beside this Python. Install it: pip install uv"
        )
    done = subprocess.run(
        [uv, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=pip_settings() | os.environ,
    )
    if done.returncode:
        lines = [line.strip() for line in (done.stderr or done.stdout).strip().splitlines()[-3:]]
        end = " ".join(lines) or f"exit code {done.returncode}."
        raise MissingToolError(failed.replace("{end}", end))


def pip_settings() -> dict[str, str]:
    """The index and certificates that pip's files and variables set, as uv's variables."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    pairs = (line.partition("=")[::2] for line in listed.splitlines() if "='" in line)
    settings = {
        key.rpartition(".")[2]: " ".join(str(ast.literal_eval(value)).split())
        for key, value in pairs
    }
    variables = {uv: settings[pip] for pip, uv in UV_OF_PIP.items() if pip in settings}
    # pip takes the best version of all indexes, uv the first index that has the package
    return variables | {"UV_INDEX_STRATEGY": "unsafe-best-match"}
