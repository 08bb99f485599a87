"""The settings of an environment of several turns. Loads no torch. Part of the tree of `config`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from stream_grpo.config_section import Section

Option = str | bool | int | float | tuple[str | int | float, ...]


class Environment(Section):
    """Rollouts of several turns: the policy acts, an environment answers; see docs/environments.md."""

    name: str | None = Field(None, pattern=r"^([a-z_]+|python:[A-Za-z_]\w*(\.[A-Za-z_]\w*)+|verifiers:[\w/@.-]+)$")
    """`calculator`, `records`, `python:module.name`, or `verifiers:ID` of that package. None: rollouts are one turn."""
    options: dict[str, Option] = Field(default_factory=dict)
    """Further arguments of the environment, by their names."""
    max_steps: int = Field(8, ge=1, le=1000)
    """Actions of a trajectory; after the last one it ends as max_steps."""
    max_turn_tokens: int | None = Field(None, ge=1)
    """Sampled tokens of one action, at most. None: what is left of sampler.max_new_tokens, which counts all actions."""
    max_observation_tokens: int = Field(64, ge=1)
    """A longer observation loses its middle. As many fit into model.max_length_tokens as there are answers."""
    max_observation_bytes: int = Field(1 << 16, ge=64)
    """The same for the text, before it leaves its worker."""
    observation_prefix: str = ""
    """Stands before every observation, where model.prompt_format is `text`."""
    observation_suffix: str = "\n"
    """Stands after it."""
    observation_role: Literal["tool", "user", "system"] = "tool"
    """Whose message an observation is, where model.prompt_format is `chat`."""
    grammar: bool = False
    """Sample what follows the opening mark of a call from valid calls alone; all other text is free. The learner's
    logprobs are over the same tokens. For environments that say how a call is written."""
    waiting_kv: Literal["drop", "keep"] = "drop"
    """`keep`: keys and values of what a trajectory has so far stay in the prefix cache while its environment answers,
    as long as there is room and weights do not change. Needs sampler.prefix_cache. `drop`: they are computed again."""
    max_waiting: int = Field(1024, ge=1)
    """Trajectories of one sampler that may wait between two actions without keeping others from beginning."""
    replicas: int = Field(1, ge=1, le=64)
    """How often the actions of a trajectory are played, each time with another seed; its score is the mean. More than 1
    shows how much of the rewards' variance is the environment's."""
    branch_share: float = Field(0.0, ge=0.0, le=1.0)
    """Share of the groups that branch: one rollout plays up to a turn that is drawn before anything is sampled, and
    from that very state all sample their own action and go on to their ends. What comes before is not trained."""
    branch_turns: int | None = Field(None, ge=2, le=1000)
    """The turn is drawn from the second to this one, each as often; None: to max_steps."""
    num_workers: int = Field(1, ge=1)
    """Worker processes of each sampler."""
    step_timeout_s: float = Field(10.0, gt=0)
    """Of one reset or step; a worker over it is killed, and the trajectory is played again in another, which has it for
    the reset and for each action."""
    memory_limit_bytes: int = Field(4 << 30, ge=256 << 20)
    """Address space of a worker, libraries included."""
    max_retries: int = Field(1, ge=0)
    """How often a call is made again after an error of the environment; then the rollout ends as env_error."""
    max_errors_in_row: int = Field(32, ge=1)
    """Errors in so many groups, without an answer between them, end the run with the last of them."""

    @property
    def observation_room_tokens(self) -> int:
        """What all observations of a trajectory may take, that of its start included; 0 where rollouts are one turn."""
        return 0 if self.name is None else self.max_steps * self.max_observation_tokens

    @model_validator(mode="after")
    def _is_asked_for(self) -> Environment:
        if self.name is None and (given := sorted(self._changed())):
            raise ValueError(f"{given[0]}: without environment.name nothing reads it; name an environment")
        return self

    @model_validator(mode="after")
    def _can_branch(self) -> Environment:
        if self.branch_turns is not None and not self.branch_share:
            raise ValueError(
                f"branch_turns = {self.branch_turns}: with branch_share = 0 nothing reads it; leave it out, or let a "
                f"share of the groups branch"
            )
        if self.branch_turns is not None and self.branch_turns > self.max_steps:
            raise ValueError(
                f"branch_turns = {self.branch_turns}: a trajectory has at most max_steps = {self.max_steps} turns; "
                f"use at most {self.max_steps}"
            )
        if self.branch_share and self.max_steps < 2:
            raise ValueError(
                f"branch_share = {self.branch_share:g} with max_steps = 1: a group that branches has a turn before; "
                f"use max_steps of 2 or more, or branch_share = 0"
            )
        return self

    def _changed(self) -> set[str]:
        """Fields that differ from their defaults."""
        fields = type(self).model_fields
        return {name for name, field in fields.items() if getattr(self, name) != _default(field)}


def _default(field: Any) -> Any:
    return field.get_default(call_default_factory=True)


def as_rules(environment: Environment) -> dict[str, Any]:
    """What decides the meaning of a trajectory, for hashes; how fast and where it is played is left out."""
    machinery = {
        "num_workers",
        "step_timeout_s",
        "memory_limit_bytes",
        "max_retries",
        "max_errors_in_row",
        "max_waiting",
        "waiting_kv",
    }
    # A run that does not branch, or has no grammar, has the hash of one that knows nothing of it.
    unused = set() if environment.branch_share else {"branch_share", "branch_turns"}
    if not environment.grammar:
        unused.add("grammar")
    return environment.model_dump(mode="json", exclude=machinery | unused)
