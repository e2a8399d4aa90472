"""The prefix cache of an engine: parts of prompts that later requests share, the least recently used evicted first."""

from collections.abc import Sequence
from dataclasses import dataclass, field

Part = tuple[int, int]  # a node of the prefix tree, and the tokens of its part of a prompt
Prefix = tuple[Part, ...]


@dataclass(slots=True, kw_only=True)
class PrefixCache:
    """Nodes of the tree of prompts whose keys and values are in blocks of `block_tokens`.

    A node stands for its part of a prompt and all parts before it. Blocks of nodes that no sequence uses count
    as free until they are needed: `n_idle` of them. `n_hit` of `n_asked` prompt tokens came from the cache.
    """

    block_tokens: int
    n_idle: int = 0
    n_hit: int = 0
    n_asked: int = 0
    _n_blocks: dict[int, int] = field(default_factory=dict[int, int])
    _n_users: dict[int, int] = field(default_factory=dict[int, int])
    _idle: dict[int, None] = field(default_factory=dict[int, None])  # the least recently used first

    def hit(self, prefix: Prefix) -> tuple[int, int]:
        """How many parts from the start are here, and their tokens in whole blocks."""
        n_parts = n_tokens = 0
        for node, size in prefix:
            if node not in self._n_blocks:
                break
            n_parts += 1
            n_tokens += size
        return n_parts, n_tokens - n_tokens % self.block_tokens

    def n_new(self, prefix: Prefix, n_parts: int) -> tuple[int, int]:
        """Blocks of these first parts, and how many of them no sequence uses yet."""
        nodes = [node for node, _ in prefix[:n_parts]]
        return (
            sum(self._n_blocks[node] for node in nodes),
            sum(self._n_blocks[node] for node in nodes if node not in self._n_users),
        )

    def use(self, nodes: Sequence[int]) -> int:
        """Keeps nodes for a sequence; returns the blocks that are no longer idle."""
        n_taken = 0
        for node in nodes:
            self._n_users[node] = self._n_users.get(node, 0) + 1
            if node in self._idle:
                del self._idle[node]
                n_taken += self._n_blocks[node]
        self.n_idle -= n_taken
        return n_taken

    def add(self, prefix: Prefix, n_parts: int) -> tuple[tuple[int, ...], int]:
        """The parts after the first ones that are not here yet, now used by a sequence, and their blocks."""
        added: list[int] = []
        at, n_blocks = sum(size for _, size in prefix[:n_parts]), 0
        for node, size in prefix[n_parts:]:
            n_of_node = (at + size) // self.block_tokens - at // self.block_tokens
            at += size
            if node not in self._n_blocks:
                self._n_blocks[node], self._n_users[node] = n_of_node, 1
                n_blocks += n_of_node
                added.append(node)
        return tuple(added), n_blocks

    def release(self, nodes: Sequence[int]) -> int:
        """Ends the use of nodes by a sequence, the last part first; returns the blocks that are idle now."""
        n_freed = 0
        for node in reversed(nodes):
            self._n_users[node] -= 1
            if not self._n_users[node]:
                del self._n_users[node]
                self._idle[node] = None
                n_freed += self._n_blocks[node]
        self.n_idle += n_freed
        return n_freed

    def evict(self, n_free: int) -> None:
        """Drops the least recently used nodes until idle blocks are at most the free ones."""
        while self.n_idle > n_free:
            node = next(iter(self._idle))
            del self._idle[node]
            self.n_idle -= self._n_blocks.pop(node)
