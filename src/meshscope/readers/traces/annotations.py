"""Steps of vLLM and SGLang by their annotations: the tokens of a step, and prefill, decode or mixed.

A step whose tokens are at least 90 % prefill counts as prefill, one with at most 20 % as decode,
and one in between as mixed: the thresholds of vLLM's phased profiling on TPU
(vllm-project/tpu-inference, PHASED_PROFILING_DIR).
"""

import re
from dataclasses import dataclass
from enum import StrEnum

MIN_PREFILL_FRAC = 0.9
MAX_DECODE_FRAC = 0.2


class StepKind(StrEnum):
    """What a step of a server processes."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAnnotation:
    """A step as its annotation describes it; None if it does not say."""

    kind: StepKind | None
    prefill_tokens: int | None = None
    decode_tokens: int | None = None
    n_prefill: int | None = None  # sequences
    n_decode: int | None = None


# vLLM: execute_context_2(4096)_generation_30(30), and since 2025
# execute_8192_context_9(sq8155sk8430sqsq...sqsk...)_generation_37(sq37sk34489...): sq are query
# tokens, sk key tokens, sqsq and sqsk sums of squares and products.
_VLLM = re.compile(
    r"^execute_(?:\d+_)?context_(?P<n_prefill>\d+)\((?:sq)?(?P<prefill>\d+)[^)]*\)"
    r"_generation_(?P<n_decode>\d+)\((?:sq)?(?P<decode>\d+)[^)]*\)"
)
# vLLM between the two: new requests prefill, cached ones decode or go on with a chunk of prefill.
_VLLM_REQUESTS = re.compile(r"^execute_new_(?P<new>\d+)_cached_(?P<cached>\d+)")
# SGLang: step[DECODE bs=16], step[EXTEND bs=2 toks=4096], step[MIXED bs=2].
_SGLANG = re.compile(
    r"^step\[(?P<mode>[A-Z_]+)(?: bs=(?P<n>\d+))?(?: toks=(?P<tokens>\d+))?[^\]]*\]"
)
# vLLM on TPU (tpu-inference 0.32, runner/tpu_runner.py): execute_model: 8 reqs, 4103 toks.
_TPU_VLLM = re.compile(r"^execute_model: (?P<n>\d+) reqs, (?P<tokens>\d+) toks")
# PyTorch's own, TPU steps of older vLLM, and SGLang-JAX (managers/tp_worker_overlap_thread.py,
# scheduler.py); they do not say what the step processes.
_PLAIN = re.compile(
    r"^(?:ProfilerStep[#*]\s*\d+|\$core\.py:\d+ step|StepMarker\b.*"
    r"|forward_batch_generation(?:_overlap)? \d+)$"
)
_SGLANG_KINDS = {
    "EXTEND": StepKind.PREFILL,
    "PREFILL": StepKind.PREFILL,
    "DECODE": StepKind.DECODE,
    "MIXED": StepKind.MIXED,
    "TARGET_VERIFY": StepKind.DECODE,
}


def read_annotation(name: str) -> StepAnnotation | None:
    """The step that an annotation marks; None if it marks none."""
    if match := _VLLM.match(name):
        n = {key: int(value) for key, value in match.groupdict().items()}
        return StepAnnotation(
            kind=kind_of_tokens(n["prefill"], n["decode"]),
            prefill_tokens=n["prefill"],
            decode_tokens=n["decode"],
            n_prefill=n["n_prefill"],
            n_decode=n["n_decode"],
        )
    if match := _VLLM_REQUESTS.match(name):
        return _of_requests(int(match["new"]), int(match["cached"]))
    if match := _SGLANG.match(name):
        return _of_sglang(match)
    if match := _TPU_VLLM.match(name):
        return _of_tpu_vllm(int(match["n"]), int(match["tokens"]))
    return StepAnnotation(kind=None) if _PLAIN.match(name) else None


def kind_of_tokens(prefill: int, decode: int) -> StepKind | None:
    """The kind of a step by the share of prefill in its tokens; None for a step without tokens."""
    if not prefill + decode:
        return None
    prefill_frac = prefill / (prefill + decode)
    if prefill_frac >= MIN_PREFILL_FRAC:
        return StepKind.PREFILL
    return StepKind.DECODE if prefill_frac <= MAX_DECODE_FRAC else StepKind.MIXED


def _of_requests(new: int, cached: int) -> StepAnnotation:
    """Cached requests may be in a later chunk of prefill, so without new ones the kind is unknown."""
    kind = StepKind.PREFILL if new and not cached else StepKind.MIXED if new else None
    return StepAnnotation(kind=kind, n_prefill=new)


def _of_tpu_vllm(n: int, tokens: int) -> StepAnnotation:
    """Each request has one token in decode and more in prefill, so at most n - 1 tokens decode.

    Without speculation, a step is prefill if its share is at least MIN_PREFILL_FRAC in any case, decode
    if each request has one token, and otherwise mixed, as far as the annotation tells.
    """
    if not n or tokens <= n:
        return StepAnnotation(
            kind=StepKind.DECODE if tokens else None,
            prefill_tokens=0,
            decode_tokens=tokens,
            n_decode=n,
        )
    is_prefill = (tokens - n + 1) / tokens >= MIN_PREFILL_FRAC
    return StepAnnotation(kind=StepKind.PREFILL if is_prefill else StepKind.MIXED)


def _of_sglang(match: re.Match[str]) -> StepAnnotation | None:
    kind = _SGLANG_KINDS.get(match["mode"])
    n = None if match["n"] is None else int(match["n"])
    tokens = None if match["tokens"] is None else int(match["tokens"])
    match kind:
        case StepKind.PREFILL:
            return StepAnnotation(kind=kind, prefill_tokens=tokens, decode_tokens=0, n_prefill=n)
        case StepKind.DECODE:
            verified = tokens or (n if match["mode"] == "DECODE" else None)
            return StepAnnotation(kind=kind, prefill_tokens=0, decode_tokens=verified, n_decode=n)
        case _:
            return StepAnnotation(kind=kind)
