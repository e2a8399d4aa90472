"""Keeps a run in a folder; apart from the rest because it imports polars."""

from dataclasses import replace
from pathlib import Path

from meshscope.exporters.card import CARD, card_text
from meshscope.store.folder import new_folder
from meshscope.store.run import RunRecord
from meshscope.store.write import write_run
from meshscope.views.document import metrics_document


def kept(run: RunRecord, path: Path, *, force: bool) -> RunRecord:
    """The run as it stands in the folder `path`, whole."""
    with new_folder(path, force=force) as partial:
        keep(run, partial)
    return replace(run, path=path)


def keep(run: RunRecord, partial: Path) -> None:
    """Writes the run, with its workload card, into a folder that may hold HLO and traces already."""
    (partial / CARD).write_text(card_text(run), encoding="utf-8")
    write_run(partial, run, metrics=metrics_document(run))
