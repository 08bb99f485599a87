"""One synchronous run in two ways: its processes' classes over their sockets, and called in order without transport.

`python -m tests.e2e.synchronous transport CONFIG` runs the parts in threads; `sequential CONFIG` makes the same steps
in one loop, and leaves in the run's folder what came of them.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from curator.curation import Curation
from curator.pool import Pool
from stream_grpo.buffer.admission import admit
from stream_grpo.buffer.facts import facts_of
from stream_grpo.buffer.lineage import Lineage
from stream_grpo.buffer.outcomes import outcome_of
from stream_grpo.buffer.signal import SignalWatch
from stream_grpo.buffer.tickets import block_size, group_id_of, seed_of
from stream_grpo.buffer.transitions import Kind, Transition
from stream_grpo.config import Config
from stream_grpo.config_file import load
from stream_grpo.sampler.environment import environment
from stream_grpo.types import Fate, PolicyVersion, RolloutGroup, Ticket

RESULT, ENGINE = "result.pt", "engine"


class Loop:
    """Curator, sampler and learner of one run, in step."""

    def __init__(self, config: Config) -> None:
        from stream_grpo.learner.train_step import TrainStep
        from stream_grpo.parts import learner_engine
        from stream_grpo.rewards.scoring import Scoring
        from stream_grpo.sampler.engines import make_engine
        from stream_grpo.sampler.prompts import Prompts
        from stream_grpo.sampler.update import Updater

        self.config, sampler = config, config.sampler
        pool = Pool.open(config.run_dir / "pool")
        self.curation = Curation(
            pool, group_size=sampler.group_size, seed=config.run.seed, **config.curator.model_dump()
        )
        self.sampler, self.prompts, self.scoring = make_engine(config), Prompts(config), Scoring(config.rewards)
        self.updater = Updater(config, self.sampler)
        self.learner = learner_engine(config)
        self.train_step = TrainStep(
            self.learner,
            config.algo,
            config.learner,
            max_new_tokens=sampler.max_new_tokens,
        )
        self.signal, self.lineage = SignalWatch(), Lineage()
        self.num_groups = 0
        self.picks: dict[str, str] = {}
        self.groups: dict[str, RolloutGroup] = {}
        self.batches: list[list[str]] = []
        self.surplus: list[str] = []
        self.weights: dict[int, dict[str, Any]] = {}

    def run(self) -> None:
        from stream_grpo.learner.process import _first_probe, _probe_from

        sequences = _first_probe(self.config, self.learner.vocab_size)
        self.publish(sequences)
        while self.train_step.step < self.config.run.num_steps:
            batch = self.sample_batch()
            self.batches.append([group.group_id for group in batch])
            self.train(batch)
            self.publish(_probe_from(batch, self.config.weights.num_probe_sequences))

    def publish(self, sequences: Sequence[Sequence[int]]) -> None:
        """The learner's weights, given to the sampler and proved there."""
        from stream_grpo.weights.manifest import Manifest, Probe
        from stream_grpo.weights.subscriber import Published

        version = PolicyVersion(0, self.train_step.step)
        tensors = self.weights[version.step] = dict(self.learner.named_weights())
        probe = Probe(tuple(map(tuple, sequences)), tuple(map(tuple, self.learner.probe_logprobs(sequences))))
        manifest = Manifest(version=version, forks={}, tensors={}, sha256="", probe=probe, created_at_s=0.0)
        self.updater.update(Published(manifest, tensors), [])
        self.lineage.version = version

    def train(self, batch: Sequence[RolloutGroup]) -> None:
        from stream_grpo.learner.batching import Sampled, make_train_batch

        self.train_step.run(
            make_train_batch(
                batch,
                self.train_step.advantages,
                vocab_size=self.learner.vocab_size,
                microbatch_tokens=self.config.learner.microbatch_tokens,
                num_minibatches=self.config.learner.num_minibatches,
                sampled_by=lambda version: Sampled(0, False),
                attention_cost=self.learner.attention_cost,
                share_prompts=self.config.learner.share_prompts,
                packing=self.config.learner.packing,
            )
        )

    def sample_batch(self) -> list[RolloutGroup]:
        """Blocks until the batch is full: the first groups by id are trained, what is left over is surplus."""
        accepted: list[RolloutGroup] = []
        while (missing := self.config.stream.groups_per_step - len(accepted)) > 0:
            block = self.sample_block(block_size(missing, self.signal.expected_share))
            accepted += [group for group in block if self.is_accepted(group)]
        num_trained = self.config.stream.groups_per_step
        self.surplus += [group.group_id for group in accepted[num_trained:]]
        return accepted[:num_trained]

    def sample_block(self, num_groups: int) -> list[RolloutGroup]:
        """All requests are added, in the order of group ids, before the first engine step."""
        from stream_grpo.sampler.rollout import GroupInProgress, group_of, make_requests, request_of, task_id_of

        ids = [group_id_of(self.num_groups + i + 1) for i in range(num_groups)]
        self.num_groups += num_groups
        under_way: dict[str, GroupInProgress] = {}
        for pick in self.curation.next(ids):
            self.picks[pick.group_id] = pick.problem.problem_id
            ticket = self.ticket(pick.group_id)
            requests = make_requests(ticket, self.prompts.token_ids(pick.problem), self.config, pick.group_size)
            under_way[pick.group_id] = GroupInProgress(ticket, pick.problem, requests, time.time())
            for request in requests:
                self.sampler.add(request)
        while self.sampler.num_unfinished:
            for generation in self.sampler.step():
                group = under_way[group_of(generation.request_id)]
                group.take(generation)
                text = self.prompts.decode(generation.token_ids.tolist())
                task_id = task_id_of(group.ticket, generation.request_id)
                self.scoring.submit(task_id, group.problem, text, generation.end_reason)
        while self.scoring.num_open:
            for task_id, reward in self.scoring.poll(0.1):
                under_way[group_of(request_of(task_id))].score(request_of(task_id), reward)
        finished = {"sampler_id": "sequential", "config_hash": "", "finished_at_s": time.time()}
        return [group.finish(**finished) for group in under_way.values()]

    def ticket(self, group_id: str) -> Ticket:
        seed = seed_of(self.config.run.seed, group_id)
        now = {"issued_at_s": time.time(), "deadline_s": float("inf")}
        return Ticket(group_id=group_id, owner_epoch=0, step=self.train_step.step, seed=seed, **now)

    def is_accepted(self, group: RolloutGroup) -> bool:
        """Judge a group by the buffer's rule, and tell the curator what it scored."""
        from stream_grpo.transport.codec import group_to_batch

        self.groups[group.group_id] = group
        facts, algo = facts_of(group_to_batch(group)), self.config.algo
        tolerance = algo.signal_tolerance if algo.needs_spread else None
        fate = admit(facts, self.lineage, max_policy_age=0, signal_tolerance=tolerance, config_hash=None).fate
        self.signal.apply(Transition(kind=Kind(fate.value), time_s=0.0))
        self.curation.report([outcome_of(self.curation.position().next_sequence, facts, fate.value)])
        return fate is Fate.ACCEPTED


