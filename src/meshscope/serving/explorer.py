"""What the page of `explore` evaluates by itself: closed forms, memory and link loads of many plans, each value once.

The page has the arithmetic of `cost.closed_form` for one step. What changes with the sizes of a workload beyond it
(the form, the chunk of prefill, the kernels, temporary buffers) is in tables over (weight dtype, cache dtype, batch,
prompt, output); an axis along which a table is constant has length 1 in it.
"""

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import lru_cache
from itertools import product
from math import isnan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshscope.analysis.roofline import REASONS, cause_of, device_peaks
from meshscope.cost import closed_form, expert_load, memory, predicted
from meshscope.cost.closed_form import PlanForm, cost_s
from meshscope.cost.collective_times import CollectiveCost, batch_is_split
from meshscope.cost.features import PARTS, Cost, Feature
from meshscope.cost.memory import padding_bytes, phase_temp_bytes, why_no_estimate
from meshscope.cost.planned import NEVER_REDUCED
from meshscope.cost.predicted import is_faster_cut, longest_chunk_that_fits
from meshscope.errors import PlanError, SpecError
from meshscope.events.enums import REQUEST_PHASES, Kind, Phase, wire_factor
from meshscope.events.step_time import Activity
from meshscope.hardware.chips import peak_dtype
from meshscope.hardware.compiler_facts import OPERATIONS
from meshscope.hardware.interconnect.fabric import fabric_of, link_load
from meshscope.hardware.interconnect.lines import collective_lines
from meshscope.hardware.interconnect.strategies import geometry_of, strategies_of
from meshscope.hardware.topology import Topology
from meshscope.model.layers import AttentionKind
from meshscope.plans import kernel_choice
from meshscope.plans.caches import device_cache_bytes
from meshscope.plans.checks import check_batch, cut_block
from meshscope.plans.experiment import Experiment
from meshscope.plans.plan import Plan
from meshscope.plans.stages import default_microbatches
from meshscope.plans.weights import device_weight_bytes
from meshscope.plans.workload import Workload
from meshscope.serialize import picked
from meshscope.serving.grid import PlanForms, SearchProgress, SecondProcess, grid_of
from meshscope.serving.loads import expressible, placed_figures
from meshscope.serving.placed import place_of
from meshscope.serving.servers import ServingEngine
from meshscope.serving.slices import slice_name
from meshscope.serving.space import SearchSpace
from meshscope.units import format_dtype

MAX_PLANS = 48  # of a slice
N_FRONTS = 3  # searches of a slice: the shortest, a middle and the longest request
LARGEST = 1e300  # stands for infinity, which JSON lacks
IMPOSSIBLE = -1  # a chunk of sizes that the plan does not take, or that do not fit
OF_CELL = ("data_size", "n_stages", "has_kernel", "reads_static_cache")  # not of a form
SERVED = ("served_ttft", "served_tpot", "served_rate")
PADDED = 8  # sequences of a device whose padding has whole bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The values that the page offers of each size of a workload."""

    weight_dtypes: tuple[str, ...]
    cache_dtypes: tuple[str, ...]
    batches: tuple[int, ...]
    prompts: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of values along each axis of a table."""
        return tuple(len(getattr(self, name)) for name in self.__slots__)


def explorer_document(
    space: SearchSpace,
    slices: Sequence[Topology],
    settings: Settings,
    progress: SearchProgress | None = None,
    *,
    server: ServingEngine | None = None,
) -> dict[str, Any]:
    """Everything that the page computes with; SpecError if the model fits none of the slices.

    With a server, also what it delivers with each batch in flight, simulated for the plans that servers can express.
    """
    writer = _Writer(space, settings, server)
    written = (writer.slice(topology, progress) for topology in slices)
    documents = [one for one in written if one is not None]
    if not documents:
        names = ", ".join(map(slice_name, slices))
        raise SpecError(
            f"{space.model.name} fits none of {names} at the smallest batch. Name larger slices, or a narrower "
            "--weight-dtype."
        )
    return {
        "model": space.model.name,
        "server": None if server is None else str(server),
        "rules": _rules(has_experts=space.model.moe is not None),
        "slices": documents,
        "settings": {
            "weights": list(map(format_dtype, settings.weight_dtypes)),
            "caches": list(map(format_dtype, settings.cache_dtypes)),
            **picked(settings, "batches", "prompts", "outputs"),
        },
        **{name: pool.values for name, pool in writer.pools.items()},
    }


def _rules(*, has_experts: bool) -> dict[str, Any]:
    """Constants of the closed form and of memory, the order of its arrays, and names."""
    groups = ("FLOPS", "HBM_BYTES", "PRODUCTS", "KERNEL_FLOPS", "KERNELS", "READS", "GATHERS")
    spent = [one for one in Activity if one is not Activity.EXPOSED]
    sizes = (
        "NO_LIMIT",
        "VMEM_ARRAY_BYTES",
        "VMEM_TOKENS_BYTES",
        "VMEM_RETURNED_BYTES",
        "FUSED_BLOCK_TOKENS",
    )
    return {
        "features": [one.name for one in Feature],
        "costs": [one.name for one in Cost],
        "parts": [part.value for part in PARTS],
        "other_costs": list(map(int, closed_form.OTHER_COSTS)),
        "groups": {
            name: list(map(int, costs))
            for name, costs in picked(predicted, *groups, "SMALL_OPS").items()
        },
        "activities": {one.name.lower(): one.value for one in spent},
        "causes": {one.name.lower(): cause_of(one, has_experts=has_experts) for one in spent},
        "reasons": REASONS,
        "vmem_over_hbm": OPERATIONS.vmem_over_hbm,
        **picked(closed_form, *sizes),
        **picked(kernel_choice, "SPLASH_BLOCKS", "PADDED_FROM", "MAX_PADDING_FRAC"),
        **picked(expert_load, "TILE_ROWS"),
        **picked(memory, "LOW", "HIGH", "SMALL_BYTES", "N_BRANCH_COPIES"),
    }


class _Pool:
    """Values in order, each once."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._places: dict[str, int] = {}

    def add(self, value: Any) -> int:
        """The position of the value."""
        key = json.dumps(value)
        if key not in self._places:
            self._places[key] = len(self.values)
            self.values.append(value)
        return self._places[key]


