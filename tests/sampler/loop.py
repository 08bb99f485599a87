"""The sampler's loop in a thread, between a buffer and a curator on the real wire that a test plays."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from curator.client import Curator
from curator.schema import Pick, Problem, batch_to_bytes, picks_to_batch, problems_to_batch
from curator.wire import Client, Request, Server
from stream_grpo.config import Config
from stream_grpo.config_file import parse
from stream_grpo.evaluation import EvaluationRun
from stream_grpo.metrics import MetricsLog, MetricsReader
from stream_grpo.rewards.scoring import Scoring
from stream_grpo.sampler.alarms import Alarms
from stream_grpo.sampler.heldout import HeldoutEvaluation
from stream_grpo.sampler.process import SamplerProcess
from stream_grpo.sampler.prompts import PromptRefused
from stream_grpo.transport.channels import SamplerChannel, tickets_to_plain
from stream_grpo.transport.codec import decode_group
from stream_grpo.types import Generation, PolicyVersion, RolloutGroup, Ticket
from stream_grpo.weights.manifest import Probe
from stream_grpo.weights.publisher import Publisher
from stream_grpo.weights.subscriber import Subscriber
from tests.fakes import FakeEngine

PROBE = Probe(((1, 2, 3),), ((-1.0, -1.0),))


class FakePrompts:
    """Prompt ids 1, 2, 3; every response ends in "#### 42", but for one with a token 8."""

    fingerprint = "tokenizer"

    def token_ids(self, problem: Problem) -> tuple[int, ...]:
        if problem.answer == "too long":
            raise PromptRefused("too long")
        return (1, 2, 3)

    def decode(self, token_ids: Sequence[int]) -> str:
        return "so #### 41" if 8 in token_ids else "so #### 42"


class Slow(FakeEngine):
    """A step takes a while, so that the test can act in between; with `pauses_at` it can take its time."""

    pauses_at: int | None = None
    """Nothing is sampled while a running request has so many tokens."""

    def step(self) -> list[Generation]:
        time.sleep(0.001)
        most = max((len(versions) for _, versions in self._running.values()), default=0)
        return [] if self.pauses_at is not None and most >= self.pauses_at else super().step()


@dataclass
class Outside:
    """Buffer and curator: hands out `blocks` of tickets, one block a request, and keeps what it is told."""

    blocks: list[list[Ticket]] = field(default_factory=list)
    answers: dict[str, str] = field(default_factory=dict)
    group_sizes: dict[str, int] = field(default_factory=dict)
    """Of picks, where they say one."""
    noted_sizes: dict[str, int] = field(default_factory=dict)
    """What the buffer was told of them."""
    verifiers: dict[str, str] = field(default_factory=dict)
    asked: list[dict[str, Any]] = field(default_factory=list)
    groups: list[RolloutGroup] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)
    evaluated: list[dict[str, Any]] = field(default_factory=list)
    picked: list[str] = field(default_factory=list)
    heartbeats: list[dict[str, Any]] = field(default_factory=list)
    partials: list[RolloutGroup] = field(default_factory=list)
    num_hellos: int = 0
    num_goodbyes: int = 0
    holds_inserts: bool = False
    holds_picks: bool = False
    left_pool: frozenset[str] = frozenset()
    holds_last: bool = False
    """The last block of tickets, until this is set back."""
    held: list[Request] = field(default_factory=list)
    """Questions for tickets that are not answered."""
    there: dict[str, bytes] = field(default_factory=dict)
    """Who said hello last under the name of each sampler."""
    plays_buffer: bool = True
    why_not_kept: str = ""
    """Of partials."""

    def __post_init__(self) -> None:
        self.buffer, self.curator, self.stop = Server(), Server(), threading.Event()
        targets = [self._serve_curator, *([self._serve_buffer] if self.plays_buffer else [])]
        self.threads = [threading.Thread(target=target) for target in targets]
        for thread in self.threads:
            thread.start()

    def _serve_buffer(self) -> None:
        while not self.stop.is_set():
            self._give_held()
            if (request := self.buffer.receive(0.01)) is None:
                continue
            kind, fields = request.message.kind, request.message.fields
            if kind == "hello":
                self.num_hellos += 1
                self.there[fields["sampler_id"]] = request.sender
                self.buffer.reply(request, "welcome", {"epoch": 1})
            elif kind == "goodbye":
                self.num_goodbyes += 1
                self.buffer.reply(request, "noted")
            elif kind == "tickets":
                self.asked.append(dict(fields))
                self.problems |= fields["problems"]
                self.noted_sizes |= fields["group_sizes"]
                self.held.append(request)
                self._give_held()
            elif kind == "heartbeat":
                self.heartbeats.append(dict(fields))
                self.buffer.reply(request, "noted")
            elif kind == "partial":
                self.partials.append(decode_group(request.message.body[0]))
                self.buffer.reply(request, "noted", {"is_kept": not self.why_not_kept, "reason": self.why_not_kept})
            elif kind == "evaluated":
                self.evaluated.append(dict(fields))
                self.buffer.reply(request, "noted")
            elif not self.holds_inserts:
                self.groups.append(decode_group(request.message.body[0]))
                self.buffer.reply(request, "taken", {"fate": "accepted", "reason": ""})

    @property
    def num_asked(self) -> int:
        """Questions for tickets."""
        return sum(asked["num_wanted"] > 0 for asked in self.asked)

    def _give_held(self) -> None:
        for request in list(self.held):
            # What a sampler asked for before it ended is no longer its own to have.
            is_there = self.there.get(request.message.fields["sampler_id"], request.sender) == request.sender
            is_given = bool(self.blocks and request.message.fields["num_wanted"] and is_there)
            if is_given and self.holds_last and len(self.blocks) == 1:
                continue
            self.held.remove(request)
            plain, body = tickets_to_plain(self.blocks.pop(0) if is_given else [])
            self.buffer.reply(request, "tickets", {"tickets": plain, "cause": ""}, body)

    def _serve_curator(self) -> None:
        while not self.stop.is_set():
            if (request := self.curator.receive(0.01)) is None:
                continue
            while self.holds_picks and not self.stop.is_set():
                time.sleep(0.001)
            if request.message.kind == "get":
                kept = [name for name in request.message.fields["problem_ids"] if name not in self.left_pool]
                found = [self._problem(name.removeprefix("of-")) for name in kept]
                self.curator.reply(request, "problems", body=[batch_to_bytes(problems_to_batch(found))])
            else:
                # Answered in reverse: the sampler has an order of its own.
                ids = sorted(request.message.fields["group_ids"], reverse=True)
                self.picked += ids
                body = batch_to_bytes(picks_to_batch([self._pick(group_id) for group_id in ids]))
                self.curator.reply(request, "picks", body=[body])

    def _pick(self, group_id: str) -> Pick:
        size = self.group_sizes.get(group_id, 0)
        problem = self._problem(group_id)
        return Pick(group_id=group_id, problem=problem, probability=0.5, expected_signal=0.5, group_size=size)

    def _problem(self, group_id: str) -> Problem:
        answer, verifier = self.answers.get(group_id, "42"), self.verifiers.get(group_id, "exact")
        return Problem(problem_id=f"of-{group_id}", prompt="6*7=", answer=answer, verifier=verifier)

    def close(self) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join()
        self.buffer.close()
        self.curator.close()


def ticket(group_id: str, deadline_s: float | None = None, epoch: int = 0) -> Ticket:
    return Ticket(
        group_id=group_id,
        owner_epoch=epoch,
        step=0,
        seed=3,
        issued_at_s=time.time(),
        deadline_s=time.time() + 60 if deadline_s is None else deadline_s,
    )


def publish(directory: Path, step: int, value: float = 0.0) -> None:
    Publisher(directory, 3).publish(PolicyVersion(0, step), {}, {"w": torch.full((2,), value)}, PROBE)


def heldout_evaluation(
    config: Config,
    engine: FakeEngine,
    channel: SamplerChannel,
    directory: Path,
    evaluated: Sequence[PolicyVersion] = (),
    scoring: Scoring | None = None,
) -> HeldoutEvaluation:
    """Evaluations of two problems, one of them always right; their events go to `directory`."""
    problems = [
        Problem(problem_id=answer, prompt="6*7=", answer=answer, verifier="exact", domain=f"is-{answer}")
        for answer in ("42", "43")
    ]
    prompts, scoring = FakePrompts(), scoring or Scoring(config.rewards)

    def begin(version: PolicyVersion) -> EvaluationRun[Problem]:
        return EvaluationRun(
            problems,
            prompts.token_ids,
            prompts.decode,
            scoring,
            num_samples=config.evaluation.interval_samples,
            seed=config.run.seed,
            max_new_tokens=config.sampler.max_new_tokens,
            version=version,
        )

    return HeldoutEvaluation(
        engine,
        channel,
        MetricsLog(directory, "s0"),
        begin,
        interval=config.evaluation.interval,
        num_steps=config.run.num_steps,
        max_policy_age=config.stream.max_policy_age,
        evaluated=evaluated,
    )


class Running:
    """A sampler in a thread of its own, until `until` holds. It evaluates where there is a section for it."""

    def __init__(
        self,
        outside: Outside,
        tmp_path: Path,
        engine: FakeEngine,
        make_scoring: Callable[[Config], Any] = lambda config: Scoring(config.rewards),
        sampler_id: str = "s0",
        **sections: dict[str, Any],
    ) -> None:
        sampler = {"group_size": 2, "max_new_tokens": 3, "max_num_seqs": 8} | sections.get("sampler", {})
        tree = {"model": {"path": "m"}, "evaluation": {"interval": 0}, **sections, "sampler": sampler}
        self._directory, self._make_scoring, self._sampler_id = tmp_path, make_scoring, sampler_id
        self.warnings: list[str] = []
        self.weights, self._stop = tmp_path / "weights", threading.Event()
        self.error: BaseException | None = None
        self._tree, self._outside, self._engine = tree, outside, engine
        self.process: SamplerProcess | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        buffer = Client(self._outside.buffer.address, name=self._sampler_id, peer="buffer")
        curator = Curator(self._outside.curator.address, name=self._sampler_id)
        channel = SamplerChannel(buffer, self._sampler_id)
        config = parse(self._tree, source="test")
        scoring = self._make_scoring(config)
        self.process = SamplerProcess(
            config,
            self._sampler_id,
            self._engine,
            channel,
            curator,
            Subscriber(self.weights),
            FakePrompts(),  # type: ignore[arg-type]
            scoring,
            heldout_evaluation(config, self._engine, channel, self._directory, self._evaluated(), scoring),
            Alarms(
                self.warnings.append,
                max_new_tokens=config.sampler.max_new_tokens,
                time_limit_s=config.rewards.time_limit_s,
            ),
        )
        try:
            self.process.run(self._stop)
        except (Exception, KeyboardInterrupt) as error:
            self.error = error
        buffer.close()
        curator.close()

    def _evaluated(self) -> list[PolicyVersion]:
        lines = MetricsReader(self._directory).new_lines()
        return [PolicyVersion(*line["version"]) for line in lines if line["event"] == "evaluation"]

    def wait(self, condition: Callable[[], bool]) -> None:
        """Until it holds, the sampler ends, or the time is up."""
        deadline = time.monotonic() + 30
        while not condition() and self._thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.001)

    def until(self, condition: Callable[[], bool]) -> None:
        self.wait(condition)
        self._stop.set()
        self._thread.join()
        if self.error is not None:
            raise self.error
        assert condition()
