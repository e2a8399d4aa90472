"""Rules that assign the names in foreign HLO text to phases, layers and parts; one file per engine.

The names are op_names, the functions that traced an operation, and source lines. An argument has an
op_name, too, such as `weights.layers[3].w_down`.
"""

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from meshscope.errors import SpecError
from meshscope.events.enums import Part, Phase
from meshscope.files import read_file
from meshscope.readers.hlo.attribution import MAX_LAYERS
from meshscope.readers.hlo.module import HloModule, Instruction
from meshscope.serialize import FormatError, from_plain

RULES = "rules.toml"  # the user's rules in the folder of a run
_LAYER = "layer"  # the named group of a pattern that matches the number of the layer
_NAMES = ("module", "op_name", "functions", "source")
_FOLDER = files("meshscope.readers.hlo") / "rules"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedScope:
    """What the names of an instruction say; None for what they do not name."""

    phase: Phase | None = None
    layer: int | None = None
    part: Part | None = None


class ScopeReader:
    """Reads the names of a module's instructions by the rules that apply to it."""

    def __init__(self, module: HloModule, rules: Sequence[EngineRules] = ()) -> None:
        names = _origins(module)
        built_in = {f.name: f for f in _FOLDER.iterdir() if f.name.endswith(".toml")}
        general = _built_in(built_in.pop(_GENERAL))
        of_engines = [_built_in(file) for _, file in sorted(built_in.items())]
        detected = (r for r in of_engines if r.detect and _pattern(r.detect).search(names))
        self._module = module
        self._rules = [
            (rule, rule.patterns) for one in (*rules, *detected, general) for rule in one.rules
        ]
        self._scopes: dict[tuple[str, str, str], NamedScope] = {}

    def scope(self, instruction: Instruction) -> NamedScope:
        """What the instruction's own names say."""
        key = (
            instruction.op_name or "",
            self._module.functions(instruction),
            self._module.source_line(instruction) or "",
        )
        if key not in self._scopes:
            self._scopes[key] = self._read(
                dict(zip(_NAMES, (self._module.name, *key), strict=True))
            )
        return self._scopes[key]

    def _read(self, names: dict[str, str]) -> NamedScope:
        phase, layer, part = None, None, None
        for rule, patterns in self._rules:
            is_needed = (phase is None and rule.phase) or (part is None and rule.part)
            if not is_needed and layer is not None:
                continue
            matches = [pattern.search(names[name]) for name, pattern in patterns]
            if all(matches):
                phase, part = phase or rule.phase, part or rule.part
                if layer is None:
                    numbers = (m.groupdict().get(_LAYER) for m in matches if m is not None)
                    text = next((number for number in numbers if number), "")
                    layer = int(text) if text.isdecimal() and int(text) < MAX_LAYERS else None
        return NamedScope(phase=phase, layer=layer, part=part)


def _origins(module: HloModule) -> str:
    """The source files and functions of a module, one a line."""
    if module.frames:
        names = {name for f in module.frames.values() for name in (f.file, f.function)}
    else:
        instructions = (i for c in module.computations.values() for i in c.instructions)
        names = {module.source_line(i) or "" for i in instructions}
    return "\n".join(sorted(names))


def read_rules(path: Path | str) -> EngineRules:
    """Reads a file of rules; SpecError if it is not one."""
    try:
        return from_plain(EngineRules, tomllib.loads(read_file(Path(path)).decode()))
    except OSError as error:
        raise SpecError(
            f"{path}: cannot be read ({error.strerror}). Give a TOML file of rules."
        ) from error
    except (FormatError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SpecError(
            f"{path}: {error}. Give TOML with [[rules]], each with a pattern ({', '.join(_NAMES)}) and "
            f"a phase, a part or a group (?P<{_LAYER}>...)."
        ) from error


@cache
def _built_in(file: Traversable) -> EngineRules:
    return from_plain(EngineRules, tomllib.loads(file.read_text(encoding="utf-8")))