def transport(config: Config) -> None:
    """Curator, buffer, sampler and learner as a run builds them, each in a thread."""
    from stream_grpo import parts
    from stream_grpo.parts_sampler import build_sampler

    curator: Any = parts.build_curator(config)
    buffer: Any = parts.build_buffer(config, curator.address)
    sampler = build_sampler(config, "sampler-0", curator.address, buffer.address)
    learner = parts.build_learner(config, buffer.address)
    running = []
    for part in (curator, buffer, sampler):
        stop = threading.Event()
        running.append((stop, threading.Thread(target=part.run, args=(stop,))))
        running[-1][1].start()
    learner.run(threading.Event())
    for stop, thread in reversed(running):
        stop.set()
        thread.join()


def sequential(config: Config) -> None:
    """The same in one loop."""
    import torch

    loop, out = Loop(config), config.run_dir
    loop.run()
    torch.save(
        {
            "picks": loop.picks,
            "batches": loop.batches,
            "surplus": loop.surplus,
            "weights": loop.weights,
            "rollouts": {
                f"{group.group_id}/{i}": (rollout.token_ids, rollout.behavior_logprobs, rollout.seed)
                for group in loop.groups.values()
                for i, rollout in enumerate(group.rollouts)
            },
        },
        out / RESULT,
    )
    loop.learner.save(out / ENGINE, loop.train_step.state())
    loop.curation.close()
    loop.learner.close()
    loop.sampler.close()


def main(way: str, path: Path) -> None:
    from stream_grpo.rundir import prepare

    config = load(path)
    os.environ.update(environment(config))
    config = prepare(config, resume=False, say=lambda text: None)
    {"transport": transport, "sequential": sequential}[way](config)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
    sys.stdout.flush()
    # vLLM and DeepSpeed take long to leave an interpreter that ends by itself.
    os._exit(0)
