"""Scoring a pool with a generator and a scorer of our own: stages, the log, going on after a kill."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

from curator import scorers, scoring_run
from curator.cli import app
from curator.errors import CuratorError, PoolError
from curator.pool import Pool
from curator.schema import Problem
from curator.scorers import Asked, Sample, SampleRequest, Score
from curator.scoring_log import Scored, ScoringLog
from curator.scoring_run import PoolScoring, Stages
from tests.curator.fakes import make_problems


class FakeGenerator:
    """Problem i of 10 is solved at a rate of i / 9; `stop_after` samples it dies."""

    def __init__(self, stop_after: int | None = None, seed: int = 0) -> None:
        self.asked: list[tuple[str, int]] = []
        self.stop_after = stop_after
        self.identity: Mapping[str, Any] = {"weights": "w0"}

    def refusal(self, problem: Problem) -> str | None:
        return "too long" if problem.prompt == "long" else None

    def generate(self, requests: Iterable[SampleRequest]) -> Iterator[Sample]:
        for request in requests:
            if self.stop_after is not None and len(self.asked) >= self.stop_after:
                raise CuratorError("out of memory")
            self.asked.append(request.key)
            rate = int(request.problem.problem_id[1:]) % 10 / 9
            is_right = random.Random(request.seed).random() < rate
            text = f"#### {request.problem.answer if is_right else -1}"
            yield Sample(request=request, text=text, num_tokens=3, is_cut=False)

    def close(self) -> None:
        pass


class FakeScorer:
    """Answers in the order in which it was asked, some at a time; `unscored` problems have no answer."""

    def __init__(self, unscored: Sequence[str] = ()) -> None:
        self.identity: Mapping[str, Any] = {"rewards": "r0"}
        self._out: list[Sample] = []
        self._unscored = unscored

    def submit(self, sample: Sample) -> None:
        self._out.append(sample)

    def poll(self, timeout_s: float) -> list[Score]:
        ready, self._out = (self._out, []) if timeout_s or len(self._out) > 5 else ([], self._out)
        return [self._score(sample) for sample in ready]

    def _score(self, sample: Sample) -> Score:
        if sample.request.problem.problem_id in self._unscored:
            return Score(sample=sample, passed=None, reward=None, why="no gold")
        passed = sample.text == f"#### {sample.request.problem.answer}"
        return Score(sample=sample, passed=passed, reward=float(passed))

    def close(self) -> None:
        pass


def make_fake_generator(asked: Asked) -> FakeGenerator:
    return FakeGenerator()


def make_fake_scorer(asked: Asked) -> FakeScorer:
    return FakeScorer()


HEADER = {"pool": "p0", "generator": {"weights": "w0"}}
STAGES = Stages(screen=4, most=20, target_sd=0.1)


def scoring(path: Path, generator: FakeGenerator, scorer: FakeScorer | None = None, num: int = 30) -> PoolScoring:
    return PoolScoring(make_problems(num), generator, scorer or FakeScorer(), ScoringLog(path, HEADER), STAGES)


def test_every_problem_is_screened_and_those_in_the_middle_get_more(tmp_path: Path) -> None:
    generator = FakeGenerator()
    run = scoring(tmp_path / "log", generator)
    tallies = run.run()
    assert generator.asked[:120] == [(f"p{i:04d}", k) for i in range(30) for k in range(4)]
    plan = run.plan()
    assert {name: tally.attempts for name, tally in tallies.items()} == plan
    hopeless, middle, solved = (
        sum(plan[f"p{10 * j + i:04d}"] for j in range(3) for i in of) for of in ((0,), (4, 5), (9,))
    )
    assert hopeless < middle / 2 > solved
    assert tallies["p0000"].passed == 0
    assert tallies["p0009"].passed == tallies["p0009"].scored
    assert len(tallies["p0004"].answers) == 2
    assert tallies["p0004"].num_tokens == 3 * tallies["p0004"].attempts


@pytest.mark.parametrize("stop_after", [0, 7, 100, 121, 200])
def test_a_run_that_died_goes_on_and_ends_as_one_that_did_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_after: int
) -> None:
    monkeypatch.setattr(scoring_run, "BATCH_SAMPLES", 16)
    whole = scoring(tmp_path / "whole", FakeGenerator()).run()
    first = scoring(tmp_path / "log", FakeGenerator(stop_after))
    with pytest.raises(CuratorError, match="out of memory"):
        first.run()
    first._log.close()
    second = FakeGenerator()
    resumed = scoring(tmp_path / "log", second).run()
    assert resumed == whole
    # What the first had been answered is asked of nobody again: all but the few that were out when it died.
    asked_again = sum(tally.attempts for tally in whole.values()) - stop_after
    assert asked_again <= len(second.asked) <= asked_again + 6


def test_a_torn_last_line_is_cut_off_and_the_batches_before_it_stay(tmp_path: Path) -> None:
    batch = [Scored("a", k, True, 1.0, 3, False, "x", "y", "") for k in range(2)]
    log = ScoringLog(tmp_path / "log", HEADER)
    log.append(batch)
    log.append([batch[0]._replace(number=2)])
    log.close()
    data = (tmp_path / "log").read_bytes()
    for cut in range(1, len(data)):
        (tmp_path / "log").write_bytes(data[:-cut])
        torn = ScoringLog(tmp_path / "log", HEADER)
        assert torn.scored == (batch if cut < len(data.split(b"\n")[2]) + 2 else [])
        torn.append(batch)
        torn.close()
        again = ScoringLog(tmp_path / "log", HEADER)
        assert again.scored[-2:] == batch
        again.close()


def test_a_log_of_something_else_is_refused_with_what_differs(tmp_path: Path) -> None:
    ScoringLog(tmp_path / "log", HEADER).close()
    with pytest.raises(PoolError, match="begun with another generator: weights 'w0' there, 'w1' now"):
        ScoringLog(tmp_path / "log", {**HEADER, "generator": {"weights": "w1"}})
    with pytest.raises(PoolError, match="begun with another seed: None there, 1 now"):
        ScoringLog(tmp_path / "log", {**HEADER, "seed": 1})
    (tmp_path / "other").write_text('{"a": 1}\n')
    with pytest.raises(PoolError, match="no log of a scoring"):
        ScoringLog(tmp_path / "other", HEADER)
    held = ScoringLog(tmp_path / "log", HEADER)
    with pytest.raises(PoolError, match="another process writes to this log"):
        ScoringLog(tmp_path / "log", HEADER)
    held.close()
    with (tmp_path / "log").open("ab") as file:
        file.write(b"garbage\n")
    with pytest.raises(PoolError, match="log:2: damaged"):
        ScoringLog(tmp_path / "log", HEADER)


def test_a_killed_process_loses_its_last_batch_at_most(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys\nfrom pathlib import Path\nimport curator.scoring_run as run\n"
        "from tests.curator.test_scoring_run import FakeGenerator, scoring\nrun.BATCH_SAMPLES = 16\n"
        "g = FakeGenerator()\nreal = g.generate\n"
        "def dying(requests):\n"
        "    for sample in real(requests):\n"
        "        if len(g.asked) == 100: os.kill(os.getpid(), signal.SIGKILL)\n"
        "        yield sample\n"
        "g.generate = dying\nscoring(Path(sys.argv[1]), g).run()\n"
    )
    done = subprocess.run([sys.executable, "-c", script, tmp_path / "log"], check=False)
    assert done.returncode == -9
    log = ScoringLog(tmp_path / "log", HEADER)
    # A batch of 16 and what the scorer holds, up to 6 samples: at least 78 of the 99 are there.
    assert 78 <= len(log.scored) <= 99
    log.close()
    assert scoring(tmp_path / "log", FakeGenerator()).run() == scoring(tmp_path / "whole", FakeGenerator()).run()


def test_what_cannot_be_scored_gets_no_second_stage_and_no_rate(tmp_path: Path) -> None:
    run = scoring(tmp_path / "log", FakeGenerator(), FakeScorer(unscored=["p0004"]))
    tally = run.run()["p0004"]
    assert (tally.attempts, tally.scored, dict(tally.whys)) == (4, 0, {"no gold": 4})


@pytest.mark.parametrize("values", [{"screen": 0}, {"most": -1}, {"target_sd": 0.0}, {"target_sd": 0.7}])
def test_stages_that_mean_nothing_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="--"):
        Stages(**values)


def entry(group: str, name: str, what: str) -> EntryPoint:
    return EntryPoint(name=name, value=f"tests.curator.test_scoring_run:{what}", group=group)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with a generator and a scorer called fake."""
    entries = [
        entry(scorers.GENERATORS, "fake", "make_fake_generator"),
        entry(scorers.GENERATORS, "broken", "nothing"),
        entry(scorers.SCORERS, "fake", "make_fake_scorer"),
    ]
    monkeypatch.setattr(scorers, "entry_points", lambda group: EntryPoints(e for e in entries if e.group == group))


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["score", *map(str, arguments), "--model", "m", "--generator", "fake"])


