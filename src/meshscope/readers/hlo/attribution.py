"""The phase, layers and model part that the scopes in an instruction's `op_name` name."""

import re
from dataclasses import dataclass
from functools import lru_cache

from meshscope.events.enums import REQUEST_PHASES, Part, Phase

MAX_LAYERS = 10_000  # a larger layer or stage number is not one of a model

_UNIQUIFIER = re.compile(r"\.\d+$")
_PARAMETERS = re.compile(r"\[[^\[\]]*\]")
_LAYERS = re.compile(r"layer(?:(\d+)|s(\d+)-(\d+)(?:by(\d+))?)")
_STAGES = re.compile(r"stage(?:(\d+)|s(\d+)-(\d+)(?:by(\d+))?)")
_MICROBATCHES = re.compile(r"microbatches(\d+)of(\d+)")
_PHASES = {phase.value: phase for phase in REQUEST_PHASES}
_PARTS = {part.value: part for part in Part}
_EXPERT_PARTS = frozenset(part for part in Part if part.value.startswith("moe."))
# Parts outside the layers.
OUTSIDE_LAYERS = frozenset({Part.EMBED, Part.LM_HEAD, Part.STAGE, Part.SAMPLE})


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """The scopes of an `op_name`; `layers` are all layers that execute the instruction.

    If pipeline stages share the instruction, `layers` belong to the first stage in `stages`, and
    each later stage has the next `stage_layers` layers. A pipeline step has `n_ticks` ticks; a stage
    executes the instruction in `n_microbatches` of them.
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
        """The number of layers in one stage that execute the instruction; 1 outside layers."""
        return len(self.layers) if self.layers else 1

    @property
    def n_times(self) -> int:
        """The expected divisor of the execution count: the layers in every tick."""
        return self.n_layers * self.n_ticks

    @property
    def missing(self) -> str | None:
        """Which of phase, layer and part the scopes do not name; None if they name all of them."""
        if self.phase is Phase.STEP:  # a program of the user, whose scopes follow no contract
            return None
        needs_layer = self.part is not None and self.part not in OUTSIDE_LAYERS
        needs = {
            "phase": self.phase is None,
            "layer": needs_layer and self.layers is None,
            "part": self.part is None,
        }
        return " and ".join(name for name, is_missing in needs.items() if is_missing) or None


NO_SCOPE = Scope(phase=None, layers=None, part=None)


@lru_cache(maxsize=2**16)
def scope_of(op_name: str | None) -> Scope:
    """Parses a path like `jit(f)/prefill/layer3/mlp/psum`.

    The programs name their scopes in this order: `prefill|decode`; `layer{i}`,
    `layers{first}-{last}` or `layers{first}-{last}by{step}`; the model part. The framework may add
    components between them. A pipeline adds, after the phase, `stage{i}`, `stages{first}-{last}` or
    (around layers) `stages{first}-{last}by{layers per stage}`, then `microbatches{m}of{ticks}`.
    A uniquifier at the end of a component, such as `.7`, is ignored.
    """
    phase, layers, part = None, None, None
    stages, stage_layers, schedule = None, 0, (1, 1)
    for component in (op_name or "").split("/"):
        name = _UNIQUIFIER.sub("", component)
        if phase is None:
            phase = _PHASES.get(name)
        if layers is None and (match := _LAYERS.fullmatch(name)):
            layers = _range(match, step=int(match[4] or 1))
        if stages is None and (match := _STAGES.fullmatch(name)):
            stages, stage_layers = _range(match, step=1), int(match[4] or 0)
        if stages is not None and schedule == (1, 1) and (match := _MICROBATCHES.fullmatch(name)):
            n_microbatches, n_ticks = int(match[1]), int(match[2])
            schedule = (n_microbatches, n_ticks) if 0 < n_microbatches <= n_ticks else schedule
        inner = _PARTS.get(name)
        if part is None or (inner in _EXPERT_PARTS and part in _EXPERT_PARTS):
            part = inner
    return Scope(
        phase=phase,
        layers=layers,
        part=part,
        stages=stages,
        stage_layers=stage_layers,
        n_microbatches=schedule[0],
        n_ticks=schedule[1],
    )


def _range(match: re.Match[str], *, step: int) -> range | None:
    """The range of `{i}` or `{first}-{last}`; None if it is empty or beyond MAX_LAYERS."""
    first, last = int(match[1] or match[2]), int(match[1] or match[3])
    return range(first, last + 1, step) if first <= last < MAX_LAYERS and step else None


def same_name(one: str | None, other: str | None) -> bool:
    """Whether two op_names are equal up to uniquifiers."""
    if one is None or other is None:
        return False
    return one == other or plain_name(one) == plain_name(other)


def leaf(op_name: str | None) -> str | None:
    """The primitive at the end of the path, e.g. `psum`.

    Older versions of JAX write parameters after the names: `xmap(f)[axes=('x',)]/psum[axes=('x',)]`.
    """
    path = op_name or ""
    while (shorter := _PARAMETERS.sub("", path)) != path:
        path = shorter
    return _UNIQUIFIER.sub("", path.partition("[")[0].rsplit("/", 1)[-1]) or None


def plain_name(op_name: str | None) -> str:
    """The op_name without uniquifiers; empty for None."""
    return "/".join(_UNIQUIFIER.sub("", component) for component in (op_name or "").split("/"))
