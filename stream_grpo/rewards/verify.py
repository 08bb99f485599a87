"""Scores rows of gold and response by hand: what a person uses to see why a verifier decides as it does."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from stream_grpo.errors import ConfigError
from stream_grpo.rewards.limits import Limits
from stream_grpo.rewards.messages import ProblemRow
from stream_grpo.rewards.policy import UnscoredPolicy
from stream_grpo.rewards.pool import RewardPool
from stream_grpo.rewards.user import PREFIX
from stream_grpo.rewards.verifiers import VERIFIERS
from stream_grpo.types import RewardResult

# Looked at by a person: an error is shown as it is, at once, and stops nothing.
_POLICY = UnscoredPolicy(num_env_error_retries=0, max_env_errors_in_row=None)
_WAIT_S = 1.0
# Rows that are with the pool at a time, for each worker: a file may be larger than memory.
_NUM_AHEAD = 256


class Pair(NamedTuple):
    """A response and the problem it answers."""

    problem: ProblemRow
    response: str


def read_pairs(path: Path, verifier: str) -> Iterator[Pair]:
    """The rows of a JSONL file: `gold`, `response`, optionally `verifier`; every further column is the problem's.

    Raises ConfigError naming file, line and field for a row that is none.
    """
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _pair(line, f"{path}, line {number}", verifier)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def make_pair(gold: str, response: str, verifier: str, where: str = "the pair", **extra: Any) -> Pair:
    """One pair. Raises ConfigError, beginning with `where`, for a verifier that does not exist."""
    if verifier not in VERIFIERS and not verifier.startswith(PREFIX):
        known = ", ".join(sorted(VERIFIERS))
        raise ConfigError(f"{where}: no verifier is called {verifier!r}; known: {known}, {PREFIX}module.function")
    prompt = extra.get("prompt")
    return Pair(ProblemRow(problem_id=where, answer=gold, verifier=verifier, extra=extra, prompt=prompt), response)


def verify(
    pairs: Iterable[Pair], *, num_workers: int, limits: Limits, preload: Sequence[str] = ()
) -> Iterator[RewardResult]:
    """The results in the order of the pairs, each as soon as it and all before it are there.

    `preload`: verifiers that many pairs name. Raises RewardError where no worker starts.
    """
    waiting, results, next_place = iter(pairs), dict[int, RewardResult](), 0
    with RewardPool(num_workers, limits, policy=_POLICY, preload=preload) as pool:
        num_submitted, is_read = 0, False
        while not is_read or next_place < num_submitted:
            while not is_read and num_submitted - next_place < _NUM_AHEAD * num_workers:
                if (pair := next(waiting, None)) is None:
                    is_read = True
                    break
                pool.submit(str(num_submitted), pair.problem.verifier, pair.response, pair.problem)
                num_submitted += 1
            results |= {int(task_id): result for task_id, result in pool.poll(_WAIT_S)}
            while next_place in results:
                yield results.pop(next_place)
                next_place += 1


def _pair(line: str, where: str, verifier: str) -> Pair:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: a JSON object with 'gold' and 'response' is due, not {type(row).__name__}")
    for field in ("gold", "response"):
        if field not in row:
            raise ConfigError(f"{where}: no field {field!r}; it has {', '.join(map(repr, row)) or 'none'}")
    if not isinstance(row["response"], str):
        raise ConfigError(f"{where}: field 'response' is {type(row['response']).__name__}, not text")
    gold, response, name = row.pop("gold"), row.pop("response"), row.pop("verifier", None) or verifier
    return make_pair(gold if isinstance(gold, str) else json.dumps(gold), response, str(name), where, **row)
