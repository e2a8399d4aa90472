"""Prefill and decode apart: conservation, what each engine sees, and the transfer of caches."""

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from constant_server import DECODE_S, PREFILL_S, ROOMY, at_once, placed, poisson, pool
from tables import table

from meshscope.errors import SpecError
from meshscope.hardware.interconnect.constants import spec_constants
from meshscope.serving.apart import (
    ApartServer,
    Networks,
    TransferPath,
    cache_transfer,
    networks_of_engines,
)
from meshscope.serving.engine import EnginePolicy
from meshscope.serving.load import Load
from meshscope.serving.objective import Objective
from meshscope.serving.simulation import (
    EngineRole,
    decode_rate,
    prefill_rate,
    served_alone,
    simulated_apart,
)
from meshscope.serving.step_costs import CacheBlocks

TOKEN_BYTES = 64 * 2 * 8 * 128 * 2  # layers, keys and values, heads, head dim, bf16
TRANSFER_S = 0.03
MANY = EnginePolicy(max_sequences=16, max_step_tokens=200)


def server(
    load: Load, *, n_prefill: int = 1, n_decode: int = 1, blocks: CacheBlocks = ROOMY,
    prefill_blocks: CacheBlocks | None = None, transfer_s: float = TRANSFER_S,
    networks: tuple[Networks, Networks] = (((0,),), ((0,),)), max_concurrency: int | None = None,
) -> ApartServer:  # fmt: skip
    return ApartServer(
        max_concurrency=max_concurrency,
        load=load,
        prefill_pool=pool(MANY, prefill_blocks or blocks, n_engines=n_prefill),
        decode_pool=pool(MANY, blocks, n_engines=n_decode),
        transfer=SimpleNamespace(seconds=lambda _: transfer_s, networks=networks),
    )


def held_blocks(one: ApartServer) -> list[int]:
    """Blocks of each prefill engine that keep caches until they have been fetched."""
    held = [sum(n for _, n in engine.releases) for engine in one.prefill]
    for engine in one.decode:
        for sequence in (*engine.waiting, *(queued for *_, queued in engine.inbox)):
            if sequence.prefill_engine is not None:
                held[sequence.prefill_engine] += one.n_held[sequence.number]
    return held


def test_a_request_alone_is_prefilled_moved_and_decoded() -> None:
    one = server(poisson(1.0, 1, output=5)).run()
    requests = one.requests
    first_s = float(requests.first_token_s[0] - requests.arrival_s[0])
    later_s = float(requests.finish_s[0] - requests.first_token_s[0])
    assert first_s == pytest.approx(PREFILL_S)
    assert later_s == pytest.approx(TRANSFER_S + 4 * DECODE_S)
    gaps_s = np.repeat(*requests.weighted_gaps)
    assert sorted(gaps_s) == pytest.approx([DECODE_S] * 3 + [TRANSFER_S + DECODE_S])


@pytest.mark.parametrize("until_s", [0.25, 1.0, 3.3, 7.7, 1e9])
@pytest.mark.parametrize(("n_prefill", "n_decode"), [(1, 1), (3, 2)])
@pytest.mark.parametrize("n_blocks", [12, 40, 10_000])
@pytest.mark.parametrize("max_concurrency", [None, 7])
def test_requests_blocks_and_tokens_are_conserved(
    until_s, n_prefill, n_decode, n_blocks, max_concurrency
) -> None:
    load, n_engines = poisson(30.0, 120, output=40), {"n_prefill": n_prefill, "n_decode": n_decode}
    blocks = CacheBlocks(n_blocks=n_blocks)
    one = server(load, blocks=blocks, max_concurrency=max_concurrency, **n_engines)
    one.run(until_s)
    engines = (*one.prefill, *one.decode)
    n_done = int((~np.isnan(one.requests.finish_s)).sum())
    n_inside = sum(e.n_admitted + len(e.waiting) + len(e.inbox) for e in engines)
    n_left = load.n_requests - n_done
    assert n_inside == min(max_concurrency or n_left, n_left)
    assert until_s < 1e6 or n_done == load.n_requests
    for engine, n_held in zip(engines, (*held_blocks(one), *([0] * n_decode)), strict=True):
        fetched = (sequence for _, sequence in engine.fetched)
        used = sum(s.n_blocks for s in (*engine.running, *engine.filling, *fetched))
        assert engine.n_free + used + n_held == n_blocks
        assert engine.n_free >= 0
    left = sum(
        s.n_left
        for e in engines
        for s in (
            *e.running, *e.filling, *e.waiting,
            *(s for _, s in e.fetched), *(s for *_, s in e.inbox),
        )
    )  # fmt: skip
    assert one.requests.n_tokens + left + 40 * (n_left - n_inside) == load.n_output.sum()
    n_first = int((~np.isnan(one.requests.first_token_s)).sum())
    assert int(one.requests.weighted_gaps[1].sum()) == one.requests.n_tokens - n_first


