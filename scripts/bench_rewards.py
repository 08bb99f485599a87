"""What the reward pool costs: against the verifier called in a loop, per core; and the price of answers that hang.

Loop and pool take turns, and so many loops run at once as the pool has workers: both meet the machine as it is. Two
ratios of verifications: by the clock, which sees workers that wait and means little on a busy machine, and by CPU time,
which sees what the pool itself costs, its own thread and the caller's included.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from stream_grpo.rewards.limits import Limits
from stream_grpo.rewards.messages import ProblemRow
from stream_grpo.rewards.policy import UnscoredPolicy
from stream_grpo.rewards.pool import RewardPool
from stream_grpo.rewards.verifiers import VERIFIERS

VERIFIER = "math"
LEAST_RATIO, MOST_WALL = 0.9, 1.5
NUM_STEPS = 20
"""Lines of reasoning before the answer: some 1,800 characters, a short response."""
HANG_SHARE, HANG_LIMIT_S = 0.01, 0.2
SOMETIMES_HANGS = "python:bench_rewards.sometimes_hangs"
POLICY = UnscoredPolicy(max_env_errors_in_row=None)


def answers(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """(gold, response): numbers, fractions, roots, intervals and sets, half of them right, after reasoning."""
    draw = random.Random(seed)
    return [_answer(draw, number) for number in range(count)]


def _answer(draw: random.Random, number: int) -> tuple[str, str]:
    a, b = draw.randint(2, 99), draw.randint(2, 99)
    gold, same, other = [
        (str(a), f"{a}.0", str(a + 1)),
        (f"{a}/{b}", f"\\frac{{{a}}}{{{b}}}", f"\\frac{{{a}}}{{{b + 1}}}"),
        (f"{a}\\sqrt{{2}}", f"\\sqrt{{{2 * a * a}}}", f"\\sqrt{{{a}}}"),
        (f"[{a}, {a + b})", f"{a} \\le x < {a + b}", f"({a}, {a + b})"),
        (f"\\{{{a}, {a + b}\\}}", f"{a + b}, {a}", f"{a}"),
    ][number % 5]
    text = same if draw.random() < 0.5 else other
    step = f"We look at {a} and ${b}$ again, write $x = {a} + {b}$, and see what is left of the first part.\n"
    return gold, f"{NUM_STEPS * step}So the answer is $\\boxed{{{text}}}$."


def problem(place: int, gold: str, verifier: str = VERIFIER) -> ProblemRow:
    return ProblemRow(problem_id=str(place), answer=gold, verifier=verifier)


def sometimes_hangs(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """The verifier, as a function of the user's that sleeps where the response says so."""
    if solution_str == "hang":
        time.sleep(1000)
    result = VERIFIERS[VERIFIER].check(solution_str, problem(0, ground_truth), False)
    return result.reward or 0.0


# -- the loop ---------------------------------------------------------------------------------------------------------


def loop(count: int) -> None:
    """One process of the loop: get ready, wait for a line, print the seconds and the CPU seconds."""
    check = VERIFIERS[VERIFIER].check
    for gold, response in answers(50):
        check(response, problem(0, gold), False)
    print("ready", flush=True)
    for seed in sys.stdin:  # verifiers remember golds: no round sees the answers of another
        rows = [(problem(place, gold), response) for place, (gold, response) in enumerate(answers(count, int(seed)))]
        begun, cpu_begun = time.perf_counter(), time.process_time()
        for row, response in rows:
            check(response, row, False)
        print(time.perf_counter() - begun, time.process_time() - cpu_begun, flush=True)


class Rates(NamedTuple):
    """Verifications."""

    per_s: float
    per_cpu_s: float


class Loops:
    """Some loops at once, each in a process of its own."""

    def __init__(self, count: int, num_answers: int) -> None:
        command = [sys.executable, __file__, "--loop", str(num_answers)]
        self._all = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(count)
        ]
        self._num_answers = num_answers
        self._read()

    def run(self, seed: int) -> Rates:
        """All together, while all run."""
        for process in self._all:
            assert process.stdin
            process.stdin.write(f"{seed}\n")
            process.stdin.flush()
        found = [tuple(map(float, line.split())) for line in self._read()]
        return Rates(
            sum(self._num_answers / seconds for seconds, _ in found),
            self._num_answers * len(found) / sum(cpu for _, cpu in found),
        )

    def close(self) -> None:
        """End all."""
        for process in self._all:
            process.communicate()

    def _read(self) -> list[str]:
        return [process.stdout.readline() for process in self._all if process.stdout]


# -- the pool ---------------------------------------------------------------------------------------------------------


def problems(rows: list[tuple[str, str]], verifier: str) -> list[tuple[ProblemRow, str]]:
    """(problem, response), as a sampler has them."""
    return [(problem(place, gold, verifier), response) for place, (gold, response) in enumerate(rows)]


