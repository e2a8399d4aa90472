"""Names the mesh axes of one run as another run names them, if they group the devices alike."""

from collections.abc import Mapping
from dataclasses import replace

from meshscope.events.step_time import StepTime
from meshscope.plans.mesh import Mesh
from meshscope.plans.plan import MESH_AXES
from meshscope.store.run import RunRecord


def with_axes_of(run: RunRecord, other: RunRecord) -> RunRecord:
    """The run with rows and times of equal axes under the other run's names; other axes keep theirs.

    Axes of two plans keep their names: fsdp means something else than the pp and tp of the same devices.
    """
    mesh, known = _mesh(run), _mesh(other)
    if mesh.names == known.names or not mesh.axes or not known.axes:
        return run
    labels = {row.axis for row in run.rows} | {
        axis for time in run.times for axis in (*time.exposed_by_axis_s, *_activity_axes(time))
    }
    names = {
        label: name
        for label in labels
        if label is not None and (name := _name_in(known, mesh, label)) is not None
    }
    if all(label == name for label, name in names.items()):
        return run
    return replace(
        run,
        rows=tuple(replace(row, axis=names.get(row.axis or "", row.axis)) for row in run.rows),
        times=tuple(_renamed(time, names) for time in run.times),
    )


def _mesh(run: RunRecord) -> Mesh:
    return Mesh(axes=tuple(run.manifest.experiment.mesh.items()))


def _activity_axes(time: StepTime) -> tuple[str, ...]:
    return tuple(spent.axis for spent in time.activities if spent.axis is not None)


def _name_in(known: Mesh, mesh: Mesh, label: str) -> str | None:
    """The other mesh's axes with the same groups of positions as `label`, such as `data+model`."""
    axes = label.split("+")
    if mesh.n_devices != known.n_devices or not set(axes) <= set(mesh.names):
        return None
    name = known.axis_of_groups(mesh.groups(*axes))
    is_of_plans = {*axes, *(name or "").split("+")} <= set(MESH_AXES)
    return None if is_of_plans else name


def _renamed(time: StepTime, names: Mapping[str, str]) -> StepTime:
    return replace(
        time,
        exposed_by_axis_s={names.get(a, a): s for a, s in time.exposed_by_axis_s.items()},
        activities=tuple(
            replace(spent, axis=names.get(spent.axis or "", spent.axis))
            for spent in time.activities
        ),
    )
