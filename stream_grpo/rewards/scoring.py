"""The rewards of a run: responses go in while generation goes on, results come out as they are found."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self

from stream_grpo.config_composition import COMPOSE_PREFIX, Composition
from stream_grpo.config_http import PREFIX as HTTP
from stream_grpo.config_http import Judge
from stream_grpo.config_rewards import Rewards
from stream_grpo.config_section import settings
from stream_grpo.errors import ConfigError
from stream_grpo.rewards import sandbox
from stream_grpo.rewards.code import CODE, CodeSettings
from stream_grpo.rewards.composition import chosen, plain_verifiers, verifiers_of, version_of
from stream_grpo.rewards.gathering import Gathering, Place
from stream_grpo.rewards.judging import Answer, api_key
from stream_grpo.rewards.limits import Limits
from stream_grpo.rewards.policy import UnscoredCount, UnscoredPolicy
from stream_grpo.rewards.pool import RewardPool
from stream_grpo.rewards.result import VerifiableProblem
from stream_grpo.rewards.score import Scorer, rewards_version
from stream_grpo.rewards.user import PREFIX, source_version
from stream_grpo.rewards.verifiers import VERIFIERS
from stream_grpo.types import EndReason, RewardResult

if TYPE_CHECKING:
    from stream_grpo.rewards.http import HttpRewards

UNSCORED_ENDS = (EndReason.ABORT, EndReason.ERROR, EndReason.MODEL_TIMEOUT, EndReason.ENV_ERROR)
"""No verifier is asked about a response that ended so."""
# Where both the pool and judges are waited for, each is looked at so often.
_TURN_S = 0.005


class Pool(Protocol):
    """What Scoring needs of a RewardPool."""

    def submit(
        self, task_id: str, verifier: str, response_text: str, problem: VerifiableProblem, *, is_cut: bool = False
    ) -> None:
        """Give one response to be checked."""

    def poll(self, timeout_s: float = 0.0) -> list[tuple[str, RewardResult]]:
        """What is finished and was not yet returned."""

    def status(self) -> dict[str, Any]:
        """Plain values."""

    def close(self) -> None:
        """End all workers."""


class Scoring:
    """Scores responses with the verifiers that their problems name. Belongs to one thread, but for `status`.

    A cheap verifier is asked at once, in this process: a pool of workers would cost more than its checks. A judge
    behind a URL is asked by HttpRewards, every other verifier in a RewardPool; both start where they are needed.
    """

    def __init__(
        self,
        rewards: Rewards,
        expected: Iterable[str] = (),
        *,
        make_pool: Callable[[Rewards, Sequence[str]], Pool] | None = None,
    ) -> None:
        """`expected`: the verifiers that the run's problems name; their workers start at once, with them loaded.

        Raises ConfigError where one of them is not known to the run, or the key of a judge is not there.
        """
        expected = set(expected)
        _require_known(expected, rewards)
        self._judges = {f"{HTTP}{name}": judge for name, judge in rewards.http.items()}
        asked = sorted(expected & self._judges.keys())
        for name in asked:
            _require_key(name, self._judges[name])
        self._rewards, self._make_pool = rewards, make_pool or start_pool
        self._in_pool = {name for name, verifier in VERIFIERS.items() if not verifier.is_cheap} | {*rewards.functions}
        self._scorer = Scorer(VERIFIERS)
        self._unscored = UnscoredCount(_policy(rewards))
        self._answered: list[tuple[str, RewardResult]] = []
        self._num_with_pool = 0
        self._pool: Pool | None = None
        self._pooled = sorted(expected & self._in_pool)
        if self._pooled:
            self._pool = self._make_pool(rewards, self._pooled)
        self._gathering, self._num_with_http = Gathering(), 0
        self._http: HttpRewards | None = None
        if asked:
            self._start_http()

    def submit(
        self,
        task_id: str,
        problem: VerifiableProblem,
        response_text: str,
        end_reason: EndReason,
        place: Place | None = None,
        *,
        num_tokens: int = 0,
        may_be_trained: bool = False,
    ) -> None:
        """Give one response; its result comes from `poll` under `task_id`.

        A judge that compares is asked once all responses of the group at `place` are there; without a place a response
        is a group of its own. What it is for, and its sampled tokens, are read where a scoring is made of several, see
        `composed`.

        One that the engine aborted is `unknown` and one that the engine failed at is `env_error`, both without a reward
        and without asking the verifier, which is told of a response that was cut at the length limit.

        Raises RewardError where too many responses in a row cannot be scored.
        """
        if problem.verifier in self._in_pool and end_reason not in UNSCORED_ENDS:
            if self._pool is None:
                self._pool = self._make_pool(self._rewards, [problem.verifier])
            is_cut = end_reason is EndReason.LENGTH
            self._pool.submit(task_id, problem.verifier, response_text, problem, is_cut=is_cut)
            self._num_with_pool += 1
            return
        if problem.verifier in self._judges:
            is_scored = end_reason not in UNSCORED_ENDS
            self._judge(problem, Answer(task_id, response_text) if is_scored else None, place)
            if is_scored:
                return
        result = self._scorer.score(problem, response_text, end_reason)
        self._answered.append((task_id, result))
        if end_reason not in UNSCORED_ENDS:
            self._unscored.settle(result)

    def poll(self, timeout_s: float = 0.0) -> list[tuple[str, RewardResult]]:
        """What is known and was not yet returned; waits up to `timeout_s` where nothing is and something is out.

        Raises RewardError where too many responses in a row cannot be scored, or no worker starts.
        """
        results, self._answered = self._answered, []
        wait_s = 0.0 if results else timeout_s
        if not (self._num_with_pool and self._num_with_http):
            return results + self._from_pool(wait_s) + self._from_http(wait_s)
        deadline = time.monotonic() + wait_s
        while True:
            wait_s = max(0.0, deadline - time.monotonic())
            results += self._from_pool(min(wait_s, _TURN_S)) + self._from_http(0.0)
            if results or not wait_s:
                return results

    def forget(self, group: str) -> None:
        """No more responses of this group come: those that wait for them are dropped, without a result."""
        self._num_with_http -= self._gathering.forget(group)

    def _from_pool(self, timeout_s: float) -> list[tuple[str, RewardResult]]:
        if self._pool is None or not self._num_with_pool:
            return []
        found = self._pool.poll(timeout_s)
        self._num_with_pool -= len(found)
        return found

    def _from_http(self, timeout_s: float) -> list[tuple[str, RewardResult]]:
        if self._http is None or not self._num_with_http:
            return []
        found = self._http.poll(timeout_s)
        self._num_with_http -= len(found)
        return found

    def _judge(self, problem: VerifiableProblem, answer: Answer | None, place: Place | None) -> None:
        """Ask a judge; `answer` None: the response has none, and is missed by those of its group."""
        http = self._http or self._start_http()
        if self._judges[problem.verifier].kind == "pairwise":
            answers = self._gathering.add(answer, place)
        else:
            answers = [] if answer is None else [answer]
        self._num_with_http += answer is not None
        if answers:
            http.submit(problem.verifier, problem, answers)

    def _start_http(self) -> HttpRewards:
        from stream_grpo.rewards.http import HttpRewards  # brings the client's library, which few runs need

        self._http = HttpRewards(self._rewards.http, policy=_policy(self._rewards))
        return self._http

    @property
    def num_open(self) -> int:
        """Responses submitted whose results `poll` has not returned."""
        return len(self._answered) + self._num_with_pool + self._num_with_http

    @property
    def exhausted_share(self) -> float:
        """Of the pool's answers, those on which the verifier ran out of time or memory."""
        return 0.0 if self._pool is None else float(self._pool.status()["exhausted_share"])

    @property
    def hidden_alarm(self) -> str | None:
        """What is wrong between the reward and a hidden verifier, in a sentence; None where there is none."""
        return None

    def status(self) -> dict[str, Any]:
        """What was decided here, in the pool and by judges; None where there is none."""
        here = {"num_open": self.num_open, "in_process": self._unscored.status()}
        return {
            **here,
            "pool": None if self._pool is None else self._pool.status(),
            "http": None if self._http is None else self._http.status(),
        }

    def close(self) -> None:
        """End pool and judges, whatever they do. May be called twice."""
        for part in (self._pool, self._http):
            if part is not None:
                part.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def start_pool(rewards: Rewards, names: Sequence[str]) -> RewardPool:
    """The worker processes of these settings, with the verifiers `names` loaded."""
    limits = Limits(
        wall_s=rewards.time_limit_s,
        wall_s_by_verifier={CODE: rewards.code_check_s},
        memory_bytes=rewards.memory_limit_bytes,
    )
    return RewardPool(
        rewards.num_workers,
        limits,
        policy=_policy(rewards),
        preload=[name for name in names if name != CODE],
        paths=[str(rewards.function_dir)],
        code=code_settings(rewards),
    )


