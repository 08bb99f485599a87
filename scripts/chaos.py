"""Kills a run with SIGKILL again and again, resumes it, and recounts from disk what is left of it.

Exit code 0 only where nothing acknowledged was lost, nothing was trained twice, no token was too old, the account
closes, the run made 30 steps or more, and at least one kill fell inside a checkpoint.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kills.audit import Audit, audit
from kills.driver import ChaosError, Driver, Tally
from kills.real_run import RealTarget
from kills.schedule import LEAST, PARTS, RAY_PARTS, Kill, least_kills, schedule

LEAST_STEPS = 30
DEFAULT_KILLS = {"real": 24, "fake": 500}
MAX_DELAY_S = {"real": 2.0, "fake": 0.1}
FAKE_POOLED = 2


def main() -> int:
    arguments = parse_arguments()
    kind = "fake" if arguments.fake else "real"
    num_kills = DEFAULT_KILLS[kind] if arguments.kills is None else arguments.kills
    parts = parts_of(kind)
    kills = schedule(num_kills, arguments.seed, parts, max_delay_s=MAX_DELAY_S[kind])[arguments.skip :]
    root = (arguments.root or Path(tempfile.mkdtemp(prefix="chaos-"))).resolve()
    say = _to_stderr if arguments.json else print
    say(f"{len(kills)} kills of a {kind} run in {root}, seed {arguments.seed}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    began = time.monotonic()
    deadline = began + 60 * arguments.minutes
    run = run_fake if arguments.fake else run_real
    found, tally, failures = run(root, kills, arguments, deadline, say)
    failures += complaints(found, tally)
    say(table(found, tally, failures, time.monotonic() - began))
    if arguments.json:
        print(json.dumps(result(found, tally)))
    return 1 if failures else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fake", action="store_true", help="no vLLM, DeepSpeed and Ray; all else is real")
    parser.add_argument("--kills", type=int, help="how many; 24, with --fake 500")
    parser.add_argument("--seed", type=int, default=0, help="decides who is killed, where, and in which order")
    parser.add_argument("--skip", type=int, default=0, help="leave out so many at the start, made by an earlier call")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no further kill after so many")
    parser.add_argument("--root", type=Path, help="a folder to make and to leave; by default a temporary one")
    parser.add_argument("--model", type=Path, default=Path("models/arithmetic"), help="folder of the small model")
    parser.add_argument("--json", action="store_true", help="end with one JSON object on standard output")
    arguments = parser.parse_args()
    least = least_kills(parts_of("fake" if arguments.fake else "real"))
    if arguments.kills is not None and arguments.kills < least:
        parser.error(
            f"--kills {arguments.kills}: too few, since half of them fall at points and each part is killed {LEAST} "
            f"times; at least {least}"
        )
    return arguments


def parts_of(kind: str) -> tuple[str, ...]:
    """Whom a run of this kind can lose."""
    return PARTS if kind == "fake" else (*PARTS, *RAY_PARTS)


Outcome = tuple[Audit, Tally, list[str]]
"""What the audit found, what was killed, and what the run did not take."""


def run_fake(
    root: Path, kills: list[Kill], arguments: argparse.Namespace, deadline: float, say: Callable[[str], None]
) -> Outcome:
    # Heavy, and of the fake run alone.
    from kills.fake_parts import configuration
    from kills.fake_run import FakeTarget

    target = FakeTarget(configuration(root, num_steps=10**6, seed=arguments.seed), num_pooled=FAKE_POOLED)
    driver = Driver(target, arguments.seed, say)
    failures = attempt(driver, kills, deadline)
    if not failures:
        failures += stop(driver, target)
    return recount(target), driver.tally, failures


def run_real(
    root: Path, kills: list[Kill], arguments: argparse.Namespace, deadline: float, say: Callable[[str], None]
) -> Outcome:
    if not (arguments.model / "model").is_dir():
        subprocess.run([sys.executable, "-m", "stream_grpo.cli", "make-model", str(arguments.model)], check=True)
    target = RealTarget(root, arguments.model.resolve(), arguments.seed)
    driver = Driver(target, arguments.seed, say)
    failures = attempt(driver, kills, deadline)
    if not failures:
        failures += stop(driver, target)
    if not failures and (code := target.finish(driver.step + 2)) != 0:
        failures.append(f"the last resume ended with {code}: {target.output()}")
    return recount(target), driver.tally, failures


def attempt(driver: Driver, kills: list[Kill], deadline: float) -> list[str]:
    """All kills, and then steps without any; what went wrong."""
    try:
        driver.begin()
        driver.carry_out(kills, deadline)
        driver.wait_for_steps(1)  # of who is there after the last kill
        driver.wait_for_step(LEAST_STEPS)
    except BaseException as error:
        driver.end_all()
        if isinstance(error, ChaosError):
            return [str(error)]
        raise
    return []


def stop(driver: Driver, target: Any) -> list[str]:
    """End the run by SIGTERM; what went wrong."""
    target.stop()
    try:
        code = driver.wait_for_end()
    except ChaosError as error:
        return [f"after SIGTERM: {error}"]
    return [] if code == 0 else [f"SIGTERM ended the run with {code}: {target.output()}"]


def recount(target: Any) -> Audit:
    """What is on disk, against what was seen acknowledged."""
    witnessed = [name for path in target.witnesses() if path.exists() for name in path.read_text().split()]
    return audit(target.run_dir, witnessed)


def complaints(found: Audit, tally: Tally) -> list[str]:
    """What makes this run of kills a failure."""
    failures = list(found.findings)
    if found.final[1] < LEAST_STEPS:
        failures.append(f"{found.final[1]} steps were trained, {LEAST_STEPS} are needed")
    if not any(point.startswith("checkpoint.") for point in tally.by_point):
        failures.append("no kill fell inside a checkpoint")
    return failures


def result(found: Audit, tally: Tally) -> dict[str, Any]:
    """The last line of --json."""
    return {
        "kills": tally.num_kills,
        "lost": found.lost,
        "trained_twice": found.trained_twice,
        "age_violations": found.age_violations,
        "ledger_closes": found.ledger_closes,
        "by_process": dict(tally.by_process),
        "by_point": dict(tally.by_point),
        "groups_accepted": found.groups_accepted,
        "groups_trained": found.groups_trained,
        "steps": found.final[1],
        "resumes": tally.num_resumes,
    }


def table(found: Audit, tally: Tally, failures: list[str], seconds: float) -> str:
    """For people."""
    values: Mapping[str, Any] = {**result(found, tally), "branches": found.num_branches, "seconds": round(seconds)}
    lines = [""]
    for name, value in values.items():
        if isinstance(value, dict):
            lines += [name.replace("_", " "), *(f"  {key:26}{count:6}" for key, count in Counter(value).most_common())]
        else:
            lines.append(f"{name.replace('_', ' '):28}{value!s:>6}")
    return "\n".join([*lines, *(f"WRONG: {failure}" for failure in failures[:20]), "" if failures else "sound"])


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
