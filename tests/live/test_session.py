"""The cache between prefill and decode, whose layouts may differ."""

from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental.layout import Layout
from made import experiment_with

from meshscope.backends.live.session import Session, host_tokens
from meshscope.events.enums import Phase
from meshscope.programs.jax import build
from meshscope.programs.jax.values import random_weights


class _SlotsLast(Layout):
    """In the place of the compiler's choice, which on CPU is the usual layout."""

    AUTO = Layout(major_to_minor=(0, 2, 3, 1))


def _session(config_file: Path, *, prefill_chunk: int | None = None) -> Session:
    sizes = {"batch": 4, "prompt": 16, "output": 6, "prefill_chunk": prefill_chunk}
    asked = experiment_with(str(config_file), "dp=2,tp=2", "cpu:4", **sizes)
    return Session(
        asked,
        partial(build.build_program, asked, devices=jax.devices()[:4]),
        make_weights=lambda program: random_weights(program, seed=1),
        prompt=np.arange(64, dtype=np.int32).reshape(4, 16),
        report=lambda _: None,
    )


@pytest.fixture(scope="module")
def shared(config_file: Path) -> tuple[Session, list[list[int]]]:
    """A session whose phases share the layout of the cache, and the tokens of its request."""
    session = _session(config_file)
    return session, host_tokens(session.request()[1])


def test_a_separate_cache_layout_of_decode_gives_the_same_tokens(
    config_file, shared, monkeypatch
) -> None:
    session, tokens = shared
    monkeypatch.setattr(build, "MemoryLayout", _SlotsLast)
    monkeypatch.setattr(
        build, "compiler_lays_out_cache", lambda _experiment, phase: phase is Phase.DECODE
    )
    separate = _session(config_file)

    assert "{1,3,2,0}" in separate.hlo_texts()[Phase.DECODE].splitlines()[0]
    assert host_tokens(separate.request()[1]) == tokens
    cache = session.new_cache()
    session.compiled.clear()  # a timed step does not look for formats
    assert session.as_cache(cache) is cache


@pytest.mark.parametrize("chunk", [16, 8])
def test_chunks_of_a_prefill_give_the_tokens_of_the_whole_batch(config_file, shared, chunk) -> None:
    assert host_tokens(_session(config_file, prefill_chunk=chunk).request()[1]) == shared[1]