def code_settings(rewards: Rewards) -> CodeSettings:
    """How `code` runs programs in this run."""
    second = rewards.code_time_limit_s
    limits = sandbox.Limits(wall_s=second, cpu_s=max(1.0, second), memory_bytes=rewards.code_memory_limit_bytes)
    return CodeSettings(limits=limits, total_s=rewards.code_total_s, allow_weaker=rewards.allow_weaker_sandbox)


def check_verifiers(names: Iterable[str], rewards: Rewards, sample_deadline_s: float) -> None:
    """Refuse what cannot be scored, before anything starts.

    Raises ConfigError for a name that no verifier has, a function that `rewards.functions` does not list or that is
    not there, a judge without its key or that would outlast its tickets, and for `code` where programs could not be
    isolated or would outlast theirs.
    """
    wanted = plain_verifiers(names, rewards.compose)
    if (hidden := rewards.hidden) is not None and hidden.verifier in wanted:
        raise ConfigError(
            f"rewards.hidden.verifier = {hidden.verifier!r}: it also makes rewards, and would watch itself; use another"
        )
    wanted |= asked_verifiers((), rewards)
    _require_known(wanted, rewards)
    versions(wanted, rewards)
    for name in sorted(name for name in rewards.http if f"{HTTP}{name}" in wanted):
        _check_judge(name, rewards.http[name], sample_deadline_s)
    if CODE not in wanted:
        return
    if sample_deadline_s <= rewards.code_check_s:
        raise ConfigError(
            f"stream.sample_deadline_s = {sample_deadline_s:g}: a check with `code` may take 2 x "
            f"(rewards.code_total_s + rewards.code_time_limit_s) = {rewards.code_check_s:g} s; use more than that"
        )
    isolation = sandbox.isolation()
    if isolation.missing and not rewards.allow_weaker_sandbox:
        raise ConfigError(
            f"verifier 'code': this machine cannot isolate {', '.join(isolation.missing)} of a program "
            f"({isolation.reason}); allow user namespaces, or set rewards.allow_weaker_sandbox = true where every "
            f"program may be trusted"
        )


