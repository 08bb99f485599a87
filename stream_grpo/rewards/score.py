"""Scores a response with the verifier its problem names; a failure of the verifier is never a reward."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping

from stream_grpo.errors import ConfigError
from stream_grpo.rewards.verifiers import MAX_EVIDENCE_CHARACTERS, VERIFIERS, VerifiableProblem, Verifier
from stream_grpo.types import Decision, EndReason, RewardResult


class Scorer:
    """The verifiers of a run. Keeps no state between calls.

    Raises ConfigError at construction for a name that no verifier has; the message lists those there are.
    """

    def __init__(self, names: Iterable[str], verifiers: Mapping[str, Verifier] = VERIFIERS) -> None:
        self._verifiers = _chosen(names, verifiers)

    def score(self, problem: VerifiableProblem, response_text: str, end_reason: EndReason) -> RewardResult:
        """What the problem's verifier says of the response.

        A response that reached the length limit is scored, and the verifier is told that it was cut. One that the
        engine aborted is `unknown` and one that the engine failed at is `env_error`, both without a reward and without
        asking the verifier. Whatever the verifier raises becomes `env_error` without a reward, with the exception as
        evidence.
        """
        verifier = self._verifiers.get(problem.verifier)
        version = verifier.version if verifier else ""
        if end_reason is EndReason.ABORT:
            return _unscored(Decision.UNKNOWN, problem.verifier, version, "the engine aborted the response")
        if end_reason is EndReason.ERROR:
            return _unscored(Decision.ENV_ERROR, problem.verifier, version, "the engine failed at the response")
        if end_reason is EndReason.MODEL_TIMEOUT:
            return _unscored(Decision.UNKNOWN, problem.verifier, version, "not sampled by the deadline of its group")
        if end_reason is EndReason.ENV_ERROR:
            return _unscored(Decision.ENV_ERROR, problem.verifier, version, "its environment failed")
        if verifier is None:
            known = ", ".join(sorted(self._verifiers))
            evidence = f"verifier {problem.verifier!r} is not one of this run: {known}"
            return _unscored(Decision.ENV_ERROR, problem.verifier, version, evidence)
        try:
            return verifier.check(response_text, problem, end_reason is EndReason.LENGTH)
        except Exception as error:  # a verifier may be anyone's code: none of its failures may stop a sampler
            evidence = traceback.format_exception_only(error)[-1].strip()[:MAX_EVIDENCE_CHARACTERS]
            return _unscored(Decision.ENV_ERROR, problem.verifier, version, evidence)


def rewards_version(names: Iterable[str], verifiers: Mapping[str, Verifier] = VERIFIERS) -> str:
    """The rules by which a run scores, for its configuration hash: "exact=1", sorted by name, each name once.

    Raises ConfigError for a name that no verifier has.
    """
    return ",".join(f"{name}={verifier.version}" for name, verifier in sorted(_chosen(names, verifiers).items()))


def _chosen(names: Iterable[str], verifiers: Mapping[str, Verifier]) -> dict[str, Verifier]:
    wanted = set(names)
    unknown = sorted(wanted - verifiers.keys())
    if unknown:
        known = ", ".join(sorted(verifiers))
        raise ConfigError(f"no verifier is called {', '.join(map(repr, unknown))}; known: {known}")
    return {name: verifiers[name] for name in wanted}


def _unscored(decision: Decision, verifier: str, version: str, evidence: str) -> RewardResult:
    return RewardResult(decision=decision, reward=None, verifier=verifier, verifier_version=version, evidence=evidence)
