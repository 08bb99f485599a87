"""The whole configuration, one tree of frozen models; loads no torch.

What cannot work together is refused with the setting, its value, the true reason and what would be right. The text
under a field is its documentation. `config_file` reads and writes the tree.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from stream_grpo.algo.choices import GROUP_BASELINES
from stream_grpo.algo.presets import DEFAULT, PRESETS
from stream_grpo.algo.recipe import Recipe, readers
from stream_grpo.config_alarms import Alarms
from stream_grpo.config_cluster import Cluster, cluster_complaints
from stream_grpo.config_environment import Environment
from stream_grpo.config_http import Judge
from stream_grpo.config_lora import Lora, lora_complaints
from stream_grpo.config_rewards import Composition, Hidden, Name, Shaping, composition_complaints, sample_complaints

ProblemField = Literal["prompt", "answer", "verifier", "problem_id", "domain", "source"]
"""What is read of a row of problems."""
AdamBeta = Annotated[float, Field(ge=0, lt=1)]
TooOld = Literal["wait", "drop", "requeue", "baseline_only"]
"""What is done about groups that get too old."""
Selector = Literal["fewest_steps_left", "freshest_first", "expected_signal"]
"""Which groups a step takes first."""


class Section(BaseModel):
    """A frozen part of the tree."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class Run(Section):
    """What is run and where it is kept."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._ -]{0,99}$")
    """Folder under `root`: letters, digits, dot, dash, underscore, space. One that exists is refused unless resumed."""
    root: Path = Path("runs")
    """Folder of all runs, relative to the working directory."""
    seed: int = Field(0, ge=0, lt=1 << 63)
    """Every seed of the run is derived from this one."""
    num_steps: int = Field(100, ge=0)
    """Learner steps in all, those before a resume included."""
    max_generated_tokens: int | None = Field(None, ge=1)
    """Its last step is that after which so many tokens were sampled, evaluations left out. None: num_steps alone."""
    stop_timeout_s: float = Field(25.0, gt=0)
    """What a stop by signal gives the processes, the learner's step in hand and its checkpoint included."""


class Model(Section):
    """The model to train."""

    path: Path
    """A Hugging Face folder: config, tokenizer, safetensors."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights in sampler and learner."""
    prompt_format: Literal["text", "chat"] = "text"
    """`text`: the prompt is tokenised as it is; `chat`: through the tokenizer's chat template."""
    max_length_tokens: int = Field(256, ge=2)
    """Prompt and response together, of one sequence."""
    max_prompt_tokens: int | None = Field(None, ge=1)
    """Longer prompts are refused; None: what max_new_tokens leaves of max_length_tokens."""


class Pool(Section):
    """The problems to train on and those held out."""

    files: tuple[Path, ...] = ()
    """JSONL, JSON or Parquet files that are imported into the run's pool when it is new."""
    verifier: str | None = None
    """Verifier for rows that name none."""
    mapping: dict[ProblemField, str] = Field(default_factory=dict)
    """Column that a field of a problem is read from, where the usual names do not fit; of held-out files too."""
    max_refused_share: float = Field(0.05, ge=0, le=1)
    """Above this share of refused rows the import fails."""


