"""What the planner's model costs, and how far its cohorts depart from following every sampler.

Samplers with 64 slots each answer in 4,000 tokens in the mean, log-normal, at most 16,384, in groups of 16; 1,000 ranks
make steps of 16,000 groups. Seconds are processor time of this process, so that what else runs does not count.
"""

from __future__ import annotations

import argparse
import json
import time

from stream_grpo.planner.given import Given, given_world
from stream_grpo.planner.prediction import Prediction
from stream_grpo.planner.simulation import NUM_COHORTS, simulate
from stream_grpo.planner.world import Settings, World

NUM_RANKS, RANK_TOKENS_PER_S = 1000, 12_000.0
GROUPS_PER_SAMPLER = 1.6
"""Groups of a learner step for each sampler: with an age of 4 there is room for all that their slots hold."""
GOAL_S, GOAL_DEPARTURE = 60.0, 0.03
NUM_EXACT, SEEDS = 200, (0, 1, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="a last line with all figures")
    parser.add_argument("--samplers", type=int, default=10_000)
    parser.add_argument("--hours", type=float, default=1.0, help="of virtual time")
    parser.add_argument("--no-agreement", action="store_true", help="leave the comparison at 200 samplers out")
    options = parser.parse_args()
    begun = time.process_time()
    found = simulate(
        world_of(options.samplers), settings_of(options.samplers), num_steps=1 << 62, duration_s=3600 * options.hours
    )
    seconds = time.process_time() - begun
    print(f"{options.samplers:,} samplers, {options.hours:g} h of virtual time: {seconds:.1f} s (goal {GOAL_S:g} s)")
    print(
        f"{found.num_steps} steps, {found.sampled_tokens:,} tokens, {found.sampled_tokens_per_s:,.0f} a second, "
        f"mean age {found.age_mean:.2f}, max {found.age_max}; {found.bottleneck()}",
        flush=True,
    )
    figures = {"seconds": round(seconds, 1), "steps": found.num_steps, "tokens": found.sampled_tokens}
    if not options.no_agreement:
        departures = agreement()
        print(f"cohorts against {NUM_EXACT} samplers followed alone (goal {GOAL_DEPARTURE:.0%}):")
        for name, departure in departures.items():
            print(f"  {name:24} {departure:+.2%}")
        figures |= {"departures": departures, "worst_departure": max(map(abs, departures.values()))}
    if options.json:
        print(json.dumps(figures))


def world_of(num_samplers: int) -> World:
    """Learner ranks in proportion to the samplers."""
    given = Given(
        mean_tokens=4000,
        tokens_cv=0.7,
        engine_step_s=0.03,
        learner_tokens_per_s=NUM_RANKS * RANK_TOKENS_PER_S * num_samplers / 10_000,
        publish_s=5.0,
        update_s=3.0,
        score_s=1.0,
    )
    return given_world(given, group_size=16, max_num_seqs=64, max_tokens=16_384)


def settings_of(num_samplers: int) -> Settings:
    return Settings(
        num_samplers=num_samplers,
        group_size=16,
        max_num_seqs=64,
        groups_per_step=round(GROUPS_PER_SAMPLER * num_samplers),
        max_policy_age=4,
        sample_deadline_s=1800.0,
    )


def agreement() -> dict[str, float]:
    """Relative departures of cohorts, means over seeds: throughput, mean age and its quantiles."""
    world, settings = world_of(NUM_EXACT), settings_of(NUM_EXACT)
    exact, cohorts = (
        [
            simulate(world, settings, seed=seed, num_steps=40, warmup_steps=15, samplers_per_cohort=size)
            for seed in SEEDS
        ]
        for size in (1, NUM_EXACT // NUM_COHORTS)
    )
    ours, theirs = mean_figures(cohorts), mean_figures(exact)
    return {name: ours[name] / theirs[name] - 1 for name in ours}


def mean_figures(found: list[Prediction]) -> dict[str, float]:
    rows = [
        {
            "sampled_tokens_per_s": p.sampled_tokens_per_s,
            "trained_tokens_per_s": p.trained_tokens_per_s,
            "age_mean": p.age_mean,
            **{f"age_q{round(100 * q)}": value for q, value in p.age_quantiles.items()},
        }
        for p in found
    ]
    return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}


if __name__ == "__main__":
    main()