def asked_verifiers(names: Iterable[str], rewards: Rewards) -> set[str]:
    """The verifiers that are asked for rows that name `names`: compositions taken apart, the hidden one with them."""
    hidden = set() if rewards.hidden is None else {rewards.hidden.verifier}
    return plain_verifiers(names, rewards.compose) | hidden


def check_scores_alone(names: Iterable[str], rewards: Rewards) -> None:
    """Raise ConfigError where a verifier compares the responses of a group: it has no score for one, or of a run."""
    required = set[str]()
    for name in names:
        if (whole := chosen(name, rewards.compose)) is None:
            required.add(name)
        else:
            required |= {part.verifier for part in whole.composition.components.values() if not part.optional}
    for name in sorted(required):
        judge = rewards.http.get(name.removeprefix(HTTP)) if name.startswith(HTTP) else None
        if judge is not None and judge.kind == "pairwise":
            raise ConfigError(
                f"evaluation.files: verifier {name!r} compares the responses of a group with each other, so that its "
                f"scores say nothing of the policy; a held-out problem needs one that scores a response alone"
            )


def _require_key(name: str, judge: Judge) -> None:
    try:
        api_key(judge)
    except ConfigError as error:
        raise ConfigError(f"rewards.http.{name.removeprefix(HTTP)}.{error}") from None


