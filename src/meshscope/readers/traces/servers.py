"""The annotations that vLLM and SGLang write: steps with their tokens.

A step whose tokens are at least 90 % prefill counts as prefill, one with at most 20 % as decode,
and one in between as mixed: the thresholds of vLLM's phased profiling on TPU
(vllm-project/tpu-inference, PHASED_PROFILING_DIR).
"""

import re
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import astuple, dataclass, field
from functools import lru_cache
from typing import NamedTuple

from meshscope.events.enums import REQUEST_PHASES
from meshscope.events.measured import StepLabel
from meshscope.readers.traces import meanings, names

PHASE_PATTERN = r"(?i)(?:^|[^a-z])(" + "|".join(REQUEST_PHASES) + r")(?:$|[^a-z])"
MIN_PREFILL_FRAC = 0.9
MAX_DECODE_FRAC = 0.2
ROUNDING_NS = 2000  # Kineto rounds to 1 us, or writes microseconds as floats
MAX_OPEN = 64  # overlapping annotations among which the one around another is looked for


@lru_cache(maxsize=1 << 16)
def phase_of(name: str) -> str | None:
    """The phase in a name: `jit_decode` -> `decode`; None if it contains none or both."""
    phases = {phase.lower() for phase in re.findall(PHASE_PATTERN, name)}
    return phases.pop() if len(phases) == 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAnnotation:
    """A step as its annotation describes it; None if it does not say."""

    kind: StepLabel | None
    prefill_tokens: int | None = None
    decode_tokens: int | None = None
    n_prefill: int | None = None  # sequences
    n_decode: int | None = None


@lru_cache(maxsize=1 << 16)
def read_annotation(name: str) -> StepAnnotation | None:
    """The step that an annotation marks; None if it marks none."""
    known = names("steps")
    if match := re.match(known["vllm"], name):
        n = {key: int(value) for key, value in match.groupdict().items()}
        return StepAnnotation(kind=kind_of_tokens(n["prefill_tokens"], n["decode_tokens"]), **n)
    if match := re.match(known["vllm_requests"], name):
        # Cached requests may be in a later chunk of prefill, so without new ones the kind is unknown.
        new, cached = int(match["new"]), int(match["cached"])
        of_new = StepLabel.MIXED if cached else StepLabel.PREFILL
        return StepAnnotation(kind=of_new if new else None, n_prefill=new)
    if match := re.match(known["sglang"], name):
        return _of_sglang(match)
    if match := re.match(known["tpu_vllm"], name):
        return _of_tpu_vllm(int(match["n"]), int(match["tokens"]))
    return StepAnnotation(kind=None) if re.match(known["plain"], name) else None


def kind_of_tokens(prefill: int, decode: int) -> StepLabel | None:
    """The kind of a step by the share of prefill in its tokens; None for a step without tokens."""
    if not prefill + decode:
        return None
    prefill_frac = prefill / (prefill + decode)
    if prefill_frac >= MIN_PREFILL_FRAC:
        return StepLabel.PREFILL
    return StepLabel.DECODE if prefill_frac <= MAX_DECODE_FRAC else StepLabel.MIXED


def _of_tpu_vllm(n: int, tokens: int) -> StepAnnotation:
    """Each request has one token in decode and more in prefill, so at most n - 1 tokens decode.

    Without speculation, a step is prefill if its share is at least MIN_PREFILL_FRAC in any case, decode
    if each request has one token, and otherwise mixed, as far as the annotation tells.
    """
    if not n or tokens <= n:
        kind = StepLabel.DECODE if tokens else None
        return StepAnnotation(kind=kind, prefill_tokens=0, decode_tokens=tokens, n_decode=n)
    is_prefill = (tokens - n + 1) / tokens >= MIN_PREFILL_FRAC
    return StepAnnotation(kind=StepLabel.PREFILL if is_prefill else StepLabel.MIXED)


def _of_sglang(match: re.Match[str]) -> StepAnnotation:
    mode = meanings("step_kinds").get(match["mode"])
    kind, is_decode = None if mode is None else StepLabel(mode), match["mode"] == "DECODE"
    n, tokens = (None if match[key] is None else int(match[key]) for key in ("n", "tokens"))
    if kind is StepLabel.PREFILL:
        return StepAnnotation(kind=kind, prefill_tokens=tokens, decode_tokens=0, n_prefill=n)
    if kind is StepLabel.DECODE:
        verified = tokens or (n if is_decode else None)
        return StepAnnotation(kind=kind, prefill_tokens=0, decode_tokens=verified, n_decode=n)
    return StepAnnotation(kind=kind)


