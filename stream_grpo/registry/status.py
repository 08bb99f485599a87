"""What `status` lines carry: every two seconds one of each part."""

from __future__ import annotations

from stream_grpo.registry.figure import figures

_DECISIONS = """
    decisions/* | responses | decided so: pass, fail, unknown, env_error
    num_left_out | responses | without a reward
    num_retries | checks | made again after an error of the environment
    num_env_errors_in_row | responses | longest present row of errors of the environment
"""
_TIMES = """
    times/*/num | checks | of this verifier
    times/*/p50_s | s | median time of a check
    times/*/p99_s | s | 99th percentile
"""
_ENVIRONMENT = """
    num_waiting | trajectories | that wait for their environment and hold no slot
    num_sampling | trajectories | of which an action is being sampled
    num_other_starts | trajectories | that began in another state than their group, and began again
    num_held | trajectories | that wait for the trunk of their group and hold no slot
    num_trunks_cut | groups | that branch before their turn, because the trunk ended, in all
    num_trunks_failed | groups | whose trunk failed, so that they are plain ones, in all
    num_trunk_tokens_dropped | tokens | sampled as the action that ended a trunk, and thrown away, in all
    num_history_tokens | tokens | of histories from which second and later actions were sampled, each counted, in all
    num_history_cached | tokens | of these from the prefix cache; 0 unless `environment.waiting_kv = "keep"`
    num_workers | processes | of the environments
    num_queued | calls | waiting for a worker
    num_open | calls | without an answer
    num_calls | calls | answered, in all
    num_retries | calls | made again after an error
    num_errors | calls | that failed for good
    num_kills | processes | killed over their deadline
    num_restarts | processes | started again
    num_replayed | actions | played again, after a worker was lost or busy, and for replicas
    tools/*/num | calls | of this tool; `start`: beginnings, `answer`: actions that call none
    tools/*/queue_p50_s | s | median wait for a worker
    tools/*/queue_p99_s | s | 99th percentile
    tools/*/p50_s | s | median time of a call
    tools/*/p99_s | s | 99th percentile
    num_trajectories | trajectories | finished, in all
    ends/* | trajectories | of these, by end
    success_share | share | of valid trajectories that ended in success
    consistent_share | share | of groups, all of whose valid trajectories did
    env_error_share | share | of trajectories whose environment failed
    steps_mean | steps | of a trajectory
    calls_mean | calls | of tools, of a trajectory
    tokens_per_success | tokens | of all actions, a trunk's included, whoever sampled them; mean over successes
    calls_per_success | calls | of tools, mean over successes
    recovery_share | share | of trajectories with a failed call that ended in success
    branching_share | share | of groups that branched
    decision_turn_mean | turns | of these the turn at which they did, from 1; null where none did
    trunk_token_share | share | of sampled tokens that are of trunks, and not trained
    noise_share | share | of the variance of rewards in a group that is the environment's chance; null without replicas
"""


def _under(prefix: str, rows: str) -> str:
    return "\n".join(prefix + row.strip() for row in rows.strip().splitlines())


