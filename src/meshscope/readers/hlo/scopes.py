"""Gives the instructions of a foreign module the scopes of this package: `phase/layer{i}/part`.

Names come first: an instruction's, else the names of the largest weight that it reads. What has no name
belongs where its users belong if they agree, else where its operands do. Layers without names are counted:
a new one begins where attention depends on the MLP before it.
"""

from collections.abc import Iterator
from dataclasses import replace

from meshscope.events.enums import Part, Phase
from meshscope.readers.hlo.attribution import (
    NO_SCOPE,
    OUTSIDE_LAYERS,
    Scope,
    ScopeReader,
    scope_of,
)
from meshscope.readers.hlo.dataflow import MOVEMENT, Dataflow
from meshscope.readers.hlo.executions import runs_called_computations, trip_count
from meshscope.readers.hlo.module import Computation, HloModule, Instruction
from meshscope.readers.hlo.semantics import KIND_OF_OPCODE

_GATHERS = ("all-gather", "collective-broadcast")
_BEHIND_PARTS = frozenset({Part.LM_HEAD, Part.SAMPLE})
_MIXTURE = "moe."
# Opcodes that pass on a weight: moves, and what the compiler prefetches and unpacks it with.
_PASSES = MOVEMENT | frozenset(
    {"convert", "bitcast-convert", "get-tuple-element", "slice", "dynamic-slice"}
    | {"slice-start", "slice-done"}
)
_WITHOUT_WORK = frozenset({"parameter", "constant", "bitcast", "get-tuple-element", "tuple"})
_MAX_DEPTH = 64

# The position of an instruction along the residual stream: the layer, and whether its attention is done.
_Position = tuple[int, bool]
_BEFORE: _Position = (-1, True)
_BEHIND: _Position = (10**9, True)


def _path(phase: Phase | None, layers: range | None, part: Part | None) -> str:
    """The scopes, e.g. `decode/layer3/attn`; empty if nothing is known."""
    pieces: list[str] = [phase] if phase is not None else []
    if layers is not None and part not in OUTSIDE_LAYERS:
        step = f"by{layers.step}" if layers.step > 1 else ""
        one = f"layer{layers[0]}"
        pieces.append(one if len(layers) == 1 else f"layers{layers[0]}-{layers[-1]}{step}")
    elif part is None:
        return ""
    return "/".join([*pieces, *([part] if part is not None else [])])


def with_scopes(module: HloModule) -> HloModule:
    """The module with a scope on every instruction whose phase, layer or part could be determined.

    A module with scopes of this package is returned as is.
    """
    scopes_of_text = (scope_of(i.op_name) for i in module.instructions)
    is_named = any(s.phase is not None and s.missing is None for s in scopes_of_text)
    if is_named:
        return module
    placement = _Placement(module, ScopeReader(module))
    placement.place(module.entry, NO_SCOPE, depth=0)
    computations = dict(module.computations)
    for name, computation in module.computations.items():
        if scopes := placement.scopes.get(name):
            instructions = (
                replace(i, scope=scope) if (scope := scopes.get(i.name)) else i
                for i in computation.instructions
            )
            computations[name] = replace(computation, instructions=tuple(instructions))
    return replace(module, computations=computations)


