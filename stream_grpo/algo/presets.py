"""The named recipes: each a frozen row of choices, with where it comes from and what it trades. Data only, no torch.

The idea is the source's, and the numbers are where `trades` does not say otherwise. None has a KL term or a length
penalty, whatever its source has: both are choices to add.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from stream_grpo.algo.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Preset:
    """A recipe under a name."""

    recipe: Recipe
    source: str
    """arXiv number, or where it is written down."""
    trades: str
    """What one gains and gives up, in words."""


def _row(base: Recipe | None = None, **choices: Any) -> Recipe:
    """A recipe from another one and the choices that differ; checked as every recipe is."""
    earlier = {} if base is None else base.model_dump(exclude_none=True)
    return Recipe.model_validate(earlier | choices)


_GROUP_STD: Mapping[str, Any] = {"scale": "group_std", "std": "population", "scale_floor": 0.01}
_CLIPPED: Mapping[str, Any] = {"ratio_to": "behavior", "weight": "ppo", "clip_low": 0.2, "clip_high": 0.2}
_RECOMPUTED: Mapping[str, Any] = {"ratio_to": "proximal", "proximal": "recomputed"}
_TRUNCATED: Mapping[str, Any] = {"correction": "truncated", "correction_level": "token", "correction_high": 2.0}

_grpo = _row(baseline="group_mean", **_GROUP_STD, **_CLIPPED, aggregation="sequences")
_dr_grpo = _row(baseline="group_mean", **_CLIPPED, aggregation="constant")
_dapo = _row(
    baseline="group_mean",
    **_GROUP_STD,
    ratio_to="behavior",
    weight="ppo",
    clip_low=0.2,
    clip_high=0.28,
    aggregation="tokens",
)
_update = _row(baseline="leave_one_out", **_RECOMPUTED, weight="ppo", clip_low=0.2, clip_high=0.28)
_decoupled = _row(_update, **_TRUNCATED)
_gspo = _row(
    baseline="group_mean",
    **_GROUP_STD,
    ratio_to="behavior",
    ratio_level="sequence_mean",
    weight="ppo",
    clip_low=3e-4,
    clip_high=4e-4,
    aggregation="sequences",
)
_on_behavior: Mapping[str, Any] = {"baseline": "leave_one_out", "ratio_to": "behavior"}
_cispo = _row(baseline="group_mean", **_GROUP_STD, ratio_to="behavior", weight="cispo", cap=5.0, aggregation="tokens")
_dppo = _row(**_on_behavior, weight="cispo", cap=20.0)

PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "grpo": Preset(
            _grpo,
            "2402.03300",
            "The reference everyone compares with. Its spread in the denominator favours problems that are nearly "
            "solved or nearly out of reach, its sequence mean favours short right answers, and its clip on stale "
            "data throws away gradient as age grows.",
        ),
        "dr_grpo": Preset(
            _dr_grpo,
            "2503.20783",
            "grpo without its two biases: no spread, a constant denominator. The step size then follows how many "
            "tokens the answers have.",
        ),
        "rloo": Preset(
            _row(**_on_behavior, weight="ppo", clip_low=0.2, clip_high=0.28),
            "2402.14740",
            "Unbiased for every number of valid rollouts, no spread; with a clip per token, which the paper has not. "
            "More variance between batches than grpo, since problems of middling difficulty weigh most.",
        ),
        "ppo": Preset(
            _row(
                advantage="gae",
                gae_gamma=1.0,
                gae_lambda=1.0,
                gae_whiten=True,
                value_clip=0.2,
                critic_rate=5.0,
                baseline="none",
                **_CLIPPED,
                aggregation="tokens",
            ),
            "1707.06347, 1506.02438",
            "A critic says what each prefix is worth: advantages differ within an answer, and groups without spread "
            "teach too. It is a second model to train and to keep, and early on it knows nothing. Gamma and lambda of "
            "1 are those of Open-Reasoner-Zero (2503.24290).",
        ),
        "reinforce": Preset(
            _row(baseline="running_mean", baseline_decay=0.9, ratio_to="behavior", weight="plain"),
            "Williams 1992",
            "A running baseline and the bare importance weight: groups without spread still teach, nothing is "
            "clipped, and a few large ratios can carry a batch.",
        ),
        "dapo": Preset(
            _dapo,
            "2503.14476",
            "A wider upper bound keeps rare tokens alive and entropy up; the token mean lets long answers weigh by "
            "their length, repetition included.",
        ),
        "gspo": Preset(
            _gspo,
            "2507.18071",
            "The ratio of the whole sequence, so that single tokens (and experts of a mixture) cannot blow it up. "
            "Its narrow bounds drop whole sequences; with stale data, most of them.",
        ),
        "gspo_token": Preset(
            _gspo,
            "2507.18071",
            "Another name of gspo: written token by token it is the same row, with room for advantages that differ "
            "within an answer.",
        ),
        "gmpo": Preset(
            _row(
                baseline="group_mean",
                **_GROUP_STD,
                ratio_to="behavior",
                weight="geometric",
                clip_low=0.4,
                clip_high=0.4,
                aggregation="sequences",
            ),
            "2507.20673",
            "The geometric mean of clipped ratios: outliers count little, bounds may be wide. One number per answer "
            "again, so that a late good token shares the fate of its sentence.",
        ),
        "cispo": Preset(
            _cispo,
            "2506.13585",
            "Every token keeps its gradient, with a weight that is capped instead of clipped: no token is silenced, "
            "and nothing stops one that keeps moving the same way.",
        ),
        "scalerl": Preset(
            _row(
                baseline="group_mean",
                scale="batch_std",
                std="population",
                scale_floor=0.01,
                ratio_to="behavior",
                weight="cispo",
                cap=5.0,
                aggregation="problems",
            ),
            "2510.13786",
            "cispo with one scale for the batch and the same weight for every problem, as in a long study of what "
            "still helps at scale.",
        ),
        "decoupled": Preset(
            _decoupled,
            "2110.00641, 2505.24298",
            "The clip bounds the update alone (and acts only with several updates a step), staleness is a weight that "
            "is cut at 2; leave-one-out and the wider bound are choices of this project. The usual choice at ages of 1 "
            "to 8. Beyond that the cut weight is a bias that grows.",
        ),
        "a3po": Preset(
            _row(_decoupled, proximal="interpolated"),
            "2512.06547",
            "decoupled with a proximal policy put between sampler and policy by age: saves a forward pass, and mainly "
            "moves the bounds of the clip.",
        ),
        "tis": Preset(
            _row(_grpo, **_RECOMPUTED, **_TRUNCATED),
            "fengyao.notion.site/off-policy-rl",
            "grpo with the gap between engine and learner as a truncated weight per token: little variance, biased "
            "where the weight is cut.",
        ),
        "seq_tis": Preset(
            _row(_grpo, **_RECOMPUTED, **(dict(_TRUNCATED) | {"correction_level": "sequence_sum"})),
            "yingru.notion.site/when-speed-kills-stability",
            "The weight of the whole sequence: unbiased below the cut, of a variance that grows with length.",
        ),
        "mis": Preset(
            _row(
                _grpo,
                **_RECOMPUTED,
                correction="masked",
                correction_level="sequence_sum",
                correction_low=0.0,
                correction_high=2.0,
            ),
            "yingru.notion.site/when-speed-kills-stability",
            "Sequences whose weight is above 2 are left out instead of cut: no biased gradient from outliers, but "
            "long answers are the first to go.",
        ),
        "icepop": Preset(
            _row(
                _grpo,
                **_RECOMPUTED,
                correction="masked",
                correction_level="token",
                correction_low=0.5,
                correction_high=5.0,
            ),
            "2510.18855",
            "Tokens on which engine and learner disagree on either side get no gradient. The mask can hide that they "
            "disagree more and more.",
        ),
        "geo_mask": Preset(
            _row(_update, **_TRUNCATED, mask_sequence=(0.97, 1.03)),
            "SkyRL, off_policy_correction",
            "Drops sequences whose mean ratio has left 1, by a measure that does not punish length. The band is wider "
            "than its source's, to admit some steps of age; it is a guess.",
        ),
        "m2po": Preset(
            _row(
                baseline="group_mean",
                **_GROUP_STD,
                ratio_to="behavior",
                weight="plain",
                mask_second_moment=0.04,
            ),
            "2510.01161",
            "Masks only as many of the furthest tokens as it takes to hold the second moment of the log ratio: far "
            "less than a clip at great age. The tokens it masks are the informative ones.",
        ),
        "dppo_tv": Preset(
            _row(_dppo, mask_tv=0.2),
            "2602.04879",
            "Stops a token by how far its probability has moved, not by its ratio: rare tokens may grow, likely ones "
            "may not collapse. Its bound is on the sampled token alone.",
        ),
        "dppo_kl": Preset(
            _row(_dppo, mask_binary_kl=0.05),
            "2602.04879",
            "The same with a binary KL: stricter near probabilities of 0 and 1.",
        ),
        "sapo": Preset(
            _row(
                baseline="group_mean",
                **_GROUP_STD,
                ratio_to="behavior",
                weight="soft",
                soft_positive=1.0,
                soft_negative=1.05,
                aggregation="sequences",
            ),
            "2511.20347",
            "The clip as a smooth gate, a little tighter for negative advantages: no cliff, and no hard bound either.",
        ),
        "topr": Preset(
            _row(**_on_behavior, ratio_level="sequence_sum", weight="topr"),
            "2503.14286",
            "Right answers count in full however old, wrong ones by a ratio that only shrinks: stable far off-policy, "
            "biased towards imitating what once worked.",
        ),
        "vespo": Preset(
            _row(
                **_on_behavior,
                ratio_level="sequence_sum",
                weight="gamma",
                gamma_positive=(2.0, 3.0),
                gamma_negative=(3.0, 2.0),
            ),
            "2602.10693",
            "Weighs whole sequences by a kernel that fades on both sides of 1: reported to bear great staleness, and "
            "long answers, whose products stray furthest, fade first.",
        ),
        "vcpo": Preset(
            _row(
                baseline="leave_one_out",
                **_RECOMPUTED,
                weight="reinforce",
                correction="truncated",
                correction_level="sequence_sum",
                correction_high=8.0,
                learning_rate_scale="ess",
                ess_base=1.0,
            ),
            "2602.17616",
            "No clip, and not the baseline of the paper; the step shrinks with the effective sample size, so that a "
            "batch of few effective answers moves little. Slow where lengths make that size small.",
        ),
        "max_rl": Preset(
            _row(baseline="group_mean", scale="group_mean", scale_floor=0.001, **_CLIPPED),
            "2602.02710",
            "Divides by the success rate, which is the gradient of its logarithm: hard problems weigh most, and with "
            "them the noise of rare successes.",
        ),
        "lite_ppo": Preset(
            _row(
                baseline="group_mean",
                scale="batch_reward_std",
                std="population",
                scale_floor=0.01,
                **_CLIPPED,
                aggregation="tokens",
            ),
            "2508.08221",
            "Group mean, batch spread, token mean: two tricks in place of many, and no weight that depends on how hard "
            "a single problem is.",
        ),
    }
)
"""Every preset by name."""

DEFAULT = "dppo_kl"
"""By measurement: the largest lower bound of the rise at the worse of ages 4 and 16 (docs/recipes.md)."""