class _Writer:
    def __init__(
        self, space: SearchSpace, settings: Settings, server: ServingEngine | None
    ) -> None:
        self.space, self.settings, self.server = space, settings, server
        names = ("forms", "costs", "collectives", "lines", "rates", "loads", "links", "tables")
        self.pools = {name: _Pool() for name in names}
        self._of_lines: dict[Hashable, tuple[int, int]] = {}
        self._of_strategy: dict[Hashable, int] = {}
        self._written: dict[int, tuple[Any, int]] = {}  # the object keeps its identity

    def slice(self, topology: Topology, progress: SearchProgress | None) -> dict[str, Any] | None:
        """A slice with its plans; None if the model does not fit."""
        space = replace(self.space, topology=topology)
        with SecondProcess() as second:
            plans, n_legal = front_plans(space, self.settings, progress, second)
        if not plans:
            return None
        chip = topology.chip
        return {
            "name": slice_name(topology),
            "chip": chip.name,
            "n_chips": topology.n_chips,
            "n_legal": n_legal,
            "topology": topology.name,
            "hbm_bytes": chip.device_hbm_bytes,
            "peaks": [
                [*astuple(peaks), peak_dtype(dtype, chip)]
                for dtype in self.settings.weight_dtypes
                if (peaks := device_peaks(chip, dtype)) is not None
            ],
            "plans": [self._plan(space, plan) for plan in plans],
        }

    def _plan(self, space: SearchSpace, plan: Plan) -> dict[str, Any]:
        tables = _PlanTables(space, plan, self.settings, self._form, self.server)
        return {
            "plan": str(plan),
            "data": plan.data_size,
            "stages": plan.pp,
            **{name: self._table(table) for name, table in tables.every().items()},
        }

    def _table(self, table: NDArray[Any]) -> int:
        """A table without the axes along which it is constant: its sizes and its values."""
        for axis in range(table.ndim):
            first = np.take(table, [0], axis=axis)
            if np.array_equal(np.broadcast_to(first, table.shape), table, equal_nan=True):
                table = first
        values = [None if isnan(value) else value for value in table.ravel().tolist()]
        return self.pools["tables"].add([table.shape, values])

    def _once(self, value: Any, write: Callable[[Any], int]) -> int:
        if id(value) not in self._written:
            self._written[id(value)] = value, write(value)
        return self._written[id(value)][1]

    def _form(self, form: PlanForm) -> int:
        efficiency = form.efficiency
        constants = (efficiency.constants, efficiency.fast, efficiency.slow)
        spreads = form.constants.spreads
        inside = None if spreads is None else max(spreads.short, spreads.long)
        rates = {
            "cost_s": [
                cost_s(replace(form, efficiency=replace(efficiency, constants=one))).tolist()
                for one in constants
            ],
            "overlap": [one.overlap if form.is_decode else 1.0 for one in constants],
            "streams": efficiency.streams_weights,
            "spread": efficiency.model_spread,
            "inside": inside,
            "outside": None if spreads is None else spreads.out_of_sample,
        }
        return self.pools["forms"].add(
            {
                **picked(form, *(name for name in closed_form.NUMBERS if name not in OF_CELL)),
                "costs": self._once(form.costs.coefficients, self._costs),
                "every": self._once(form.costs.all_stages, self._costs),
                "collectives": self._once(form.collectives, self._collectives(form)),
                "rates": self.pools["rates"].add(rates),
            }
        )

    def _costs(self, coefficients: NDArray[np.float64]) -> int:
        places = np.argwhere(coefficients).tolist()
        return self.pools["costs"].add([[*at, coefficients[tuple(at)]] for at in places])

    def _collectives(self, form: PlanForm) -> Callable[[Any], int]:
        def write(collectives: Sequence[CollectiveCost]) -> int:
            every = [self._collective(form, one) for one in collectives]
            return self.pools["collectives"].add(every)

        return write

    def _collective(self, form: PlanForm, cost: CollectiveCost) -> dict[str, Any]:
        planned, rule = cost.planned, cost.planned.reduced_for
        group_size = len(planned.groups[0])
        lines, loads = self._lines(form, cost)
        return {
            "part": planned.part.value,
            "kind": planned.kind.value,
            "axis": planned.axis,
            "n": group_size,
            "tick": cost.n_tick,
            "pass": cost.n_pass,
            "once": cost.n_once,
            "payload": [[int(at), cost.payload[at]] for at in np.flatnonzero(cost.payload)],
            "lines": lines,
            "loads": loads,
            "factor": cost.factor,
            "of_end": planned.is_of_end,
            "wire": [
                float(wire_factor(kind, group_size)) for kind in (planned.kind, Kind.ALL_REDUCE)
            ],
            "behind": cost.hidden_behind,
            "rule": [min(rule.n_sequences, LARGEST), rule.over_bytes, rule.multiple],
            "measured": [
                [one.min_payload_bytes, min(one.max_payload_bytes, LARGEST)]
                for one in form.constants.measured
                if one.kind is planned.kind
                and one.min_group_size <= group_size <= one.max_group_size
            ],
        }

    def _lines(self, form: PlanForm, cost: CollectiveCost) -> tuple[int, int]:
        """The lines of a collective and, in the same order, the loads of the links in their strategies."""
        planned = cost.planned
        is_own = planned.reduced_for == NEVER_REDUCED
        key = (form.topology, planned.kind, planned.groups, is_own)
        if key not in self._of_lines:
            rows = np.minimum(cost.lines, LARGEST).T.tolist()
            loads = self._loads(form, cost)
            self._of_lines[key] = self.pools["lines"].add(rows), self.pools["loads"].add(loads)
        return self._of_lines[key]

    def _loads(self, form: PlanForm, cost: CollectiveCost) -> list[int]:
        """For each line, the load of every link [chip, dim, direction] as a fraction of the payload."""
        planned, fabric = cost.planned, fabric_of(form.topology)
        groups, is_own = planned.groups, planned.reduced_for == NEVER_REDUCED
        geometry, places = geometry_of(form.topology, groups), list[int]()
        for kind in (planned.kind,) if is_own else (planned.kind, Kind.ALL_REDUCE):
            strategies = strategies_of(kind, fabric, groups) if fabric.is_torus else {}
            for line in collective_lines(kind, geometry, form.constants):
                key = (form.topology, kind, groups, line.strategy)
                if key not in self._of_strategy:
                    legs = strategies[line.strategy]() if line.strategy in strategies else ()
                    total = sum(link_load(fabric, leg) for leg in legs)
                    loads = np.round(np.ravel(total), 9).tolist() if legs else []
                    self._of_strategy[key] = self.pools["links"].add(loads)
                places.append(self._of_strategy[key])
        return places