class Curator(Section):
    """Which problem is sampled next."""

    estimator: Literal["sliding_rate", "last_mean", "beta", "item_response"] = "item_response"
    """How pass rates are predicted: see docs/curation.md. The sliding rate is reported whatever this is."""
    choice: Literal["signal", "worth"] = "signal"
    """`signal`: by expected signal; `worth`: by it per expected token, with shares for domains and the unseen."""
    signal: Literal["mixed", "centered", "scaled"] = "mixed"
    """Value of a group: its rewards differ; their variance (advantages not scaled); their deviation (scaled ones)."""
    group_sizes: tuple[int, ...] = ()
    """Sizes out of which each group has the one that pays best per token; sampler.group_size, which is that of a group
    of which nobody knows, is one of them. Empty: sampler.group_size is that of all."""
    rate_step: float = Field(0.3, gt=0, le=1)
    """Step size a of the sliding success rate p <- (1 - a) p + a mean(rewards)."""
    domain_step: float = Field(0.05, gt=0, le=1)
    """Step size of the same rate kept for each domain: what is expected of a problem never sampled."""
    exploration: float = Field(0.05, ge=0, le=1)
    """Share of picks drawn uniformly over the pool, whatever the rate says."""
    sharpness: float = Field(4.0, ge=0)
    """The other picks are drawn by expected signal to this power; 1 draws by the signal itself."""
    doubt: float = Field(0.5, ge=0, le=1)
    """What uncertainty costs a problem: the share of its deviation that the value is averaged over; 0: none of it."""
    unseen_rate: float = Field(0.5, ge=0, le=1)
    """Success rate assumed of a domain never sampled."""
    keep: float = Field(0.98, gt=0, le=1)
    """With `beta`: what a rollout still counts after one learner step, as a share."""
    text_numbers: int = Field(32, ge=0, le=256)
    """With `item_response`: numbers by which problems of like texts tell of one another; 0: texts say nothing."""
    start_from: Path | None = None
    """Folder of another run, or a pool, whose outcomes are learned before this run's first; copied when it begins."""
    unseen_share: float = Field(0.05, ge=0, le=1)
    """With `worth`: share of picks drawn uniformly over the problems never sampled."""
    domain_share: float = Field(0.5, ge=0, le=1)
    """With `worth`: part of the picks by worth that is divided equally between domains."""
    flush_outcomes: int = Field(512, ge=1)
    """Outcomes kept in memory before they are written to the table; the buffer's journal holds them meanwhile."""


class Sampler(Section):
    """vLLM and what it is asked for."""

    num_samplers: int = Field(1, ge=1, le=4096)
    """Sampler processes."""
    group_size: int = Field(8)
    """Rollouts per problem."""
    max_new_tokens: int = Field(64, ge=1)
    """Response limit; a rollout that reaches it ends as `length`."""
    temperature: float = Field(1.0, gt=0)
    """The learner divides its logits by the same number."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Below 1 only with learner.filter_logits: the learner must filter its logits alike."""
    top_k: int = Field(-1, ge=-1)
    """Above 0 only with learner.filter_logits."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Above 0 only with learner.filter_logits."""
    max_num_seqs: int = Field(256, ge=1)
    """Sequences that run at once in one sampler."""
    kv_cache_bytes: int = Field(256 << 20, ge=1 << 20)
    """KV cache of one sampler on CPU."""
    gpu_memory_utilization: float = Field(0.85, gt=0, le=1)
    """Share of a GPU's memory for one sampler."""
    num_threads: int = Field(1, ge=1)
    """Compute threads of one sampler on CPU. Two on busy cores are several times slower than one."""
    num_gpus: float = Field(0, ge=0)
    """GPUs of one sampler, as Ray counts them."""
    engine: Literal["in_process", "async"] = "in_process"
    """`in_process`: vLLM in the sampler's process; `async`: in processes of its own, where it has several workers."""
    tensor_parallel_size: int = Field(1, ge=1)
    """Workers that share the layers of one engine (`async`)."""
    kv_after_update: Literal["keep", "recompute"] = "keep"
    """What happens to the KV cache of running sequences when weights change (weights.on_update = keep)."""
    prefix_cache: bool = False
    """Whether requests compute tokens that they begin with alike only once, until weights change: worth it where
    prompts are long. Which sequence computes them changes the last bits of logprobs, so that runs are no longer equal
    bit for bit, also at stream.max_policy_age = 0."""
    max_restarts: int = Field(10, ge=0)
    """How often a dead sampler is started again before the run ends."""


