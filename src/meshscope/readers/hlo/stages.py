"""Operations that only some stages of a pipeline run, as what each of these stages does.

One program holds all stages; a stage takes the branches that are its own. The scopes say which.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from meshscope.events.enums import Kind, Part
from meshscope.readers.hlo.attribution import Scope
from meshscope.readers.hlo.executions import BRANCH_CAVEAT
from meshscope.spec.plan.mesh import Groups, Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlacement:
    """Where an operation runs: stage and layer, and those of its groups that are in the stage."""

    stage: int | None
    layer: int | None
    groups: Groups


def stage_placements(
    scope: Scope, groups: Groups, layers: Sequence[int | None], mesh: Mesh
) -> Iterator[StagePlacement]:
    """A place for every stage and layer that an operation stands for.

    `layers` are those of the first stage. Pairs of a hand-over belong to the stage of the sender.
    """
    if scope.stages is None or scope.stages[-1] >= mesh.size("pp"):
        for layer in layers:
            yield StagePlacement(stage=None, layer=layer, groups=groups)
        return
    for number, stage in enumerate(scope.stages):
        of_stage = mesh.groups_of_stage(groups, stage)
        for layer in layers:
            here = None if layer is None else layer + number * scope.stage_layers
            yield StagePlacement(stage=stage, layer=here, groups=of_stage)


def with_stage_send(scope: Scope, kind: Kind, axis: str | None, mesh: Mesh) -> Scope:
    """The scope, or that of the hand-over between stages where a permute along pp names no part.

    What crosses slices has no name of its own, and the loop around it none that serves.
    """
    if scope.part is not None or kind is not Kind.PERMUTE or axis != "pp":
        return scope
    return Scope(phase=scope.phase, layers=None, part=Part.STAGE, stages=range(mesh.size("pp") - 1))


def without_stage_branch_caveat(caveats: Sequence[str]) -> tuple[str, ...]:
    """The caveats without that about the outermost branch: it is the stage's own, and it takes it."""
    own = next((caveat for caveat in caveats if caveat.startswith(BRANCH_CAVEAT)), None)
    return tuple(caveat for caveat in caveats if caveat != own)
