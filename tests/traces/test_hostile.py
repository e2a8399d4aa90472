"""Broken and hostile traces: a marked row or one message, in bounded time and memory."""

import gzip
import json
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import made_kineto as made
import made_profiles as profiles
import pytest

import meshscope
from meshscope.errors import MeshscopeError

N = 400
HOUR_US = 3_600_000_000


def kernels(n: int = N, *, first_us: float = 0.0) -> list[made.Event]:
    return [
        made.collective(made.NCCL, first_us + 20 * i, 10, (0, 1), 64, correlation=i + 1)
        for i in range(n)
    ]


def content(events: list[made.Event]) -> bytes:
    return json.dumps(made.document(events, world_size=2)).encode()


def database(*tables: str) -> bytes:
    with closing(sqlite3.connect(":memory:")) as connection:
        for table in tables:
            connection.execute(f"create table {table} (id int, value text)")
        return connection.serialize()


def nested(depth: int) -> bytes:
    event = made.collective(made.NCCL, 0, 10, (0, 1), 64)
    value: object = 0
    for _ in range(depth):
        value = [value]
    event["args"]["deep"] = value
    return content([event])


def xplane() -> bytes:
    return profiles.xspace(
        profiles.tpu(*(profiles.Event(profiles.REDUCE, 10 * i, 5) for i in range(N)))
    )


def edited(data: bytes) -> bytes:
    """What a text editor saves that takes the bytes for UTF-8."""
    return data.decode("utf-8", errors="replace").encode()


