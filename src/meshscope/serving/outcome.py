"""A simulated server: its instances, the load and the result."""

from dataclasses import dataclass

from meshscope.errors import read_only
from meshscope.plans.experiment import Experiment
from meshscope.serving.apart import EnginePool
from meshscope.serving.cache_blocks import BLOCK_TOKENS
from meshscope.serving.host_fit import HostFit
from meshscope.serving.results import ServiceLimits
from meshscope.serving.simulation import SimulatedLoad, Simulation
from meshscope.serving.transfer import CacheTransfer


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedPool:
    """Instances of a server: the slice and plan of each, and the engines of all."""

    experiment: Experiment
    n_instances: int
    pool: EnginePool

    @property
    def n_chips(self) -> int:
        """Chips of all instances."""
        return self.n_instances * self.experiment.topology.n_chips

    @property
    def n_cache_tokens(self) -> int:
        """Tokens in the cache of one engine."""
        return self.pool.blocks.n_blocks * BLOCK_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """Requests that are not simulated: without tokens, or longer than the model's context or the cache."""

    n_empty: int = 0
    n_beyond_context: int = 0
    n_beyond_cache: int = 0


@read_only
@dataclass(frozen=True, slots=True, kw_only=True)
class ServingOutcome:
    """The result of a simulation with what was simulated.

    `prefill` are the instances that only prefill, with the transfer of caches from them; None if all
    instances do both. `load` says in words what arrives.
    """

    main: PlacedPool
    prefill: PlacedPool | None
    transfer: CacheTransfer | None
    load: str
    objective: ServiceLimits
    left_out: LeftOut
    host_fit: HostFit | None
    simulation: Simulation

    @property
    def result(self) -> SimulatedLoad:
        """The figures."""
        return self.simulation.result

    @property
    def n_chips(self) -> int:
        """Chips of all instances."""
        return self.main.n_chips + (0 if self.prefill is None else self.prefill.n_chips)
