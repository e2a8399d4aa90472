"""What the runs of a sweep need on the workers of a slice."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from meshscope.backends.sweep.folder import PlannedRun
from meshscope.errors import SpecError

BUCKET = "gs://"
HOME = "meshscope"  # on a worker, in the home folder of its user


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """A wheel of meshscope with extras, JAX, local paths that are copied, and buckets that are mounted.

    `copied` has the folder on the workers that gets each path.
    """

    wheel: Path
    jax_version: str
    extras: tuple[str, ...] = ()
    copied: Mapping[Path, str] = field(default_factory=dict[Path, str])
    buckets: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """SpecError without the wheel."""
        if not self.wheel.is_file():
            raise SpecError(
                f"the wheel '{self.wheel}' does not exist. Make one in your clone: pip wheel --no-deps -w dist ."
            )

    @property
    def key(self) -> str:
        """Changes with the content of the wheel and with all that is installed."""
        digest = hashlib.sha256(self.wheel.read_bytes())
        digest.update("\0".join([*self._words, *self.copied.values()]).encode())
        return digest.hexdigest()[:16]

    @property
    def words(self) -> list[str]:
        """The arguments of install_on_worker.sh."""
        return [self.key, *self._words]

    @property
    def _words(self) -> list[str]:
        extras = f"[{','.join(self.extras)}]" if self.extras else ""
        return [self.wheel.name, extras, self.jax_version, *self.buckets]

    def words_there(self, planned: PlannedRun) -> tuple[str, ...]:
        """The words of a run with the paths that its workers have."""
        there = {str(path): f"{folder}/{path.name}" for path, folder in self.copied.items()}
        return tuple(
            f"{HOME}/buckets/{word.removeprefix(BUCKET)}"
            if word.startswith(BUCKET)
            else there.get(word, word)
            for word in planned.words
        )


def installation_of(runs: Iterable[PlannedRun], *, wheel: Path, jax_version: str) -> Installation:
    """What these runs need: front ends, checkpoints and configs."""
    extras, copied, buckets = set[str](), dict[Path, str](), set[str]()
    for one in runs:
        if one.is_traced:
            extras.add("torchxla")
        checkpoint = one.options.get("checkpoint")
        if checkpoint is not None:
            extras.add("checkpoint")
        for given in (one.options["model"], checkpoint):
            path = Path(str(given))
            if str(given).startswith(BUCKET):
                buckets.add(str(given).removeprefix(BUCKET).partition("/")[0])
            elif path.exists():
                copied[path] = f"{HOME}/copied/{_digest(path)}"
    return Installation(
        wheel=wheel,
        jax_version=jax_version,
        extras=tuple(sorted(extras)),
        copied=copied,
        buckets=tuple(sorted(buckets)),
    )


def _digest(path: Path) -> str:
    """Changes with the names, sizes and times of the files."""
    paths: Sequence[Path] = sorted(path.rglob("*")) if path.is_dir() else [path]
    stats = [(str(one.relative_to(path)), one.stat()) for one in paths if one.is_file()]
    text = "\0".join(f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
