"""The walk of a compiled schedule: what a device does in one step, in the order of issue.

The order of instructions is the order of issue. The core works on one instruction at a time; a
synchronous collective stops it; an asynchronous one runs beside it from its start to its done, which
waits; so do copies between memories, one after the other. Loops repeat their body. Of a conditional
the dearest branch runs: where it is that of a pipeline's stages, in the ticks in which a stage has
work, and in the others the device waits for the slowest stage.

Left out: that copies and the core share the HBM's rate, that links and cores share power, and what
the host does.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

from meshscope.cost.machine import (
    ON_COPIES,
    ON_CORE,
    ON_LINKS,
    InFlight,
    Machine,
    Span,
    Task,
)
from meshscope.cost.op_cost import OpCosts, Work, copied_bytes, part_of
from meshscope.cost.rates import OpCost
from meshscope.cost.scheduled_collectives import CollectiveEstimate, CollectiveEstimates
from meshscope.events.step_time import TimeEstimate
from meshscope.readers.hlo.attribution import scope_of
from meshscope.readers.hlo.collectives import ModuleCollectives
from meshscope.readers.hlo.loops import trip_count
from meshscope.readers.hlo.module import Computation, HloModule, Instruction
from meshscope.readers.hlo.operations import Operation
from meshscope.readers.hlo.semantics import KIND_OF_OPCODE

Pick = Callable[[TimeEstimate], float]
_COPY_ENGINE = ("copies",)
BUBBLE = "pipeline"
_MAX_DEPTH = 64
_MAX_HANDS = 3  # from the start of a copy over its done and a bitcast to who computes with it


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledCollective:
    """A collective where the schedule issues it: the arrays that one instruction carries."""

    operations: tuple[Operation, ...]
    price: CollectiveEstimate | None

    @property
    def name(self) -> str:
        """The scheduled instruction's name."""
        return self.operations[0].scheduled_op.instruction.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Walked:
    """A step on the machine: its clock and tally at the end, its spans, and what doubts there are."""

    machine: Machine
    collectives: Mapping[str, ScheduledCollective]
    works: Mapping[str, Work]
    copied_bytes: Mapping[str, int]
    unpriced: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def spans(self) -> list[Span]:
        """What ran when, repetitions folded."""
        return self.machine.spans


class SimulatedSchedule:
    """A module's schedule with every price found once; `walk` plays it."""

    def __init__(
        self,
        module: HloModule,
        found: ModuleCollectives,
        prices: OpCosts,
        wires: CollectiveEstimates,
    ) -> None:
        self.module = module
        self.prices = prices
        self.flow = found.flow
        self.collectives: dict[str, ScheduledCollective] = {}
        self.issued: dict[int, list[ScheduledCollective]] = {}  # by id of the anchor
        self.awaited: dict[int, list[str]] = {}  # by id of the instruction that holds a result
        for operations in _by_instruction(found.scheduled):
            self._add(ScheduledCollective(operations=operations, price=wires.price(operations)))

    def _add(self, collective: ScheduledCollective) -> None:
        first = collective.operations[0]
        anchor = first.scheduled_op
        self.collectives.setdefault(collective.name, collective)
        self.issued.setdefault(id(anchor.instruction), []).append(collective)
        has_end = anchor.result is not None and anchor.result is not anchor.instruction
        if first.is_async and has_end:
            self.awaited.setdefault(id(anchor.result), []).append(collective.name)

    def part_that_uses(self, computation: Computation, start: Instruction) -> str | None:
        """The part of the model that uses the result of a copy; None where the text does not tell."""
        users = [start]
        for _ in range(_MAX_HANDS):
            users = [u for user in users for u in self.flow.users(computation, user)]
            parts = [part for user in users if (part := part_of(user)) is not None]
            if parts or not users:
                return parts[0] if parts else None
        return None

    def walk(self, pick: Pick) -> Walked:
        """One run of the module; `pick` takes the low, the middle or the high end of a duration."""
        assert self.module.entry is not None
        player = _Simulator(self, pick)
        player.play(self.module.entry, depth=0)
        unpriced = [c.name for c in self.collectives.values() if c.price is None]
        return Walked(
            machine=player.machine,
            collectives=self.collectives,
            works=player.works,
            copied_bytes=player.copied_bytes,
            unpriced=tuple(unpriced),
            notes=tuple(dict.fromkeys(player.notes)),
        )