def front_plans(
    space: SearchSpace, settings: Settings, progress: SearchProgress | None, second: SecondProcess
) -> tuple[list[Plan], int]:
    """The plans on the Pareto front of the shortest, a middle or the longest request, and the number of legal plans.

    If they are more than MAX_PLANS, those that are on it most often.
    """
    n_lengths = len(settings.prompts)
    counts: dict[Plan, int] = {}
    n_legal = 0
    for at in sorted({0, n_lengths // 2, n_lengths - 1}):
        output = settings.outputs[min(at, len(settings.outputs) - 1)]
        workload = replace(space.workload, prompt=settings.prompts[at], output=output)
        grid = grid_of(replace(space, workload=workload), progress, second, has_floors=True)
        n_legal = max(n_legal, len(grid.plans))
        for row in grid.front(np.ones(len(grid), dtype=np.bool_)).tolist():
            plan = grid.plans[grid.plan[row]]
            counts[plan] = counts.get(plan, 0) + 1
    return sorted(counts, key=lambda plan: -counts[plan])[:MAX_PLANS], n_legal


Cell = tuple[int, int, int, int, int]  # weight dtype, cache dtype, batch, prompt, output


class _PlanTables:
    """The tables of a plan over the settings, filled cell by cell; what cells share is computed once."""

    def __init__(
        self,
        space: SearchSpace,
        plan: Plan,
        settings: Settings,
        write_form: Callable[[PlanForm], int],
        server: ServingEngine | None,
    ) -> None:
        self.space, self.plan, self.settings, self._write_form = space, plan, settings, write_form
        self.server = server
        self._known: dict[Hashable, Any] = {}
        shape = settings.shape
        self.chunk = np.full(shape, IMPOSSIBLE)
        self.forms = {phase: np.zeros(shape, int) for phase in REQUEST_PHASES}
        self.temps = {phase: np.full(shape, np.nan) for phase in REQUEST_PHASES}
        self.has_kernel, self.is_static = np.zeros(shape, int), np.zeros(shape, int)
        self.served = {name: np.full(shape, np.nan) for name in SERVED if server is not None}

    def every(self) -> dict[str, NDArray[Any]]:
        """The tables by name: bytes of a device, of one sequence for the cache, and what the closed form needs."""
        sizes = self._memory()
        _, _, n_batches, n_prompts, _ = self.settings.shape
        for batch, prompt in product(range(n_batches), range(n_prompts)):
            whole = Workload(
                batch=self.settings.batches[batch], prompt=self.settings.prompts[prompt]
            )
            try:
                check_batch(self.plan, whole)
            except PlanError:
                continue
            self._fill(batch, prompt, sizes)
        return {
            "chunk": self.chunk,
            "prefill": self.forms[Phase.PREFILL],
            "decode": self.forms[Phase.DECODE],
            "kernel": self.has_kernel,
            "static": self.is_static,
            "temp_prefill": self.temps[Phase.PREFILL],
            "temp_decode": self.temps[Phase.DECODE],
            **self.served,
            **sizes,
        }

    def _once(self, key: Hashable, value: Callable[[], Any]) -> Any:
        if key not in self._known:
            self._known[key] = value()
        return self._known[key]

    def _experiment(self, cell: Cell, batch: int | None = None) -> Experiment:
        weight, cache, at, prompt, output = cell
        workload = replace(
            self.space.workload,
            batch=self.settings.batches[at] if batch is None else batch,
            prompt=self.settings.prompts[prompt],
            output=self.settings.outputs[output],
            weight_dtype=self.settings.weight_dtypes[weight],
            cache_dtype=self.settings.cache_dtypes[cache],
        )
        return self.space.experiment(self.plan, workload)

    def _memory(self) -> dict[str, NDArray[Any]]:
        """Weights by dtype; the cache of a sequence by dtype and lengths; and their padding."""
        n_weights, n_caches, _, n_prompts, n_outputs = self.settings.shape
        weights = np.zeros((n_weights, 1, 1, 1, 1), int)
        caches = np.zeros((1, n_caches, 1, n_prompts, n_outputs), int)
        padded, of_cache = np.zeros(weights.shape), np.zeros(caches.shape)
        n_each = self.plan.data_size * PADDED
        for weight in range(n_weights):
            dtype = self.settings.weight_dtypes[weight]
            weights[weight] = device_weight_bytes(self.space.model, self.plan, dtype)
            few, more = (
                padding_bytes(self._experiment((weight, 0, 0, 0, 0), n))
                for n in (n_each, 2 * n_each)
            )
            padded[weight] = 2 * few - more
        for cache, prompt, output in product(*map(range, (n_caches, n_prompts, n_outputs))):
            experiment = self._experiment((0, cache, 0, prompt, output), n_each)
            parts = (experiment.model, self.plan, experiment.workload)
            caches[0, cache, 0, prompt, output] = device_cache_bytes(*parts) // PADDED
            of_cache[0, cache, 0, prompt, output] = (
                padding_bytes(experiment) - padded[0]
            ).item() / PADDED
        return {"weights": weights, "cache": caches, "padding": padded, "cache_padding": of_cache}

    def _fill(self, batch: int, prompt: int, sizes: Mapping[str, NDArray[Any]]) -> None:
        shape, plan = self.settings.shape, self.plan
        whole = self._experiment((0, 0, batch, prompt, 0)).with_auto_chunk()
        n_local = whole.workload.batch // plan.data_size
        hbm_bytes = self.space.topology.chip.device_hbm_bytes
        for weight, cache, output in product(range(shape[0]), range(shape[1]), range(shape[4])):
            cell = (weight, cache, batch, prompt, output)
            if cut_block(plan, self.space.model, self.settings.weight_dtypes[weight]) is not None:
                continue
            chunk = whole.workload.prefill_chunk
            if whole.prefill_chunks.is_cut:
                caches = n_local * sizes["cache"][0, cache, 0, prompt, output]
                needed = sizes["weights"][weight] + caches
                if hbm_bytes is not None and needed.item() > hbm_bytes:
                    continue
                cut = longest_chunk_that_fits(self._experiment(cell))
                key = ("faster", weight, batch, prompt, cut.workload.prefill_chunk)
                is_taken = plan.cp == 1 or self._once(key, lambda cut=cut: is_faster_cut(cut))
                chunk = cut.workload.prefill_chunk if is_taken else None
            self._fill_cell(cell, n_local, chunk)

    def _fill_cell(self, cell: Cell, n_local: int, chunk: int | None) -> None:
        weight, cache, batch, prompt, output = cell
        plan, attention = self.plan, self.space.model.attention

        @lru_cache
        def experiment() -> Experiment:
            whole = self._experiment(cell)
            return replace(whole, workload=replace(whole.workload, prefill_chunk=chunk))

        self.chunk[cell] = chunk or 0
        self.has_kernel[cell] = self._once(
            ("prefill kernel", prompt, chunk),
            lambda: experiment().kernels.prefill_attention.kernel is not None,
        )
        is_static = self._once(
            ("decode kernel", cache, prompt, output),
            lambda: experiment().kernels.decode_attention.kernel is None,
        )
        self.is_static[cell] = is_static
        n_microbatches = default_microbatches(n_local, plan.pp)
        cut = (chunk or 0) if plan.cp > 1 and experiment().prefill_chunks.is_cut else 0
        # Steps of a ring depend on how many blocks a window spans, and what a device reads of chosen positions on all.
        has_spans = cut or attention.window_of(AttentionKind.SLIDING) or attention.chosen_positions
        span = (prompt, output) if plan.cp > 1 and has_spans else 0
        kinds = {
            Phase.PREFILL: (weight, 0, n_microbatches, cut),
            Phase.DECODE: (weight, cache, 1, int(batch_is_split(plan, n_local))),
        }
        for phase, kind in kinds.items():
            key = (phase, span, *kind)
            forms = self._once(
                (phase, span),
                lambda phase=phase: PlanForms(self._space_at(experiment()), plan, phase),
            )
            self.forms[phase][cell] = self._once(
                key,
                lambda kind=kind, forms=forms: self._write_form(
                    forms.form(self.settings.batches[batch], *kind)
                ),
            )
        if self.server is not None and expressible([experiment()]):
            self._serve(cell, self._experiment(cell))
        if self._once("has estimate", lambda: why_no_estimate(experiment()) is None):
            of_scores = cache if is_static else 0
            self.temps[Phase.PREFILL][cell] = self._once(
                ("temp", weight, batch, prompt, chunk),
                lambda: phase_temp_bytes(experiment(), Phase.PREFILL),
            )
            self.temps[Phase.DECODE][cell] = self._once(
                ("temp", weight, of_scores, batch, prompt, output),
                lambda: phase_temp_bytes(experiment(), Phase.DECODE),
            )

    def _serve(self, cell: Cell, experiment: Experiment) -> None:
        """The figures of the server; they stay unknown if it cannot run the plan, or has no room for a cache."""
        weight, cache, _, prompt, output = cell
        try:
            placed = self._once(
                ("served", weight, cache, prompt, output),
                lambda: place_of(experiment, self.server, profile=self.space.profile).pool(
                    experiment.workload.context
                ),
            )
        except SpecError:
            return
        figures = placed_figures(placed, experiment.workload, str(self.server))
        values = (figures.ttft_s, figures.tpot_s, figures.output_tokens_per_s)
        for name, value in zip(SERVED, values, strict=True):
            self.served[name][cell] = np.nan if value is None else value

    def _space_at(self, experiment: Experiment) -> SearchSpace:
        """The space with the lengths of the experiment, and the dtypes of the settings."""
        dtypes = picked(self.settings, "weight_dtypes", "cache_dtypes")
        return replace(self.space, workload=experiment.workload, **dtypes)