class _Placement:
    def __init__(self, module: HloModule, reader: ScopeReader) -> None:
        self._module = module
        self._reader = reader
        self.flow = Dataflow(module)
        self.scopes: dict[str, dict[str, str]] = {}
        self._names: dict[int, Scope] = {}
        names = [self.name(i) for c in self._scheduled() for i in c.instructions]
        phases = {name.phase for name in names if name.phase is not None}
        self._phase = phases.pop() if len(phases) == 1 else None
        self._has_layers = any(name.layers is not None for name in names)
        # A training step passes its layers forward and backward: their order is not their number.
        self._is_counted = self._phase is not Phase.STEP

    def place(
        self, computation: Computation, outer: Scope, *, depth: int, is_loop: bool = False
    ) -> None:
        """Places the instructions of a computation called from `outer`, which may be a loop over layers, several in its body."""
        if computation.name in self.scopes or depth > _MAX_DEPTH:
            return
        self.scopes[computation.name] = scopes = {}
        is_counted = is_loop or (self._is_counted and not self._has_layers)
        flow = _Flow(self, computation, is_counted=is_counted)
        for instruction in computation.instructions:
            if instruction.opcode == "parameter" and not is_loop:
                continue
            place = flow.places[instruction.name]
            if is_loop and outer.layers is not None:
                first = outer.layers[0] + (place.layers[0] if place.layers else 0)
                place = replace(place, layers=range(first, outer.layers[-1] + 1, flow.n_layers))
            elif outer.layers is not None or place.part is None:
                layers, part = outer.layers or place.layers, place.part or outer.part
                place = Scope(layers=layers, part=part)
            scopes[instruction.name] = _path(self._phase, place.layers, place.part)
            has_layers = place.layers is not None and len(place.layers) > 1
            has_layers = has_layers and instruction.opcode == "while" and not is_loop
            for callee in self.callees(instruction):
                if instruction.opcode == "fusion":
                    self._place_fused(callee, place)
                else:
                    self.place(callee, place, depth=depth + 1, is_loop=has_layers)

    def _place_fused(self, fused: Computation, place: Scope, depth: int = 0) -> None:
        """Places the instructions of a fusion where it is, in the parts that they name."""
        if fused.name in self.scopes or depth > _MAX_DEPTH:
            return
        self.scopes[fused.name] = scopes = {}
        for instruction in fused.instructions:
            if instruction.opcode in _WITHOUT_WORK:
                continue
            part = self.name(instruction).part or place.part
            scopes[instruction.name] = _path(self._phase, place.layers, part)
            if instruction.opcode == "fusion":
                for callee in self.callees(instruction):
                    self._place_fused(callee, place, depth + 1)

    def name(self, instruction: Instruction) -> Scope:
        """What the instruction's own names say."""
        if (key := id(instruction)) not in self._names:
            self._names[key] = self._reader.scope(instruction)
        return self._names[key]

    def _scheduled(self) -> list[Computation]:
        """The entry, and the computations that it runs other than in fusions."""
        reached = {self._module.entry.name: self._module.entry}
        pending = [self._module.entry]
        while pending:
            for instruction in pending.pop().instructions:
                if instruction.opcode != "fusion":
                    called = [c for c in self.callees(instruction) if c.name not in reached]
                    reached |= {c.name: c for c in called}
                    pending += called
        return list(reached.values())

    def callees(self, instruction: Instruction) -> Iterator[Computation]:
        """The computations that an instruction runs, fusions included."""
        if instruction.opcode == "fusion" or runs_called_computations(instruction):
            for names in instruction.called.values():
                yield from (c for n in names if (c := self._module.computations.get(n)) is not None)

    def inner_parts(self, computation: Computation, depth: int = 0) -> set[Part]:
        """The parts that names in a computation and its callees say."""
        parts = {self.name(i).part for i in computation.instructions}
        if depth < _MAX_DEPTH:
            for instruction in computation.instructions:
                for callee in self.callees(instruction):
                    parts |= self.inner_parts(callee, depth + 1)
        return {part for part in parts if part is not None}

    def looped_layers(self, computation: Computation, instruction: Instruction) -> int:
        """Layers that a loop executes: its trips times its body's layers; 0 if it is no loop over layers."""
        if instruction.opcode != "while" or not self._is_counted:
            return 0
        trips = trip_count(self._module, instruction, computation)
        names = instruction.called.get("body", ())
        body = self._module.computations.get(names[0]) if names else None
        if body is None or isinstance(trips, str) or trips < 2:
            return 0
        parts = self.inner_parts(body)
        if Part.ATTN not in parts or not any(_is_behind_attention(part) for part in parts):
            return 0
        return trips * _Flow(self, body, is_counted=True).n_layers


def _is_behind_attention(part: Part | None) -> bool:
    return part is Part.MLP or (part is not None and part.value.startswith(_MIXTURE))


