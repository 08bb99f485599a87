"""What the benchmarks say of results that are made up here: goals, ratios, what is missing, what bounds a goal."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from bench_time_to_score import cause_of
from benchmarks import made, page
from benchmarks.page import QUICK, Goal
from benchmarks.results import Results
from benchmarks.watch import figures, memory_table, slope_per_hour
from smollm2 import cells as smollm2_cells
from smollm2 import pages as smollm2_pages
from smollm2.clock import Clock
from smollm2.ours import Training
from time_to_score import outcome, pages, picture, tuning
from time_to_score.contestants import Point
from time_to_score.trl_clock import Clock as TrlClock
from train_smollm2 import merged

MADE = {"date": "2026-01-02", "machine": "a machine, 2 cores", "versions": {"torch": "2.0"}, "commit": "abc"}


def test_a_goal_says_by_how_much_it_is_missed() -> None:
    # 1.5 of 2 is a quarter too little; 0.03 of 0.02 is half too much.
    assert Goal("a", 1.5, 2.0).as_row() == ("`a`", "1.5", "at least 2", "missed by 25%")
    assert Goal("b", 0.03, 0.02, at_least=False).as_row()[2:] == ("under 0.02", "missed by 50%")
    assert Goal("c", 2.0, 2.0).is_met
    assert not Goal("d", 0.02, 0.02, at_least=False).is_met
    assert Goal("e", None, 2.0).as_row() == ("`e`", "not measured", "at least 2", "")


def test_a_section_names_the_command_the_machine_and_the_days_of_its_results(tmp_path: Path) -> None:
    results = [MADE, {**MADE, "date": "2026-01-05"}]
    path = tmp_path / "page.md"
    assert page.write_section(path, "b", "B", "text", is_quick=False, command="scripts/b --seeds 2", made=results)
    assert (
        "`scripts/b --seeds 2`, 2026-01-02 to 2026-01-05, a machine, 2 cores; torch 2.0; commit abc."
        in path.read_text()
    )


def test_a_picture_is_put_beside_the_page_only_with_its_section(tmp_path: Path) -> None:
    said: list[str] = []

    def put(text: str, *, is_quick: bool) -> None:
        page.put(
            tmp_path / "page.md", "b", "B", text,
            is_quick=is_quick, image="b.png", draw=lambda path: path.write_text(text) and None, say=said.append,
        )  # fmt: skip

    put("look", is_quick=True)
    put("measured", is_quick=False)
    put("another look", is_quick=True)
    assert (tmp_path / "images" / "b.png").read_text() == "measured"
    assert [path.name for path in (tmp_path / "images").iterdir()] == ["b.png"]
    assert QUICK not in (tmp_path / "page.md").read_text()
    assert [text.partition(":")[2] for text in said] == [" left as it is; it has figures of a whole measurement"]


def test_a_command_is_told_without_what_is_about_one_call() -> None:
    given = [
        "--root",
        "/x/y",
        "--seeds",
        "2",
        "--only",
        "own",
        "score",
        "--json",
        "--minutes=5",
        "--model",
        "/m/smollm2",
    ]
    assert made.command("b", given) == "scripts/b --seeds 2 --model smollm2"


def test_results_go_on_after_a_torn_line_and_refuse_other_settings(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    Results(path).add("a", {"steps": 2, "pair": (1, 2)}, {"value": 1})
    with path.open("a") as file:
        file.write('{"key": "b", "sett')
    found = Results(path)
    line = found.find("a", {"steps": 2, "pair": (1, 2)})
    assert line is not None
    assert (line["value"], line["made"]["machine"]) == (1, made.machine())
    assert found.find("b") is None
    with pytest.raises(SystemExit, match="steps: 2 is there, 3 is asked for"):
        found.find("a", {"steps": 3, "pair": [1, 2]})
    found.add("a", {"steps": 2}, {"value": 5})
    assert [line["value"] for line in Results(path)] == [5]
    path.write_text("[]\n")
    with pytest.raises(SystemExit, match="line 1: not a result"):
        Results(path)


def test_growth_is_told_of_what_comes_after_the_start() -> None:
    # 1 GiB more in the first 30 s of 300, then 1 MiB every 10 s: 360 MiB an hour.
    grown = [(10.0 * n, (1 << 30) * min(n, 3) / 3 + (n << 20)) for n in range(31)]
    slope = slope_per_hour(grown)
    assert slope == pytest.approx(360 * 2**20)
    assert slope_per_hour(grown[:7]) is None
    assert slope_per_hour([]) is None
    found = figures({"learner": 3 << 30, "small": 1 << 20}, {"learner": grown})
    assert found["learner"] == {"peak_bytes": 3 << 30, "bytes_per_hour": slope, "span_s": 300.0}
    told = memory_table(found)
    assert "| learner | 3,072 MiB | +360 MiB over 5 min |" in told
    assert "small" not in told


def line(contestant: str, seed: int, curve: list[Point], **loop: float) -> dict[str, Any]:
    """A line of results as bench_time_to_score has it."""
    whole = {"wall_s": 100.0, "steps": 50, "sampler_s": 90.0, "learner_s": 60.0, "tokens": 10_000, "trained_share": 0.5}
    return {
        "key": f"{contestant}-{seed}", "contestant": contestant, "seed": seed, "made": MADE, "curve": curve,
        "start_s": 20.0, "num_scored": 300, "loop": {**whole, **loop}, "memory": {},
        "versions": {"trl": "1.0"}, "settings": {"learning_rate": 1e-4, "num_threads": 2},
    }  # fmt: skip


def straight(seconds: float, score: float = 1.0) -> list[Point]:
    """From 0.5 to `score` in so many seconds, and as many tokens."""
    return [Point(0, 0.0, 0, 0.5), Point(50, seconds, int(seconds), score)]


OPTIONS = argparse.Namespace(target=0.75, seeds=3, samples=4)


def test_ratios_of_medians_come_with_those_of_every_seed(tmp_path: Path) -> None:
    # 0.75 is reached half way: after 10, 20, 30 s against 60, 60, 60.
    found = {
        "default": {seed: line("default", seed, straight(20.0 * (seed + 1))) for seed in range(3)},
        "trl": {seed: line("trl", seed, straight(120.0)) for seed in range(3)},
    }
    text, compared = pages.section(found, {"trl_vllm": "no loader"}, OPTIONS, config="c.toml")
    assert compared["vs_trl"] == (3.0, "trl", "")
    assert "`vs_trl` is 3.00 against TRL's GRPOTrainer, its own generation; seed by seed 6.00, 3.00, 2.00." in text
    assert "vLLM in its process does not run here: `no loader`" in text
    assert "| this trainer | 3 of 3 | 20 (10 to 30) |" in text
    # Five of this trainer and one of TRL are wanted of three seeds; that with vLLM is known not to run.
    assert "**6 of 18 trainings are there.**" in text
    assert "Missed" not in text
    picture.draw({name: [lines[0]["curve"]] for name, lines in found.items()}, 0.75, tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 0


def test_a_target_that_is_never_reached_is_said_and_what_bounds_a_goal_is_counted() -> None:
    found = {
        "default": {seed: line("default", seed, straight(100.0)) for seed in range(3)},
        "trl": {
            seed: line("trl", seed, straight(seconds, best))
            for seed, (seconds, best) in enumerate([(90.0, 1.0), (80.0, 0.7), (70.0, 0.7)])
        },
    }  # fmt: skip
    text, compared = pages.section(found, {}, OPTIONS, config="c.toml")
    # Two of three never reach it: the median is a bound, of what they had spent.
    assert compared["vs_trl"] == (70.0 / 50.0, "trl", "at least")
    assert "| TRL's GRPOTrainer, its own generation | 1 of 3 | over 70 | over 0 | over 50 | 1.000 | 20 s |" in text
    assert "seed by seed 0.90, at least 1.60, at least 1.40" in text
    # The sampler takes 90 s of 50 steps; (90 + 60) / 90 = 1.67.
    assert "sampler is busy 90% of the time and takes 1.80 s a step" in text
    assert "wholly overlapped are 1.67 times as fast" in text


def test_where_this_trainer_has_not_reached_the_target_a_ratio_is_a_bound_from_above() -> None:
    never, there = outcome.Reached(50, 100.0, 100, is_bound=True), outcome.Reached(50, 80.0, 100)
    compared = outcome.Compared(("trl", "trl_vllm"), "seconds", 2.0)
    assert outcome.ratio(never, {"trl": there}, compared) == (0.8, "trl", "at most")
    assert outcome.ratio(never, {"trl": never}, compared) == (None, "trl", "")
    # Of two the one that has reached it, however little the other has spent.
    early = never._replace(seconds=1.0)
    assert outcome.ratio(there, {"trl": there._replace(seconds=160.0), "trl_vllm": early}, compared) == (2.0, "trl", "")


def test_trl_is_given_the_rate_that_reaches_the_target_first_else_the_best() -> None:
    assert tuning.best({}, 0.75) is None
    tried = {
        1e-4: straight(100.0, 0.7),
        2e-4: straight(100.0, 0.9),
        4e-4: straight(80.0, 0.9),
        8e-4: straight(10.0, 0.6),
    }
    # 0.75 lies 5/8 of the way from 0.5 to 0.9: after 62.5 s and after 50 s.
    assert tuning.best(tried, 0.75) == 4e-4
    assert tuning.best(tried, 0.95) == 2e-4
    text, _ = pages.section({"trl": {0: line("trl", 0, straight(1.0))}}, {}, OPTIONS, config="c", tried=tried)
    assert "0.0001 not reached, at last 0.700; 0.0002 62 s, at last 0.900; 0.0004 50 s" in text


def test_the_cause_is_the_line_that_names_an_error() -> None:
    assert cause_of("a\n  File x\nValueError: no loader\nwarning: left\n") == "ValueError: no loader"
    assert cause_of("a\nb\n") == "b"


def status(part: str, first: float | None, busy_s: float, time_s: float) -> dict[str, Any]:
    return {"event": "status", "part": part, "first_busy_at": first, "busy_s": busy_s, "time_s": time_s}


def step(number: int, time_s: float) -> dict[str, Any]:
    return {"event": "step", "step": number, "time_s": time_s, "step_s": 4.0, "tokens": {"generated": 100 * number}}


def test_the_clock_of_a_run_stands_still_between_its_starts() -> None:
    clock = Clock()
    clock.add([status("sampler-0", None, 0.0, 90.0), status("sampler-0", 100.0, 2.0, 102.0), step(1, 110.0)])
    clock.add([status("sampler-0", 100.0, 18.0, 121.0), step(2, 120.0), status("sampler-0", 100.0, 19.0, 125.0)])
    assert clock.seconds == 20.0
    # Within the newest start it runs on, whether or not a step has ended.
    assert clock.at(130.0) == 30.0
    clock.add([status("sampler-0", 500.0, 5.0, 506.0), step(3, 515.0)])
    assert clock.seconds == 35.0
    # Of the pause nothing counts: weights of 119 s are 19 s old in training, of 300 s 20, of 510 s 30.
    assert [clock.at(time_s) for time_s in (119.0, 300.0, 510.0)] == [19.0, 20.0, 30.0]
    assert clock.loop() == {"wall_s": 35.0, "steps": 3, "sampler_s": 24.0, "learner_s": 12.0, "tokens": 300}


def score(seconds: float, value: float) -> smollm2_cells.Score:
    return smollm2_cells.Score(int(seconds), seconds, 1000, value, value - 0.1, value + 0.1)


def test_trials_choose_and_the_time_is_told_of_the_score_that_both_reach() -> None:
    default = (1e-5, 8)
    assert smollm2_cells.chosen("trl", {}, default) == default
    scores = {"ours-trial-1": 0.2, "ours-trial-2": 0.4, "ours-trial-4": 0.4, "trl-trial-3": 0.9}
    # 2 and 4 are alike and have the same rate.
    assert smollm2_cells.chosen("ours", scores, default)[0] == 3e-5
    assert smollm2_cells.chosen("trl", scores, default) == (1e-4, 8)
    curves = {"ours": [score(0, 0.1), score(600, 0.5)], "trl": [score(0, 0.1), score(600, 0.3)]}
    assert smollm2_cells.both_reach(curves) == 0.3
    assert smollm2_cells.reaches(curves["ours"], 0.3) == pytest.approx(300.0)
    assert smollm2_cells.both_reach({**curves, "trl": [score(0, 0.1), score(600, 0.1)]}) is None
    assert smollm2_cells.both_reach({"ours": curves["ours"]}) is None


def trained(trainer: str, curve: list[smollm2_cells.Score], steps: int) -> dict[str, Any]:
    """A line of results as train_smollm2 has it."""
    loop = {"wall_s": 600.0, "steps": steps, "sampler_s": 1.0, "learner_s": 1.0, "tokens": 6000, "trained_share": 1.0}
    answer = {"domain": "sum-1", "asked": "2 + 3 = ?", "gold": "5", "before": "It is\n`2 | 3`", "after": "5"}
    return {
        "key": trainer, "trainer": trainer, "curve": curve, "rise": [0.4, 0.3, 0.5], "num_scored": 320,
        "num_samples": 4, "loop": loop, "versions": {}, "memory": {}, "minutes": 10.0, "answers": [answer],
        "made": MADE, "settings": {"learning_rate": 3e-5, "groups_per_step": 8},
    }  # fmt: skip


def test_the_page_of_the_pretrained_model_has_ratio_curve_trials_and_answers() -> None:
    curve = [score(0, 0.1), score(600, 0.5)]
    lines = {"ours": trained("ours", curve, 40), "ours-trial-1": trained("ours", curve, 5)}
    text, ratio = smollm2_pages.section(lines, config="c.toml")
    assert ratio is None
    assert "| `step_vs_trl` | not measured | at least 3 |" in text
    assert "| this trainer | 0.00003 |" in text.replace("3e-05", "0.00003")
    lines["trl"] = trained("trl", [score(0, 0.1), score(600, 0.3)], 10)
    text, ratio = smollm2_pages.section(lines, config="c.toml")
    # 60 s a step against 15.
    assert ratio == 4.0
    assert "The highest score that both reach is 0.300: this trainer after 5 min" in text
    assert "| sum-1 | 2 + 3 = ? | 5 | It is '2 \\| 3' | 5 |" in text


def test_answers_stand_side_by_side_a_domain_in_turn() -> None:
    before = [{"id": i, "domain": i[0], "asked": i, "gold": "1", "said": "x"} for i in ("a1", "a2", "b1")]
    after = [{**answer, "said": answer["id"]} for answer in before]
    found = smollm2_pages.side_by_side(before, after, 2)
    assert [(row["domain"], row["before"], row["after"]) for row in found] == [("a", "x", "a1"), ("b", "x", "b1")]
    assert json.dumps(found)


class Model:
    """With one weight, as a trainer gives it."""

    def named_parameters(self) -> list[tuple[str, torch.Tensor]]:
        return [("w", torch.zeros(1))]


def trained_piece(clock: TrlClock, now: list[float], steps: range, args: Any) -> SimpleNamespace:
    """Steps of 10 s, as HF's trainer calls its callbacks; a checkpoint takes 100 s, and ends the piece."""
    control = SimpleNamespace(should_save=False, should_training_stop=False)
    clock.on_train_begin(args, None, control, model=Model())
    for number in steps:
        now[0] += 10.0
        clock.num_tokens += 5
        state = SimpleNamespace(global_step=number, max_steps=1000)
        clock.on_step_end(args, state, control, model=Model())
        if control.should_save:
            now[0] += 100.0
            (Path(args.output_dir) / f"checkpoint-{number}").mkdir(parents=True)
            clock.on_save(args, state, control)
            break
    return control


