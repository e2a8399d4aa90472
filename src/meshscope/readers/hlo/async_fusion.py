"""Asynchronous collectives that libtpu spreads over the fusions that run meanwhile.

Every fusion that carries the collective holds a copy of its instruction with the same `chain_id`.
The first fusion passes it to a custom call `AsyncCollectiveStart`, the last one takes it from
`AsyncCollectiveDone`.
"""

import re
from collections.abc import Iterable

from meshscope.readers.hlo.executions import CallSite
from meshscope.readers.hlo.module import Computation, HloModule, Instruction

AsyncChain = tuple[str, int | None]  # chain_id and channel_id

_CHAIN_ID = re.compile(r'\bchain_id="([^"]*)"')


def starts_async_chain(site: CallSite) -> bool:
    """Whether the collective feeds an `AsyncCollectiveStart` in its computation."""
    return async_chain_of(site.instruction) is not None and any(
        call.custom_call_target == "AsyncCollectiveStart" and site.instruction.name in call.operands
        for call in site.context.computation.instructions
        if call.opcode == "custom-call"
    )


def first_of_each_chain(sites: Iterable[CallSite]) -> list[CallSite]:
    """The sites without those that continue an asynchronous chain."""
    chain_of_site = [(site, async_chain_of(site.instruction)) for site in sites]
    started = {
        chain for site, chain in chain_of_site if chain is not None and starts_async_chain(site)
    }
    return [
        site for site, chain in chain_of_site if chain not in started or starts_async_chain(site)
    ]


def async_chain_of(instruction: Instruction) -> AsyncChain | None:
    """The chain that a collective belongs to; None if it belongs to none."""
    match = _CHAIN_ID.search(instruction.attributes)
    return (match[1], instruction.channel_id) if match else None


def async_chain_ends(module: HloModule) -> dict[AsyncChain, Instruction]:
    """The last fusion of every chain, which holds the result of the collective."""
    chain_in = {c.name: chain for c in module.computations.values() for chain in _ended_in(c)}
    return {
        chain_in[name]: instruction
        for computation in (module.computations.values() if chain_in else ())
        for instruction in computation.instructions
        if instruction.opcode == "fusion"
        for name in instruction.called.get("calls", ())
        if name in chain_in
    }


def _ended_in(computation: Computation) -> list[AsyncChain]:
    for call in computation.instructions:
        if call.opcode == "custom-call" and call.custom_call_target == "AsyncCollectiveDone":
            chains = (async_chain_of(producer) for producer in computation.producers(call))
            return [chain for chain in chains if chain is not None]
    return []
