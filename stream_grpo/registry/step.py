"""What a `step` line carries: one learner step. R = policy / behavior."""

from __future__ import annotations

from stream_grpo.registry.figure import figures

PROGRESS = figures(
    "step",
    """
    step | steps | learner step that the line reports
    branch | | branch of the run; every restore from a checkpoint opens a new one
    step_s | s | the step itself: batch, forward, backward, updates
    seconds | s | of these the optimizer updates and all before them, without the making of the batch
    waited_s | s | the wait for the batch of this step
    publish_s | s | publishing weights since the step before, probe included
    checkpoint_s | s | making checkpoints since the step before
    learner_busy_s | s | in all so far: steps and probes
    """,
)

GROUPS = figures(
    "step",
    """
    num_groups | groups | of the batch
    num_baseline_only | rollouts | in the baseline of their group and not in the loss: too old
    num_left_out | rollouts | not valid: in neither baseline nor loss
    prompt_tokens_shared | tokens | of prompts that were not computed again: what `learner.share_prompts` saved a pass
    padding_share | share | of the tokens of a pass over the batch, those that are padding
    num_sequences | rollouts | trained
    num_tokens | tokens | trained
    reward_mean | reward | mean over scored rollouts
    reward_std | reward | standard deviation over scored rollouts
    reward_p10 | reward | 10th percentile
    reward_p50 | reward | median
    reward_p90 | reward | 90th percentile
    pass_share | share | of rollouts that passed or failed, those that passed
    reward_components/* | reward | mean of a component of the reward, over the rollouts that have it
    response_tokens_mean | tokens | sampled for a response, trained or not, mean
    response_tokens_p10 | tokens | 10th percentile of lengths
    response_tokens_p50 | tokens | median length
    response_tokens_p90 | tokens | 90th percentile of lengths
    response_tokens_p99 | tokens | 99th percentile of lengths
    by_decision/*/num_rollouts | rollouts | right ones, wrong ones
    by_decision/*/response_tokens_p10 | tokens | 10th percentile of their lengths
    by_decision/*/response_tokens_p50 | tokens | median of their lengths
    by_decision/*/response_tokens_p90 | tokens | 90th percentile of their lengths
    by_decision/*/response_tokens_p99 | tokens | 99th percentile of their lengths
    end_share/* | share | of responses that stopped for this reason; `length` is truncation
    reward_length_correlation | | Pearson's, over scored rollouts; harder problems have longer answers
    reward_length_correlation_within | | the same within groups: whether the longer answer to one problem gets more
    unique_responses_mean | responses | different token ids in a group, mean over groups
    unique_answers_mean | answers | different evidence of the verifier in a group, mean over groups
    by_domain/*/num_groups | groups | of the batch, from this domain
    by_domain/*/reward_mean | reward | mean over their scored rollouts
    came_in/num_groups | groups | that came in since the step before, trained on or not
    came_in/all_right | share | of these with every rollout right: no signal
    came_in/all_wrong | share | with every rollout wrong: no signal
    came_in/same_reward | share | with one reward throughout, neither all right nor all wrong: no signal
    came_in/mixed | share | with signal
    came_in/unscored | share | with fewer than two rewards, or of another configuration
    """,
)

AGES = figures(
    "step",
    """
    age_max | steps | largest policy age of a group of the batch
    age_mean | steps | mean policy age of the groups
    age_publish_lag_mean | steps | part of the age: weights were that old when the ticket was issued; mean
    age_publish_lag_max | steps | the same, largest
    age_in_flight_mean | steps | part of the age: steps made while the group was sampled and scored; mean
    age_in_flight_max | steps | the same, largest
    age_in_queue_mean | steps | part of the age: steps made while the group was buffered; mean
    age_in_queue_max | steps | the same, largest
    engine_mismatch | nats | mean abs(log R) on rollouts of the learner's own version: two engines, one set of weights
    engine_mismatch_tokens | tokens | of these rollouts
    staleness | nats | mean abs(log R) on tokens that other weights sampled, before the first update
    publish_movement | nats | mean abs change of the probe's logprobs by the newest publish
    """,
)