class Stream(Section):
    """How old data may be and how much of it flows."""

    groups_per_step: int = Field(32, ge=1)
    """Groups that one learner step consumes."""
    max_policy_age: int = Field(4, ge=0)
    """No token older than this is ever trained on. 0 is the synchronous loop."""
    too_old: TooOld = "wait"
    """`wait`: a step waits for groups that would be too old after it. The others never wait: `drop` ends what is too
    old as stale, `requeue` has its problem sampled again, `baseline_only` keeps its rewards in its group's baseline."""
    max_requeues: int = Field(3, ge=1)
    """`requeue`: how often in a row a problem is sampled again before it is reported as never fresh."""
    selector: Selector = "fewest_steps_left"
    """Which groups a step takes first: with fewest steps left, the youngest, or whose rewards vary most."""
    max_uses: int = Field(1, ge=1)
    """In how many steps a group may be trained on, each within max_policy_age."""
    reuse_share: float = Field(0.25, gt=0, lt=1)
    """`max_uses` above 1: share of a step's groups, rounded down, that is left to groups trained on before."""
    publish_interval: int = Field(1, ge=1)
    """Learner steps between two publishes; at most max_policy_age + 1."""
    uniform_group_version: bool = False
    """Whether all tokens of a group must be of one version; needs weights.on_update = finish or restart."""
    sample_deadline_s: float = Field(120.0, gt=0)
    """A group not inserted this long after its ticket ends as stale."""
    ticket_timeout_s: float = Field(30.0, gt=0)
    """A ticket whose sampler is not heard of for so long is issued again; longer than an update of weights takes."""
    partial_interval_s: float = Field(5.0, ge=0)
    """How often a sampler hands over what it has of an unfinished group, so that it outlives the sampler. 0: never."""
    on_reward_change: Literal["rescore", "invalid"] = "rescore"
    """After a change of rewards, groups scored by the old ones are scored again as a whole, or end as invalid."""
    stall_timeout_s: float = Field(300.0, gt=0)
    """A wait longer than this ends the run with the name of who was waited for."""
    max_groups_without_signal: int = Field(2000, ge=1)
    """So many groups in a row without spread end the run with their counts, where the recipe needs spread."""

    @property
    def reused_per_step(self) -> int:
        """Groups of a step, at most, that were trained on before."""
        # A share of 0.29 of 100 is 29, not the 28 that rounding makes of it.
        return math.floor(self.reuse_share * self.groups_per_step + 1e-9) if self.max_uses > 1 else 0


class Buffer(Section):
    """The journal and its bounds."""

    group_commit_s: float = Field(0.02, ge=0, le=1)
    """Longest wait for further groups before an fsync."""
    segment_bytes: int = Field(64 << 20, ge=1 << 16)
    """A journal segment is closed above this size."""
    log_bytes: int = Field(16 << 20, ge=1 << 20)
    """After so many bytes of transitions another log begins, with a snapshot; a start reads the newest log."""
    retain_bytes: int = Field(8 << 30, ge=0)
    """Segments beyond this are deleted, oldest first, once nothing needs them; what is kept can be looked at."""
    retain_groups: int | None = Field(None, ge=0)
    """Likewise segments older than the newest so many groups; None: no such limit."""
    retain_age_s: float | None = Field(None, ge=0)
    """Likewise segments whose last group came in longer ago; None: no such limit."""
    max_bytes: int = Field(32 << 30, ge=1 << 20)
    """The journal is never larger. Near it the learner is asked for checkpoints, at it groups are held back."""
    max_message_bytes: int = Field(256 << 20, ge=1 << 16)
    """A larger message is refused on receipt. Room for one is kept below max_bytes."""
    min_free_bytes: int = Field(256 << 20, ge=0)
    """Inserts are refused while the disk has less room than this."""

    @property
    def reserve_bytes(self) -> int:
        """What is kept free below max_bytes: for a message that comes in, and for the ends of what is there."""
        return self.max_message_bytes + 2 * self.log_bytes

    @property
    def min_max_bytes(self) -> int:
        """With a lower max_bytes not even checkpoints could make room."""
        return self.retain_bytes + 4 * (self.segment_bytes + self.max_message_bytes + self.log_bytes)

    @property
    def checkpoint_above_bytes(self) -> int:
        """With a larger journal the learner is asked for checkpoints: half of what retention leaves of max_bytes."""
        return (self.retain_bytes + self.max_bytes - self.reserve_bytes) // 2


