"""Attention over a sequence that cp splits: a ring or a gather of keys in prefill, a merge in decode.

Prefill: a device has a contiguous block of the prompt, and its queries meet the keys of all blocks.
Ring attention (Liu et al., arXiv 2310.01889) sends each block on to the next device, n-1 times, and
merges partial softmaxes; the other form gathers the blocks and attends once. Every array travels by
a permute of its own: packing keys and values would save a start a turn and cost a copy of both.
Blocks of the future are multiplied and masked all the same, as in the paper's text.

Decode: the cache is split by positions, all devices of cp hold the same token, and each attends to
its own positions. Merging takes the maximum (one all-reduce of N) and the sum of numerators and
denominators (one all-reduce of N(H+1)), both in float32: 8 N (H+2) (n-1)/n bytes a token sent by
each device. Gathering outputs and sums instead takes 4 N (H+1) (n-1): 1/(H+2) less for n=2, more
for every other n. (Rounded to bfloat16 before the merge, outputs would be cheaper to gather for n<4.)

Shapes: B batch, S positions of this step, T positions attended to, N query heads, K key and value
heads, H width of a value; n devices of cp.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from meshscope.events.enums import Phase
from meshscope.programs.jax.numerics import MASKED, Array
from meshscope.spec.plan.context_form import ContextForm

AXIS = "cp"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialAttention:
    """Attention to a part of the positions, in float32.

    `numerator` [B, S, N, H] and `total` [B, S, N] are sums of exponentials of scores less `largest`
    [B, S, N]. Where nothing is in sight `largest` is MASKED, and a merge drops the rest.
    """

    numerator: Array
    total: Array
    largest: Array

    def scaled(self, largest: Array) -> "PartialAttention":
        """The same with another, greater maximum."""
        factor = jnp.exp(self.largest - largest)
        return PartialAttention(
            numerator=self.numerator * factor[..., None],
            total=self.total * factor,
            largest=largest,
        )

    def merged(self, other: "PartialAttention") -> "PartialAttention":
        """Attention to the positions of both."""
        largest = jnp.maximum(self.largest, other.largest)
        one, two = self.scaled(largest), other.scaled(largest)
        return PartialAttention(
            numerator=one.numerator + two.numerator, total=one.total + two.total, largest=largest
        )

    def with_sinks(self, sinks: Array | None) -> "PartialAttention":
        """With one position more, of logits [N], that has no value."""
        if sinks is None:
            return self
        logits = jnp.broadcast_to(sinks.astype(jnp.float32), self.largest.shape)
        sink = PartialAttention(
            numerator=jnp.zeros_like(self.numerator),
            total=jnp.ones_like(self.total),
            largest=logits,
        )
        return self.merged(sink)

    def shared(self, dtype: Any) -> Array:
        """[B, S, N, H]: the mean of values that attention is."""
        return (self.numerator / self.total[..., None]).astype(dtype)


def partly_attended(
    q: Array, k: Array, v: Array, is_seen: Array, *, scale: float
) -> PartialAttention:
    """Attention of q [B, S, N, Hk] to k [B, T, K, Hk] and v [B, T, K, H], not yet divided.

    `is_seen` is [S, T] or [B, S, T].
    """
    batch, n_queries, n_heads = q.shape[:3]
    q = q.reshape(batch, n_queries, k.shape[2], n_heads // k.shape[2], q.shape[3])
    scores = jnp.einsum("bskgh,btkh->bskgt", q, k, preferred_element_type=jnp.float32) * scale
    is_seen = jnp.broadcast_to(is_seen, (batch, *is_seen.shape[-2:]))
    scores = jnp.where(is_seen[:, :, None, None, :], scores, MASKED)
    largest = scores.max(axis=-1)
    shares = jnp.exp(scores - largest[..., None])
    numerator = jnp.einsum(
        "bskgt,btkh->bskgh", shares.astype(q.dtype), v, preferred_element_type=jnp.float32
    )
    return PartialAttention(
        numerator=numerator.reshape(batch, n_queries, n_heads, -1),
        total=shares.sum(axis=-1).reshape(batch, n_queries, n_heads),
        largest=largest.reshape(batch, n_queries, n_heads),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Attending:
    """What one layer's attention is, whoever holds the keys.

    `keys` makes k [B, T, K, Hk] and v [B, T, K, Hv] of what is held, arrays [B, T, ...]; `sight` makes
    the mask [S, T] or [B, S, T] of the positions [T] of what is held; `outcome` is linear and makes
    [B, S, N, H] of [B, S, N, Hv], where that is narrower.
    """

    q: Array
    keys: Callable[..., tuple[Array, Array]]
    sight: Callable[[Array], Array]
    scale: float
    sinks: Array | None = None
    outcome: Callable[[Array], Array] = lambda x: x

    def part(self, held: Sequence[Array], positions: Array) -> PartialAttention:
        """Attention to what is held of these positions."""
        k, v = self.keys(*held)
        return partly_attended(self.q, k, v, self.sight(positions), scale=self.scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """How one phase lays a sequence over the `size` devices of cp; of size 1, it is whole.

    `n_prompt` is the length of the whole prompt.
    """

    size: int
    form: ContextForm
    phase: Phase
    n_prompt: int

    @property
    def is_split(self) -> bool:
        """Whether there is more than one device."""
        return self.size > 1

    @property
    def splits_step(self) -> bool:
        """Whether each device has other tokens of the step."""
        return self.is_split and self.phase is Phase.PREFILL

    @property
    def rank(self) -> Array | int:
        """The place of this device on the axis."""
        return lax.axis_index(AXIS) if self.is_split else 0

    def positions(self, first: Array, n_local: int) -> Array:
        """[S]: the positions of this device's tokens of a step that starts at `first`."""
        if self.splits_step:
            first = first + lax.axis_index(AXIS) * n_local
        return first + jnp.arange(n_local)

    def slot(self, positions: Array) -> Array | int:
        """Where in the cache these tokens go."""
        if not self.is_split:
            return positions[0]
        if self.phase is Phase.PREFILL:
            return 0
        return self.n_prompt // self.size + (positions[0] - self.n_prompt) // self.size

    def is_here(self, positions: Array) -> Array | None:
        """Whether these tokens go into this device's cache; None: they do on any device."""
        if not self.is_split or self.phase is Phase.PREFILL:
            return None
        return (positions[0] - self.n_prompt) % self.size == lax.axis_index(AXIS)

    def cached_positions(self, n_slots: int) -> Array:
        """[T]: the position that each slot of this device's cache is for."""
        slots = jnp.arange(n_slots)
        if not self.is_split:
            return slots
        rank, n_block = lax.axis_index(AXIS), self.n_prompt // self.size
        generated = self.n_prompt + (slots - n_block) * self.size + rank
        return jnp.where(slots < n_block, rank * n_block + slots, generated)

    @property
    def prompt_positions(self) -> Array:
        """[T]: the positions of the whole prompt."""
        return jnp.arange(self.n_prompt)

    def best(self, scores: Array, n_best: int) -> Array:
        """[B, S, T]: whether a position is among the `n_best` of the highest scores [B, S, T].

        In decode the positions lie on all devices: each proposes as many, and all choose the same
        of what everyone proposed.
        """
        values, places = lax.top_k(scores, min(n_best, scores.shape[-1]))
        if not self.is_split or self.splits_step:
            return _at_least(scores, values[..., -1:], values.shape[-1])
        proposed = lax.all_gather(values, AXIS, axis=2, tiled=True)
        chosen = lax.top_k(proposed, min(n_best, proposed.shape[-1]))[1]
        is_chosen = _marked(proposed.shape, chosen, values=True)
        start = lax.axis_index(AXIS) * values.shape[-1]
        own = lax.dynamic_slice_in_dim(is_chosen, start, values.shape[-1], axis=2)
        return _marked(scores.shape, places, values=own)

    def gathered(self, x: Array) -> Array:
        """[B, S, ...] of all blocks: [B, T, ...]."""
        return lax.all_gather(x, AXIS, axis=1, tiled=True)

    def dealt(self, x: Array) -> Array:
        """Of x [B, T, ...], which all devices have, every n-th from this device's place on, padded."""
        if not self.is_split:
            return x
        n_each = -(-x.shape[1] // self.size)
        missing = n_each * self.size - x.shape[1]
        padded = jnp.pad(x, ((0, 0), (0, missing), *((0, 0),) * (x.ndim - 2)))
        rounds = padded.reshape(x.shape[0], n_each, self.size, *x.shape[2:])
        return lax.dynamic_index_in_dim(rounds, self.rank, axis=2, keepdims=False)

    def dealt_numbers(self, n_slots: int) -> Array:
        """[T]: which of what is dealt in turn lies in each slot of this device's cache."""
        return jnp.arange(n_slots) * self.size + self.rank

    def dealt_slot(self, number: Array) -> tuple[Array, Array | None]:
        """Where this one of what is dealt in turn lies, and whether it does on this device.

        None: it does on any device.
        """
        if not self.is_split:
            return number, None
        return number // self.size, number % self.size == self.rank

    def attended(self, attending: Attending, held: Sequence[Array], positions: Array) -> Array:
        """[B, S, N, H]: attention to the positions of all devices, of which this one holds some.

        `positions` are those of what is held: this step's in prefill, those of the cache in decode.
        """
        if self.phase is Phase.DECODE:
            return self._merged(attending, held, positions)
        if self.form is ContextForm.RING:
            return self._around(attending, held, positions)
        everything = [self.gathered(x) for x in held]
        return self._finished(attending, attending.part(everything, self.prompt_positions))

    def _around(self, attending: Attending, held: Sequence[Array], positions: Array) -> Array:
        """Each turn attends to a block while the next one is on its way; none is sent in the last."""
        rank, n_local = lax.axis_index(AXIS), positions.shape[0]
        turn = [(source, (source + 1) % self.size) for source in range(self.size)]
        partial: PartialAttention | None = None
        for number in range(self.size):
            is_last = number == self.size - 1
            coming = [] if is_last else [lax.ppermute(x, AXIS, perm=turn) for x in held]
            source = (rank - number) % self.size
            part = attending.part(held, positions + (source - rank) * n_local)
            partial = part if partial is None else partial.merged(part)
            held = coming
        assert partial is not None
        return self._finished(attending, partial)

    def _finished(self, attending: Attending, partial: PartialAttention) -> Array:
        shared = partial.with_sinks(attending.sinks).shared(attending.q.dtype)
        return attending.outcome(shared).astype(shared.dtype)

    def _merged(self, attending: Attending, held: Sequence[Array], positions: Array) -> Array:
        """The parts of all devices added up, after `outcome`: values are narrower than latents.

        Numerators and denominators lie flat, [B, S, N(H+1)]: an array of width H+1 would be padded
        to the next multiple of 128.
        """
        partial = attending.part(held, positions)
        partial = partial.scaled(lax.pmax(partial.largest, AXIS))
        narrow = attending.outcome(partial.numerator)
        numerator = narrow.reshape(*narrow.shape[:2], -1)
        both = jnp.concatenate([numerator, partial.total], axis=-1)
        both = lax.psum(both, AXIS)
        n_heads = partial.total.shape[-1]
        merged = PartialAttention(
            numerator=both[..., :-n_heads].reshape(narrow.shape),
            total=both[..., -n_heads:],
            largest=partial.largest,
        )
        return merged.with_sinks(attending.sinks).shared(attending.q.dtype)


def _at_least(scores: Array, least: Array, n_best: int) -> Array:
    """[B, S, T]: whether a score is among the `n_best`, of which `least` [B, S, 1] is the lowest.

    Of equals, the first ones count, as `top_k` has it. A scatter of its places would say the same,
    element by element.
    """
    is_above, is_equal = scores > least, scores == least
    n_left = n_best - is_above.sum(axis=-1, keepdims=True)
    return is_above | (is_equal & (jnp.cumsum(is_equal, axis=-1) <= n_left))


def _marked(shape: tuple[int, ...], places: Array, *, values: Array | bool) -> Array:
    """[B, S, T] of bool: `values` at the places [B, S, n], false elsewhere."""
    rows = jnp.arange(shape[0])[:, None, None], jnp.arange(shape[1])[None, :, None]
    return jnp.zeros(shape, bool).at[(*rows, places)].set(values)