class _Flow:
    """The places of the instructions of one computation, by the names in it and its data flow."""

    def __init__(
        self, placement: _Placement, computation: Computation, *, is_counted: bool
    ) -> None:
        self._placement = placement
        self._computation = computation
        self._is_counted = is_counted
        self._producers = {i.name: computation.producers(i) for i in computation.instructions}
        self._weights: dict[str, tuple[Scope, int]] = {}  # scope and bytes
        self._named = {i.name: self._name(i) for i in computation.instructions}
        self._has_embedding = any(n.part is Part.EMBED for n in self._named.values())
        self._loops = {
            i.name: n
            for i in computation.instructions
            if (n := placement.looped_layers(computation, i))
        }
        self._positions: dict[str, _Position | None] = {}
        self._shared: set[str] = set()  # computed once, ahead of the layers that use it
        self._place_along_stream()
        self.places: dict[str, Scope] = {}
        self._place_by_users()
        self._place_by_producers()

    @property
    def n_layers(self) -> int:
        """Layers of the computation; at least 1."""
        layers = [p[0] for p in self._positions.values() if p not in (None, _BEFORE, _BEHIND)]
        return max((layer + 1 for layer in layers if layer >= 0), default=1)

    def _users(self, instruction: Instruction) -> list[Instruction]:
        return self._placement.flow.users(self._computation, instruction)

    def _name(self, instruction: Instruction) -> Scope:
        """What the instruction's names say, else the names of the largest weight that it reads."""
        name, producers = self._placement.name(instruction), self._producers[instruction.name]
        if instruction.opcode == "parameter":
            n_bytes = sum(array.n_bytes or 0 for array in instruction.arrays)
            self._weights[instruction.name] = (name, n_bytes)
            return name
        read = [self._weights[p.name] for p in producers if p.name in self._weights]
        if not read:
            return name
        weight, n_bytes = max(read, key=lambda scope_and_bytes: scope_and_bytes[1])
        passes = instruction.opcode in _PASSES or instruction.custom_call_target == "ConcatBitcast"
        if passes and len(read) == len(producers):
            self._weights[instruction.name] = (weight, n_bytes)
            name = Scope(phase=name.phase, layers=weight.layers, part=weight.part)
        return Scope(
            phase=name.phase,
            layers=name.layers or weight.layers,
            part=name.part or weight.part,
        )

    def _place_along_stream(self) -> None:
        """Positions along the residual stream, first from producers, then from users."""
        for instruction in self._computation.instructions:
            before = [self._positions.get(p.name) for p in self._producers[instruction.name]]
            furthest = max((p for p in before if p is not None), default=None)
            self._positions[instruction.name] = self._position(instruction, furthest)
        for instruction in reversed(self._computation.instructions):
            if self._positions[instruction.name] is None:
                users = [user.name for user in self._users(instruction)]
                known = [p for name in users if (p := self._positions[name]) is not None]
                if len({layer for layer, _ in known}) > 1 or not self._shared.isdisjoint(users):
                    self._shared.add(instruction.name)
                else:
                    self._positions[instruction.name] = min(known, default=None)

    def _position(self, instruction: Instruction, before: _Position | None) -> _Position | None:
        """The position of an instruction after its furthest producer; None if it depends on no layer."""
        name = self._named[instruction.name]
        if n_layers := self._loops.get(instruction.name):
            first = 0 if before is None else before[0] + before[1]
            return first + n_layers - 1, True
        if name.part in _BEHIND_PARTS and before is not None:
            return _BEHIND
        if name.part is Part.EMBED:
            return before or _BEFORE
        if name.layers is not None:
            (layer,) = name.layers
            is_same = before is not None and before[0] == layer and before[1]
            return layer, _is_behind_attention(name.part) or (is_same and name.part is None)
        if not self._is_counted or name.part is None or before == _BEHIND:
            return before
        return self._counted(name.part, before)

    def _counted(self, part: Part, before: _Position | None) -> _Position | None:
        """The position of a part of a layer by its order: attention after an MLP begins a layer."""
        if before is None:
            return None if self._has_embedding else (0, _is_behind_attention(part))
        if _is_behind_attention(part):
            return max(0, before[0]), True
        return (before[0] + 1, False) if part is Part.ATTN and before[1] else before

    def _placed(self, instruction: Instruction, part: Part | None) -> Scope:
        position = self._positions[instruction.name]
        if n_layers := self._loops.get(instruction.name):
            assert position is not None
            return Scope(layers=range(position[0] - n_layers + 1, position[0] + 1))
        is_inside = position is not None and position not in (_BEFORE, _BEHIND) and position[0] >= 0
        layers = range(position[0], position[0] + 1) if is_inside and position else None
        return Scope(layers=layers, part=part)

    def _place_by_users(self) -> None:
        """Places what has a name, and what is used in one place only."""
        for instruction in reversed(self._computation.instructions):
            part = self._named[instruction.name].part
            if part is None and instruction.name in self._shared:
                part = Part.EMBED
            if part is not None or instruction.name in self._loops:
                self.places[instruction.name] = self._placed(instruction, part)
                continue
            is_gather = instruction.opcode.startswith(_GATHERS)
            if is_gather or not _communicates(self._placement, instruction):
                places = (self.places.get(u.name) for u in self._users(instruction))
                used = {place for place in places if place is not None and place.part is not None}
                if len(used) == 1:
                    self.places[instruction.name] = used.pop()

    def _place_by_producers(self) -> None:
        """Places the others where the producer that is furthest along the stream is."""
        for instruction in self._computation.instructions:
            if instruction.name in self.places:
                continue
            placed = {  # producers that are of one place
                p.name: self.places[p.name]
                for p in self._producers[instruction.name]
                if p.opcode != "parameter" and p.name not in self._shared
            }
            names = [name for name, place in placed.items() if place.part is not None]
            place = self._placed(instruction, None)
            if names:
                place = placed[max(names, key=lambda name: self._positions[name] or _BEFORE)]
                if _communicates(self._placement, instruction) and place.part is Part.MOE_EXPERTS:
                    place = replace(place, part=Part.MOE_COMBINE)
            self.places[instruction.name] = place


def _communicates(placement: _Placement, instruction: Instruction) -> bool:
    inner = [instruction]
    if instruction.opcode == "fusion" or instruction.opcode.endswith("-start"):
        inner += [i for c in placement.callees(instruction) for i in c.instructions]
    names = (i.opcode.removesuffix("-start").removesuffix("-done") for i in inner)
    return any(name in KIND_OF_OPCODE for name in names)