def pool_seconds(pool: RewardPool, rows: list[tuple[ProblemRow, str]]) -> float:
    """Seconds from the first submission to the last result."""
    begun = time.perf_counter()
    for row, response in rows:
        pool.submit(row.problem_id, row.verifier, response, row)
    while pool.num_open:
        pool.poll(1.0)
    pool.poll()
    return time.perf_counter() - begun


def cpu_seconds() -> float:
    """Of this process and all below it."""
    here = psutil.Process()
    times = [process.cpu_times() for process in (here, *here.children(recursive=True))]
    return sum(t.user + t.system for t in times)


def pool_rates(pool: RewardPool, rows: list[tuple[ProblemRow, str]]) -> Rates:
    """Nothing else may run below this process meanwhile."""
    cpu_begun = cpu_seconds()
    seconds = pool_seconds(pool, rows)
    return Rates(len(rows) / seconds, len(rows) / (cpu_seconds() - cpu_begun))


def throughput(num_workers: int, num_answers: int, num_rounds: int) -> Iterator[tuple[Rates, Rates]]:
    """(loops, pool), round by round."""
    loops = Loops(num_workers, num_answers)
    with RewardPool(num_workers, policy=POLICY, preload=[VERIFIER]) as pool:
        pool_seconds(pool, problems(answers(200), VERIFIER))
        for seed in range(1, num_rounds + 1):
            yield loops.run(seed), pool_rates(pool, problems(answers(num_answers * num_workers, seed), VERIFIER))
    loops.close()


def hangs(num_workers: int, num_answers: int) -> dict[str, float | int]:
    """Wall time with and without answers that hang, and how far it is beyond their limits."""
    num_hangs = int(num_answers * HANG_SHARE)
    hung = set(random.Random(1).sample(range(num_answers), num_hangs))
    rows = problems(answers(num_answers), SOMETIMES_HANGS)
    with_hangs = [(row, "hang") if place in hung else (row, text) for place, (row, text) in enumerate(rows)]
    without = [row for place, row in enumerate(rows) if place not in hung]
    limits, here = Limits(wall_s=HANG_LIMIT_S), [str(Path(__file__).parent)]
    with RewardPool(num_workers, limits, policy=POLICY, preload=[VERIFIER, SOMETIMES_HANGS], paths=here) as pool:
        pool_seconds(pool, rows[:200])
        without_s = pool_seconds(pool, without)
        with_s = pool_seconds(pool, with_hangs)
        status = pool.status()
    limits_s = num_hangs * HANG_LIMIT_S / num_workers
    return {
        "num_answers": num_answers,
        "num_hangs": num_hangs,
        "num_kills": status["num_kills"],
        "num_left_out": status["num_left_out"],
        "times": status["times"],
        "without_s": without_s,
        "with_s": with_s,
        "limits_s": limits_s,
        "ratio": with_s / (without_s + limits_s),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--answers", type=int, default=10_000, help="of the measurement with hangs; a fifth per loop")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--loop", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.loop:
        loop(options.loop)
        return
    rounds = list(throughput(options.workers, options.answers // 5, options.rounds))
    loops, pool = _best(a for a, _ in rounds), _best(b for _, b in rounds)
    found: dict[str, Any] = {
        "verifier": VERIFIER,
        "num_workers": options.workers,
        "loops": loops._asdict(),
        "pool": pool._asdict(),
        "ratio": pool.per_s / loops.per_s,
        "cpu_ratio": pool.per_cpu_s / loops.per_cpu_s,
        "rounds": [{"loops": a._asdict(), "pool": b._asdict()} for a, b in rounds],
        "hangs": hangs(options.workers, options.answers),
    }
    is_good = min(found["ratio"], found["cpu_ratio"]) >= LEAST_RATIO and found["hangs"]["ratio"] <= MOST_WALL
    if options.json:
        print(json.dumps(found))
    else:
        slow = found["hangs"]
        print(
            f"{VERIFIER}: {options.workers} loops {loops.per_s:,.0f}/s, pool {pool.per_s:,.0f}/s, "
            f"ratio {found['ratio']:.2f}; "
            f"per CPU second {loops.per_cpu_s:,.0f} and {pool.per_cpu_s:,.0f}, ratio {found['cpu_ratio']:.2f}; "
            f"goal {LEAST_RATIO}"
        )
        print(
            f"{slow['num_answers']:,} answers of which {slow['num_hangs']} hang: {slow['with_s']:.1f} s, without hangs "
            f"{slow['without_s']:.1f} s, their limits {slow['limits_s']:.1f} s, ratio {slow['ratio']:.2f}, "
            f"goal {MOST_WALL}; {slow['num_kills']} killed"
        )
    sys.exit(not is_good)


def _best(rounds: Iterable[Rates]) -> Rates:
    """What else runs on the machine only ever slows down: the best of each figure is nearest to a quiet one."""
    return Rates(*map(max, zip(*rounds, strict=True)))


if __name__ == "__main__":
    main()
