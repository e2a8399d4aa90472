"""Options from the launch command of a server: shell text or a Kubernetes manifest, with its benchmark (`servers.toml`)."""

import json
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import yaml

from meshscope.errors import SpecError
from meshscope.files import own_table, path_of, read_text
from meshscope.model.config import read_model
from meshscope.model.quantization import UNQUANTIZED_DTYPE
from meshscope.serialize import from_plain
from meshscope.units import decimal_number, whole_number

MAX_COMMAND_BYTES = 1 << 20
REMEDY = (
    "Paste a command that starts with 'vllm serve' or 'python -m sgl_jax.launch_server', or give a file "
    "with it or with its Kubernetes manifest."
)
_UNIFORM = 0.8  # the shortest length over the longest, in --lengths uniform
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_RULES = re.compile(r".*(int8|fp8)[^/]*\.ya?ml")  # a file for --quantization-config-path
_ENDS = frozenset("\n;|&")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCommand:
    """A row of `servers.toml`: a server or a benchmark, and how its command is read."""

    name: str
    starts: tuple[str, ...]
    facts: Mapping[str, str]
    switches: tuple[str, ...]
    harmless: tuple[str, ...] = ()
    is_benchmark: bool = False
    defaults: Mapping[str, str] = field(default_factory=dict[str, str])