UPDATE = figures(
    "step",
    """
    loss | | mean over the optimizer updates
    grad_norm | | before clipping, mean over the updates
    learning_rate | | of the updates
    learning_rate_scale | | what the closed loop takes it times, where it is on
    target_policy_age | steps | what the closed loop aims at, where it is on
    publish_interval | steps | between two publishes, as the closed loop has it
    num_updates | updates | of the optimizer: epochs x minibatches
    advantage_std | | standard deviation of the advantages of trained rollouts; with a critic of trained tokens
    advantage_p01 | | 1st percentile
    advantage_p10 | | 10th percentile
    advantage_p50 | | median
    advantage_p90 | | 90th percentile
    advantage_p99 | | 99th percentile
    effective_groups | groups | (sum w)^2 / sum w^2, w = sum of abs(advantage) of a group; none with a critic
    groups_flattened | groups | whose rewards differ and whose advantages do not: clipped, cut, cancelled
    baseline | reward | the running baseline, where the recipe keeps one
    second_moment_bound | nats | m2po's bound, where the recipe has it
    effective_share | share | effective sample size over sequences, where the recipe scales its learning rate by it
    kl_weight | | coefficient of the KL term
    entropy | nats | mean of the policy over trained tokens
    entropy_by_position/* | nats | mean over the tokens at these places of a response, the first is 1
    """,
)

CRITIC = figures(
    "step",
    """
    value_loss | | of the critic, mean over its updates, where the recipe has one
    value_grad_norm | | of the critic, before clipping, mean over its updates
    value_mean | reward | what the critic expects before a trained token, mean at the start of the step
    return_mean | reward | what it is to learn there, mean
    explained_variance | share | of the returns, by the critic at the start of the step: 1 knows all, 0 nothing
    value_clip_share | share | of trained tokens whose value had no gradient: moved far enough, where it is clipped
    critic_learning_rate | | of the critic's updates
    critic_s | s | part of the step: the critic's passes and updates
    critic_bytes | bytes | of the critic's weights, their gradients, and what its optimizer keeps
    """,
)

_LOSS = """
    clip_share_low | share | of tokens whose weight the lower bound cut
    clip_share_high | share | of tokens whose weight the upper bound cut
    clip_share_dual | share | of tokens that the dual clip cut
    mask_share | share | of tokens that a mask took out of the loss
    mask_share_* | share | of tokens, those of one sign of the advantage, or that one mask took
    ratio_mean | | mean of the ratio that the weight takes
    abs_log_ratio | nats | mean abs(log R)
    k1 | nats | KL of behavior to policy, estimated by -log R
    k3 | nats | the same by R - 1 - log R: never negative, less noisy
    k1_proximal | nats | KL to the proximal policy, by k1
    k3_proximal | nats | the same by k3
    k1_reference | nats | KL to the reference policy, by k1
    k3_reference | nats | the same by k3
    correction_mean | | mean weight of the correction for staleness
    chi_square | | mean R^2 - 1
    ess | share | effective sample size over tokens: (sum R)^2 / (n sum R^2)
"""

LOSS = figures(
    "step",
    f"""{_LOSS}
    ratio_max | | largest ratio that a weight took
    num_clamped | tokens | log ratios beyond their bound
    ratio_p01 | | 1st percentile of R
    ratio_p10 | | 10th percentile of R
    ratio_p50 | | median of R
    ratio_p90 | | 90th percentile of R
    ratio_p99 | | 99th percentile of R
    """,
)

_BUCKET = f"""{_LOSS}
    entropy | nats | mean of the policy over its trained tokens
    num_tokens | tokens | trained, of the bucket
"""


def _bucketed(by: str, what: str) -> str:
    return "\n".join(f"{by}/*/{row.strip()}, {what}" for row in _BUCKET.splitlines() if row.strip())


BUCKETS = figures(
    "step",
    f"""
    {_bucketed("by_age", "by policy age")}
    {_bucketed("by_length", "by length of the response")}
    """,
)

ACCOUNT = figures(
    "step",
    """
    groups/* | groups | in this state by now; see ARCHITECTURE.md
    tokens/generated | tokens | sampled, and known to the buffer, so far
    tokens/* | tokens | of these with this fate: trained, thrown away for a reason, or still held
    reused/uses | groups | trained on again, one for each further use
    reused/tokens | tokens | trained on again
    """,
)

STEP = (*PROGRESS, *GROUPS, *AGES, *UPDATE, *CRITIC, *LOSS, *BUCKETS, *ACCOUNT)