class Learner(Section):
    """DeepSpeed and the optimizer."""

    learning_rate: float = Field(3e-4, ge=0)
    """Of AdamW, after warmup."""
    warmup_steps: int = Field(0, ge=0)
    """Learner steps of linear warmup."""
    weight_decay: float = Field(0.0, ge=0)
    """Of AdamW."""
    adam_betas: tuple[AdamBeta, AdamBeta] = (0.9, 0.99)
    """Decay of AdamW's two running means: of gradients, and of their squares."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are clipped to this norm."""
    zero_stage: Literal[0, 1, 2, 3] = 1
    """DeepSpeed ZeRO: what ranks cut up. 1: the optimizer's state; 2: gradients too; 3: weights too; 0: nothing."""
    num_ranks: int = Field(1, ge=1, le=1024)
    """Learner processes, `num_threads` each, among which every train batch is split."""
    lora: Lora = Lora()
    """A low-rank adapter in place of all weights, `[learner.lora]`."""
    collective_timeout_s: float = Field(600.0, gt=0)
    """A rank that keeps the others waiting for so long in one call ends them all; the error names it."""
    microbatch_tokens: int = Field(16384, ge=1)
    """Padded tokens of one forward and backward at most (one rollout always fits)."""
    share_prompts: bool = True
    """Compute the prompt of a group once for all its rollouts, in batches where that is cheaper."""
    packing: bool = False
    """Put several prompts into one row, which do not see each other, in batches where that is cheaper than padding."""
    logits_bytes: int = Field(256 << 20, ge=1)
    """Logits of more positions than fit in here, in float32, are made a part at a time, in the backward pass again."""
    activation_checkpointing: bool = False
    """Keep the input of each layer alone for the backward pass, and compute the rest of the layer again there."""
    num_epochs: int = Field(1, ge=1)
    """Passes over a train batch."""
    num_minibatches: int = Field(1, ge=1)
    """Optimizer updates per pass; divides groups_per_step."""
    filter_logits: bool = False
    """Apply the sampler's top_p, top_k and min_p to the learner's logits, so that both have the same support."""
    num_threads: int = Field(1, ge=1)
    """Compute threads on CPU."""
    num_gpus: float = Field(0, ge=0)
    """GPUs of each rank, as Ray counts them; 0 or 1 with several ranks."""
    checkpoint_interval: int = Field(50, ge=1)
    """Learner steps between two checkpoints; the last step always makes one."""
    keep_checkpoints: int = Field(2, ge=1)
    """Older ones are removed."""
    max_restarts: int = Field(3, ge=0)
    """How often a dead learner is started again, from its newest checkpoint."""


class Algo(Recipe):
    """The off-policy maths: a preset, and the single choices that differ from it."""

    preset: str = DEFAULT
    """The row that the choices below start from; `stream-grpo presets` lists all."""
    shuffle_rewards: bool = False
    """A control: the rewards of each group are shuffled among its rollouts, so that nothing can be learnt."""

    @model_validator(mode="before")
    @classmethod
    def _start_from_preset(cls, given: Any) -> Any:
        """Fill in what is not given; numbers of the preset that the given choices no longer read fall away."""
        if not isinstance(given, Mapping):
            return given
        name = given.get("preset", DEFAULT)
        if name not in PRESETS:
            near = difflib.get_close_matches(str(name), PRESETS, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(PRESETS))}"
            raise ValueError(f"preset = {name!r}: no such preset; {hint}")
        choices = {**PRESETS[name].recipe.model_dump(), **given}
        return {
            key: None if key not in given and key in Recipe.model_fields and readers(key, choices) else value
            for key, value in choices.items()
        }


