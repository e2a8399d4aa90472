"""`Run.explain`: why the partitioner inserted each collective of a compiled run."""

from collections.abc import Iterator
from pathlib import Path

from meshscope.analysis.comparison import compare_sources
from meshscope.analysis.insertion import Insertion, insertions
from meshscope.errors import RunError, read_only
from meshscope.events.enums import Source
from meshscope.readers.hlo.collectives import module_collectives
from meshscope.readers.hlo.parse import read_hlo
from meshscope.readers.hlo.resharding import reshardings
from meshscope.reports.collectives import insertion_lines
from meshscope.store.run import RunRecord
from meshscope.store.write import HLO


@read_only
class Explained(tuple[Insertion, ...]):
    """The collectives that the partitioner inserted, shown as `show --inserted` does."""

    __slots__ = ()

    def __repr__(self) -> str:
        """The sum, then each collective with its cost, its shardings and what avoids it."""
        return "\n".join(insertion_lines(self))


def explained(run: RunRecord, hlo: Path | None = None) -> Explained:
    """The collectives that the partitioner inserted; RunError without HLO text.

    First those that the plan of the run lacks, then the costliest.

    `hlo` is the text of a run without a folder.
    """
    topology = run.manifest.experiment.topology
    mesh = run.manifest.experiment.device_mesh
    texts = list(_texts(run, hlo))
    if topology is None or not mesh.axes or not texts:
        raise RunError(
            f"{run.path or 'the run'} has no compiled program. Compile one, into a folder if it is to be explained later."
        )
    rows = run.rows_of(Source.COMPILED)
    comparison = compare_sources(run, Source.COMPILED)
    every: list[Insertion] = []
    for text in texts:
        collectives = module_collectives(
            read_hlo(text, is_partial=True), mesh=mesh, crosses_slices=topology.crosses_slices
        )
        phase = text.name.split(".")[0]
        of_phase = [row for row in rows if len(texts) == 1 or row.phase in {None, phase}]
        every += insertions(of_phase, reshardings(collectives), comparison)
    return Explained(sorted(every, key=lambda one: bool(one.is_planned)))


def _texts(run: RunRecord, hlo: Path | None) -> Iterator[Path]:
    if run.path is not None:
        yield from sorted((run.path / HLO).glob("*.txt*"))
    elif hlo is not None:
        yield hlo
