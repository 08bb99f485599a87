"""Every difference that is known, each with the peer's line, the oracle's flag and a verdict."""

from __future__ import annotations

from peers.cell import Cause

TRL = "trl/trainer/grpo_trainer.py"
VERL = "verl/trainer/ppo/core_algos.py"
VERL_CORRECTION = "verl/trainer/ppo/rollout_corr_helper.py"

TRL_COUNTS_MASKED = Cause(
    flag="counts_masked_rollouts",
    file=TRL,
    anchor='if self.loss_type in ["grpo", "sapo"]:',
    line="loss = ((per_token_loss * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()",
    what="The mean is over all rollouts, also those whose tokens are all masked (truncated ones, by a setting of TRL).",
    right="Ours: a rollout that is not trained does not shrink the step. The paper has no masked rollouts.",
)
TRL_MICROBATCH = Cause(
    flag="microbatch_denominator",
    file=TRL,
    anchor='elif self.loss_type == "bnpo":',
    line="loss = (per_token_loss * mask).sum() / mask.sum().clamp(min=1.0)",
    what="The denominator is the tokens of one microbatch, so that the loss depends on how a batch is cut.",
    right="Ours: one denominator for all microbatches of an update. TRL's documentation says so of bnpo.",
)
TRL_GENERATION = Cause(
    flag="generation_denominator",
    file=TRL,
    anchor='elif self.loss_type in ["cispo", "dapo", "vespo"]:',
    line="normalizer = normalizer * self.current_gradient_accumulation_steps / self.args.steps_per_generation",
    what="With several optimizer steps per generation every step is divided by their mean tokens, not by its own.",
    right="Either: over a generation the tokens weigh alike in TRL; in one update they do with ours (DAPO's formula).",
)
TRL_SPREADS = Cause(
    flag="spreads_correction",
    file=TRL,
    anchor='if self.use_vllm and self.vllm_importance_sampling_correction and self.loss_type != "vespo":',
    line='per_token_loss = per_token_loss * inputs["importance_sampling_ratio"]',
    what="Token corrections multiply one ratio of the sequence, whose gradient spreads over all tokens: each token "
    "gets the mean correction of its sequence instead of its own.",
    right="Ours: the correction of a token weighs that token (GSPO-token, arXiv 2507.18071). verl does so too.",
)
TRL_FLOOR = Cause(
    flag="floors_small_weights",
    file=TRL,
    anchor='if self.vllm_importance_sampling_mode in ["sequence_truncate", "token_truncate"]:',
    line="min=self.vllm_importance_sampling_clip_min,",
    what="With clip_min, truncation also lifts small ratios to it.",
    right="Ours: truncated importance sampling bounds from above alone; a floor adds weight to what proximal would "
    "hardly sample. Off in TRL unless set.",
)
TRL_INSIDE = Cause(
    flag="truncates_inside_product",
    file=TRL,
    anchor="def get_gamma_weights(",
    line="seq_log_ratio += torch.sum(log_is_ratio, dim=-1, keepdim=True)",
    what="token_truncate: the truncated token ratios go into VESPO's product in place of proximal / behavior.",
    right="Ours: the paper's W is the product of policy / behavior (arXiv 2602.10693), and its weight bounds itself.",
)
TRL_COLLAPSES = Cause(
    flag="mask_collapses_product",
    file=TRL,
    anchor="def get_gamma_weights(",
    line="log_is_ratio = torch.clamp(torch.log(importance_sampling_ratio), lower_clamp, 20.0)",
    what="token_mask: the ratio 0 of one masked token becomes log 1e-8 in the product, and the whole sequence gets a "
    "weight of nearly 0.",
    right="Ours: a token mask takes a token, not its sequence.",
)
TRL_STD = Cause(
    flag="std_plus_1e_4",
    file=TRL,
    anchor='if self.scale_rewards != "none":',
    line="advantages = advantages / (std_rewards + 1e-4)",
    what="1e-4 is added to the standard deviation.",
    right="Neither is the paper's, which has no guard. Ours is max(std, floor): exact above the floor.",
)
TRL_UNBOUNDED = Cause(
    flag="unbounded",
    file=TRL,
    anchor="def _compute_loss(self, model, inputs):",
    line="coef_1 = torch.exp(log_importance_weights)",
    what="TRL has no bound on log ratios.",
    right="TRL's is the paper's formula. Ours is a guard, as verl's is: beyond 20 a token is counted (num_clamped) and "
    "has no gradient, where it would otherwise be the whole gradient of its batch.",
)
VERL_COUNTS_MASKED = Cause(
    flag="counts_masked_rollouts",
    file=VERL,
    anchor='elif loss_agg_mode == "seq-mean-token-mean":',
    line="loss = verl_F.masked_sum(seq_losses, seq_mask) / global_batch_size * dp_size",
    what="The trainer hands in all rollouts of the mini-batch as global_batch_size, fully masked ones included. "
    "Without it the same function counts those with tokens.",
    right="Ours, as for TRL.",
)
VERL_PADDED = Cause(
    flag="padded_width",
    file=VERL,
    anchor='if loss_agg_mode == "seq-mean-token-sum-norm":',
    line="horizon = loss_mask.shape[-1]",
    what="Unless loss_scale_factor is set, the constant is the padded width of the batch.",
    right="Ours: the constant of Dr. GRPO (arXiv 2503.20783) must not change with the longest answer of a batch.",
)
VERL_GSPO_BOUND = Cause(
    flag="sequence_bound_10",
    file=VERL,
    anchor="def compute_policy_loss_gspo(",
    line="log_seq_importance_ratio = torch.clamp(log_seq_importance_ratio, max=10.0)",
    what="The sequence's mean log ratio is bounded by 10 above, where its gradient ends, and not below. Ours: by 20 on "
    "both sides.",
    right="Neither is the paper's. Both act only where policy and proximal have nothing in common.",
)
VERL_CISPO_FLOOR = Cause(
    flag="cispo_floor",
    file=VERL,
    anchor="def compute_policy_loss_cispo(",
    line="clipped_ratio = torch.clamp(ratio, 1 - clip_ratio_low, 1 + clip_ratio_high)",
    what="Ratios below 1 - clip_ratio_low are lifted to it; the default 0.2 is on.",
    right="Ours: the paper (arXiv 2506.13585) writes the lower bound and leaves it off. clip_ratio_low = 1 agrees.",
)
VERL_GEO_MEAN_COUNTS = Cause(
    flag="counts_masked_rollouts",
    file=VERL,
    anchor="def compute_policy_loss_geo_mean(",
    line="pg_loss = torch.mean(pg_losses)",
    what="The mean is over all rollouts, fully masked ones included, and over one microbatch: loss_agg_mode and the "
    "global counts are not read.",
    right="Ours, as for TRL.",
)
VERL_GEO_MEAN_UNBOUNDED = Cause(
    flag="unbounded",
    file=VERL,
    anchor="def compute_policy_loss_geo_mean(",
    line="# negative_approx_kl = torch.clamp(negative_approx_kl, min=-20.0, max=20.0)",
    what="The bound on log ratios is commented out.",
    right="verl's is the paper's formula; ours bounds every log ratio, as verl does in its other losses.",
)
VERL_GEO_MEAN_CORRECTION = Cause(
    flag="geometric_mean_correction",
    file=VERL,
    anchor="def compute_policy_loss_geo_mean(",
    line="seq_is_weights = torch.exp(",
    what="Token corrections are put together into their geometric mean over the sequence.",
    right="Either: the paper has no correction. verl's is consistent with the geometric ratio; ours weighs each token "
    "by its own.",
)
VERL_SAPO = Cause(
    flag="ignores_aggregation",
    file=VERL,
    anchor="def compute_policy_loss_sapo(",
    line='loss_mat=pg_losses, loss_mask=response_mask, loss_agg_mode="seq-mean-token-mean"',
    what="loss_agg_mode is not read: sequence means whatever is set.",
    right="Ours: a setting acts or is refused. The paper (arXiv 2511.20347) has sequence means.",
)
VERL_BATCH_NORMALIZED = Cause(
    flag="batch_normalized",
    file=VERL_CORRECTION,
    anchor="if weights_mean > 1e-8:",
    line="rollout_is_weights = rollout_is_weights / weights_mean",
    what="rollout_is_batch_normalize: the weights are divided by their mean over the batch.",
    right="Either: self-normalised importance sampling, off by default. Ours has no such choice.",
)
VERL_SURVIVORS = Cause(
    flag="survivor_denominator",
    file=VERL_CORRECTION,
    anchor="def compute_rollout_correction_and_add_to_batch(",
    line='batch.batch["response_mask"] = modified_response_mask',
    what="Rejection replaces the mask before tokens are counted: what is left is divided by its own number.",
    right="Ours: rejected tokens stay in the denominator, or the kept ones would be inflated by N / kept.",
)
VERL_INVERTED = Cause(
    flag="inverted_band",
    file=VERL_CORRECTION,
    anchor="def compute_rollout_rejection_mask(",
    line="token_k1: torch.Tensor = -log_ratio_safe",
    what="The bounds `lower_upper`, documented as those of the ratio, are compared with the negated log ratio: they "
    "bound behavior / proximal. No difference for bounds like 0.5_2.",
    right="Ours: bounds on proximal / behavior, as verl's own docstring says (reported in its pull request 6377, not "
    "merged).",
)
VERL_STD = Cause(
    flag="std_plus_1e_6",
    file=VERL,
    anchor="def compute_grpo_outcome_advantage(",
    line="scores[i] = (scores[i] - id2mean[index[i]]) / (id2std[index[i]] + epsilon)",
    what="1e-6 is added to the standard deviation.",
    right="Neither is the paper's, as for TRL.",
)
VERL_LONE_GRPO = Cause(
    flag="lone_rollout_keeps_reward",
    file=VERL,
    anchor="def compute_grpo_outcome_advantage(",
    line="id2mean[idx] = torch.tensor(0.0)",
    what="A rollout that is alone in its group gets its raw reward as advantage.",
    right="Ours: 0; there is nothing to compare it with.",
)
VERL_LONE_RLOO = Cause(
    flag="lone_rollout_keeps_reward",
    file=VERL,
    anchor="def compute_rloo_outcome_advantage(",
    line="if response_num > 1:",
    what="A rollout that is alone in its group gets its raw reward as advantage; rloo_vectorized gives it 0.",
    right="Ours: 0; there is nothing to compare it with.",
)
VERL_WHITENING = Cause(
    flag="token_whitening",
    file=VERL,
    anchor="def compute_reinforce_plus_plus_baseline_outcome_advantage(",
    line="scores = verl_F.masked_whiten(scores, response_mask) * response_mask",
    what="Mean and spread of the batch are over tokens, so that long answers count more, and a mean is taken off "
    "again.",
    right="Either reading of REINFORCE++ (arXiv 2501.03262). Ours, like ms-swift's, counts every rollout once and "
    "keeps the mean of a group at 0.",
)
