"""Expands an operation of a pipeline program to the stages that execute it.

One program contains all stages, and each stage takes its own branches. The scopes name the stages.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from meshscope.events.collective import Groups
from meshscope.events.enums import Kind, Part
from meshscope.readers.hlo.attribution import Scope
from meshscope.readers.hlo.executions import BRANCH_CAVEAT
from meshscope.spec.plan.mesh import Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlacement:
    """One stage and layer that execute an operation, with the groups in that stage."""

    stage: int | None
    layer: int | None
    groups: Groups


def stage_placements(
    scope: Scope, groups: Groups, layers: Sequence[int | None], mesh: Mesh
) -> Iterator[StagePlacement]:
    """One placement for every stage and layer; `layers` are those of the first stage.

    The pairs of a send between stages belong to the sending stage.
    """
    if scope.stages is None or scope.stages[-1] >= mesh.size("pp"):
        for layer in layers:
            yield StagePlacement(stage=None, layer=layer, groups=groups)
        return
    for number, stage in enumerate(scope.stages):
        stage_groups = mesh.groups_of_stage(groups, stage)
        for first_layer in layers:
            layer = None if first_layer is None else first_layer + number * scope.stage_layers
            yield StagePlacement(stage=stage, layer=layer, groups=stage_groups)


def with_stage_send(scope: Scope, kind: Kind, axis: str | None, mesh: Mesh) -> Scope:
    """The scope; that of the send between stages for a permute along pp without a part.

    A send across slices loses its op_name, and the loop around it has no usable one.
    """
    if scope.part is not None or kind is not Kind.PERMUTE or axis != "pp":
        return scope
    return Scope(phase=scope.phase, layers=None, part=Part.STAGE, stages=range(mesh.size("pp") - 1))


def without_stage_branch_caveat(caveats: Sequence[str]) -> tuple[str, ...]:
    """The caveats without the one about the outermost branch, which the stage always takes."""
    stage_branch = next((c for c in caveats if c.startswith(BRANCH_CAVEAT)), None)
    return tuple(caveat for caveat in caveats if caveat != stage_branch)
