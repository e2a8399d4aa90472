"""Names of the modules that a quantization of the checkpoint may quantize, and patterns that select some of them."""

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import combinations

from meshscope.errors import SpecError
from meshscope.model.families import Family, FamilyTraits
from meshscope.model.layers import AttentionKind, Layer


class MatrixGroup(StrEnum):
    """Matrices that recipes quantize or leave out together."""

    ATTENTION = "attention"
    LINEAR = "linear attention"
    MLPS = "the MLPs"  # dense layers and shared experts
    EXPERTS = "the experts"  # routed ones


# Starts of names before `layers`, in checkpoints of text models and of models with a text part.
_PREFIXES = ("", "model.", "model.language_model.", "language_model.model.")
_BEFORE_LAYERS = re.compile(r"^(?:(?:model|language_model|text_model)\.)+(?=layers\.)")
_PLAIN = re.compile(r"[\w.\-]+")
_REGEX = "re:"
_GROUPED = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_ATTENTION = {
    "latent": tuple(
        f"self_attn.{name}"
        for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    ),
    "compressed": ("attn.wq_a", "attn.wq_b", "attn.wkv", "attn.wo_a", "attn.wo_b"),
}


def module_names(family: Family, layers: Sequence[Layer]) -> Mapping[MatrixGroup, tuple[str, ...]]:
    """The modules of each group with matrices, from `layers` on, with the first expert for all of a layer."""
    names: dict[MatrixGroup, list[str]] = {}
    for index, layer in enumerate(layers):
        for group, short in _of_layer(family, layer):
            names.setdefault(group, []).append(f"layers.{index}.{short}")
    return {group: tuple(of_group) for group, of_group in names.items()}


def _of_layer(family: Family, layer: Layer) -> Iterable[tuple[MatrixGroup, str]]:
    row = family.traits
    if layer.attention is AttentionKind.LINEAR:
        names = ("in_proj_qkvz",) if row.is_fused else ("in_proj_qkv", "in_proj_z")
        yield from ((MatrixGroup.LINEAR, f"linear_attn.{name}") for name in (*names, "out_proj"))
    else:
        yield from ((MatrixGroup.ATTENTION, name) for name in _attention(row))
    if layer.has_mlp:
        names = _modules(row.dense_tensors)
        names = ["mlp.gate_up_proj", "mlp.down_proj"] if row.is_fused_mlp else names
        yield from ((MatrixGroup.MLPS, name) for name in names)
    if not layer.has_experts:
        return
    if row.has_shared_experts:
        yield from ((MatrixGroup.MLPS, name) for name in _modules(row.shared_tensors))
    fused = row.fused_experts
    experts = [fused.base.rstrip(".")] if fused else _modules(row.expert_tensors)
    yield from ((MatrixGroup.EXPERTS, name.format(expert=0)) for name in experts)


def _attention(row: FamilyTraits) -> Sequence[str]:
    if row.is_fused_mlp:
        return ("self_attn.qkv_proj", "self_attn.o_proj")
    return _ATTENTION.get(row.mechanism, _GROUPED)


def _modules(tensors: Mapping[str, str]) -> list[str]:
    return [name.removesuffix(".weight") for name in tensors.values()]


# The time of a failing match grows with the power of its repeats, and exponentially if a group is repeated.
MAX_REPEATS = 4
SHOWN = 100  # characters of an expression in a message
_ONE_CHARACTER = re.compile(r"\\.|\[[^\]]*\]")  # escaped, or of a set
_REPEATED_GROUP = re.compile(r"\)[*+{]")
_REPEATS = re.compile(r"[*+{]|(?<![(*+])\?")


class ModulePatterns:
    """Modules that the entries of a config select.

    An entry is a regular expression for the start of a name (`re:.*self_attn.*`), a pattern with `*`, or a part of
    a name between dots: `self_attn` and `model.layers.0` select all modules below them. Other entries of a list,
    such as numbers, select nothing.
    """

    def __init__(self, entries: object, source: str = "quantization_config") -> None:
        """Sort the entries by their kind; SpecError for an invalid regular expression."""
        words = entries if isinstance(entries, list | tuple) else []
        texts = [word for word in words if isinstance(word, str)]
        plain = [text for text in texts if _PLAIN.fullmatch(text)]
        self._names = {_BEFORE_LAYERS.sub("", text.strip(".")) for text in plain}
        globs = [
            text for text in texts if not text.startswith(_REGEX) and not _PLAIN.fullmatch(text)
        ]
        regexes = [text.removeprefix(_REGEX) for text in texts if text.startswith(_REGEX)]
        self._regexes = [_compiled(text, source) for text in regexes]
        if globs:
            below = [f"{text}.*" for text in globs]
            self._regexes.append(re.compile("|".join(map(fnmatch.translate, [*globs, *below]))))

    def __contains__(self, name: str) -> bool:
        """Whether the entries select this module, whose name starts at `layers`."""
        parts = name.split(".")
        spans = combinations(range(len(parts) + 1), 2)
        if self._names and any(".".join(parts[i:j]) in self._names for i, j in spans):
            return True
        return any(regex.match(prefix + name) for regex in self._regexes for prefix in _PREFIXES)


def _compiled(text: str, source: str) -> re.Pattern[str]:
    """The regular expression; SpecError if it is invalid, or may take too long to match."""
    bare = _ONE_CHARACTER.sub("x", text)
    if _REPEATED_GROUP.search(bare) or len(_REPEATS.findall(bare)) > MAX_REPEATS:
        raise SpecError(
            f"{source}: 're:{text[:SHOWN]}' repeats a group, or has more than {MAX_REPEATS} repeats, and may "
            "take too long to match. Name the modules, or simplify it."
        )
    try:
        return re.compile(text)
    except re.error as error:
        raise SpecError(
            f"{source}: 're:{text[:SHOWN]}' is not a regular expression ({error}). Correct the config."
        ) from error
