"""The programs in a profile: the HLO protos of its `/host:metadata` plane, as text."""

from collections.abc import Iterator
from pathlib import Path

from meshscope.errors import TraceError
from meshscope.readers.profile.hlo_proto import hlo_text
from meshscope.readers.profile.proto import Proto
from meshscope.readers.profile.source import ProfileBytes, read_bytes
from meshscope.readers.profile.wire import Message, WireError

METADATA_PLANE = "/host:metadata"
_HLO_PROTO = 6  # the value of a stat that is bytes


def read_programs(path: Path, *, n_devices: int = 1) -> tuple[dict[str, str], list[str]]:
    """HLO text of the programs by `module(program id)`, and a finding for each damaged one.

    `n_devices` applies to programs that do not say for how many devices they are.
    TraceError if the file cannot be read.
    """
    file = read_bytes(path, ())
    texts: dict[str, str] = {}
    findings: list[str] = []
    try:
        for name, content in _protos(file):
            try:
                texts[name] = hlo_text(Proto(content), n_devices=n_devices)
            except WireError as error:
                findings.append(f"the HLO of program '{name[:200]}' is damaged: {error.reason}")
    except WireError as error:
        raise TraceError(f"{path}: damaged or truncated: {error.reason}. Copy it again.") from error
    return texts, findings


def _protos(file: ProfileBytes) -> Iterator[tuple[str, bytes]]:
    """Names and HloProtos of the programs: stats of the kinds of events of the plane."""
    for plane in _messages(file, Message(file.data, 0, len(file.data)), 1):
        if file.last_text(plane, 2) != METADATA_PLANE:
            continue
        for entry in _messages(file, plane, 4):
            for kind in _messages(file, entry, 2):
                for stat in _messages(file, kind, 5):
                    for start, end in zip(*stat.spans(_HLO_PROTO).chunk(), strict=True):
                        yield file.last_text(kind, 2), bytes(file.data[int(start) : int(end)])


def _messages(file: ProfileBytes, message: Message, field: int) -> Iterator[Message]:
    for start, end in zip(*message.spans(field).chunk(), strict=True):
        yield Message(file.data, int(start), int(end))