class Rewards(Section):
    """How responses are checked: worker processes with limits, and what a response without a reward means."""

    num_workers: int = Field(1, ge=1)
    """Worker processes of each sampler, where problems name a verifier that needs them."""
    time_limit_s: float = Field(10.0, gt=0)
    """Of one check; a worker over it is killed. The response is wrong if the problem's gold is checked in time."""
    memory_limit_bytes: int = Field(4 << 30, ge=256 << 20)
    """Address space of a worker, libraries included."""
    max_retries: int = Field(1, ge=0)
    """How often a response is checked again after an error of the verifier; then it is left out of its group."""
    retry_after_s: float = Field(1.0, ge=0)
    """How long after."""
    max_errors_in_row: int = Field(32, ge=1)
    """So many responses in a row left out for errors end the run with the first of them."""
    functions: tuple[Annotated[str, Field(pattern=r"^python:[A-Za-z_]\w*(\.[A-Za-z_]\w*)+$")], ...] = ()
    """The user's own verifiers, `python:module.function`: code that rows of the pool may have run. No other is."""
    function_dir: Path = Path(".")
    """Where their modules are looked for after the path, relative to the working directory."""
    code_time_limit_s: float = Field(10.0, gt=0)
    """Of a program in one test of `code`; a row's `time_limit_s` replaces it."""
    code_total_s: float = Field(30.0, gt=0)
    """Of all tests of a program; those that it does not reach count as failed."""
    code_memory_limit_bytes: int = Field(1 << 30, ge=64 << 20)
    """Of each process of a program; a row's `memory_limit_bytes` replaces it."""
    allow_weaker_sandbox: bool = False
    """Whether `code` runs where this machine cannot isolate a program; only for programs that may be trusted."""
    http: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")], Judge] = Field(default_factory=dict)
    """Judges and reward models behind URLs, `[rewards.http.NAME]`; a row names one as `http:NAME`."""
    compose: dict[Name, Composition] = Field(default_factory=dict)
    """Several verifiers as one: a row that names `compose:NAME` as its verifier is scored by all of them."""
    shaping: Shaping = Shaping()
    """Terms for length, repetition and truncation, added to what the verifiers say."""
    hidden: Hidden | None = None
    """A verifier that watches a sample of the responses without being part of any reward."""

    @model_validator(mode="after")
    def _compositions_fit(self) -> Rewards:
        compares = {f"http:{name}" for name, judge in self.http.items() if judge.kind == "pairwise"}
        for complaint in composition_complaints(self.compose):
            raise ValueError(complaint)
        for complaint in sample_complaints(self.compose, self.hidden, compares):
            raise ValueError(complaint)
        return self

    @property
    def code_check_s(self) -> float:
        """Time limit of a check with `code`: its tests, twice where a second run looks for chance."""
        return 2 * (self.code_total_s + self.code_time_limit_s)


class Weights(Section):
    """How new weights reach samplers, and how they are proved."""

    transfer: Literal["files", "nccl"] = "files"
    """How tensors come to samplers: as files, or from GPU to GPU through vLLM's weight transfer."""
    keep_versions: int = Field(3, ge=2)
    """Published versions that stay on disk."""
    publish: Literal["full", "changed"] = "full"
    """`changed`: a version holds the tensors that differ from the version before, and names where the others are."""
    poll_interval_s: float = Field(0.01, gt=0)
    """How often a sampler looks for new weights."""
    on_update: Literal["keep", "finish", "restart"] = "keep"
    """`keep`: running requests go on with new weights; `finish`: new weights wait until they have ended, and no request
    begins meanwhile; `restart`: groups that are not sampled to the end begin anew from their prompt."""
    num_probe_sequences: int = Field(4, ge=1)
    """Sequences whose logprobs the learner sends along."""
    probe_mean_tolerance: float = Field(1e-4, gt=0)
    """Largest mean gap of probe logprobs, fp32."""
    probe_max_tolerance: float = Field(1e-3, gt=0)
    """Largest single gap of probe logprobs, fp32."""