class StepMark(NamedTuple):
    """An annotated interval; `thread` is the host thread, None for a timeline of the device."""

    name: str
    start_ns: int
    dur_ns: int
    thread: Hashable = None

    @property
    def end_ns(self) -> int:
        """The end of the interval."""
        return self.start_ns + self.dur_ns


@dataclass(slots=True)
class _Node:
    mark: StepMark
    inner: list["_Node"] = field(default_factory=list["_Node"])
    steps: Sequence[StepMark] = ()


def distinct_steps(marks: Iterable[StepMark]) -> list[StepMark]:
    """The steps that the annotations of one process mark, each once, in the order of their starts.

    Annotations that contain each other mark one step: two conventions, or two calls on a thread.
    The step has the name that tells most, and their whole interval. An annotation around several
    steps is a step only if it alone tells the tokens.
    """
    steps: list[StepMark] = []
    nodes = _nested(sorted(set(marks), key=lambda mark: (mark.start_ns, -mark.dur_ns)))
    for root in nodes:
        inside = [root]
        for node in inside:  # grows: outer nodes come before inner ones
            inside += node.inner
        for node in reversed(inside):
            node.steps = _joined(node.mark, [step for inner in node.inner for step in inner.steps])
        steps += root.steps
    if any(_detail(step.name) for step in steps):  # then ProfilerStep#N is no step of a server
        steps = [step for step in steps if not re.match(names("steps")["plain"], step.name)]
    return sorted(steps, key=lambda step: step.start_ns)


def _nested(ordered: Sequence[StepMark]) -> list[_Node]:
    """The annotations that no other contains, with those inside of them."""
    roots: list[_Node] = []
    open_nodes: list[_Node] = []
    for mark in ordered:
        node = _Node(mark)
        while open_nodes and open_nodes[-1].mark.end_ns <= mark.start_ns:
            open_nodes.pop()
        latest = reversed(open_nodes[-MAX_OPEN:])
        around = next((other for other in latest if _contains(other.mark, mark)), None)
        siblings = roots if around is None else around.inner
        while siblings and _contains(mark, siblings[-1].mark):  # which starts a rounding earlier
            node.inner.append(siblings.pop())
        siblings.append(node)
        open_nodes.append(node)
    return roots


def _contains(outer: StepMark, inner: StepMark) -> bool:
    """Whether one annotation is inside of another, up to rounding.

    Steps of one convention on two threads are two steps. On a device, the profiler repeats an
    annotation on each stream, with the times of its kernels.
    """
    is_same = outer.name == inner.name and outer.thread == inner.thread
    if outer.thread != inner.thread or (outer.thread is None and not is_same):
        conventions = {re.split(r"[\d\[(:#*]", m.name, maxsplit=1)[0] for m in (outer, inner)}
        if len(conventions) == 1:
            return False
    outside = max(outer.start_ns - inner.start_ns, 0) + max(inner.end_ns - outer.end_ns, 0)
    half = inner.dur_ns // 2
    return outside <= (half if is_same else max(inner.dur_ns // 100, min(ROUNDING_NS, half)))


def _joined(mark: StepMark, inner: Sequence[StepMark]) -> Sequence[StepMark]:
    """One step of an annotation and what it contains, or the several steps inside."""
    if not inner:
        return (mark,)
    if len(inner) > 1 and _detail(mark.name) <= max(_detail(step.name) for step in inner):
        return inner
    most = max((mark, *inner), key=lambda step: _detail(step.name))
    start_ns = min(mark.start_ns, *(step.start_ns for step in inner))
    end_ns = max(mark.end_ns, *(step.end_ns for step in inner))
    return (most._replace(start_ns=start_ns, dur_ns=end_ns - start_ns),)


def _detail(name: str) -> int:
    """How many facts of a step its annotation tells."""
    annotation = read_annotation(name)
    if annotation is None:
        return int(phase_of(name) is not None)
    return sum(fact is not None for fact in astuple(annotation))