def test_decode_with_room_never_delays_prefill() -> None:
    """The first tokens are those of a server that only prefills."""
    load = poisson(6.0, 300, output=30)
    both = server(load)
    both.run()
    alone, _ = served_alone(replace(load, n_output=np.ones_like(load.n_output)), pool(MANY))
    assert both.requests.first_token_s == pytest.approx(alone.first_token_s)


def test_caches_that_wait_for_room_hold_up_prefill() -> None:
    load = poisson(50.0, 100, output=100)
    roomy, full = server(load), server(load, blocks=CacheBlocks(n_blocks=30))  # two sequences
    for one in (roomy, full):
        one.run()
    assert np.nanmax(full.requests.first_token_s) > 2 * np.nanmax(roomy.requests.first_token_s)
    assert np.isfinite(full.requests.finish_s).all()


def test_transfers_of_an_engine_follow_each_other() -> None:
    """Two decode engines fetch from one prefill engine: its links carry one cache at a time."""
    one = server(poisson(50.0, 60, output=3), n_decode=2, transfer_s=0.2).run()
    spans = sorted((moved.start_s, moved.end_s) for moved in one.transfers)
    assert len(spans) == 60
    assert all(end <= start + 1e-9 for (_, end), (start, _) in pairwise(spans))
    assert all(moved.ready_s <= moved.start_s for moved in one.transfers)
    # The links are the bottleneck: they rest only until the first cache is ready.
    assert spans[-1][1] - spans[0][0] == pytest.approx(60 * 0.2)


def test_one_request_in_flight_follows_the_other() -> None:
    one = server(at_once(20, output=5), max_concurrency=1).run()
    request_s = PREFILL_S + TRANSFER_S + 4 * DECODE_S
    assert one.requests.finish_s == pytest.approx(request_s * np.arange(1, 21))
    assert one.requests.arrival_s == pytest.approx(request_s * np.arange(20))


@pytest.mark.parametrize(("n_prefill", "n_decode"), [(1, 1), (3, 2)])
@pytest.mark.parametrize("max_concurrency", [3, 20])
def test_a_client_keeps_so_many_requests_in_flight(max_concurrency, n_prefill, n_decode) -> None:
    """Little's law: requests in flight are the rate times the time of a request."""
    load = at_once(400, output=11)
    one = server(
        load, n_prefill=n_prefill, n_decode=n_decode, max_concurrency=max_concurrency
    ).run()
    done = one.requests
    # At equal times, a request ends before the next one is sent.
    changes = sorted([(t, 1) for t in done.arrival_s] + [(t, -1) for t in done.finish_s])
    in_flight = np.cumsum([change for _, change in changes])
    assert in_flight.max() == max_concurrency
    mean_s = float((done.finish_s - done.arrival_s).mean())
    measured = mean_s * load.n_requests / float(done.finish_s.max())
    assert measured == pytest.approx(max_concurrency, rel=0.05)


@pytest.mark.slow
def test_many_requests_in_flight_reach_the_stable_rate() -> None:
    transfer = cache_transfer(placed(), placed(), TransferPath.DCN)
    result = simulated_apart(
        at_once(600, output=11),
        prefill=pool(n_engines=2),
        decode=pool(n_engines=3),
        transfer=transfer,
        objective=Objective(),
        max_concurrency=12,
    )
    assert result.max_concurrency == 12
    assert result.figures.requests_per_s == pytest.approx(2 / PREFILL_S, rel=0.03)