class Guard(Section):
    """A capability that training must not cost: problems that are never trained on, scored before and after it."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")
    """What it is called in the summary and in its alarm."""
    files: tuple[Path, ...] = Field(min_length=1)
    """Its problems, in the formats of the pool."""
    max_drop: float = Field(0.02, ge=0, lt=1)
    """A fall of pass@1 whose whole 95% interval lies beyond this is an alarm."""
    num_problems: int = Field(64, ge=1)
    """Problems that are scored; a seeded subset when there are more."""


class Evaluation(Section):
    """Held-out problems, scored before, during and after training."""

    files: tuple[Path, ...] = ()
    """Held-out problems, in the formats of the pool."""
    num_samples: int = Field(16, ge=1)
    """Rollouts per held-out problem."""
    num_problems: int = Field(256, ge=0)
    """Problems evaluated before and after training; a seeded subset when there are more. 0: neither is done."""
    num_engines: int = Field(1, ge=1, le=4096)
    """Engines that share these problems, each in a process of its own with the resources of a sampler."""
    domains: tuple[str, ...] = ()
    """Domains that make the headline figure; empty: all."""
    problems_seed: int | None = Field(None, ge=0, lt=1 << 63)
    """Of the choice of problems. None: run.seed. Runs of several seeds are compared on the same problems alone."""
    guards: tuple[Guard, ...] = ()
    """What a run must not lose, `[[evaluation.guards]]`; sampled as often as held-out problems."""
    interval: int = Field(25, ge=0)
    """Learner steps between two evaluations during training, on the engine of the first sampler. 0: none."""
    interval_problems: int = Field(64, ge=1)
    """Problems of each of these, from the headline's domains; more of them let newer weights wait for longer."""
    interval_samples: int = Field(4, ge=1)
    """Rollouts per problem of each of these."""

    @property
    def is_around(self) -> bool:
        """Whether anything is scored before and after training."""
        return bool((self.files and self.num_problems) or self.guards)


class Control(Section):
    """The closed loop: staleness steered by what it costs, see docs/control.md."""

    enabled: bool = False
    """Whether the learner moves its staleness by itself, within stream.max_policy_age and stream.publish_interval."""
    min_ess: float = Field(0.9, gt=0, lt=1)
    """Floor of the effective share of the trained tokens (`ess` in the metrics)."""
    max_behavior_kl: float = Field(0.05, gt=0)
    """Ceiling of KL(behavior || policy) per token, by k3."""
    interval: int = Field(4, ge=1)
    """Learner steps that both are averaged over before anything is decided; more after a change, until it shows."""
    margin: float = Field(0.5, gt=0, lt=1)
    """Share of the way from a bound to no staleness at all that must be left before anything is loosened."""
    patience: int = Field(3, ge=1)
    """So many averages in a row with that margin loosen by one; twice as many each time that had to be taken back."""
    min_learning_rate_scale: float = Field(0.1, gt=0, le=1)
    """The learning rate is never lowered below this share. 1: it stays."""


class Tracking(Section):
    """Where metrics go besides metrics.jsonl."""

    dashboard: bool = True
    """Whether `train` serves the live page of the run, on loopback, in a process of its own."""
    dashboard_port: int = Field(0, ge=0, le=65535)
    """Of the live page; 0: a free one, which is printed."""

    wandb: Literal["offline", "online", "disabled"] = "offline"
    """W&B mode; offline needs no account."""
    wandb_project: str = Field("stream-grpo", pattern=r"^[^/\\#?%:]{1,128}$")
    """W&B project: at most 128 characters, none of / \\ # ? % and colon."""
    tensorboard: bool = False
    """Whether an event file for TensorBoard is written, into `tensorboard/` of the run."""
    prometheus_port: int | None = Field(None, ge=0, lt=1 << 16)
    """Port on loopback under which Prometheus finds the newest figures; 0 takes a free one. None: no such server."""


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
    yield from _buffer_complaints(config.buffer)
    yield from _curator_complaints(config.curator)
    yield from _group_size_complaints(config)
    yield from _control_complaints(config)
    yield from _guard_complaints(config.evaluation)
    yield from cluster_complaints(
        config.cluster,
        sampler_gpus=config.sampler.num_gpus,
        learner_gpus=config.learner.num_gpus,
        num_ranks=config.learner.num_ranks,
        evaluates_around=config.evaluation.is_around,
    )
    yield from _environment_complaints(config)
    yield from _transfer_complaints(config)


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


