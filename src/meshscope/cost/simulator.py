"""Simulates a compiled schedule: what a device does in one step, in the order of issue.

The core runs one instruction at a time. A synchronous collective stalls it; an asynchronous one runs
concurrently from its start to its done, which waits. Copies between memories run the same way. All of them
share the HBM with the instruction on the core. Loops are simulated to steady state and extrapolated. A
conditional takes its costliest branch. If it selects the work of pipeline stages, each stage takes its own
branch in ticks where it has work, then waits for the slowest stage of the tick. The tally is the mean over the
stages; each span names its stage.

Left out: the HBM traffic of collectives, power shared by links and cores, and the host.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache

from meshscope.cost import machine as clock
from meshscope.cost.expert_load import is_exchange
from meshscope.cost.op_cost import OpCost, OpCostModel, copied, part_of
from meshscope.cost.rates import OpTime
from meshscope.errors import SpecError
from meshscope.events.collective import Groups
from meshscope.events.enums import Kind
from meshscope.events.step_time import NO_INTERVAL, TimeEstimate
from meshscope.hardware.interconnect.constants import LinkConstants, constants_of
from meshscope.hardware.interconnect.lines import collective_time, link_loads
from meshscope.hardware.topology import Topology
from meshscope.readers.hlo.attribution import NO_SCOPE, Scope, scope_of
from meshscope.readers.hlo.collectives import ModuleCollectives
from meshscope.readers.hlo.executions import trip_count
from meshscope.readers.hlo.module import Computation, HloModule, Instruction
from meshscope.readers.hlo.operations import Operation
from meshscope.readers.hlo.semantics import KIND_OF_OPCODE

CROSS_PROGRAM = "cross_program_prefetch_index"
BUBBLE = "pipeline"
_MAX_DEPTH = 64
_MAX_USES = 5  # from a copy over its done, the joining of slices and bitcasts to its consumer


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledCollective:
    """The arrays that one scheduled instruction communicates; `seconds` is None if bytes or devices are unknown.

    `links` are those that it occupies; a time outside the measured range `is_extrapolated`.
    """

    operations: tuple[Operation, ...]
    seconds: TimeEstimate | None = None
    links: tuple[Hashable, ...] = ()
    is_extrapolated: bool = False

    @property
    def name(self) -> str:
        """The scheduled instruction's name."""
        return self.operations[0].scheduled_op.instruction.name


def scheduled_collective(
    operations: tuple[Operation, ...],
    topology: Topology,
    constants: LinkConstants | None = None,
    *,
    exchange_load: float = 1.0,
) -> ScheduledCollective:
    """One scheduled instruction with all its arrays, by fitted or calibrated link constants.

    The opcode decides: a reduce-scatter that the compiler implements as an all-reduce costs an
    all-reduce. Combined arrays count as one payload. All-to-alls with experts take `exchange_load` times as long
    as under balanced routing.
    """
    first = operations[0]
    sizes = [o.carried_bytes or o.payload_bytes for o in operations]
    known = [size for size in sizes if size is not None]
    if len(known) < len(sizes) or not first.groups:
        return ScheduledCollective(operations=operations)
    kind = KIND_OF_OPCODE.get(first.opcode, first.kind)
    time = collective_time(
        kind,
        groups=first.groups,
        payload_bytes=sum(known),
        topology=topology,
        algorithm=first.algorithm,
        constants=constants or constants_of(topology.chip),
    )
    is_loaded = is_exchange(kind, part_of(first.site.instruction))
    seconds = TimeEstimate(value_s=time.seconds, low_s=time.low_s, high_s=time.high_s)
    return ScheduledCollective(
        operations=operations,
        seconds=seconds * (exchange_load if is_loaded else 1.0),
        links=_occupied_links(topology, kind, first.groups),
        is_extrapolated=time.is_extrapolated,
    )


@lru_cache(maxsize=4096)
def _occupied_links(topology: Topology, kind: Kind, groups: Groups) -> tuple[Hashable, ...]:
    """Dimensions and directions of the ICI links that a collective uses on any chip, and DCN.

    Collectives that share a link serialize. On chips where one of them is inactive they could overlap;
    this is left out.
    """
    links: set[str] = set()
    if topology.crosses_slices(groups):
        links.add("network")
    try:
        loads = link_loads(kind, groups=groups, payload_bytes=1, topology=topology)
    except SpecError:
        loads = []
    for load in loads:
        at = "xyz".index(load.dim)
        is_up = (load.target[at] > load.source[at]) != load.is_wrap
        links.add(f"{load.dim}{'+' if is_up else '-'}")
    return tuple(sorted(links)) or ("other",)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedSchedule:
    """A stretch of the entry computation that is executed `times` times.

    It begins after the instruction `after` and ends with the instruction `last`.
    """

    after: str
    last: str
    times: int