def test_the_clock_of_trl_goes_on_in_the_next_piece_and_leaves_out_what_saving_takes(tmp_path: Path) -> None:
    now, args = [1000.0], SimpleNamespace(output_dir=str(tmp_path / "trainer"))
    clock = TrlClock(tmp_path, every_s=20.0, stop_after_s=30.0, timer=lambda: now[0])
    control = trained_piece(clock, now, range(1, 100), args)
    assert control.should_training_stop
    # At 20 s it is time, and at 30 s the piece ends.
    assert [(s["step"], s["seconds"], s["tokens"]) for s in clock.found] == [(0, 0.0, 0), (2, 20.0, 10), (3, 30.0, 15)]
    assert clock.seconds == 30.0
    again = TrlClock(tmp_path, every_s=20.0, stop_after_s=10.0, timer=lambda: now[0])
    again.read(tmp_path / "trainer" / "checkpoint-3")
    now[0] += 500.0  # loading
    trained_piece(again, now, range(4, 100), args)
    assert (again.seconds, again.num_tokens) == (40.0, 20)
    assert [s["seconds"] for s in again.found] == [0.0, 20.0, 30.0, 40.0]
    assert (tmp_path / "000004.safetensors").exists()


def test_weights_of_a_run_are_kept_when_it_is_time_and_stay_when_the_run_removes_them(tmp_path: Path) -> None:
    run, start = tmp_path / "ours" / "run", tmp_path / "start.safetensors"
    start.write_text("start")

    def publish(number: int, created_at_s: float) -> Path:
        version = run / "weights" / f"0.{number:08}"
        version.mkdir(parents=True)
        (version / "model.safetensors").write_text(str(number))
        (version / "manifest.json").write_text(json.dumps({"created_at_s": created_at_s}))
        return version

    def training() -> Training:
        return Training(tmp_path / "ours", every_s=20.0, limit_s=30.0, say=print)

    first = publish(1, 110.0)
    lines = [status("sampler-0", 100.0, 5.0, 101.0), step(1, 110.0), step(2, 121.0), step(3, 131.0)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[:2]))
    found = training()
    found._keep(start, 0, None, 0)
    found._keep_newest()  # 10 s: too early
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    second = publish(2, 121.0)
    found = training()
    found._keep_newest()
    shutil.rmtree(first)
    shutil.rmtree(second)
    publish(3, 131.0)
    found._keep_newest()  # 31 s: the next ones are due at 40 s
    assert [s["step"] for s in found.snapshots()] == [0, 2]
    found._keep_newest(is_last=True)
    assert [(s["step"], s["seconds"]) for s in training().snapshots()] == [(0, 0.0), (2, 21.0), (3, 31.0)]
    assert (tmp_path / "ours" / "000002.safetensors").read_text() == "2"
    assert training().is_done


def test_of_two_pieces_the_larger_peak_and_the_growth_in_the_longer_one_are_told() -> None:
    early = {"learner": {"peak_bytes": 5.0, "bytes_per_hour": 1.0, "span_s": 100.0}}
    late = {"learner": {"peak_bytes": 4.0, "bytes_per_hour": 2.0, "span_s": 200.0}}
    assert merged({}, early) == early
    assert merged(early, late) == {"learner": {"peak_bytes": 5.0, "bytes_per_hour": 2.0, "span_s": 200.0}}