def _curator_complaints(curator: Curator) -> Iterable[str]:
    if curator.choice == "worth" and curator.exploration + curator.unseen_share > 1:
        yield (
            f"curator.unseen_share = {curator.unseen_share}: with curator.exploration = {curator.exploration} the two "
            "are more than all picks; their sum is at most 1"
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


def _guard_complaints(evaluation: Evaluation) -> Iterable[str]:
    names = [guard.name for guard in evaluation.guards]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        yield f"evaluation.guards: the name {twice[0]!r} is given twice; every guard needs a name of its own"


def _buffer_complaints(buffer: Buffer) -> Iterable[str]:
    if buffer.max_bytes < buffer.min_max_bytes:
        yield (
            f"buffer.max_bytes = {buffer.max_bytes}: beside buffer.retain_bytes = {buffer.retain_bytes} there must be "
            f"room for four segments and logs, and in each segment a message of buffer.max_message_bytes = "
            f"{buffer.max_message_bytes}; use at least {buffer.min_max_bytes}, or lower one of these"
        )


def _sampler_complaints(config: Config) -> Iterable[str]:
    sampler = config.sampler
    if sampler.group_size < 2:
        yield f"sampler.group_size = {sampler.group_size}: a group needs at least 2 rollouts to have a spread"
    if sampler.group_size > sampler.max_num_seqs:
        yield (
            f"sampler.group_size = {sampler.group_size}: a group must fit sampler.max_num_seqs = "
            f"{sampler.max_num_seqs}; raise max_num_seqs"
        )
    yield from _worker_complaints(sampler, shares_gpu=config.cluster.colocate)
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


def _worker_complaints(sampler: Sampler, *, shares_gpu: bool) -> Iterable[str]:
    num_workers = sampler.tensor_parallel_size
    if num_workers > 1 and sampler.engine == "in_process":
        yield (
            f"sampler.tensor_parallel_size = {num_workers}: sampler.engine = 'in_process' is one process, which is one "
            f"worker; use sampler.engine = 'async', or tensor_parallel_size = 1"
        )
    if 0 < sampler.num_gpus < num_workers and not (shares_gpu and num_workers == 1):
        yield (
            f"sampler.num_gpus = {sampler.num_gpus:g}: each of sampler.tensor_parallel_size = {num_workers} workers "
            f"needs a GPU of its own; use num_gpus = {num_workers}"
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
    yield from _staleness_complaints(stream)
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


def _staleness_complaints(stream: Stream) -> Iterable[str]:
    if stream.selector != "fewest_steps_left" and stream.too_old == "wait":
        yield (
            f"stream.selector = {stream.selector} with stream.too_old = wait: any other order than fewest steps left "
            f"may leave behind what is then too old, however long a step waits; use another too_old, as drop"
        )
    if stream.max_policy_age == 0 and stream.too_old != "wait":
        yield (
            f"stream.too_old = {stream.too_old} with stream.max_policy_age = 0: the synchronous loop waits for its "
            f"whole block, and nothing gets too old; use too_old = wait, or a larger max_policy_age"
        )
    if stream.max_uses > 1 and stream.max_policy_age == 0:
        yield (
            f"stream.max_uses = {stream.max_uses} with stream.max_policy_age = 0: after its first use every group is 1 "
            f"step old, and too old for another; use max_uses = 1, or a larger max_policy_age"
        )
    if stream.max_uses > 1 and not stream.reused_per_step:
        yield (
            f"stream.reuse_share = {stream.reuse_share:g} of stream.groups_per_step = {stream.groups_per_step} is less "
            f"than one group: nothing would be used again; raise one of the two, or use max_uses = 1"
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