REFUSED: dict[str, tuple[str, Callable[[], bytes], str]] = {
    "gzip bomb": (
        "a.json.gz",
        lambda: gzip.compress(b'{"traceEvents": [' + b" " * (150 << 20), 1),
        "longer than 64 MiB",
    ),
    "UTF-16": ("a.json", lambda: content(kernels(3)).decode().encode("utf-16"), "Convert it to UTF-8"),
    "XPlane through a text editor": ("a.xplane.pb", lambda: edited(xplane()), "text"),
    "SQLite without kernels": (
        "a.sqlite",
        lambda: database("StringIds"),
        "has no table CUPTI_ACTIVITY_KIND_KERNEL.*Record with",
    ),
    "SQLite without names": (
        "a.sqlite",
        lambda: database("CUPTI_ACTIVITY_KIND_KERNEL"),
        "has no table StringIds.*Record with",
    ),
    "SQLite of another tool": ("a.sqlite", lambda: database("users"), "of another tool"),
    "truncated XPlane": ("a.xplane.pb", lambda: xplane()[:-20], "a.xplane.pb"),
    "nesting 100,000 deep": (
        "a.json",
        lambda: nested(900).replace(b"[" * 900, b"[" * 100_000).replace(b"]" * 900, b"]" * 100_000),
        "no op of a device, but 0 events. 1 event left out: not valid JSON",
    ),
    "open brackets": (
        "a.json.gz",
        lambda: gzip.compress(b"[" * 200_000),
        "no op of a device, but 0 events.*truncated",
    ),
    "no events": ("a.json", lambda: b'{"traceEvents": []}', "Record the device, too"),
    "events of the host": (
        "a.json",
        lambda: content([{**e, "cat": c} for e, c in zip(kernels(3), ("cpu_op", "mtia_ccp_events", ""), strict=True)]),
        "3 events: 1 of 'cpu_op', 1 of 'mtia_ccp_events', 1 without a category",
    ),
    "XPlane of an idle chip": (
        "a.xplane.pb",
        lambda: profiles.xspace(profiles.Plane(name="/host:CPU", lines=[profiles.Line("python", [profiles.Event("main", 0, 5)])])),
        r"'/host:CPU' \(1 events\).*jax.profiler.trace",
    ),
    "empty": ("a.json", lambda: b"", "a.json:1: is empty"),
    "text": ("a.json", lambda: b"not a trace", "got 'not a trace'"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSED)
def test_one_message_and_nothing_written(tmp_path, monkeypatch, case) -> None:
    monkeypatch.chdir(tmp_path)
    name, make, message = REFUSED[case]
    Path(name).write_bytes(make())
    with pytest.raises(MeshscopeError, match=message):
        meshscope.import_(name, topology="h100:2", plan="tp=2")
    assert not Path("runs").exists()


def repeated_events() -> bytes:
    return content([*kernels(), *kernels()])


def jumped_clock() -> bytes:
    return content([*kernels(N // 2), *kernels(N // 2, first_us=30 * HOUR_US)])


def damaged_times() -> bytes:
    events = kernels()
    events[0]["ts"], events[1]["dur"] = float("nan"), -5.0
    events[2]["ts"], events[3]["ts"] = float("inf"), 1e30
    return content(events)


# case: file name, content, ops that count, and a finding
MARKED: dict[str, tuple[str, Callable[[], bytes], range, str]] = {
    "truncated gzip": (
        "a.json.gz",
        lambda: gzip.compress(content(kernels()))[:-200],
        range(1, N),
        "truncated: the gzip stream",
    ),
    "half a JSON": (
        "a.json",
        lambda: content(kernels())[: len(content(kernels())) // 2],
        range(N // 2 - 5, N // 2 + 5),
        "truncated: the file ends inside the list of events",
    ),
    "duplicate events": ("a.json", repeated_events, range(N, N + 1), "400 device events twice in the file"),
    "clock jump": ("a.json", jumped_clock, range(N, N + 1), "a pause of 30.0 hours between ops"),
    "NaN, infinite, huge and negative times": (
        "a.json",
        damaged_times,
        range(N - 4, N - 3),
        "4 device events left out: no valid start, duration or device",
    ),
    "nesting 200 deep": ("a.json", lambda: nested(200), range(1, 2), "1 of 2 ranks"),
    "Latin-1 in a name": (
        "a.json",
        lambda: content(kernels()).replace(b"ncclDevKernel", b"nccl\xe9DevKernel", 1),
        range(N - 1, N + 1),
        "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MARKED)
def test_what_can_be_read_counts_and_the_rest_is_said(tmp_path: Path, case: str) -> None:
    name, make, n_ops, message = MARKED[case]
    (tmp_path / name).write_bytes(make())
    run = meshscope.import_(tmp_path / name, topology="h100:2", plan="tp=2", out=tmp_path / "run")
    measured = run.record.measured
    assert measured.trace.n_ops in n_ops
    assert any(message in finding for finding in measured.findings)


def test_links_out_of_a_folder_are_not_followed(tmp_path: Path) -> None:
    folder, secret = tmp_path / "traces", tmp_path / "secret"
    folder.mkdir()
    secret.mkdir()
    made.write(secret / "rank1.json", made.document(kernels(), rank=1, world_size=2))
    made.write(folder / "rank0.json", made.document(kernels(), world_size=2))
    (folder / "rank1.json").symlink_to(secret / "rank1.json")
    (folder / "inside.json").symlink_to("rank0.json")
    (folder / "loop.json").symlink_to("loop.json")
    (folder / "card.yaml").symlink_to(secret / "card.yaml")
    run = meshscope.import_(folder, topology="h100:2", plan="tp=2", out=tmp_path / "run")
    measured = run.record.measured
    assert measured.trace.devices == (0,)
    assert any("1 links lead out of the folder" in finding for finding in measured.findings)


MANY_NAMES = """
import re, sys
import meshscope
from meshscope.readers.traces import kineto, trace
trace.MAX_OPS = kineto.MAX_OPS = 20_000
run = meshscope.import_(sys.argv[1], out=sys.argv[2])
# Not ru_maxrss, which a process inherits from the one that started it
peak_kib = re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]
print(len(run.record.rows), int(peak_kib) // 1024)
print(run.record.measured.findings)
"""


@pytest.mark.slow
def test_many_distinct_names_need_bounded_memory(tmp_path: Path) -> None:
    """200,000 different kernels, ten times the limit: they share a row, and memory stays bounded."""
    path = tmp_path / "names.json"
    with path.open("w") as file:
        file.write('{"distributedInfo": {"rank": 0, "world_size": 1}, "traceEvents": [\n')
        for i in range(200_000):
            event = made.kernel(f"kernel_{i:032x}", 2.0 * i, 1.0)
            file.write(f"{json.dumps(event)}{',' if i < 199_999 else ''}\n")
        file.write("]}")
    words = [sys.executable, "-c", MANY_NAMES, str(path), str(tmp_path / "run")]
    output = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    n_rows, mib = map(int, output.splitlines()[0].split())
    assert n_rows == 0
    assert mib < 600
    assert re.search(r"more than 20,000 distinct kernel names: 1[78]\d,\d{3} events share", output)
