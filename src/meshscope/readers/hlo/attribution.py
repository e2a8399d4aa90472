"""The phase, layers and model part of an instruction, by the scopes in its `op_name` or by rules for other names.

Rules assign the names in foreign HLO text to phases, layers and parts; each engine has a file of them. The names
are op_names, the functions that traced an operation, and source lines. An argument has an op_name, too, such as
`weights.layers[3].w_down`.
"""

import re
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

from meshscope.events.enums import REQUEST_PHASES, Part, Phase
from meshscope.files import own_table
from meshscope.readers.hlo.module import HloModule, Instruction
from meshscope.serialize import FormatError, from_plain

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

    phase: Phase | None = None
    layers: range | None = None
    part: Part | None = None
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


NO_SCOPE = Scope()


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
        phase = phase or _PHASES.get(name)
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


_LAYER = "layer"  # the named group of a pattern that matches the number of the layer
_NAMES = ("module", "op_name", "functions", "source")
_FOLDER = Path(__file__).with_name("rules")
_GENERAL = "general.toml"  # for every module, after the rules of its engine


@dataclass(frozen=True, slots=True, kw_only=True)
class ScopeRule:
    """What an instruction belongs to if every pattern of the rule occurs in its names.

    The patterns are regular expressions: `module` for the name of the module, `op_name`, `functions` for
    the call stack `outermost/.../innermost`, `source` for `file:line`. A group `(?P<layer>...)` in one of
    them is the number of the layer.
    """

    module: str | None = None
    op_name: str | None = None
    functions: str | None = None
    source: str | None = None
    phase: Phase | None = None
    part: Part | None = None

    def __post_init__(self) -> None:
        """Check that the rule has a pattern and a result, and that the patterns are regular expressions."""
        if not self.patterns:
            raise FormatError(f"a rule needs a pattern: one of {', '.join(_NAMES)}")
        names_layer = any(_LAYER in pattern.groupindex for _, pattern in self.patterns)
        if self.phase is None and self.part is None and not names_layer:
            raise FormatError(f"a rule needs a phase, a part or a group (?P<{_LAYER}>...)")

    @property
    def patterns(self) -> tuple[tuple[str, re.Pattern[str]], ...]:
        """The names that the rule matches, with their patterns."""
        texts = ((name, getattr(self, name)) for name in _NAMES)
        return tuple((name, _pattern(text)) for name, text in texts if text is not None)


@cache
def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise FormatError(f"'{text}' is not a regular expression ({error})") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRules:
    """The rules of an engine, the first that matches first.

    They apply to modules with a source file or function in which `detect` occurs; without it, to all.
    """

    rules: tuple[ScopeRule, ...]
    detect: str | None = None

    def __post_init__(self) -> None:
        """Check the pattern."""
        if self.detect is not None:
            _pattern(self.detect)


class ScopeReader:
    """Reads the names of a module's instructions by the rules that apply to it."""

    def __init__(self, module: HloModule) -> None:
        frames = module.frames.values()
        origins = {name for frame in frames for name in (frame.file, frame.function)}
        origins = origins or {module.source_line(i) or "" for i in module.instructions}
        names = "\n".join(sorted(origins))
        engines = sorted(file.name for file in _FOLDER.glob("*.toml") if file.name != _GENERAL)
        of_engines = map(_built_in, engines)
        detected = (r for r in of_engines if r.detect and _pattern(r.detect).search(names))
        self._module = module
        every = (*detected, _built_in(_GENERAL))
        self._rules = [(rule, rule.patterns) for one in every for rule in one.rules]
        self._scopes: dict[tuple[str, str, str], Scope] = {}

    def scope(self, instruction: Instruction) -> Scope:
        """What the instruction's own names say."""
        module = self._module
        source = module.source_line(instruction) or ""
        key = (instruction.op_name or "", module.functions(instruction), source)
        if key not in self._scopes:
            names: dict[str, str] = dict(zip(_NAMES, (module.name, *key), strict=True))
            self._scopes[key] = self._read(names)
        return self._scopes[key]

    def _read(self, names: dict[str, str]) -> Scope:
        phase, layers, part = None, None, None
        for rule, patterns in self._rules:
            is_needed = (phase is None and rule.phase) or (part is None and rule.part)
            if not is_needed and layers is not None:
                continue
            matches = [pattern.search(names[name]) for name, pattern in patterns]
            if all(matches):
                phase, part = phase or rule.phase, part or rule.part
                if layers is None:
                    numbers = (m.groupdict().get(_LAYER) for m in matches if m is not None)
                    text = next((number for number in numbers if number), "")
                    is_layer = text.isdecimal() and int(text) < MAX_LAYERS
                    layers = range(int(text), int(text) + 1) if is_layer else None
        return Scope(phase=phase, layers=layers, part=part)


@cache
def _built_in(name: str) -> EngineRules:
    return from_plain(EngineRules, own_table(f"readers/hlo/rules/{name}"))
