"""Scores rows of gold and response by hand: what a person uses to see why a verifier decides as it does."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from stream_grpo.config_composition import COMPOSE_PREFIX
from stream_grpo.config_http import PREFIX as HTTP
from stream_grpo.config_rewards import Rewards
from stream_grpo.errors import ConfigError
from stream_grpo.rewards.composition import Usage, chosen, plain_verifiers
from stream_grpo.rewards.judging import Answer
from stream_grpo.rewards.limits import Limits
from stream_grpo.rewards.messages import ProblemRow
from stream_grpo.rewards.policy import UnscoredPolicy
from stream_grpo.rewards.pool import RewardPool
from stream_grpo.rewards.scoring import versions
from stream_grpo.rewards.user import PREFIX
from stream_grpo.rewards.verifiers import VERIFIERS
from stream_grpo.rewards.whole import Part, Whole, no_row
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

NO_REWARDS = Rewards()
"""Where no configuration is given: no judges, no compositions."""


class Pair(NamedTuple):
    """A response and the problem it answers."""

    problem: ProblemRow
    response: str


class Verified(NamedTuple):
    """What was decided of a pair."""

    result: RewardResult
    parts: Mapping[str, RewardResult]
    """Of a composition what each component said, in its order, and the second verifiers; else empty."""


def read_pairs(path: Path, verifier: str, rewards: Rewards = NO_REWARDS) -> Iterator[Pair]:
    """The rows of a JSONL file: `gold`, `response`, optionally `verifier`; every further column is the problem's.

    Raises ConfigError naming file, line and field for a row that is none.
    """
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _pair(line, f"{path}, line {number}", verifier, rewards)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def make_pair(
    gold: str,
    response: str,
    verifier: str,
    rewards: Rewards = NO_REWARDS,
    where: str = "the pair",
    extra: Mapping[str, Any] = MappingProxyType({}),
) -> Pair:
    """One pair; `verifier` may be a list of several, as JSON.

    Raises ConfigError, beginning with `where`, for a verifier that does not exist.
    """
    try:
        asked = plain_verifiers([verifier], rewards.compose)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    names = [*sorted(VERIFIERS), *(f"{HTTP}{name}" for name in rewards.http)]
    if odd := [name for name in sorted(asked) if name not in names and not name.startswith(PREFIX)]:
        given = [f"{COMPOSE_PREFIX}{name}" for name in rewards.compose]
        known = f"{', '.join([*names, *given])}, {PREFIX}module.function, {HTTP}NAME and {COMPOSE_PREFIX}NAME"
        raise ConfigError(
            f"{where}: no verifier is called {odd[0]!r}; known: {known} of the configuration that is given"
        )
    prompt = extra.get("prompt")
    return Pair(ProblemRow(problem_id=where, answer=gold, verifier=verifier, extra=extra, prompt=prompt), response)


def verify(
    pairs: Iterable[Pair],
    *,
    num_workers: int,
    limits: Limits,
    preload: Sequence[str] = (),
    rewards: Rewards = NO_REWARDS,
) -> Iterator[Verified]:
    """The results in the order of the pairs, each as soon as it and all before it are there.

    `preload`: verifiers that many pairs name. Tokens are not counted here: a cost of tokens is 0. Raises RewardError
    where no worker starts, ConfigError where a function of a composition is not there.
    """
    waiting, results, next_place = iter(pairs), dict[int, Verified](), 0
    with _Askers(num_workers, limits, preload, rewards) as askers:
        num_submitted, is_read = 0, False
        while not is_read or next_place < num_submitted:
            while not is_read and num_submitted - next_place < _NUM_AHEAD * num_workers:
                if (pair := next(waiting, None)) is None:
                    is_read = True
                    break
                results |= askers.submit(num_submitted, pair)
                num_submitted += 1
            if next_place not in results:
                results |= askers.poll()
            while next_place in results:
                yield results.pop(next_place)
                next_place += 1


class _Askers:
    """A pool for what runs here, and the judges where there are any; compositions are asked part by part."""

    def __init__(self, num_workers: int, limits: Limits, preload: Sequence[str], rewards: Rewards) -> None:
        self._rewards = rewards
        self._parts: dict[str, tuple[int, Pair, Whole, Part]] = {}
        self._numbers, self._versions = itertools.count(), dict[str, str]()
        with ExitStack() as stack:
            self._http: HttpRewards | None = None
            if rewards.http:
                from stream_grpo.rewards.http import HttpRewards  # brings the client's library

                self._http = stack.enter_context(HttpRewards(rewards.http, policy=_POLICY))
            ours = [name for name in sorted(plain_verifiers(preload, rewards.compose)) if not name.startswith(HTTP)]
            paths = [str(rewards.function_dir.resolve())]
            self._pool = stack.enter_context(RewardPool(num_workers, limits, policy=_POLICY, preload=ours, paths=paths))
            self._stack = stack.pop_all()

    def submit(self, place: int, pair: Pair) -> dict[int, Verified]:
        """Give one pair; what is known at once, where nothing of it can be asked."""
        found = chosen(pair.problem.verifier, self._rewards.compose)
        if found is None:
            self._give(str(place), pair)
            return {}
        usage = Usage(num_tool_calls=pair.response.count(found.composition.tool_marker))
        whole = Whole(found, self._version(pair.problem.verifier), usage)
        return self._ask(place, pair, whole, whole.first())

    def poll(self) -> dict[int, Verified]:
        """What is finished, after a short wait."""
        found = dict[int, Verified]()
        for task_id, result in self._answers():
            if task_id not in self._parts:
                found[int(task_id)] = Verified(result, {})
            else:
                place, pair, whole, part = self._parts.pop(task_id)
                found |= self._take(place, pair, whole, part, result)
        return found

    def _version(self, verifier: str) -> str:
        """Of a composition. Who asks by hand may ask any function."""
        if verifier not in self._versions:
            asked = plain_verifiers([verifier], self._rewards.compose)
            functions = tuple(name for name in asked if name.startswith(PREFIX))
            self._versions |= versions([verifier], self._rewards.model_copy(update={"functions": functions}))
        return self._versions[verifier]

    def _ask(self, place: int, pair: Pair, whole: Whole, parts: Iterable[Part]) -> dict[int, Verified]:
        found = dict[int, Verified]()
        for part in parts:
            try:
                row = part.row(pair.problem)
            except ValueError as error:
                found |= self._take(place, pair, whole, part, no_row(part.verifier, error))
                continue
            task_id = f"{place}#{next(self._numbers)}"
            self._parts[task_id] = place, pair, whole, part
            self._give(task_id, Pair(row, pair.response))
        return found

    def _take(self, place: int, pair: Pair, whole: Whole, part: Part, result: RewardResult) -> dict[int, Verified]:
        if more := whole.take(part, result):
            return self._ask(place, pair, whole, more)
        return {} if whole.result is None else {place: Verified(whole.result, whole.said())}

    def _give(self, task_id: str, pair: Pair) -> None:
        name = pair.problem.verifier
        if self._http is not None and name.startswith(HTTP):
            self._http.submit(name, pair.problem, [Answer(task_id, pair.response)])
        else:
            self._pool.submit(task_id, name, pair.response, pair.problem)

    def _answers(self) -> list[tuple[str, RewardResult]]:
        if self._http is None:
            return self._pool.poll(_WAIT_S)
        found = self._pool.poll(_TURN_S if self._http.num_open else _WAIT_S)
        return found + self._http.poll(0.0 if found or self._pool.num_open else _WAIT_S)

    def __enter__(self) -> _Askers:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _pair(line: str, where: str, verifier: str, rewards: Rewards) -> Pair:
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
    named = json.dumps(name) if isinstance(name, list) else str(name)
    return make_pair(gold if isinstance(gold, str) else json.dumps(gold), response, named, rewards, where, row)
