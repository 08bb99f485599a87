"""Run folders whose metrics are written as the parts of a run write them."""

import json
from pathlib import Path
from typing import Any

from stream_grpo.metrics import MetricsLog

BEGUN_S = 1_700_000_000.0
RECORDED = [
    json.loads(line) for line in (Path(__file__).parents[1] / "data" / "metrics_run.jsonl").read_text().splitlines()
]
"""The lines of a run with every part."""
CONFIG = """
[model]
path = "model"
[run]
num_steps = 50
[stream]
max_policy_age = 4
groups_per_step = 2
[evaluation]
domains = ["add"]
"""


class WrittenRun:
    """Writes lines; the clock goes on by two seconds a step."""

    def __init__(self, path: Path) -> None:
        path.mkdir(parents=True)
        (path / "config.toml").write_text(CONFIG)
        self.path, self.now_s = path, BEGUN_S
        self._log = MetricsLog(path, "learner", clock=lambda: self.now_s)

    def write(self, event: str, **values: Any) -> None:
        self._log.write(event, values)

    def recorded(self) -> None:
        """Write the lines of a recorded run, each at its time."""
        for line in RECORDED:
            self.now_s = line["time_s"]
            self.write(line["event"], **{name: value for name, value in line.items() if name != "event"})

    def step(self, step: int, **values: Any) -> None:
        self.now_s += 2.0
        figures = {
            "step": step,
            "branch": 0,
            "reward_mean": step / 100,
            "age_max": 2,
            "age_mean": 1.0,
            "num_groups": 2,
            "num_tokens": 100.0,
            "step_s": 0.5,
            "waited_s": 1.0,
            "entropy": 0.5,
            "ess": 0.9,
            "by_age": {"0": {"num_tokens": 60.0}, "3-4": {"num_tokens": 40.0}},
            "tokens": {"generated": 150 * step, "trained": 100 * step, "no_signal": 50 * step},
        }
        self.write("step", **(figures | values))

    def curator(self, **values: Any) -> None:
        figures = {"problems": 10, "seen": 4, "solved": 1, "useful": 2, "too_hard": 1, "picks": 8}
        self.write("status", part="curator", **(figures | {"domain_rates": {"add": 0.5}} | values))

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            self.step(step)
            self.curator()
