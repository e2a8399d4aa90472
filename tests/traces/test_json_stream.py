"""Hostile and broken JSON: an error with the remedy, or a marked row, in bounded memory."""

import gzip
import json
import tracemalloc
from functools import partial
from pathlib import Path

import made_kineto as made
import pytest

from meshscope.errors import TraceError
from meshscope.readers.traces import json_stream
from meshscope.readers.traces.kineto import read_kineto
from meshscope.readers.traces.trace import Trace

N = 400


def content() -> bytes:
    events = [made.kernel(f"kernel_{i % 7}", 10.0 * i, 4.0) for i in range(N)]
    return json.dumps(made.document(events), indent=1).encode()


def read(folder: Path, data: bytes | list[made.Event], name: str = "t.json") -> Trace:
    content = data if isinstance(data, bytes) else json.dumps(made.document(data)).encode()
    (folder / name).write_bytes(content)
    return read_kineto(folder / name)


@pytest.mark.parametrize("piece_bytes", [200, 1000, 5000, 1 << 20])
def test_pieces_of_any_size_give_the_same_events(tmp_path, monkeypatch, piece_bytes) -> None:
    monkeypatch.setattr(json_stream, "PIECE_BYTES", piece_bytes)
    for name, data in (("a.json", content()), ("b.json.gz", gzip.compress(content()))):
        trace = read(tmp_path, data, name)
        assert (len(trace.events), trace.n_events, trace.findings) == (N, N, ())
        assert trace.device_name == "NVIDIA H100 80GB HBM3"
        assert trace.origin_unix_ns == made.BASE_NS
        assert trace.events["start_ns"].to_list() == [10_000 * i for i in range(N)]


def test_other_forms_of_a_document_are_read(tmp_path: Path) -> None:
    """Keys behind the events, a bare array without its end, and a byte order mark."""
    head = made.document([])
    del head["traceEvents"]
    late = {"traceEvents": [made.kernel("k", 1.0, 1.0)], **head}
    assert read(tmp_path, json.dumps(late).encode()).rank == 0
    text = json.dumps([made.kernel("k", float(i), 0.5) for i in range(5)])[:-1]
    trace = read(tmp_path, text.encode())
    assert (len(trace.events), trace.findings) == (5, ())
    assert len(read(tmp_path, b"\xef\xbb\xbf" + content()).events) == N


def test_events_of_another_form_are_left_out_and_counted(tmp_path: Path) -> None:
    good, bad = json.dumps(made.kernel("a", 1.0, 1.0)), '{"ph": "X", "cat": "kernel", "ts": "soon"}'
    deep = '{"args": {"x": ' + "[" * 2000 + "]" * 2000 + "}}"
    broken = b'{"ph": "X", "name": "\xff\xfe"}'.decode("latin-1")
    text = f'{{"traceEvents": [{good}, {bad}, {deep}, {broken}, 5, {good.replace("1.0", "9.0")}]}}'
    trace = read(tmp_path, text.encode("latin-1"))
    assert trace.events["start_ns"].to_list() == [1000, 9000]
    assert any("left out: not valid JSON, or no events" in finding for finding in trace.findings)


def test_strings_that_look_like_the_end_of_an_event_do_not_split_it(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(json_stream, "PIECE_BYTES", 150)
    events = [made.kernel('k"}, {"name": [', 10.0 * i, 1.0) for i in range(50)]
    assert len(read(tmp_path, events).events) == 50


def test_metadata_beyond_the_limit_is_named(tmp_path, monkeypatch) -> None:
    """Before the events it was "has no 'traceEvents'"; after them nothing was said."""
    monkeypatch.setattr(json_stream, "PIECE_BYTES", 200)
    monkeypatch.setattr(json_stream, "MAX_HEAD_BYTES", 1 << 20)
    document, large = made.document([made.kernel("k", 1.0, 1.0)]), {"large": "x" * (3 << 20)}
    with pytest.raises(TraceError, match="up to 1 MiB are read before the first event"):
        read(tmp_path, json.dumps(large | document).encode())
    monkeypatch.setattr(json_stream, "MAX_EVENT_BYTES", 1 << 20)
    late = {"traceEvents": document.pop("traceEvents"), **large, **document}
    (finding,) = read(tmp_path, json.dumps(late).encode()).findings
    assert "after the events is longer than 1 MiB and was not read" in finding
    few = {"large": "x" * 1000, **made.document([made.kernel("k", 1.0, 1.0)])}
    assert read(tmp_path, json.dumps(few).encode()).findings == ()


def test_a_gzip_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_stream, "MIN_BOMB_BYTES", 1 << 20)
    bomb = gzip.compress(b'{"traceEvents": [' + b" " * (20 << 20))
    with pytest.raises(TraceError, match="inflates to more than 300 times its size"):
        read(tmp_path, bomb, "bomb.json.gz")


def test_bytes_after_a_gzip_stream_are_ignored(tmp_path: Path) -> None:
    trace = read(tmp_path, gzip.compress(content()) + b"more", "t.json.gz")
    assert (len(trace.events), trace.findings) == (N, ())


@pytest.mark.slow
@pytest.mark.parametrize(
    "pack", [bytes, partial(gzip.compress, compresslevel=0)], ids=["json", "gzip"]
)
def test_a_long_event_is_copied_a_few_times_at_most(tmp_path, monkeypatch, pack) -> None:
    monkeypatch.setattr(json_stream, "PIECE_BYTES", 1 << 12)
    searched: list[int] = []
    last_cut = json_stream._last_cut

    def counted(buffer: bytes) -> int | None:
        searched.append(len(buffer))
        return last_cut(buffer)

    monkeypatch.setattr(json_stream, "_last_cut", counted)
    event = made.kernel("a", 1.0, 1.0) | {"note": "a" * (8 << 20)}
    data = json.dumps(made.document([event])).encode()

    assert len(read(tmp_path, pack(data)).events) == 1
    assert sum(searched) < 3 * len(data)


def test_distinct_names_beyond_the_limit_share_a_row(tmp_path, monkeypatch) -> None:
    for module in ("trace", "kineto"):
        monkeypatch.setattr(f"meshscope.readers.traces.{module}.MAX_OPS", 10)
    monkeypatch.setattr(json_stream, "PIECE_BYTES", 1000)
    trace = read(tmp_path, [made.kernel(f"kernel_{i}", float(i), 0.5) for i in range(300)])
    assert len(trace.events) == 300
    assert len(trace.ops) < 40
    assert "more than 10 distinct kernel names" in trace.findings[0]


@pytest.mark.slow
def test_memory_is_that_of_a_piece_and_the_columns(tmp_path, monkeypatch) -> None:
    """25 MB of text, of which 1 MB is held at a time, beside some 50 bytes for each event."""
    monkeypatch.setattr(json_stream, "PIECE_BYTES", 1 << 20)
    padding = "x" * 1000
    events = [made.kernel(f"k{i % 9}", float(i), 0.5, note=padding) for i in range(22_000)]
    data = json.dumps(made.document(events)).encode()
    del events
    (tmp_path / "t.json").write_bytes(data)
    n_bytes = len(data)
    del data
    tracemalloc.start()
    trace = read_kineto(tmp_path / "t.json")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(trace.events) == 22_000
    assert peak < n_bytes / 2