class Schedule:
    """A module's schedule with the costs of its instructions, which a `SimulatedStep` runs."""

    def __init__(
        self,
        module: HloModule,
        module_collectives: ModuleCollectives,
        op_costs: OpCostModel,
        collective_of: Callable[[tuple[Operation, ...]], ScheduledCollective],
    ) -> None:
        self.module = module
        self.op_costs = op_costs
        self.flow = module_collectives.flow
        self.n_stages = module_collectives.devices.mesh.size("pp")
        self.collectives: dict[str, ScheduledCollective] = {}
        self.issued: dict[int, list[ScheduledCollective]] = {}  # by id of the scheduled instruction
        self.awaited: dict[int, list[str]] = {}  # by id of the instruction with the result
        # The operations of each scheduled instruction; one with several call sites counts once.
        by_site: dict[int, dict[int, list[Operation]]] = {}
        for operation in module_collectives.scheduled:
            sites = by_site.setdefault(id(operation.site.instruction), {})
            sites.setdefault(id(operation.site), []).append(operation)
        for sites in by_site.values():
            collective = collective_of(tuple(next(iter(sites.values()))))
            first = collective.operations[0]
            scheduled = first.scheduled_op
            self.collectives.setdefault(collective.name, collective)
            self.issued.setdefault(id(scheduled.instruction), []).append(collective)
            has_done = scheduled.result is not None
            has_done = has_done and scheduled.result is not scheduled.instruction
            if first.is_async and has_done:
                self.awaited.setdefault(id(scheduled.result), []).append(collective.name)

    def consumer_scope(self, computation: Computation, start: Instruction) -> Scope:
        """The scope with a part that consumes the result of a copy first; without one if the HLO does not name it."""
        users = [start]
        for _ in range(_MAX_USES):
            users = [u for user in users for u in self.flow.users(computation, user)]
            scopes = [scope for user in users if (scope := scope_of(user.op_name)).part is not None]
            if scopes or not users:
                return scopes[0] if scopes else NO_SCOPE
        return NO_SCOPE


