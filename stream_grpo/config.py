"""The whole configuration, one tree of frozen models; loads no torch.

What cannot work together is refused with the setting, its value, the true reason and what would be right. The text
under a field is its documentation; the sections stand in `config_*`. `config_file` reads and writes the tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import model_validator

from stream_grpo.algo.choices import GROUP_BASELINES
from stream_grpo.config_alarms import Alarms
from stream_grpo.config_algo import Algo
from stream_grpo.config_cluster import Cluster, cluster_complaints
from stream_grpo.config_environment import Environment
from stream_grpo.config_learner import Learner, Weights
from stream_grpo.config_lora import lora_complaints
from stream_grpo.config_problems import Curator, Evaluation, Pool, curator_complaints, guard_complaints
from stream_grpo.config_rewards import Rewards
from stream_grpo.config_run import Model, Run, Tracking
from stream_grpo.config_sampler import Sampler, worker_complaints
from stream_grpo.config_section import Section
from stream_grpo.config_stream import Buffer, Control, Stream, buffer_complaints, staleness_complaints


class Config(Section):
    """The whole run."""

    model: Model
    run: Run = Run()
    pool: Pool = Pool()
    curator: Curator = Curator()
    sampler: Sampler = Sampler()
    stream: Stream = Stream()
    buffer: Buffer = Buffer()
    learner: Learner = Learner()
    algo: Algo = Algo()
    rewards: Rewards = Rewards()
    environment: Environment = Environment()
    weights: Weights = Weights()
    evaluation: Evaluation = Evaluation()
    control: Control = Control()
    cluster: Cluster = Cluster()
    tracking: Tracking = Tracking()
    alarms: Alarms = Alarms()

    @model_validator(mode="before")
    @classmethod
    def _ray_is_the_cluster(cls, given: Any) -> Any:
        """`[ray] address` is another name of `[cluster] address`."""
        ray, cluster = (given.get(name, {}) for name in ("ray", "cluster")) if isinstance(given, Mapping) else ({}, {})
        if not isinstance(ray, Mapping) or not isinstance(cluster, Mapping) or ray.keys() - {"address"}:
            return given  # refused below, by its name
        rest = {name: section for name, section in given.items() if name != "ray"} if "ray" in given else given
        return {**rest, "cluster": {**ray, **cluster}} if ray else rest

    @model_validator(mode="after")
    def _sizes_fit(self) -> Config:
        for complaint in _complaints(self):
            raise ValueError(complaint)
        return self

    @property
    def prompt_limit_tokens(self) -> int:
        """The longest prompt that is sampled, in tokens after the template."""
        response_tokens = self.sampler.max_new_tokens + self.environment.observation_room_tokens
        return self.model.max_prompt_tokens or self.model.max_length_tokens - response_tokens

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """Rollouts that a group may have, ascending."""
        return self.curator.group_sizes or (self.sampler.group_size,)

    @property
    def run_dir(self) -> Path:
        """Folder of this run."""
        return self.run.root / self.run.name


def _complaints(config: Config) -> Iterable[str]:
    """What cannot work together: the setting, its value, the reason, and what would be right."""
    yield from _sampler_complaints(config)
    yield from _stream_complaints(config)
    yield from _rewards_complaints(config)
    yield from buffer_complaints(config.buffer)
    yield from curator_complaints(config.curator)
    yield from _group_size_complaints(config)
    yield from _control_complaints(config)
    yield from guard_complaints(config.evaluation)
    yield from cluster_complaints(
        config.cluster,
        sampler_gpus=config.sampler.num_gpus,
        learner_gpus=config.learner.num_gpus,
        num_ranks=config.learner.num_ranks,
        evaluates_around=config.evaluation.is_around,
    )
    yield from _environment_complaints(config)
    yield from _transfer_complaints(config)


def _sampler_complaints(config: Config) -> Iterable[str]:
    sampler = config.sampler
    if sampler.group_size < 2:
        yield f"sampler.group_size = {sampler.group_size}: a group needs at least 2 rollouts to have a spread"
    if sampler.group_size > sampler.max_num_seqs:
        yield (
            f"sampler.group_size = {sampler.group_size}: a group must fit sampler.max_num_seqs = "
            f"{sampler.max_num_seqs}; raise max_num_seqs"
        )
    yield from worker_complaints(sampler, shares_gpu=config.cluster.colocate)
    if sampler.prefix_cache and sampler.engine == "async" and sampler.kv_after_update == "keep":
        yield (
            "sampler.prefix_cache = true with sampler.engine = 'async': its processes empty the cache only where "
            "running sequences give up theirs too; use sampler.kv_after_update = 'recompute', or engine = 'in_process'"
        )
    if sampler.max_new_tokens >= config.model.max_length_tokens:
        yield (
            f"sampler.max_new_tokens = {sampler.max_new_tokens}: no room for a prompt in model.max_length_tokens = "
            f"{config.model.max_length_tokens}; at most {config.model.max_length_tokens - 1}"
        )
    if config.model.max_prompt_tokens is not None:
        total = config.model.max_prompt_tokens + sampler.max_new_tokens
        if total > config.model.max_length_tokens:
            yield (
                f"model.max_prompt_tokens + sampler.max_new_tokens = {total} > model.max_length_tokens = "
                f"{config.model.max_length_tokens}; lower one of the two"
            )
    filters = {name: getattr(sampler, name) for name in ("top_p", "top_k", "min_p")}
    full = {"top_p": (1.0,), "top_k": (-1, 0), "min_p": (0.0,)}
    for name, value in filters.items():
        if value not in full[name] and not config.learner.filter_logits:
            yield (
                f"sampler.{name} = {value}: the sampler would draw from a smaller support than the learner's "
                f"distribution, and ratios would be wrong; use {full[name][0]}, or learner.filter_logits = true"
            )


def _stream_complaints(config: Config) -> Iterable[str]:
    stream, learner = config.stream, config.learner
    if stream.uniform_group_version and config.weights.on_update == "keep":
        yield (
            "stream.uniform_group_version = true with weights.on_update = keep: groups that run while weights change "
            "have tokens of two versions, and would all end as invalid; use on_update = finish or restart"
        )
    if stream.publish_interval > stream.max_policy_age + 1:
        yield (
            f"stream.publish_interval = {stream.publish_interval}: no ticket could ever be issued; at most "
            f"max_policy_age + 1 = {stream.max_policy_age + 1}"
        )
    yield from staleness_complaints(stream)
    if stream.sample_deadline_s <= 2 * config.rewards.time_limit_s:
        yield (
            f"stream.sample_deadline_s = {stream.sample_deadline_s:g}: a check that runs into rewards.time_limit_s = "
            f"{config.rewards.time_limit_s:g}, and that of the gold after it, would outlast the ticket; use more than "
            f"{2 * config.rewards.time_limit_s:g}, or a lower rewards.time_limit_s"
        )
    yield from _rank_complaints(config)
    yield from _critic_complaints(config)
    yield from lora_complaints(learner.lora, kl_reference=config.algo.kl_reference, has_critic=config.algo.has_critic)
    num_sequences = stream.groups_per_step * max(config.group_sizes)
    if learner.zero_stage == 3 and config.algo.kl_reference in ("refreshed", "ema"):
        yield (
            f"algo.kl_reference = {config.algo.kl_reference} with learner.zero_stage = 3: the reference follows whole "
            f"weights, which stage 3 cuts up; use zero_stage = 2, or kl_reference = fixed"
        )
    if config.algo.kl_horizon is not None and config.algo.kl_horizon < num_sequences:
        yield (
            f"algo.kl_horizon = {config.algo.kl_horizon}: below the {num_sequences} sequences of one learner step; the "
            f"coefficient would overshoot; use some hundred times as many"
        )
    num_fresh = stream.groups_per_step - stream.reused_per_step
    if num_fresh < learner.num_minibatches:
        yield (
            f"stream.reuse_share = {stream.reuse_share:g}: a step may have no more than its {num_fresh} fresh groups, "
            f"too few for learner.num_minibatches = {learner.num_minibatches}; lower one of the two"
        )
    if stream.groups_per_step % learner.num_minibatches:
        yield (
            f"learner.num_minibatches = {learner.num_minibatches} does not divide stream.groups_per_step = "
            f"{stream.groups_per_step}"
        )


def _rank_complaints(config: Config) -> Iterable[str]:
    learner, stream = config.learner, config.stream
    num_sequences = stream.groups_per_step * min(config.group_sizes) // learner.num_minibatches
    smallest = "the smallest of curator.group_sizes" if config.curator.group_sizes else "sampler.group_size"
    if learner.num_ranks > num_sequences:
        yield (
            f"learner.num_ranks = {learner.num_ranks}: an optimizer update has {num_sequences} sequences "
            f"(stream.groups_per_step x {smallest} / learner.num_minibatches), and more ranks would have none; "
            f"use at most {num_sequences}"
        )
    if learner.num_ranks > 1 and learner.num_gpus not in (0, 1):
        yield (
            f"learner.num_ranks = {learner.num_ranks} with learner.num_gpus = {learner.num_gpus:g}: NCCL wants one GPU "
            f"for each rank; use num_gpus = 1, or 0 for ranks on CPUs"
        )


def _critic_complaints(config: Config) -> Iterable[str]:
    if not config.algo.has_critic:
        return
    if config.learner.num_ranks > 1:
        yield (
            f"learner.num_ranks = {config.learner.num_ranks} with algo.advantage = gae: the critic is of one rank; use "
            f"num_ranks = 1, or a recipe without a critic"
        )
    if config.learner.zero_stage == 3:
        yield (
            "learner.zero_stage = 3 with algo.advantage = gae: stage 3 cuts weights up among ranks, and the critic is "
            "of one rank; use zero_stage = 2 or less"
        )
    if config.stream.too_old == "baseline_only":
        yield (
            "stream.too_old = baseline_only with algo.advantage = gae: a critic is the baseline, to which the rewards "
            "of other rollouts add nothing; use another too_old, as drop"
        )


def _rewards_complaints(config: Config) -> Iterable[str]:
    rewards, limit = config.rewards, config.sampler.max_new_tokens
    if (overlong := rewards.shaping.overlong_tokens) is not None and overlong > limit:
        yield f"rewards.shaping.overlong_tokens = {overlong}: at most sampler.max_new_tokens = {limit} can be used"
    deadline_s = config.stream.sample_deadline_s
    for name, composition in rewards.compose.items():
        asks_again = any(part.tail_verifier is not None for part in composition.components.values())
        if asks_again and deadline_s <= 4 * rewards.time_limit_s:
            yield (
                f"stream.sample_deadline_s = {deadline_s:g}: rewards.compose.{name} may ask a second verifier after "
                f"the first, each for up to twice rewards.time_limit_s = {rewards.time_limit_s:g}; use more than "
                f"{4 * rewards.time_limit_s:g}"
            )


def _group_size_complaints(config: Config) -> Iterable[str]:
    sizes, size = list(config.curator.group_sizes), config.sampler.group_size
    if not sizes:
        return
    if sizes[0] < 2 or sorted(set(sizes)) != sizes or size not in sizes:
        yield (
            f"curator.group_sizes = {sizes}: expected whole numbers from 2 that ascend, sampler.group_size = {size} "
            f"among them, as {sorted({*(each for each in sizes if each > 1), max(2, size)})}"
        )
    if sizes[-1] > config.sampler.max_num_seqs:
        yield (
            f"curator.group_sizes = {sizes}: a group must fit sampler.max_num_seqs = {config.sampler.max_num_seqs}; "
            f"raise max_num_seqs, or leave the largest out"
        )
    if config.algo.baseline not in GROUP_BASELINES or config.algo.has_critic:
        own = "advantage = gae" if config.algo.has_critic else f"baseline = {config.algo.baseline}"
        yield (
            f"curator.group_sizes = {sizes} with algo.{own}: what a rollout teaches does not depend on how many others "
            f"its group has, and the smallest size would always pay best; use group_sizes = [], or a baseline of the "
            f"group: {', '.join(sorted(GROUP_BASELINES))}"
        )
    if config.environment.branch_share > 0:
        yield (
            f"curator.group_sizes = {sizes} with environment.branch_share = {config.environment.branch_share:g}: the "
            f"rollouts of a branching group share their beginning, and a larger one differs less than its pass rate "
            f"says; use group_sizes = [], or branch_share = 0"
        )


def _control_complaints(config: Config) -> Iterable[str]:
    if config.control.enabled and config.stream.max_policy_age == 0:
        yield (
            "control.enabled = true with stream.max_policy_age = 0: the synchronous loop has no staleness to steer; "
            "use a larger max_policy_age, or control.enabled = false"
        )


def _environment_complaints(config: Config) -> Iterable[str]:
    environment, model = config.environment, config.model
    if environment.name is None:
        return
    room = environment.observation_room_tokens
    taken = config.sampler.max_new_tokens + room + (model.max_prompt_tokens or 1)
    if taken > model.max_length_tokens:
        yield (
            f"environment.max_steps x environment.max_observation_tokens = {room}: with sampler.max_new_tokens = "
            f"{config.sampler.max_new_tokens} and a prompt a trajectory may take {taken} tokens, more than "
            f"model.max_length_tokens = {model.max_length_tokens}; lower one of these, or raise that"
        )
    if config.weights.on_update != "keep":
        yield (
            f"weights.on_update = {config.weights.on_update} with environment.name = {environment.name}: a trajectory "
            f"that waits for its environment would keep new weights waiting too, or be sampled anew; use keep"
        )
    if environment.waiting_kv == "keep" and not config.sampler.prefix_cache:
        yield (
            "environment.waiting_kv = keep with sampler.prefix_cache = false: keys and values are kept nowhere but in "
            "the prefix cache; use sampler.prefix_cache = true, or waiting_kv = drop"
        )
    num_calls = environment.max_retries + 1
    if config.stream.sample_deadline_s <= num_calls * environment.step_timeout_s:
        yield (
            f"stream.sample_deadline_s = {config.stream.sample_deadline_s:g}: {num_calls} tries of one step, each of "
            f"up to environment.step_timeout_s = {environment.step_timeout_s:g}, would outlast the ticket; use more "
            f"than {num_calls * environment.step_timeout_s:g}, or a lower step_timeout_s"
        )


def _transfer_complaints(config: Config) -> Iterable[str]:
    if config.weights.transfer != "nccl":
        return
    sampler, learner = config.sampler, config.learner
    if sampler.num_gpus < 1 or learner.num_gpus < 1:
        yield (
            f"weights.transfer = nccl with sampler.num_gpus = {sampler.num_gpus:g} and learner.num_gpus = "
            f"{learner.num_gpus:g}: NCCL goes from GPU to GPU, and wants one of its own at either end; use files, or "
            f"num_gpus of 1 or more for both"
        )
    if sampler.engine != "async":
        yield (
            f"weights.transfer = nccl with sampler.engine = {sampler.engine}: vLLM's weight transfer is that of its "
            f"AsyncLLM; use engine = 'async', or transfer = 'files'"
        )
    if learner.lora.rank:
        yield (
            f"weights.transfer = nccl with learner.lora.rank = {learner.lora.rank}: an adapter is small, and samplers "
            f"add it to their own model folder; use transfer = 'files'"
        )
    if config.weights.publish == "changed":
        yield (
            "weights.transfer = nccl with weights.publish = changed: over NCCL all tensors go, to each sampler; use "
            "publish = 'full', or transfer = 'files'"
        )
    if config.cluster.node_root is not None:
        yield (
            "weights.transfer = nccl with cluster.node_root: manifests and probes go by files that all nodes see; "
            "share run.root, or use transfer = 'files'"
        )