def test_engines_on_one_host_share_its_network() -> None:
    """Caches that are ready together take their bytes over one rate, not over one rate for each engine."""
    n, transfer_s = 60, 0.2
    for shared, n_networks in ((((0,), (0,)), 1), (((0,),), 2)):
        options = {"n_prefill": 2, "n_decode": 2, "transfer_s": transfer_s}
        one = server(at_once(n, output=2), networks=(shared, ((0,),)), **options)
        one.run()
        spans = sorted((moved.start_s, moved.end_s) for moved in one.transfers)
        # With two of each, a turn may wait for a sender while the receiver rests.
        expected_s = n * transfer_s / n_networks
        assert expected_s - 1e-9 <= spans[-1][1] - spans[0][0] <= expected_s + transfer_s * 1.01
        assert one.busiest_network_s == pytest.approx(n * transfer_s / n_networks)


@table
def test_ranks_use_the_networks_of_their_hosts_or_share_links(
    path: TransferPath, topology, plan, networks: Networks
) -> None:
    one = placed(topology, plan)
    assert cache_transfer(one, one, path).networks == (networks, networks)


def test_requests_in_turn_reach_every_instance_first() -> None:
    of_instance = ((0,), (0,), (1,))  # three ranks on two hosts
    assert networks_of_engines(6, of_instance) == ((0,), (2,), (0,), (2,), (1,), (3,))


def test_the_stable_rate_is_that_of_the_slowest() -> None:
    load = poisson(1.0, 200, output=11)
    prefill, decode = pool(n_engines=2), pool(n_engines=3)
    assert prefill_rate(load, prefill) == pytest.approx(2 / PREFILL_S, rel=0.02)
    assert decode_rate(load, decode) == pytest.approx(3 / (10 * DECODE_S), rel=0.02)
    result = simulated_apart(
        load,
        prefill=prefill,
        decode=decode,
        transfer=cache_transfer(placed(), placed(), TransferPath.DCN),
        objective=Objective(),
    )
    assert result.slowest.role is EngineRole.PREFILL
    assert result.saturated_per_s == pytest.approx(2 / PREFILL_S, rel=0.02)


def test_a_transfer_moves_the_keys_and_values_of_the_prompt() -> None:
    transfer = cache_transfer(placed(), placed(), TransferPath.DCN)
    assert transfer.n_bytes(1024) == 1024 * TOKEN_BYTES
    doubled = cache_transfer(placed(), placed("v6e:4x4", "tp=16"), TransferPath.DCN)
    # 16 devices, 8 heads: each is held twice
    assert doubled.n_bytes(1024) == 2 * 1024 * TOKEN_BYTES


@table
def test_hosts_or_rows_share_the_bytes_between_the_instances(
    path: TransferPath, topology, plan, bytes_per_s
) -> None:
    one = placed(topology, plan)
    transfer = cache_transfer(one, one, path, spec_constants(one.topology.chip))
    expected_s = transfer.n_bytes(4096) / bytes_per_s
    assert transfer.seconds(4096) == pytest.approx(expected_s, rel=1e-3)


def test_the_slower_side_sets_the_time() -> None:
    small, large = placed("v6e:2x2", "tp=4"), placed("v6e:2x4", "tp=8")
    mixed, narrow, wide = (
        cache_transfer(*pair, TransferPath.DCN).seconds(8192)
        for pair in ((large, small), (small, small), (large, large))
    )
    assert mixed == narrow > wide


def test_instances_that_fill_a_pod_are_no_parts_of_one() -> None:
    pod = placed("v6e:16x16", "dp=32,tp=8")
    with pytest.raises(SpecError, match=r"do not fit in one slice .*Use --transfer dcn"):
        cache_transfer(pod, pod, TransferPath.ICI)


def test_a_prompt_longer_than_the_prefill_cache_is_refused() -> None:
    with pytest.raises(SpecError, match="needs 7 blocks of 16 tokens, and the cache has 6"):
        simulated_apart(
            poisson(1.0, 3, output=4),
            prefill=pool(MANY, CacheBlocks(n_blocks=6)),
            decode=pool(MANY),
            transfer=cache_transfer(placed(), placed(), TransferPath.DCN),
            objective=Objective(),
        )