class SimulatedStep:
    """One run of a schedule, with some stretches repeated: the machine at its end, and notes on gaps."""

    def __init__(self, schedule: Schedule, folds: Sequence[FoldedSchedule] = ()) -> None:
        self.schedule = schedule
        self.collectives = schedule.collectives
        self._marks: dict[str, clock.Mark | None] = dict.fromkeys(fold.after for fold in folds)
        self._folds = {fold.last: fold for fold in folds}
        self.machine = clock.Machine()
        self.op_costs: dict[str, OpCost] = {}
        self.copied_bytes: dict[str, int] = {}
        self.notes: list[str] = []
        self._in_flight: dict[str, clock.InFlight] = {}
        self._opcodes: dict[str, str] = {}
        self._ticks: Counter[Hashable] = Counter()  # executions by the stages of a conditional
        self.execute(schedule.module.entry, depth=0)

    @property
    def unestimated(self) -> list[str]:
        """The collectives without an estimate."""
        return [name for name, one in self.collectives.items() if one.seconds is None]

    def execute(self, computation: Computation, *, depth: int) -> None:
        """Runs the instructions of a computation in order."""
        assert depth < _MAX_DEPTH, "the reader refuses calls that nest deeper"
        awaited = self.schedule.awaited
        for instruction in computation.instructions:
            issued = self.schedule.issued.get(id(instruction), ())
            if issued and instruction.opcode == "custom-call":
                self._run_kernel(computation, instruction, issued)
            else:
                for collective in issued:
                    self._issue(collective)
                self._work(computation, instruction, depth, is_collective=bool(issued))
                for name in awaited.get(id(instruction), ()):
                    self._await(name)
                if instruction.opcode.endswith("-done") and id(instruction) not in awaited:
                    self._done(computation, instruction)
            name = instruction.name
            if (fold := self._folds.get(name)) and (mark := self._marks[fold.after]):
                self.machine.repeat_since(mark, fold.times - 1)
            if name in self._marks:
                self._marks[name] = self.machine.mark()

    def _work(
        self, computation: Computation, instruction: Instruction, depth: int, *, is_collective: bool
    ) -> None:
        opcode = instruction.opcode
        if opcode == "while":
            self._loop(computation, instruction, depth)
        elif opcode == "call":
            for inner in self._called(instruction, "to_apply"):
                self.execute(inner, depth=depth + 1)
        elif opcode == "conditional":
            self._branch(instruction, depth)
        elif opcode.endswith("-start") and not is_collective:
            self._start_copy(computation, instruction)
        elif instruction.estimated_cycles is not None or not (
            is_collective or id(instruction) in self.schedule.awaited
        ):
            # A fusion around a collective, or its done, without an estimate does nothing else.
            self._compute(computation, instruction)

    def _compute(self, computation: Computation, instruction: Instruction) -> None:
        cost = self.schedule.op_costs.cost(computation, instruction)
        if cost is None:
            return
        self.op_costs[instruction.name] = cost
        self.machine.run(self._task(instruction, clock.CORE_LANE, cost.time, part_of(instruction)))

    def _run_kernel(
        self,
        computation: Computation,
        instruction: Instruction,
        issued: Sequence[ScheduledCollective],
    ) -> None:
        """Runs a kernel that communicates while it computes, if the work of either is known."""
        in_flight = [self._issued(collective) for collective in issued]
        cost = self.schedule.op_costs.cost(computation, instruction)
        if cost is not None and cost.is_known:
            self._compute(computation, instruction)
        for collective in in_flight:
            self.machine.wait(collective)

    def _issue(self, collective: ScheduledCollective) -> None:
        first = collective.operations[0]
        issued = self._issued(collective)
        if not first.is_async:
            self.machine.wait(issued)
            return
        self._in_flight[collective.name] = issued
        opcode = first.scheduled_op.instruction.opcode
        self._opcodes[collective.name] = opcode.removesuffix("-start")
        if first.scheduled_op.result is None:
            self.notes.append(f"'{collective.name}' has no done; treated as synchronous")
            self._await(collective.name)

    def _issued(self, collective: ScheduledCollective) -> clock.InFlight:
        seconds, key = collective.seconds, (clock.LINK_LANE, collective.name)
        seconds_s = 0.0 if seconds is None else seconds.value_s
        task = clock.Task(name=collective.name, lane=clock.LINK_LANE, seconds=seconds_s, key=key)
        return self.machine.issue(task, collective.links)

    def _await(self, name: str) -> None:
        if (issued := self._in_flight.pop(name, None)) is not None:
            self.machine.wait(issued)

    def _start_copy(self, computation: Computation, start: Instruction) -> None:
        """Starts a copy, attributed to the part that consumes it, the first of several.

        A prefetch across programs runs in the first step only if the end of each step repeats it.
        """
        if CROSS_PROGRAM in start.attributes:
            copies = [i for i in computation.instructions if i.opcode == start.opcode]
            if sum(copy.operands == start.operands for copy in copies) > 1:
                return
        moved = copied(start)
        time = self.schedule.op_costs.rates.roofline(moved=moved)
        self.copied_bytes[start.name] = moved.hbm_bytes
        part = part_of(start)
        if part is None and (consumer := self.schedule.consumer_scope(computation, start).part):
            part = consumer.value
        task = self._task(start, clock.COPY_LANE, time, part)
        self._in_flight[start.name] = self.machine.fetch(task)

    def _done(self, computation: Computation, done: Instruction) -> None:
        """Awaits a copy, or the oldest collective of this opcode, started in an earlier iteration."""
        start = computation.producer(done)
        if start is not None and start.name in self._in_flight:
            self._await(start.name)
            return
        base = done.opcode.removesuffix("-done")
        matches = [name for name in self._in_flight if self._opcodes.get(name) == base]
        if matches and base in KIND_OF_OPCODE:
            self._await(matches[0])

    def _loop(self, computation: Computation, loop: Instruction, depth: int) -> None:
        trips = trip_count(self.schedule.module, loop, computation)
        if isinstance(trips, str):
            self.notes.append(f"{NO_INTERVAL}{trips}; simulated once")
        bodies = self._called(loop, "body")

        def body() -> None:
            for inner in bodies:
                self.execute(inner, depth=depth + 1)

        n = 1 if isinstance(trips, str) else trips
        conditionals = [i for b in bodies for i in b.instructions if i.opcode == "conditional"]
        scopes = [scope for c in conditionals for scope in self._stage_scopes(c).values()]
        if any(scope.n_ticks > 1 for scope in scopes):
            for _ in range(n):  # a stage is idle in the first or in the last ticks
                body()
        else:
            self.machine.repeat(n, body)

    def _branch(self, conditional: Instruction, depth: int) -> None:
        """Runs the costliest branch; stages of a pipeline run their own, and wait for the slowest."""
        before, n_spans = self.machine, len(self.machine.spans)
        ends: list[tuple[clock.Machine, dict[str, clock.InFlight]]] = []
        for branch in self._branches(conditional):
            copies = {id(shared): shared.copy() for shared in (before.spans, before.tally)}
            saved, self.machine = self._in_flight, deepcopy(before, copies)
            self._in_flight = deepcopy(saved, copies)
            self.execute(branch, depth=depth + 1)
            ends.append((self.machine, self._in_flight))
            self._in_flight = saved
        if not ends:
            return
        by_cost = sorted(range(len(ends)), key=lambda at: ends[at][0].now_s)
        owned = self._branches_of_stages(conditional, costliest=by_cost[-1])
        if owned is None:
            self.machine, self._in_flight = ends[by_cost[-1]]
            return
        taken = [owned.get(stage, by_cost[0]) for stage in range(self.schedule.n_stages)]
        self.machine, self._in_flight = ends[max(taken, key=by_cost.index)]
        self._join_stages([machine for machine, _ in ends], taken, n_spans)

    def _join_stages(
        self, machines: Sequence[clock.Machine], taken: Sequence[int], n_spans: int
    ) -> None:
        """Gives this machine, of the slowest branch, the spans of all branches taken and the mean tally.

        `taken` has the branch of each stage.
        """
        machine, end_s = self.machine, self.machine.now_s
        tally, spans = clock.Machine().tally, machine.spans[:n_spans]
        for branch in sorted(set(taken), key=lambda at: machines[at] is not machine):
            stages = tuple(stage for stage, at in enumerate(taken) if at == branch)
            machines[branch].wait_until(end_s, BUBBLE)
            for key, value in machines[branch].tally.items():
                tally[key] += value * len(stages) / len(taken)
            spans += [replace(span, stages=stages) for span in machines[branch].spans[n_spans:]]
        machine.tally, machine.spans = tally, spans

    def _branches_of_stages(
        self, conditional: Instruction, *, costliest: int
    ) -> dict[int, int] | None:
        """The branch of each stage that has work in this tick; None outside of a pipeline."""
        scopes = self._stage_scopes(conditional)
        if not scopes:
            return None
        key = tuple(scope.stages for scope in scopes.values())
        self._ticks[key] += 1
        return {
            stage: costliest if branch is None else branch
            for branch, scope in scopes.items()
            for stage in scope.stages or ()
            if 0 <= (self._ticks[key] - 1) % scope.n_ticks - stage < scope.n_microbatches
            or scope.n_ticks == 1
        }

    def _stage_scopes(self, conditional: Instruction) -> dict[int | None, Scope]:
        """The scopes with stages of the branches by number; None is the costliest branch; a layer's own selects no stage."""
        outer = scope_of(conditional.op_name)
        if outer.part is not None:
            return {}
        scopes: dict[int | None, Scope] = {None: outer}
        if outer.stages is None:
            names = [[i.op_name for i in b.instructions] for b in self._branches(conditional)]
            inner = [[s for s in map(scope_of, of_branch) if s.stages] for of_branch in names]
            scopes = {at: of_branch[0] for at, of_branch in enumerate(inner) if of_branch}
        known = range(self.schedule.n_stages)
        return {at: s for at, s in scopes.items() if s.stages and s.stages[-1] in known}

    def _branches(self, conditional: Instruction) -> list[Computation]:
        names = (name for names in conditional.called.values() for name in names)
        return [self.schedule.module.computation(name, conditional) for name in names]

    def _task(
        self, instruction: Instruction, lane: str, time: OpTime, part: str | None
    ) -> clock.Task:
        key: tuple[Hashable, ...] = (lane, instruction.name, part, time.basis)
        return clock.Task(
            name=instruction.name,
            lane=lane,
            seconds=time.seconds.value_s,
            hbm_s=time.hbm_s,
            key=key,
        )

    def _called(self, caller: Instruction, attribute: str) -> list[Computation]:
        names = caller.called.get(attribute, ())
        return [self.schedule.module.computation(name, caller) for name in names]
