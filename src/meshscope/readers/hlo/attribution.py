"""Which phase, layer and part of the model an instruction belongs to, read from its scopes."""

import re
from dataclasses import dataclass

from meshscope.events.enums import Part, Phase

MAX_LAYERS = 10_000  # a range beyond is no layer of a model, nor a stage of a pipeline

_UNIQUIFIER = re.compile(r"\.\d+$")
_LAYERS = re.compile(r"layer(?:(\d+)|s(\d+)-(\d+)(?:by(\d+))?)")
_STAGES = re.compile(r"stage(?:(\d+)|s(\d+)-(\d+)(?:by(\d+))?)")
_MICROBATCHES = re.compile(r"microbatches(\d+)of(\d+)")
_PHASES = {phase.value: phase for phase in Phase}
_PARTS = {part.value: part for part in Part}
# Parts that stand outside the layers.
OUTSIDE_LAYERS = frozenset({Part.EMBED, Part.LM_HEAD, Part.STAGE, Part.SAMPLE})


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What the scopes of an `op_name` say; `layers` are those that one instruction stands for.

    Where stages of a pipeline share an instruction, they are those of the first of `stages`; each
    stage behind it has the `stage_layers` layers after those of the stage before. Of the `n_ticks`
    ticks of a pipeline, a stage takes the branch of the instruction in `n_microbatches`.
    """

    phase: Phase | None
    layers: range | None
    part: Part | None
    stages: range | None = None
    stage_layers: int = 0
    n_microbatches: int = 1
    n_ticks: int = 1

    @property
    def n_layers(self) -> int:
        """Layers of one stage that one instruction stands for; 1 outside layers."""
        return len(self.layers) if self.layers else 1

    @property
    def n_times(self) -> int:
        """Of what the executions of an instruction are a multiple: its layers, in every tick."""
        return self.n_layers * self.n_ticks

    @property
    def is_every_tick(self) -> bool:
        """Whether stages run the operations of one layer in all ticks, busy or not, each written out."""
        return self.n_microbatches == self.n_ticks > 1 and self.n_layers == 1

    @property
    def missing(self) -> str | None:
        """Which of phase, layer and part the scopes do not name; None when all is told."""
        needs_layer = self.part is not None and self.part not in OUTSIDE_LAYERS
        names = [
            name
            for name, is_missing in (
                ("phase", self.phase is None),
                ("layer", needs_layer and self.layers is None),
                ("part", self.part is None),
            )
            if is_missing
        ]
        return " and ".join(names) or None


NO_SCOPE = Scope(phase=None, layers=None, part=None)


def scope_of(op_name: str | None) -> Scope:
    """The scope that a path like `jit(f)/prefill/layer3/mlp/psum` names.

    The contract with the programs: `prefill|decode`, then `layer{i}`, `layers{first}-{last}` or
    `layers{first}-{last}by{step}`, then a part, in this order, with whatever the framework puts
    between them. In a pipeline, `stage{i}`, `stages{first}-{last}` or, around layers,
    `stages{first}-{last}by{layers of a stage}` comes after the phase, and `microbatches{m}of{ticks}`
    after that. A uniquifier such as `.7` at the end of a component is ignored.
    """
    phase, layers, part = None, None, None
    stages, stage_layers, turns = None, 0, (1, 1)
    for component in (op_name or "").split("/"):
        name = _UNIQUIFIER.sub("", component)
        if phase is None:
            phase = _PHASES.get(name)
        if layers is None and (match := _LAYERS.fullmatch(name)):
            layers = _range(match, step=int(match[4] or 1))
        if stages is None and (match := _STAGES.fullmatch(name)):
            stages, stage_layers = _range(match, step=1), int(match[4] or 0)
        if stages is not None and turns == (1, 1) and (match := _MICROBATCHES.fullmatch(name)):
            taken, ticks = int(match[1]), int(match[2])
            turns = (taken, ticks) if 0 < taken <= ticks else turns
        if part is None:
            part = _PARTS.get(name)
    return Scope(
        phase=phase,
        layers=layers,
        part=part,
        stages=stages,
        stage_layers=stage_layers,
        n_microbatches=turns[0],
        n_ticks=turns[1],
    )


def _range(match: re.Match[str], *, step: int) -> range | None:
    """`{i}` or `{first}-{last}` of a match; None where it is no range of layers."""
    first, last = int(match[1] or match[2]), int(match[1] or match[3])
    return range(first, last + 1, step) if first <= last < MAX_LAYERS and step else None


def same_name(one: str | None, other: str | None) -> bool:
    """Whether two op_names are the same but for uniquifiers."""
    if one is None or other is None:
        return False
    return one == other or plain_name(one) == plain_name(other)


def leaf(op_name: str | None) -> str | None:
    """The primitive at the end of the path, e.g. `psum`."""
    return _UNIQUIFIER.sub("", op_name.rsplit("/", 1)[-1]) if op_name else None


def plain_name(op_name: str | None) -> str:
    """The op_name without uniquifiers; empty for none."""
    return "/".join(_UNIQUIFIER.sub("", component) for component in (op_name or "").split("/"))
