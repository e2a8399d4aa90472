"""Writes fits into the package's `fitted_constants.json`, under the installed libtpu version."""

import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from meshscope.hardware import compiler_facts

PATH = Path(compiler_facts.__file__).with_name(compiler_facts.FITTED_CONSTANTS)


def update_constants(
    section: str, entries: Mapping[str, object], *, record: Mapping[str, object] | None = None
) -> None:
    """Replaces a section ("collectives" or "closed_form") of each chip and updates its common record.

    A libtpu version without fits starts with a copy of the newest known version.
    """
    document = compiler_facts.read_facts(compiler_facts.FITTED_CONSTANTS)
    versions, libtpu = document["libtpu"], version("libtpu")
    if libtpu not in versions:
        versions[libtpu] = json.loads(json.dumps([*versions.values()][-1]))
    fits = versions[libtpu]
    fits[section] |= dict(record or {})
    for chip, entry in entries.items():
        fits["chips"].setdefault(chip, {})[section] = entry
    PATH.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    print(f"wrote {PATH.name}, libtpu {libtpu}")