def _by_instruction(operations: tuple[Operation, ...]) -> list[tuple[Operation, ...]]:
    """The operations of each scheduled instruction; one reached by several calls counts once."""
    by_site: dict[int, dict[int, list[Operation]]] = {}
    for operation in operations:
        sites = by_site.setdefault(id(operation.site.instruction), {})
        sites.setdefault(id(operation.site), []).append(operation)
    return [tuple(next(iter(sites.values()))) for sites in by_site.values()]


class _Simulator:
    """Plays computations on a machine."""

    def __init__(self, schedule: SimulatedSchedule, pick: Pick) -> None:
        self.schedule = schedule
        self.pick = pick
        self.machine = Machine()
        self.works: dict[str, Work] = {}
        self.copied_bytes: dict[str, int] = {}
        self.notes: list[str] = []
        self._under_way: dict[str, InFlight] = {}
        self._opcodes: dict[str, str] = {}

    def play(self, computation: Computation, *, depth: int) -> None:
        """Runs the instructions of a computation in order."""
        assert depth < _MAX_DEPTH, "the reader refuses calls that nest deeper"
        for instruction in computation.instructions:
            self._play_one(computation, instruction, depth)

    def _play_one(self, computation: Computation, instruction: Instruction, depth: int) -> None:
        issued = self.schedule.issued.get(id(instruction), ())
        for collective in issued:
            self._issue(collective)
        self._work_on(computation, instruction, depth, is_collective=bool(issued))
        for name in self.schedule.awaited.get(id(instruction), ()):
            self._await(name)
        if instruction.opcode.endswith("-done") and id(instruction) not in self.schedule.awaited:
            self._done(computation, instruction)

    def _work_on(
        self, computation: Computation, instruction: Instruction, depth: int, *, is_collective: bool
    ) -> None:
        """What the instruction asks of the core, or runs through other computations."""
        opcode = instruction.opcode
        if opcode == "while":
            self._loop(computation, instruction, depth)
        elif opcode == "call":
            for inner in self._called(instruction, "to_apply"):
                self.play(inner, depth=depth + 1)
        elif opcode == "conditional":
            self._branch(instruction, depth)
        elif opcode.endswith("-start") and not is_collective:
            self._start_copy(computation, instruction)
        elif instruction.estimated_cycles is not None or not (
            is_collective or id(instruction) in self.schedule.awaited
        ):
            # A fusion around a collective, or its end, without an estimate of its own does nothing else.
            self._compute(computation, instruction)

    def _compute(self, computation: Computation, instruction: Instruction) -> None:
        work = self.schedule.prices.work(computation, instruction)
        if work is None:
            return
        self.works[instruction.name] = work
        seconds = self.pick(work.price.seconds)
        self.machine.run(_task(instruction, ON_CORE, seconds, work.price, part_of(instruction)))

    def _issue(self, collective: ScheduledCollective) -> None:
        """A synchronous collective is awaited at once; one without a price takes no time here, and is told."""
        first = collective.operations[0]
        seconds = self.pick(collective.price.seconds) if collective.price else 0.0
        resources = collective.price.resources if collective.price else ()
        task = Task(
            name=collective.name,
            lane=ON_LINKS,
            seconds=seconds,
            key=("collective", collective.name),
        )
        flight = self.machine.issue(task, resources)
        if not first.is_async:
            self.machine.wait(flight)
            return
        self._under_way[collective.name] = flight
        self._opcodes[collective.name] = first.scheduled_op.instruction.opcode.removesuffix(
            "-start"
        )
        if first.scheduled_op.result is None:
            self.notes.append(f"where '{collective.name}' ends is not told; taken as synchronous")
            self._await(collective.name)

    def _await(self, name: str) -> None:
        if (flight := self._under_way.pop(name, None)) is not None:
            self.machine.wait(flight)

    def _start_copy(self, computation: Computation, start: Instruction) -> None:
        """A copy belongs to the part that uses what it brings; one for several parts, to the first."""
        price = self.schedule.prices.copied(start)
        self.copied_bytes[start.name] = copied_bytes(start)
        part = part_of(start) or self.schedule.part_that_uses(computation, start)
        task = _task(start, ON_COPIES, self.pick(price.seconds), price, part)
        self._under_way[start.name] = self.machine.issue(task, _COPY_ENGINE)

    def _done(self, computation: Computation, done: Instruction) -> None:
        """The end of a copy, or of something that was started in an earlier iteration: the oldest of its sort."""
        start = computation.producer(done)
        if start is not None and start.name in self._under_way:
            self._await(start.name)
            return
        base = done.opcode.removesuffix("-done")
        open_names = [n for n in self._under_way if self._opcodes.get(n) == base]
        if open_names and base in KIND_OF_OPCODE:
            self._await(open_names[0])

    def _loop(self, computation: Computation, loop: Instruction, depth: int) -> None:
        found = trip_count(self.schedule.module, loop, computation)
        if found.count is None:
            self.notes.append(f"{found.reason}; taken once")
        bodies = self._called(loop, "body")

        def body() -> None:
            for inner in bodies:
                self.play(inner, depth=depth + 1)

        self.machine.repeat(1 if found.count is None else found.count, body)

    def _branch(self, conditional: Instruction, depth: int) -> None:
        """The dearest branch; a stage of a pipeline takes it in some ticks and waits in the others."""
        branches = [
            self.schedule.module.computation(name, conditional)
            for names in conditional.called.values()
            for name in names
        ]
        costs = [self._cost(branch, depth) for branch in branches]
        if not branches or max(costs) <= 0:
            return
        dearest = branches[costs.index(max(costs))]
        busy_frac = self._busy_frac(conditional, dearest)
        if busy_frac == 1:
            self.play(dearest, depth=depth + 1)
            return
        machine = self.machine
        before_s, before = machine.now_s, dict(machine.tally)
        self.play(dearest, depth=depth + 1)
        for key in list(machine.tally):
            grown = machine.tally[key] - before.get(key, 0)
            machine.tally[key] -= (1 - busy_frac) * grown
        machine.tally["idle", BUBBLE] += (1 - busy_frac) * (machine.now_s - before_s)

    def _cost(self, branch: Computation, depth: int) -> float:
        """Seconds of a branch by itself."""
        player = _Simulator(self.schedule, self.pick)
        player.play(branch, depth=depth + 1)
        return player.machine.now_s

    def _busy_frac(self, conditional: Instruction, branch: Computation) -> float:
        """The share of a pipeline's ticks in which a stage has work; 1 outside of a pipeline's loop."""
        names = (conditional.op_name, *(i.op_name for i in branch.instructions))
        scopes = (scope_of(name) for name in names if name)
        scope = next((s for s in scopes if s.stages is not None and s.n_ticks > 1), None)
        return 1.0 if scope is None else scope.n_microbatches / scope.n_ticks

    def _called(self, caller: Instruction, attribute: str) -> list[Computation]:
        names = caller.called.get(attribute, ())
        return [self.schedule.module.computation(name, caller) for name in names]


def _task(
    instruction: Instruction, lane: str, seconds: float, price: OpCost, part: str | None
) -> Task:
    key: tuple[Hashable, ...] = (lane, instruction.name, part, price.basis)
    return Task(name=instruction.name, lane=lane, seconds=seconds, key=key)
