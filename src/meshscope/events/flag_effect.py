"""A compiler flag, and what it changes in a program."""

from dataclasses import dataclass

from meshscope.events.enums import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """A compiler flag and its value."""

    name: str
    value: str

    def __str__(self) -> str:
        """As in the environment."""
        return f"--{self.name}={self.value}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagEffect:
    """What a flag changes in a program; `refused` is why the compiler does not take it.

    `step_s` and `total_bytes` are the figures with the flag. A program that is changed, but not in its
    collectives, has another schedule or other code. `notes` say which of its times have no measured basis, with the
    flag or without.
    """

    flag: Flag
    phase: Phase
    refused: str | None = None
    is_changed: bool = False
    is_other_collectives: bool = False
    step_s: float | None = None
    total_bytes: int | None = None
    base_step_s: float | None = None
    base_total_bytes: int | None = None
    notes: tuple[str, ...] = ()
