"""A problem as the verifiers see it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class FakeProblem:
    answer: Any = "51"
    verifier: str = "exact"
    extra: Mapping[str, Any] = field(default_factory=dict)
    problem_id: str = "p1"