SAMPLER = figures(
    "sampler",
    f"""
    sampler_id | | its name
    version | | weights in use: branch, step
    weights_sha256 | | of these weights
    busy_s | s | engine steps with running requests, in all
    first_busy_at | s | unix time of the first of them
    num_engine_steps | steps | engine steps with running requests; with `engine = "async"`, looks at the engine
    num_slots | requests | that the engine runs at once
    num_running | requests | running and queued in the engine
    num_tokens | tokens | of finished responses, in all
    num_prompt_tokens | tokens | of the prompts of finished responses, each counted, in all
    num_cached_tokens | tokens | of these from the prefix cache, computed for another response
    tokens_paused | tokens | not sampled while weights were loaded, in all: seconds of that x the mean rate
    num_tokens_restarted | tokens | thrown away because weights changed, in all
    idle_s/policy | s | nothing to sample, waiting for the first weights, in all
    idle_s/buffer | s | nothing to sample, waiting for tickets, in all
    idle_s/curator | s | nothing to sample, waiting for problems, in all
    idle_s/rewards | s | nothing to sample, waiting for scores, in all
    idle_s/environment | s | nothing to sample, waiting for environments, in all; where rollouts have several turns
    stall_s | s | taking up weights, in all
    apply_s | s | of that loading them
    prove_s | s | of that proving them, while requests go on
    publish_lag_s | s | from the publish of weights until they are in use, in all
    score_s | s | of the sampler's own thread for scoring, in all
    score_wait_s | s | from the last response of a group to its last score, sum over groups
    num_groups_scored | groups | in that sum
    num_updates | updates | of weights
    num_failed_proofs | updates | whose proof failed at first
    probe_gap | | engine mismatch on the publish probe; null before the first
    probe_gap/mean | nats | mean abs gap of logprobs, all proofs so far
    probe_gap/max | nats | largest
    probe_gap/num_tokens | tokens | compared
    num_groups_done | groups | handed over and answered
    groups_by_fate/* | groups | of these, as the buffer took them
    num_groups_in_progress | groups | being sampled or scored
    num_groups_expired | groups | past their deadline
    num_groups_continued | groups | that an earlier owner had begun
    num_prompts_refused | prompts | that could not be sampled
    num_partials | partials | of unfinished groups handed over
    num_partials_not_kept | partials | of these refused
    waits_for | | sentences: what it waits for now
    {_under("environment/", _ENVIRONMENT)}
    rewards/num_open | responses | given out and not scored yet
    {_under("rewards/in_process/", _DECISIONS)}
    rewards/pool | | worker processes; null where there are none
    rewards/pool/num_queued | responses | waiting for a worker
    rewards/pool/num_open | responses | given to the pool and not decided
    rewards/pool/num_finished | responses | decided
    rewards/pool/num_exhausted/* | responses | on which a verifier ran out of this: time, memory
    rewards/pool/num_exhausted_failed | responses | of these counted as wrong
    rewards/pool/exhausted_share | share | of decided responses
    rewards/pool/num_workers | processes | of the pool
    rewards/pool/num_kills | processes | killed
    rewards/pool/num_restarts | processes | started again
    {_under("rewards/pool/", _DECISIONS)}
    {_under("rewards/pool/", _TIMES)}
    rewards/http | | judges behind URLs; null where there are none
    rewards/http/num_open | responses | given to judges and not decided
    rewards/http/num_queued | requests | waiting
    rewards/http/requests/*/num_queued | requests | of this judge, waiting
    rewards/http/requests/*/num_running | requests | under way
    rewards/http/requests/*/num_retries | requests | made again
    {_under("rewards/http/", _DECISIONS)}
    {_under("rewards/http/", _TIMES)}
    rewards/absent/*/* | responses | of a composition, on which an optional component gave no reward
    rewards/hidden | | the hidden verifier over its newest pairs; null where there is none
    rewards/hidden/disagreement | share | decided otherwise than by the reward
    rewards/hidden/overrated | share | that pass and that the hidden verifier fails
    rewards/hidden/mean_difference | reward | mean of reward minus hidden reward
    rewards/hidden/hidden_reward_mean | reward | mean hidden reward
    rewards/hidden/num_pairs | responses | with both rewards, in all
    rewards/hidden/num_unscored | responses | that one of the two gave no reward
    """,
)