TABLES = own_table("serving/servers.toml")
COMMANDS = from_plain(tuple[ServerCommand, ...], TABLES["servers"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """Values of options by name, as a launch command gives them, and its flags that are not simulated."""

    options: Mapping[str, str]
    not_simulated: tuple[str, ...]


def read_launch(text: str, model: str | None = None) -> Launched:
    """The options of a launch command, of a file with one, or of a manifest; SpecError if there is none.

    `model` replaces the command's.
    """
    if "\n" not in text and " " not in text.strip():
        path = path_of(text)
        text = read_text(path, REMEDY, MAX_COMMAND_BYTES, kind=SpecError)
    labels: dict[str, str] = {}
    statements = list(_manifest(text, labels) if "containers:" in text else _statements(text))
    commands = [one for words in statements for one in _found(words)]
    servers = [command.name for command, _ in commands if not command.is_benchmark]
    if len(servers) != 1:
        have = f"{len(servers)} servers, {' and '.join(servers)}" if servers else "no known server"
        raise SpecError(f"--from-command has {have}. {REMEDY}")
    facts, left = dict[str, str](), list[str]()
    # What the server says counts, and a benchmark adds its load.
    for command, words in sorted(commands, key=lambda one: not one[0].is_benchmark):
        of_command, unknown = _facts(command, words)
        facts |= of_command
        left += unknown
    facts |= {} if model is None else {"model": model}
    if "model" not in facts:
        raise SpecError(f"--from-command: the command names no model. {REMEDY}")
    options = {"model": facts["model"], "server": servers[0]}
    chip = TABLES["slices"].get(labels.get("accelerator", ""))
    if chip and "topology" in labels:  # the node labels of a manifest: tpu7x:2x2x1
        options["topology"] = f"{chip}:{labels['topology']}"
    options["plan"] = _plan(facts)
    options |= dict(_limits(facts))
    if "uncached" in facts:
        options["prefix_hit"] = "0"
    options |= _load(facts, left)
    return Launched(options=options, not_simulated=tuple(dict.fromkeys(left)))


def _statements(text: str) -> Iterator[list[str]]:
    """The simple commands of shell text, with the variables that it sets put in."""
    text = re.sub(r"\\\r?\n", " ", text)
    text = re.sub(r"(?m)(^|\s)#[^'\"\n]*$", r"\1", text)
    lexer = shlex.shlex(text, posix=True, punctuation_chars="".join(_ENDS))
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    try:
        words = list(lexer)
    except ValueError as error:
        raise SpecError(f"--from-command is not a shell command ({error}). {REMEDY}") from None
    variables: dict[str, str] = {}
    statement: list[str] = []
    for word in (*words, "\n"):
        if not set(word) <= _ENDS:
            statement.append(_VARIABLE.sub(lambda v: variables.get(v[1] or v[2], v[0]), word))
            continue
        for one in statement[statement[:1] == ["export"] :]:
            if (match := _ASSIGNED.fullmatch(one)) is None:
                break
            variables[match[1]] = match[2]
        yield statement
        statement = []


def _manifest(text: str, labels: dict[str, str]) -> Iterator[list[str]]:
    """The commands of the containers in a manifest; `labels` gets the node labels that name a slice."""
    try:
        documents = list(yaml.safe_load_all(text))
    except (yaml.YAMLError, RecursionError) as error:
        reason = str(error).splitlines()[0]
        raise SpecError(f"--from-command is not a manifest in YAML ({reason}). {REMEDY}") from None
    pending: list[Any] = documents
    while pending:
        one = pending.pop()
        if isinstance(one, list):
            pending += one
        if not isinstance(one, dict):
            continue
        pending += one.values()
        prefix = "cloud.google.com/gke-tpu-"
        labels.update(
            {k[len(prefix) :]: str(v) for k, v in one.items() if str(k).startswith(prefix)}
        )
        parts = [one.get(key) or [] for key in ("command", "args")]
        words = [str(word) for part in parts if isinstance(part, list) for word in part]
        if words[:1] in (["bash"], ["sh"], ["/bin/bash"], ["/bin/sh"]):
            for word in words[1:]:
                yield from _statements(word)
        elif words:
            yield words


def _found(words: Sequence[str]) -> Iterator[tuple[ServerCommand, list[str]]]:
    """The command of a row that these words begin, with the words after its start."""
    for command in COMMANDS:
        for start in command.starts:
            first, *more = start.split()
            for at, word in enumerate(words):
                is_same = word == first or word.endswith(f"/{first}")
                if is_same and list(words[at + 1 : at + 1 + len(more)]) == more:
                    yield command, list(words[at + 1 + len(more) :])
                    return


def _facts(command: ServerCommand, words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The facts of the flags of a command, and the flags that no fact follows from."""
    facts, left = {**command.defaults}, list[str]()
    if words and not words[0].startswith("-"):
        facts["model"] = words[0]
        words = words[1:]
    at = 0
    while at < len(words):
        flag, mark, value = words[at].partition("=")
        at += 1
        if not flag.startswith("-"):
            continue
        flag = flag.replace("_", "-")
        if not mark and flag not in command.switches and at < len(words):
            is_value = not words[at].startswith("-") or re.fullmatch(r"-[0-9.]+", words[at])
            value, at = (words[at], at + 1) if is_value else ("", at)
        if (name := command.facts.get(flag)) is not None:
            if "$" in value:
                raise SpecError(
                    f"--from-command: {flag} {value} is a variable that the command does not set. "
                    "Put its value there."
                )
            facts[name] = value
        elif flag not in command.harmless and not command.is_benchmark:
            left.append(f"{flag} {value}".strip())
    return facts, left


def _number(facts: Mapping[str, str], name: str, default: int = 1) -> int:
    try:
        return whole_number(facts.get(name, str(default)))
    except ValueError:
        raise SpecError(
            f"--from-command: '{facts[name]}' is not the whole number that {name.replace('_', ' ')} needs. "
            "Correct it."
        ) from None


def _plan(facts: Mapping[str, str]) -> str:
    """The plan that an engine makes of its sizes."""
    dp, pp = _number(facts, "dp"), _number(facts, "pp")
    tp = _number(facts, "tp_and_dp", dp) // dp if "tp_and_dp" in facts else _number(facts, "tp")
    model = read_model(facts["model"])
    n_ranks = _attention_ranks(facts, tp)
    sizes = {"pp": pp, "dp": dp * n_ranks, "tp": max(tp // n_ranks, 1)}
    n_experts = dp * tp if "experts" in facts else _number(facts, "ep")
    if model.moe is not None and n_experts > 1:
        sizes["ep"] = n_experts
    return ",".join(f"{axis}={n}" for axis, n in sizes.items() if n > 1) or "tp=1"


def _limits(facts: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Limits of an engine, and dtypes that the checkpoint does not have anyway."""
    for name in ("max_sequences", "max_step_tokens", "memory_frac", "cache_dtype", "weight_dtype"):
        value = facts.get(name, "auto")
        if name == "max_sequences" and "tp_and_dp" in facts and value.isdigit():
            value = str(-(-int(value) // _number(facts, "dp")))  # of all ranks
        if name == "weight_dtype":
            match = _RULES.fullmatch(value)
            value = match[1] if match else value
            if read_model(facts["model"]).default_weight_dtype != UNQUANTIZED_DTYPE:
                continue
        if value not in {"auto", "bfloat16", "-1"}:
            yield name, value


def _attention_ranks(facts: Mapping[str, str], tp: int) -> int:
    """Data-parallel ranks of attention within tp: as many as keep each KV head on one device.

    Source: vllm-project/tpu-inference@011b7dbd tpu_inference/layers/common/sharding.py, from_vllm_config.
    """
    try:
        strategy = json.loads(facts.get("additional") or "{}")
        strategy = strategy.get("sharding", {}).get("sharding_strategy", {})
        if not strategy.get("enable_dp_attention"):
            return 1
        if (n := strategy.get("attn_dp_size")) is not None:
            return int(n)
    except (ValueError, TypeError, AttributeError):
        raise SpecError(
            f"--from-command: --additional-config '{facts['additional']}' is not JSON with the objects that "
            "vLLM reads. Correct it."
        ) from None
    attention = read_model(facts["model"]).attention
    packed = 4 if facts.get("cache_dtype", "auto").startswith("fp8") else 2  # values in 4 bytes
    packed *= 2 if getattr(attention, "head_dim", None) == 64 else 1
    n_per_device = max(1.0, 2 * getattr(attention, "n_kv_heads", 1) / packed)
    return max(int(tp // n_per_device), 1)


def _load(facts: Mapping[str, str], left: list[str]) -> dict[str, str]:
    """The load of a benchmark with random lengths."""
    if "requests" not in facts:
        return {}
    load = {"requests": facts["requests"]}
    rate = facts.get("rate", "inf")
    if "max_concurrency" in facts or rate == "inf":
        load["max_concurrency"] = facts.get("max_concurrency", facts["requests"])
    if rate != "inf":
        load["rate"] = rate
    if (dataset := facts.get("dataset", "random")) != "random":
        left.append(f"--dataset-name {dataset}")
        return load
    ratio = float("nan")
    with suppress(ValueError):
        ratio = decimal_number(facts["ratio"])
    if not 0 <= ratio <= 1:
        raise SpecError(
            f"--from-command: --random-range-ratio {facts['ratio']} is not between 0 and 1. Correct it."
        )
    is_of_longest = facts["least"] == "ratio"
    least = ratio if is_of_longest else (1 - ratio) / (1 + ratio)  # over the longest length
    for name in ("prompt", "output"):
        scale = (1 + ratio) / 2 if is_of_longest else 1.0
        load[name] = str(max(1, round(scale * _number(facts, name))))
    if least < 1:
        load["lengths"] = "uniform"
        if abs(least - _UNIFORM) > 1e-9:
            left.append(f"lengths from {least:.2g} of the longest one, instead of {_UNIFORM:g}")
    return load


def taken(launched: Launched, names: Collection[str]) -> dict[str, str]:
    """The options that a command with these options takes: requests in flight are the batch of a prediction."""
    options = dict(launched.options)
    if (n := options.get("max_concurrency")) is not None:
        options |= {"concurrency": n} if "concurrency" in names else {"batch": n}
        if "max_concurrency" not in names:
            options.pop("requests")  # they are as many as other loads need
    return {name: value for name, value in options.items() if name in names}
