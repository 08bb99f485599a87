"""What the summary of a run says of its loop: ages, overlap, probes, and the account. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stream_grpo.evaluation import HEADLINE


class AgeAccount:
    """The policy ages of the learner steps that the model is made of, over all starts of a run."""

    def __init__(self) -> None:
        self._steps: list[tuple[int, int, float, int]] = []
        """Step, largest age, mean age, groups."""

    def add(self, line: Mapping[str, Any]) -> None:
        """Take a line of metrics; only learner steps count."""
        if line["event"] == "step":
            # After a restore a step is made again: what had come from there on is lost.
            self.keep_before(line["step"])
            self._steps.append((line["step"], line["age_max"], line["age_mean"], line["num_groups"]))

    def keep_before(self, step: int) -> None:
        """Forget this step and all later ones."""
        while self._steps and self._steps[-1][0] >= step:
            self._steps.pop()

    @property
    def step(self) -> int:
        """The newest step."""
        return self._steps[-1][0] if self._steps else 0

    @property
    def max(self) -> int:
        """The largest age of a group that was trained."""
        return max((largest for _, largest, *_ in self._steps), default=0)

    @property
    def mean(self) -> float:
        """Mean age of the trained groups; one that is used again counts once a use."""
        num_groups = sum(num for *_, num in self._steps)
        return sum(mean * num for *_, mean, num in self._steps) / num_groups if num_groups else 0.0


def headline_of(line: Mapping[str, Any]) -> dict[str, Any]:
    """Of an evaluation during training: which weights, and their headline figure."""
    return {"branch": line["branch"], "step": line["step"], **line["heldout"][HEADLINE]}


def loop_facts(
    learners: Sequence[Mapping[str, Any]], samplers: Sequence[Sequence[Mapping[str, Any]]], now: float
) -> dict[str, Any]:
    """Time and overlap of this start of the run, and what the probes found.

    `learners` has a status for every incarnation of the learner, `samplers` the same for every sampler.
    overlap = (busy sampler + busy learner - wall) / the smaller of the two, where the sampler is the mean of all; wall
    runs from the first engine step with running requests to the end of the last learner step. What samplers did after
    that end, until `now`, is taken off as if they had been busy all the time, which can only lower the overlap. Engine
    steps of evaluations during training count as those of groups do.
    """
    statuses = [status for incarnations in samplers for status in incarnations]
    first = min((status["first_busy_at"] for status in statuses if status.get("first_busy_at")), default=0.0)
    last = max((status["last_step_at"] for status in learners if status), default=0.0)
    wall_s = last - first if first and last > first else 0.0
    busy_s = sum(status.get("busy_s", 0.0) for status in statuses)
    sampler_s = busy_s / len(samplers) - (now - last) if wall_s else 0.0
    learner_s = sum(status.get("busy_s", 0.0) for status in learners)
    smaller = min(sampler_s, learner_s)
    gaps = [status["probe_gap"] for status in statuses if status.get("probe_gap")]
    num_probed = sum(gap["num_tokens"] for gap in gaps)
    return {
        "loop_wall_s": wall_s,
        "busy_s": {"sampler": sampler_s, "learner": learner_s},
        "overlap": (sampler_s + learner_s - wall_s) / smaller if smaller > 0 else 0.0,
        "probe_gap": {
            "max": max((gap["max"] for gap in gaps), default=0.0),
            "mean": sum(gap["mean"] * gap["num_tokens"] for gap in gaps) / num_probed if num_probed else 0.0,
            "num_tokens": num_probed,
        },
    }


def account(ledger: Mapping[str, Any]) -> dict[str, Any]:
    """Groups and tokens by fate, further uses, and what was lost to age, over all starts of the run."""
    tokens = dict(ledger["tokens"])
    return {
        "tokens": tokens,
        "trained_share": tokens["trained"] / tokens["generated"] if tokens["generated"] else 0.0,
        "groups": dict(ledger["groups"]),
        "reused": dict(ledger["reused"]),
        "losses": dict(ledger["losses"]),
        "lost_in_sampler": int(ledger["lost_in_sampler"]),
        "ledger_closes": bool(ledger["closes"]),
    }
