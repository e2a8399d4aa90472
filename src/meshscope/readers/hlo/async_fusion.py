"""Asynchronous collectives that libtpu spreads over the fusions beside them.

The instruction stands in every fusion that carries it on, with one `chain_id`: the first hands it
to a custom call `AsyncCollectiveStart`, the last takes it from `AsyncCollectiveDone`.
"""

import re
from collections.abc import Iterable

from meshscope.readers.hlo.executions import CallSite
from meshscope.readers.hlo.module import Computation, HloModule, Instruction

AsyncChain = tuple[str, int | None]  # chain_id and channel_id

_CHAIN = re.compile(r'\bchain_id="([^"]*)"')


def starts_async_chain(site: CallSite) -> bool:
    """Whether the collective is handed to `AsyncCollectiveStart` where it stands."""
    return async_chain_of(site.instruction) is not None and any(
        call.custom_call_target == "AsyncCollectiveStart" and site.instruction.name in call.operands
        for call in site.context.computation.instructions
        if call.opcode == "custom-call"
    )


def first_of_each_chain(found: Iterable[CallSite]) -> list[CallSite]:
    """The sites, those of one chain told once, by the first."""
    legs = [(site, async_chain_of(site.instruction)) for site in found]
    started = {chain for site, chain in legs if chain is not None and starts_async_chain(site)}
    return [site for site, chain in legs if chain not in started or starts_async_chain(site)]


def async_chain_of(instruction: Instruction) -> AsyncChain | None:
    """The chain that a collective belongs to; None when it stands alone."""
    match = _CHAIN.search(instruction.attributes)
    return (match[1], instruction.channel_id) if match else None


def async_chain_ends(module: HloModule) -> dict[AsyncChain, Instruction]:
    """For every chain, the fusion that ends it and so holds its result."""
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
