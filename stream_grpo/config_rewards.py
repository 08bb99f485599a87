"""The settings of rewards: how responses are checked, terms on top, the hidden verifier. Loads no torch.

Part of the tree of `config`; what a term or the hidden verifier cannot do is refused here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from stream_grpo.config_composition import Asked, Composition, Name, composition_complaints
from stream_grpo.config_http import Judge
from stream_grpo.config_section import Section


class Shaping(Section):
    """Terms that are added to a reward whatever the verifiers say; each is named in the result's components."""

    truncated: Literal["keep", "leave_out"] = "keep"
    """A response cut at sampler.max_new_tokens: scored as any other, or left out of its group without a reward."""
    overlong_tokens: int | None = Field(None, ge=1)
    """The last so many tokens before sampler.max_new_tokens cost more and more, up to overlong_weight. None: off."""
    overlong_weight: float = Field(1.0, gt=0)
    """What a response at the limit pays."""
    repetition_weight: float = Field(0.0, ge=0)
    """Taken times the share of n-grams that stood in the response before. 0: off."""
    repetition_ngram: int = Field(4, ge=1)
    """Tokens of such an n-gram."""
    repetition_from_step: int = Field(0, ge=0)
    """Learner step from which it acts: that on the group's ticket, for all its rollouts."""
    type_token_weight: float = Field(0.0, ge=0)
    """Taken times how far the type-token ratio lies below its floor, relative to the floor. 0: off."""
    type_token_floor: float = Field(0.5, gt=0, le=1)
    """Distinct tokens over tokens of a window; a response at or above it pays nothing."""
    type_token_window: int = Field(64, ge=2)
    """Tokens of a window: the ratio is the mean over all windows, so that it does not fall with length by itself."""
    type_token_from_step: int = Field(0, ge=0)
    """Learner step from which it acts: that on the group's ticket, for all its rollouts."""


class Hidden(Asked):
    """A second verifier that scores a sample of the responses and never reaches the optimizer."""

    share: float = Field(0.1, gt=0, le=1)
    """Of the responses."""
    seed: int = Field(0, ge=0, lt=1 << 63)
    """Which responses: the same ones for the same seed."""
    window: int = Field(256, ge=16)
    """Newest responses with both results over which the gap is taken."""
    max_disagreement: float = Field(0.2, gt=0, le=1)
    """Above this share of different decisions in a full window a sampler warns, once."""
    max_difference: float | None = Field(None, gt=0)
    """The same for the mean of reward minus hidden reward, where both have one scale. None: it does not warn."""


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
        for complaint in _sample_complaints(self.compose, self.hidden, compares):
            raise ValueError(complaint)
        return self

    @property
    def code_check_s(self) -> float:
        """Time limit of a check with `code`: its tests, twice where a second run looks for chance."""
        return 2 * (self.code_total_s + self.code_time_limit_s)


def _sample_complaints(
    compositions: dict[str, Composition], hidden: Hidden | None, compares: Collection[str]
) -> Iterable[str]:
    """Where a verifier that `compares` the responses of a group would be asked about some of them alone."""
    if hidden is not None and hidden.verifier in compares:
        yield f"hidden.verifier = {hidden.verifier!r} compares whole groups, and is asked about a sample; use another"
    for name, composition in compositions.items():
        for key, component in composition.components.items():
            if component.tail_verifier in compares:
                yield (
                    f"compose.{name}.components.{key}.tail_verifier = {component.tail_verifier!r} compares whole "
                    f"groups, and is asked about a tail; use another"
                )