def test_the_command_writes_a_row_for_each_problem_and_goes_on_where_it_was(tmp_path: Path, installed: None) -> None:
    problems = make_problems(30)
    Pool.create(tmp_path / "p", [*problems, Problem(problem_id="z", prompt="long", answer="1", verifier="exact")])
    result = call(tmp_path / "p", "--screen", "4", "--most", "0", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["samples"] == 120
    result = call(tmp_path / "p", "--screen", "4", "--most", "20")
    assert result.exit_code == 0, result.stderr
    assert "goes on after 120 samples" in result.stderr
    assert result.stdout.startswith("31 problems: ")
    table = pq.read_table(tmp_path / "p.scores.parquet")
    rows = {row["problem_id"]: row for row in table.to_pylist()}
    assert len(rows) == 31
    middle = rows["p0004"]
    assert middle["keep"] is True
    assert middle["rate_low"] < middle["rate"] == middle["passed"] / middle["attempts"] < middle["rate_high"]
    assert (middle["unique_answers"], middle["tokens"]) == (2, 3 * middle["attempts"])
    assert rows["z"]["why"] == "cannot be sampled: too long"
    assert rows["z"]["attempts"] == 0
    assert rows["p0000"]["mixed_8"] < rows["p0004"]["mixed_8"]
    assert json.loads(table.schema.metadata[b"scoring"])["generator"] == {"weights": "w0"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--generator", "fak"), "--generator fak: no installed package has one of that name; the nearest is 'fake'"),
        (("--generator", "broken"), "test_scoring_run:nothing cannot be loaded"),
        (("--scorer", "x"), "--scorer x: no installed package has one of that name; there are fake"),
        (("--target-sd", "0.9"), "expected a number between 0 and 0.5"),
        (("--out", "a.csv"), "expected a name that ends in .parquet"),
    ],
)
def test_what_cannot_be_is_told_before_anything_starts(
    tmp_path: Path, installed: None, options: tuple[str, ...], message: str
) -> None:
    Pool.create(tmp_path / "p", make_problems(2))
    generator = () if "--generator" in options else ("--generator", "fake")
    result = CliRunner().invoke(app, ["score", str(tmp_path / "p"), "--model", "m", *options, *generator])
    assert result.exit_code == 2
    assert message in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["p"]
