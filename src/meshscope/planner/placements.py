"""The placement of a plan's axes on the torus: every one is predicted, and the fastest is kept.

Mesh order, in which programs lay the axes over the device ids, needs no option; another placement is an
order of devices (`--device-order`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

from meshscope.cost.closed_form import plan_form
from meshscope.cost.predicted import evaluated
from meshscope.events.enums import REQUEST_PHASES
from meshscope.hardware.chips import ChipKind
from meshscope.interconnect.placement import AxisPlacement, axis_placements, device_order
from meshscope.interconnect.profile import ChipProfile
from meshscope.plans.experiment import Experiment

MAX_DEVICES = 1024  # of a slice; the geometry of a placement takes milliseconds
MAX_PLACEMENTS = 256
MIN_GAIN = 0.01  # of a request; a smaller one is not worth an order of devices


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedPlan:
    """An experiment with its axes placed, and its predicted seconds; `placement` is None in mesh order."""

    placement: AxisPlacement | None
    experiment: Experiment
    ttft_s: float
    tpot_s: float
    e2e_s: float

    @property
    def devices(self) -> Sequence[int]:
        """The device id at each position of the mesh."""
        return self.experiment.device_order or range(self.experiment.topology.n_devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementSearch:
    """The placements of an experiment, the shortest request first; `n_left` more were not tried."""

    in_order: PlacedPlan
    placed: tuple[PlacedPlan, ...]
    n_left: int

    @property
    def best(self) -> PlacedPlan | None:
        """The placement with the shortest request, if it is shorter than in mesh order by MIN_GAIN."""
        first = self.placed[0] if self.placed else None
        is_better = first is not None and first.e2e_s < self.in_order.e2e_s * (1 - MIN_GAIN)
        return first if is_better else None


def search_placements(
    experiment: Experiment,
    profile: ChipProfile | None = None,
    *,
    max_placements: int = MAX_PLACEMENTS,
) -> PlacementSearch | None:
    """The experiment with every placement of its axes; None if they have one, or the slice has no torus."""
    topology, mesh = experiment.topology, experiment.plan.mesh
    is_large = topology.n_devices > MAX_DEVICES
    if topology.chip.kind is not ChipKind.TPU or is_large or len(mesh.axes) == 1:
        return None
    orders = (
        (one, device_order(mesh, topology, one).tolist()) for one in axis_placements(mesh, topology)
    )
    every = ((one, order) for one, order in orders if topology.keeps_slices(order))
    placed = [
        _placed(experiment, one, order, profile) for one, order in islice(every, max_placements)
    ]
    return PlacementSearch(
        in_order=_placed(experiment, None, range(topology.n_devices), profile),
        placed=tuple(sorted(placed, key=lambda one: one.e2e_s)),
        n_left=sum(1 for _ in every),
    )


def _placed(
    experiment: Experiment,
    placement: AxisPlacement | None,
    devices: Sequence[int],
    profile: ChipProfile | None,
) -> PlacedPlan:
    is_in_order = list(devices) == list(range(len(devices)))
    placed = replace(experiment, device_order=None if is_in_order else tuple(devices))
    forms = (plan_form(placed, phase, profile=profile) for phase in REQUEST_PHASES)
    ttft_s, tpot_s = (evaluated(form, placed.workload)[1].value_s for form in forms)
    return PlacedPlan(
        placement=placement,
        experiment=placed,
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        e2e_s=ttft_s + placed.workload.n_decode_steps * tpot_s,
    )