def _check_judge(name: str, judge: Judge, sample_deadline_s: float) -> None:
    _require_key(name, judge)
    if sample_deadline_s <= judge.total_s:
        raise ConfigError(
            f"rewards.http.{name}.total_s = {judge.total_s:g}: a request may take so long with its retries, and "
            f"stream.sample_deadline_s = {sample_deadline_s:g} is no longer; use less, or a later deadline"
        )


def versions(names: Iterable[str], rewards: Rewards) -> dict[str, str]:
    """The version of each verifier; of a user's function, the hash of its module; of a judge, that of its rules; of a
    composition, that of all of it.

    Raises ConfigError where one is not there.
    """
    return {name: _version(name, rewards) for name in sorted(set(names))}


def composition_version(composition: Composition, rewards: Rewards) -> str:
    """The version of a composition. Raises ConfigError where one of its verifiers is not there."""
    asked = verifiers_of(composition)
    _require_known(asked, rewards)
    return version_of(composition, {verifier: _plain_version(verifier, rewards) for verifier in asked})


def _version(name: str, rewards: Rewards) -> str:
    whole = chosen(name, rewards.compose)
    return _plain_version(name, rewards) if whole is None else composition_version(whole.composition, rewards)


def _plain_version(name: str, rewards: Rewards) -> str:
    if name.startswith(PREFIX):
        return source_version(name, [str(rewards.function_dir)])
    if name.startswith(HTTP):
        return rewards.http[name.removeprefix(HTTP)].version
    return VERIFIERS[name].version


def scoring_version(rewards: Rewards) -> str:
    """The rules by which a run scores, for its configuration hash: verifiers with their versions, and their limits.

    A limit is a rule: a response that runs into it is wrong. Of shaping the schedule counts and not its present value.
    Raises ConfigError where a function is not there.
    """
    ours = [*rewards.functions, *(f"{HTTP}{name}" for name in rewards.http)]
    functions = [f"{name}={version}" for name, version in versions(ours, rewards).items()]
    limits = [
        f"{name}={getattr(rewards, name)}"
        for name in (
            "time_limit_s",
            "memory_limit_bytes",
            "code_time_limit_s",
            "code_total_s",
            "code_memory_limit_bytes",
            "allow_weaker_sandbox",
        )
    ]
    compositions = [
        f"{COMPOSE_PREFIX}{name}={composition_version(composition, rewards)}"
        for name, composition in sorted(rewards.compose.items())
    ]
    shaping = f"shaping={json.dumps(settings(rewards.shaping), sort_keys=True)}"
    return ",".join([rewards_version(VERIFIERS), *functions, *limits, *compositions, shaping])


def _require_known(names: Iterable[str], rewards: Rewards) -> None:
    judges = [f"{HTTP}{name}" for name in rewards.http]
    unknown = sorted(set(names) - VERIFIERS.keys() - {*rewards.functions, *judges})
    if functions := [name for name in unknown if name.startswith(PREFIX)]:
        raise ConfigError(
            f"verifier {functions[0]!r}: a row may name only functions that rewards.functions lists; it lists "
            f"{', '.join(rewards.functions) or 'none'}"
        )
    if unknown:
        known = [*sorted(VERIFIERS), *rewards.functions, *judges, *(COMPOSE_PREFIX + name for name in rewards.compose)]
        raise ConfigError(f"no verifier is called {', '.join(map(repr, unknown))}; known: {', '.join(known)}")


def _policy(rewards: Rewards) -> UnscoredPolicy:
    return UnscoredPolicy(
        num_env_error_retries=rewards.max_retries,
        retry_after_s=rewards.retry_after_s,
        max_env_errors_in_row=rewards.max_errors_in_row,
    )