BUFFER = figures(
    "buffer",
    """
    version | | of the learner: branch, step
    live | groups | in flight, buffered with signal, leased
    in_flight | groups | ticketed and not come in
    buffered | groups | that wait for a step
    leased | groups | of the present step
    ledger/groups/* | groups | in this state
    ledger/tokens/* | tokens | with this fate; `generated` is their sum
    ledger/reused/uses | groups | trained on again, one for each further use
    ledger/reused/tokens | tokens | trained on again
    ledger/closes | | whether every group and token has one fate
    ledger/lost_in_sampler | tokens | that samplers had when they died, an estimate
    ledger/losses/lost_share | share | of generated tokens that ended as stale
    ledger/losses/lost/groups | groups | ended as stale
    ledger/losses/lost/tokens | tokens | of these
    ledger/losses/lost/length_mean | tokens | mean length of their responses
    ledger/losses/lost/reward_mean | reward | mean over their valid responses
    ledger/losses/trained/groups | groups | trained
    ledger/losses/trained/tokens | tokens | of these
    ledger/losses/trained/length_mean | tokens | mean length of their responses
    ledger/losses/trained/reward_mean | reward | mean over their valid responses
    ledger/losses/length_difference | tokens | lost minus trained, of the mean lengths
    ledger/losses/reward_difference | reward | lost minus trained, of the mean rewards
    ledger/losses/requeued | groups | too old, whose problem was put first again
    ledger/losses/never_fresh/* | groups | of this problem, lost after its last requeue
    ledger/losses/by_problem/*/num_lost | groups | of this problem, ended as stale
    ledger/losses/by_problem/*/num_trained | groups | of this problem, trained since
    ends/* | groups | that ended so: fate and reason
    mixed_context_tokens | tokens | sampled on a KV cache of older weights
    bytes_on_disk | bytes | of the journal
    segments_on_disk | files | of records
    log_number | | of the present log of transitions
    num_commits | commits | to disk
    commit_s | s | of these, in all
    longest_commit_s | s | the longest
    num_incomplete | records | cut by a crash, set aside at start
    expected_share | share | of groups that come in with signal, over the newest 256
    groups_without_signal | groups | in a row without signal
    without_signal/* | groups | of these, by cause
    outcomes | outcomes | for the curator
    outcomes_acknowledged | outcomes | that it has
    wire_refused/* | | by its socket: malformed and oversized messages, connections of strangers
    """,
)

CURATOR = figures(
    "curator",
    """
    problems | problems | of the pool
    seen | problems | sampled at least once
    mean_rate | share | success rate, mean over seen problems
    domain_rates/* | share | success rate of a domain
    domain_problems/* | problems | of a domain, those put aside among them
    mean_expected_signal | share | expected signal, mean over all problems
    solved | problems | seen, with a success rate too high to be useful
    useful | problems | seen, in between
    too_hard | problems | seen, with a success rate too low
    picks | picks | so far
    picks_by_size/* | picks | of groups of so many rollouts
    in_flight | picks | without an outcome yet
    requeued | problems | to be picked first
    next_sequence | outcomes | so far
    durable_sequence | outcomes | on disk
    retired_solved | problems | not picked any more: solved
    retired_hopeless | problems | not picked any more: too hard
    state/restored | outcomes | in the file of the state that the curator began with; 0 where it folded all of them
    state/saved | outcomes | in the newest file of the state
    state/write_s | s | that writing it took
    quarantined | problems | put aside, never picked
    suspects | | ids of problems that fail although all that is like them passes
    fates/* | groups | by how the buffer took them
    scored_groups | groups | that moved a rate
    earlier_groups | groups | of another run, learned before the first
    no_signal/* | groups | without signal, by cause
    no_signal_share/* | share | the same, of scored groups
    unknown_problems | outcomes | of problems that have left the pool
    clipped_rewards | rewards | outside 0 to 1, clipped for the rate
    wire_refused/* | | by its socket: malformed and oversized messages, connections of strangers
    """,
)

LEARNER = figures(
    "learner",
    """
    version | | its weights: branch, step
    busy_s | s | steps and probes, of this start
    waited_s | s | waiting for batches, of this start, the present wait included
    publish_s | s | publishing weights, of this start, probe included
    checkpoint_s | s | making checkpoints, of this start
    last_step_at | s | unix time of the end of the newest step
    age_max | steps | largest policy age of a trained group, of this start
    age_mean | steps | mean policy age of the trained groups
    num_trained | groups | of this start
    waits_for | | sentences: what it waits for now
    """,
)

WEIGHTS = figures(
    "weights",
    """
    bytes_given | bytes | of weights, to samplers that do not see the run's folder, in all
    wire_refused/* | | by its socket: malformed and oversized messages, connections of strangers
    """,
)

STATUS = (*SAMPLER, *BUFFER, *CURATOR, *LEARNER, *WEIGHTS)
