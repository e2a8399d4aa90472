"""The XPlane reader against jax.profiler.ProfileData, event by event."""

import gzip

import pytest
from made_profiles import GOLDEN, gpu, v6e_host, xspace

from meshscope.readers.profile.plane import STATS
from meshscope.readers.profile.xplane import read_xspace

CONTENTS = {
    "cpu": gzip.decompress(GOLDEN.read_bytes()),
    "tpu": xspace(*v6e_host()),
    "gpu": xspace(gpu()),
}


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
def test_events_names_times_and_stats_equal_those_that_jax_reads(content, tmp_path) -> None:
    profiler = pytest.importorskip("jax.profiler", reason="JAX is not installed")
    plain = tmp_path / "a.xplane.pb"
    plain.write_bytes(content)
    theirs = list(profiler.ProfileData.from_file(str(plain)).planes)
    ours = read_xspace(plain).planes
    assert [plane.name for plane in ours] == [plane.name for plane in theirs]
    for plane, other in zip(ours, theirs, strict=True):
        lines = list(other.lines)
        assert list(plane.lines) == [line.name for line in lines]
        names = plane.kinds["name"]
        named = plane.events.with_columns(names.gather(plane.events["kind"]).alias("name"))
        rows = named.iter_rows(named=True)
        for line in lines:
            for event in line.events:
                row = next(rows)
                assert row["name"] == event.name
                start_ns = plane.origin_ns + row["start_ps"] / 1000
                assert start_ns == pytest.approx(event.start_ns, rel=0, abs=1)
                assert row["dur_ps"] / 1000 == pytest.approx(event.duration_ns, rel=0, abs=1)
                for stat, value in dict(event.stats).items():  # the last of two of one name
                    if stat in STATS:
                        read = row[f"stat.{stat}"]
                        assert read == value or read == str(
                            value
                        )  # among texts, a number is a text
        assert next(rows, None) is None
