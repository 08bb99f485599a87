"""The verifiers by name. Importing this module loads none of their libraries: each comes with its first check."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType

from stream_grpo.rewards import exact as _exact
from stream_grpo.rewards.result import MAX_EVIDENCE_CHARACTERS, Check, VerifiableProblem, Verifier
from stream_grpo.types import RewardResult

__all__ = ["MAX_EVIDENCE_CHARACTERS", "VERIFIERS", "VerifiableProblem", "Verifier", "exact"]

exact = _exact.exact


def _lazy(name: str, version: str, *, function: str = "", is_cheap: bool = False) -> Verifier:
    """A function of the module `name` of this package, by default the one of that name, imported when first called."""
    return Verifier(name, version, _LazyCheck(name, function or name), is_cheap)


class _LazyCheck:
    """A check that imports its module at the first call. Pickles by name, so that worker processes can take it."""

    def __init__(self, module: str, function: str) -> None:
        self._module, self._function = module, function
        self._check: Check | None = None

    def __call__(self, response_text: str, problem: VerifiableProblem, is_cut: bool = False) -> RewardResult:
        if self._check is None:
            self._check = getattr(import_module(f"stream_grpo.rewards.{self._module}"), self._function)
        return self._check(response_text, problem, is_cut)

    def __reduce__(self) -> tuple[type[_LazyCheck], tuple[str, str]]:
        return _LazyCheck, (self._module, self._function)


VERIFIERS: Mapping[str, Verifier] = MappingProxyType(
    {
        verifier.name: verifier
        for verifier in (
            Verifier(_exact.NAME, _exact.VERSION, exact, is_cheap=True),
            _lazy("choice", "1", is_cheap=True),
            _lazy("code", "1", function="check_code"),
            _lazy("environment", "1", function="check_environment", is_cheap=True),
            _lazy("json_schema", "1"),
            _lazy("math", "1"),
            _lazy("reasoning_gym", "1"),
            _lazy("regex", "1"),
        )
    }
)
"""Every verifier that a problem can name."""
