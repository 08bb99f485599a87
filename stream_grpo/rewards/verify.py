"""Scores rows of gold and response by hand: what a person uses to see why a verifier decides as it does."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from stream_grpo.config_http import PREFIX as HTTP
from stream_grpo.config_http import Judge
from stream_grpo.errors import ConfigError
from stream_grpo.rewards.judging import Answer
from stream_grpo.rewards.limits import Limits
from stream_grpo.rewards.messages import ProblemRow
from stream_grpo.rewards.policy import UnscoredPolicy
from stream_grpo.rewards.pool import RewardPool
from stream_grpo.rewards.user import PREFIX
from stream_grpo.rewards.verifiers import VERIFIERS
from stream_grpo.types import RewardResult

if TYPE_CHECKING:
    from stream_grpo.rewards.http import HttpRewards

# Looked at by a person: an error is shown as it is, at once, and stops nothing.
_POLICY = UnscoredPolicy(num_env_error_retries=0, max_env_errors_in_row=None)
_WAIT_S = 1.0
# Where both the pool and judges are waited for, each is looked at so often.
_TURN_S = 0.02
# Rows that are with the pool at a time, for each worker: a file may be larger than memory.
_NUM_AHEAD = 256


NO_JUDGES: Mapping[str, Judge] = MappingProxyType({})
"""Where no configuration names any."""


class Pair(NamedTuple):
    """A response and the problem it answers."""

    problem: ProblemRow
    response: str


def read_pairs(path: Path, verifier: str, judges: Mapping[str, Judge] = NO_JUDGES) -> Iterator[Pair]:
    """The rows of a JSONL file: `gold`, `response`, optionally `verifier`; every further column is the problem's.

    Raises ConfigError naming file, line and field for a row that is none.
    """
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _pair(line, f"{path}, line {number}", verifier, judges)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def make_pair(
    gold: str,
    response: str,
    verifier: str,
    judges: Mapping[str, Judge] = NO_JUDGES,
    where: str = "the pair",
    extra: Mapping[str, Any] = MappingProxyType({}),
) -> Pair:
    """One pair. Raises ConfigError, beginning with `where`, for a verifier that does not exist."""
    names = [*sorted(VERIFIERS), *(f"{HTTP}{name}" for name in judges)]
    if verifier not in names and not verifier.startswith(PREFIX):
        known = f"{', '.join(names)}, {PREFIX}module.function, {HTTP}NAME of the configuration that is given"
        raise ConfigError(f"{where}: no verifier is called {verifier!r}; known: {known}")
    prompt = extra.get("prompt")
    return Pair(ProblemRow(problem_id=where, answer=gold, verifier=verifier, extra=extra, prompt=prompt), response)


def verify(
    pairs: Iterable[Pair],
    *,
    num_workers: int,
    limits: Limits,
    preload: Sequence[str] = (),
    judges: Mapping[str, Judge] = NO_JUDGES,
) -> Iterator[RewardResult]:
    """The results in the order of the pairs, each as soon as it and all before it are there.

    `preload`: verifiers that many pairs name. Raises RewardError where no worker starts.
    """
    waiting, results, next_place = iter(pairs), dict[int, RewardResult](), 0
    with _Askers(num_workers, limits, preload, judges) as askers:
        num_submitted, is_read = 0, False
        while not is_read or next_place < num_submitted:
            while not is_read and num_submitted - next_place < _NUM_AHEAD * num_workers:
                if (pair := next(waiting, None)) is None:
                    is_read = True
                    break
                askers.submit(str(num_submitted), pair)
                num_submitted += 1
            results |= {int(task_id): result for task_id, result in askers.poll()}
            while next_place in results:
                yield results.pop(next_place)
                next_place += 1


class _Askers:
    """A pool for what runs here, and the judges where there are any."""

    def __init__(self, num_workers: int, limits: Limits, preload: Sequence[str], judges: Mapping[str, Judge]) -> None:
        with ExitStack() as stack:
            self._http: HttpRewards | None = None
            if judges:
                from stream_grpo.rewards.http import HttpRewards  # brings the client's library

                self._http = stack.enter_context(HttpRewards(judges, policy=_POLICY))
            ours = [name for name in preload if not name.startswith(HTTP)]
            self._pool = stack.enter_context(RewardPool(num_workers, limits, policy=_POLICY, preload=ours))
            self._stack = stack.pop_all()

    def submit(self, task_id: str, pair: Pair) -> None:
        name = pair.problem.verifier
        if self._http is not None and name.startswith(HTTP):
            self._http.submit(name, pair.problem, [Answer(task_id, pair.response)])
        else:
            self._pool.submit(task_id, name, pair.response, pair.problem)

    def poll(self) -> list[tuple[str, RewardResult]]:
        if self._http is None:
            return self._pool.poll(_WAIT_S)
        found = self._pool.poll(_TURN_S if self._http.num_open else _WAIT_S)
        return found + self._http.poll(0.0 if found or self._pool.num_open else _WAIT_S)

    def __enter__(self) -> _Askers:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _pair(line: str, where: str, verifier: str, judges: Mapping[str, Judge]) -> Pair:
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
    return make_pair(gold if isinstance(gold, str) else json.dumps(gold), response, str(name), judges, where, row)
