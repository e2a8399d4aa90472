"""The files of a folder of traces: those that can be read, by their content, and the card beside them."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from meshscope.errors import TraceError
from meshscope.readers.traces.sniff import format_of, kind_in_words
from meshscope.readers.traces.trace import TraceFormat

MAX_FILES = 10_000
MAX_NAMED = 4
_CARDS = (".yaml", ".yml")
# The profile folder that TensorBoard and XProf expect below a log folder.
_SESSIONS = "plugins/profile/*"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFolder:
    """Traces with their formats, YAML files in the order of their names, and what was not read."""

    files: tuple[tuple[Path, TraceFormat], ...]
    cards: tuple[Path, ...] = ()
    findings: tuple[str, ...] = field(default=())


def trace_folder(folder: Path) -> TraceFolder:
    """The traces at the top of the folder, else of its latest profile session.

    TraceError if there are none. An XPlane takes precedence over the Chrome trace exported from it.
    """
    others: list[str] = []
    for place in (folder, *sorted(folder.glob(_SESSIONS), reverse=True)):
        traces = _folder(place)
        if traces.files:
            return traces
        others += traces.findings
    unread = f" ({others[0]})" if others else ""
    raise TraceError(
        f"{folder}: contains no trace{unread}. Give a folder with *.json, *.json.gz, *.sqlite or *.xplane.pb."
    )


def _folder(folder: Path) -> TraceFolder:
    files: list[tuple[Path, TraceFormat]] = []
    cards: list[Path] = []
    outside: list[str] = []
    other: list[str] = []
    for path in _regular_files(folder):
        if not path.resolve().is_relative_to(folder.resolve()):
            outside.append(path.name)
        elif path.suffix in _CARDS:
            cards.append(path)
        elif (kind := format_of(path)) is not None and kind is not TraceFormat.HLO:
            files.append((path, kind))
        else:
            kind = kind_in_words(path)
            other.append(path.name if kind is None else f"{path.name} ({kind})")
    if any(kind is TraceFormat.XPLANE for _, kind in files):
        files = [(path, kind) for path, kind in files if kind is not TraceFormat.CHROME_TPU]
    findings = [
        f"{len(names):,} {what}, and were not read: {_named(names)}"
        for names, what in (
            (outside, "links lead out of the folder"),
            (other, "files are no traces"),
        )
        if names
    ]
    return TraceFolder(files=tuple(files), cards=tuple(cards), findings=tuple(findings))


def _regular_files(folder: Path) -> Iterator[Path]:
    paths = sorted(path for path in folder.iterdir() if path.is_file())
    if len(paths) > MAX_FILES:
        raise TraceError(f"{folder}: has more than {MAX_FILES:,} files. Give the traces by name.")
    return iter(path for path in paths if not path.name.startswith("."))


def _named(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"{', '.join(names[:MAX_NAMED])}{more}"
