"""What one check of a response may use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of a worker and of a check in it; a worker over a limit is killed from outside, whatever it is doing."""

    wall_s: float = 10.0
    """Seconds for a check."""
    wall_s_by_verifier: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """The same for some verifiers by name."""
    memory_bytes: int = 4 << 30
    """Address space of a worker, libraries included."""
    load_s: float = 60.0
    """Seconds for a worker to start, and for a verifier to be loaded. No check's time."""

    def of(self, verifier: str) -> float:
        """Seconds for a check of this verifier."""
        return self.wall_s_by_verifier.get(verifier, self.wall_s)
