"""Profiles are read completely and exactly, and damaged ones are refused."""

import gzip
from pathlib import Path

import polars as pl
import pytest
from made_profiles import FUSION, GOLDEN, REDUCE, Event, Line, Plane, Ref, Unsigned, tpu, write

from meshscope.errors import TraceError
from meshscope.readers.profile import plane
from meshscope.readers.profile.xplane import read_profile, read_xspace
from meshscope.reports.export.chakra import number, span

CHIP = Plane(
    name="/device:TPU:0",
    lines=[
        Line("XLA Ops", [Event("a", 5, 7), Event("b", 2**40, 3, {"run_id": -4})], timestamp_ns=100),
        Line("Steps", [], timestamp_ns=3),
        Line("Async XLA Ops", [Event("a", 1, 0, {"run_id": 2**40, "hlo_op": Ref("x")})], 101),
    ],
    stats={"device_type_string": "TPU v6 Lite", "peak": 918.0, "profile_start_time": 0},
    kind_stats={
        "a": {"hlo_category": Ref("all-reduce"), "program_id": Unsigned(2**63 + 1), "flops": 3}
    },
)


def read(tmp_path: Path, *planes: Plane) -> object:
    return read_xspace(write(tmp_path / "host1.xplane.pb", *planes))


def stat_column(tmp_path: Path, *values: object) -> pl.Series:
    """The column of a stat with these values in successive events; None means no stat."""
    events = [
        Event("e", at, 1, {} if value is None else {"source": value})
        for at, value in enumerate(values)
    ]
    space = read(tmp_path, Plane("p", [Line("l", events)]))
    return space.planes[0].events["stat.source"]


def test_a_plane_keeps_exact_times_names_and_stats(tmp_path: Path) -> None:
    """Times count from the origin of the plane; stats that the readers use are kept, null for events without."""
    plane = read(tmp_path, CHIP).planes[0]
    assert plane.origin_ns == 100
    times = plane.events.select("line", "kind", "start_ps", "dur_ps").rows()
    assert times == [(0, 0, 5, 7), (0, 1, 2**40, 3), (2, 0, 1001, 0)]
    assert plane.lines == ("XLA Ops", "Steps", "Async XLA Ops")
    columns = ("name", "stat.hlo_category", "stat.program_id")
    assert plane.kinds.select(pl.exclude("kind")).columns == list(columns)
    assert plane.kinds.select(columns).rows() == [("a", "all-reduce", 2**63 + 1), ("b", None, None)]
    assert plane.stats == {"device_type_string": "TPU v6 Lite", "profile_start_time": 0}
    assert plane.events["stat.run_id"].to_list() == [None, -4, 2**40]
    assert plane.events["stat.hlo_op"].to_list() == [None, None, "x"]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0, 127, -128, 128, 2**15, -(2**31), 2**62], None),
        ([Unsigned(2**64 - 1), 5], None),
        (["x", None, "", "x"], None),
        ([Ref("x"), "y", Ref("z"), "x"], None),
        (["x", 2, 2.5, None], ["x", "2", None, None]),
        ([b"\xff\x00", 5], [None, 5]),
    ],
    ids=["integers", "unsigned", "texts", "references", "among texts", "bytes"],
)
def test_a_stat_keeps_its_values(tmp_path: Path, values: list, expected: list | None) -> None:
    """A number among texts is a text; floats and bytes are not read."""
    assert stat_column(tmp_path, *values).to_list() == (expected or values)


def test_an_event_of_an_unknown_kind_is_kept_under_its_id(tmp_path: Path) -> None:
    line = span(2, "l") + span(4, number(1, 77) + number(3, 9))
    path = tmp_path / "a.xplane.pb"
    path.write_bytes(span(1, span(2, "p") + span(3, line)))
    plane = read_xspace(path).planes[0]
    assert plane.kinds["name"].to_list() == ["unknown kind 77"]
    assert plane.events["kind"].to_list() == [0]


def test_unknown_fields_are_skipped(tmp_path: Path) -> None:
    event = number(1, 1) + number(5, 12) + number(99, 5) + span(98, "new")
    path = tmp_path / "a.xplane.pb"
    path.write_bytes(span(1, number(1, 3) + span(2, "p") + span(3, span(4, event))))
    assert read_xspace(path).planes[0].events.select("start_ps", "dur_ps").rows() == [(0, 0)]


def test_gzipped_profile_equals_the_plain_one(tmp_path: Path) -> None:
    plain = write(tmp_path / "host1.xplane.pb", CHIP)
    packed = tmp_path / "host1.xplane.pb.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_xspace(packed).planes[0].events.equals(read_xspace(plain).planes[0].events)
    assert read_xspace(packed).host == read_xspace(plain).host == "host1"


@pytest.mark.slow
def test_every_truncated_file_is_refused(tmp_path: Path) -> None:
    """The file has one plane, so no proper prefix of it is a valid profile."""
    whole = write(tmp_path / "a.xplane.pb", CHIP).read_bytes()
    for n_bytes in range(len(whole)):
        cut = tmp_path / "cut.xplane.pb"
        cut.write_bytes(whole[:n_bytes])
        with pytest.raises(TraceError, match="copy"):
            read_xspace(cut)


RECORDED = gzip.decompress(GOLDEN.read_bytes())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"Give the path of a file that ends in .xplane.pb"),
        (b"", "it is empty"),
        (b'{"traceEvents": []}', "damaged"),
        (gzip.compress(b"\x0a\x00" * 99, mtime=0)[:20], "gzip stream ends early"),
        (b"\x1f\x8bnonsense", "cannot be read"),
        (b"\x0b" * 9, "tag 11 is invalid"),
        (span(2, "only an error"), "no plane"),
        (RECORDED.decode(errors="replace").encode(), "as a binary file"),
        (RECORDED.replace(b"\n", b"\r\n"), "as a binary file"),
    ],
    ids=[
        *("missing", "empty", "json", "cut gzip", "no gzip", "group", "no plane"),
        *("treated as text by an editor", "line ends of a text"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "a.xplane.pb"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TraceError, match=message):
        read_xspace(path)


@pytest.mark.slow
def test_a_gzip_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plane, "MAX_BYTES", 1_000_000)
    path = tmp_path / "a.xplane.pb.gz"
    path.write_bytes(gzip.compress(b"\0" * 100_000_000))
    with pytest.raises(TraceError, match="Profile fewer steps"):
        read_xspace(path)


def test_a_small_file_of_countless_events_is_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(plane, "MAX_EVENTS", 1_000)
    path = tmp_path / "a.xplane.pb"
    path.write_bytes(span(1, span(3, b"\x22\x00" * 1_001)))
    with pytest.raises(TraceError, match="1,001 events on one plane, more than the limit of 1,000"):
        read_xspace(path)


def test_times_that_would_overflow_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="lasts for weeks"):
        read(tmp_path, Plane("p", [Line("l", [Event("e", 2**62, 1)])]))


def test_the_number_of_distinct_ops_is_limited(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("meshscope.readers.profile.ops.MAX_OPS", 1)
    events = [Event(FUSION, 0, 10), Event(REDUCE, 10, 10)]
    with pytest.raises(TraceError, match="2 distinct ops"):
        read_profile(write(tmp_path / "a.xplane.pb", tpu(*events)))
