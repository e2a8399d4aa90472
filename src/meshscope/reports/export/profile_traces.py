"""Converts the profile of a measured run for trace viewers."""

from pathlib import Path

from meshscope.readers.profile.session import Profile
from meshscope.readers.profile.timeline import profile_timeline
from meshscope.reports.export.chrome import write_chrome
from meshscope.reports.export.perfetto import write_perfetto

CHROME, PERFETTO = "chrome.trace.json.gz", "perfetto.pftrace"


def write_profile_traces(profile: Profile, folder: Path) -> None:
    """Writes the whole profile to `folder` as a Chrome and as a Perfetto trace."""
    chrome = profile_timeline(profile)
    write_chrome(chrome, folder / CHROME, is_gzipped=True, has_text_arguments=True)
    write_perfetto(profile_timeline(profile), folder / PERFETTO)
