"""Every alarm: raised when it must be, silent on a healthy run, once until it has cleared."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_grpo.alarm_checks import CHECKS, LOOKED_AT
from stream_grpo.alarms import Alarm, Alarms, SafeAlarms
from stream_grpo.config_alarms import Alarms as Limits

RECORDED = Path(__file__).parent / "data" / "metrics_run.jsonl"
WINDOW = 10
HEALTHY: dict[str, Any] = {
    "reward_mean": 0.5, "response_tokens_mean": 40.0, "entropy": 0.4, "ess": 0.97, "clip_share_high": 0.01,
    "mask_share": 0.0, "end_share": {"length": 0.1}, "engine_mismatch": 1e-6, "engine_mismatch_tokens": 100,
    "staleness": 1e-2, "publish_movement": 1e-2, "reward_length_correlation_within": 0.0,
    "by_domain": {"a": {"num_groups": 8}, "b": {"num_groups": 8}},
}  # fmt: skip


def alarms(**limits: Any) -> Alarms:
    return Alarms(Limits(**({"window": WINDOW} | limits)), "float32")


def step(number: int, **values: Any) -> dict[str, Any]:
    return {"event": "step", "step": number, **HEALTHY, **values}


def status(part: str, **values: Any) -> dict[str, Any]:
    return {"event": "status", "part": part, **values}


def evaluation(
    number: int, mean: float, low: float, high: float, num_problems: int = 64, row: str = "headline"
) -> dict[str, Any]:
    score = {"pass_at_1": mean, "low": low, "high": high, "num_problems": num_problems}
    return {"event": "evaluation", "step": number, "heldout": {row: score}}


def raised(watch: Alarms, lines: Iterable[dict[str, Any]]) -> list[Alarm]:
    return [alarm for line in lines for alarm in watch.take(line)]


def test_a_healthy_run_of_real_engines_raises_nothing() -> None:
    lines = [json.loads(line) for line in RECORDED.read_text().splitlines()]
    assert sum(line["event"] == "step" for line in lines) >= 40
    assert raised(Alarms(Limits(), "float32"), lines) == []


def test_steady_steps_raise_nothing() -> None:
    assert raised(alarms(), (step(i) for i in range(1, 50))) == []


def test_no_signal_names_what_the_groups_were() -> None:
    watch = alarms(groups_without_signal=100)
    causes = {"all_right": 64, "all_wrong": 35, "invalid": 1}
    assert raised(watch, [status("buffer", groups_without_signal=99, without_signal=causes)]) == []
    (alarm,) = raised(watch, [status("buffer", groups_without_signal=100, without_signal=causes)])
    assert alarm.sentence == "100 groups in a row had no signal: 64 all right, 35 all wrong"
    assert (alarm.name, alarm.step) == ("no_signal", 0)
    assert "solved" in alarm.cause
    wrong = status("buffer", groups_without_signal=256, without_signal={"all_wrong": 256})
    assert "too hard" in raised(alarms(), [wrong])[0].cause


def test_all_truncated_shows_in_batches_and_where_there_is_none() -> None:
    (alarm,) = raised(alarms(), (step(i, end_share={"length": 0.96}) for i in range(1, WINDOW)))
    assert (alarm.name, alarm.step) == ("truncated", WINDOW // 2)
    assert "96% of the responses of the newest 5 steps" in alarm.sentence


def curator(num_scored: int, num_truncated: int) -> dict[str, Any]:
    return status("curator", scored_groups=num_scored, no_signal={"all_right": 0, "truncated": num_truncated})


def test_a_run_that_collapses_to_truncated_groups_makes_no_step_and_is_seen_all_the_same() -> None:
    # A sound run of 10,000 groups; since its newest step 32 more came, 31 of them all wrong and cut off: 97%.
    sound = [curator(0, 0), curator(10_000, 200), step(1)]
    (alarm,) = raised(alarms(), [*sound, curator(10_032, 231)])
    assert (alarm.name, alarm.step) == ("truncated", 1)
    assert "in 31 of the 32 groups since the newest learner step" in alarm.sentence
    for few in (curator(10_031, 231), curator(10_032, 230)):  # 31 groups; 30 of 32 are 94%
        assert raised(alarms(), [*sound, few]) == []
    # Those before the step no longer count, although no status was as new as the step.
    assert raised(alarms(), [*sound, curator(10_016, 216), step(2), curator(10_032, 232)]) == []


def test_truncated_groups_before_the_first_step_count_from_the_first_status() -> None:
    assert [alarm.name for alarm in raised(alarms(), [curator(5, 0), curator(37, 32)])] == ["truncated"]
    # A pool that an earlier run has left, and a curator that was started again and counts anew.
    assert raised(alarms(), [curator(500, 500), curator(531, 531), status("curator"), curator(40, 40)]) == []


def test_entropy_that_falls_fast() -> None:
    # Halves of 5: 0.4 in the mean, then 0.1: 75% lost. 0.2 would be 50%.
    (alarm,) = raised(alarms(), (step(i, entropy=0.4 if i <= 5 else 0.1) for i in range(1, 11)))
    assert alarm.name == "entropy"
    assert "entropy fell from 0.4 to 0.1 nats within 10 steps" in alarm.sentence
    assert raised(alarms(), (step(i, entropy=0.4 if i <= 5 else 0.2) for i in range(1, 30))) == []


def test_mismatch_at_age_0_counts_by_tokens_and_by_precision() -> None:
    def lines(mismatch: float, tokens: int) -> list[dict[str, Any]]:
        return [step(i, engine_mismatch=mismatch, engine_mismatch_tokens=tokens) for i in range(1, 5)]

    (alarm,) = raised(alarms(), lines(2e-3, 16))  # 64 tokens by the fourth step
    assert (alarm.name, alarm.step) == ("mismatch", 4)
    assert raised(alarms(), lines(2e-3, 15)) == []
    assert raised(Alarms(Limits(), "bfloat16"), lines(2e-2, 100)) == []
    assert [found.name for found in raised(alarms(mismatch=1e-5), lines(1e-4, 100))] == ["mismatch"]


def test_a_correction_that_should_act_and_does_not() -> None:
    idle = {"ess": 0.7, "clip_share_high": 0.0, "mask_share": 0.0, "correction_mean": 1.0}
    (alarm,) = raised(alarms(), (step(i, **idle) for i in range(1, 11)))
    assert alarm.name == "idle_correction"
    assert "clip_share_high and mask_share and correction_mean have not acted once" in alarm.sentence
    assert "effective sample size of 70%" in alarm.sentence
    # One that acted once, and one that had no need to.
    assert raised(alarms(), (step(i, **idle | {"mask_share": 0.1 * (i == 4)}) for i in range(1, 11))) == []
    assert raised(alarms(), (step(i, **idle | {"ess": 0.95}) for i in range(1, 11))) == []


def test_behavior_logprobs_that_are_not_the_samplers() -> None:
    # Old tokens differ by what two engines do, while a publish moves the policy ten times as far.
    blind = {"engine_mismatch": 1e-4, "staleness": 1.2e-4, "publish_movement": 1e-3}
    (alarm,) = raised(alarms(), (step(i, **blind) for i in range(1, 11)))
    assert alarm.name == "idle_correction"
    assert "may not be the sampler's" in alarm.cause
    # A window of 4 steps is enough where it is all there is.
    assert [found.step for found in raised(alarms(window=4), (step(i, **blind) for i in range(1, 5)))] == [4]
    still = blind | {"publish_movement": 1.4e-4}
    assert raised(alarms(), (step(i, **still) for i in range(1, 11))) == []


def test_a_hidden_gap_that_grows_from_its_lowest() -> None:
    def sampler(overrated: float, num_pairs: int = 256) -> dict[str, Any]:
        hidden = {"overrated": overrated, "num_pairs": num_pairs}
        return status("sampler-0", num_running=1, rewards={"hidden": hidden})

    (alarm,) = raised(alarms(), [sampler(0.2), sampler(0.05), sampler(0.14), sampler(0.16)])
    assert alarm.name == "hidden_gap"
    assert "16% of the responses pass and should not, by the hidden verifier; it was 5%" in alarm.sentence
    assert raised(alarms(), [sampler(0.0, num_pairs=99), sampler(0.2), sampler(0.25)]) == []
    assert raised(alarms(), [status("sampler-0", num_running=1, rewards={"hidden": None})]) == []


def test_rewards_that_rise_with_length() -> None:
    def lines(length: float, reward: float, within: float) -> list[dict[str, Any]]:
        late = {"response_tokens_mean": length, "reward_mean": reward, "reward_length_correlation_within": within}
        return [step(i, **(late if i > 5 else {"reward_length_correlation_within": within})) for i in range(1, 11)]

    (alarm,) = raised(alarms(), lines(60.0, 0.7, 0.4))  # 40 to 60 tokens
    assert alarm.name == "reward_by_length"
    assert "rewards rose by 0.200 and responses by 50%" in alarm.sentence
    for length, reward, within in ((48.0, 0.7, 0.4), (60.0, 0.5, 0.4), (60.0, 0.7, 0.2)):
        assert raised(alarms(), lines(length, reward, within)) == []


def test_a_ledger_that_does_not_close() -> None:
    ledger = {"closes": False, "tokens": {"generated": 100, "trained": 60, "stale": 37}}
    (alarm,) = raised(alarms(), [status("buffer", ledger=ledger)])
    assert (alarm.name, alarm.sentence) == ("ledger", "the ledger does not close: 3 tokens have no fate or two")


def test_a_domain_that_starves_although_it_could_be_learnt_from() -> None:
    rates = {"a": 0.5, "b": 0.4, "solved": 0.99, "hopeless": 0.0}
    only, both = {"a": {"num_groups": 16}}, {"a": {"num_groups": 15}, "b": {"num_groups": 1}}
    lines = [status("curator", domain_rates=rates), *(step(i, by_domain=only) for i in range(1, 5))]
    (alarm,) = raised(alarms(), lines)
    # 64 groups over two domains that could be learnt from: 32 each.
    assert (alarm.name, alarm.step) == ("starving_domain", 4)
    assert "domain 'b' has 0 of the 64 groups of 4 steps, at a success rate of 40%" in alarm.sentence
    assert raised(alarms(), [*lines[:3], *(step(i, by_domain=both) for i in (3, 4))]) == []  # 2 of 32 are 6%
    assert raised(alarms(), lines[:-1]) == []


def test_a_domain_of_few_problems_does_not_starve_where_it_has_few_groups() -> None:
    only = [step(i, by_domain={"a": {"num_groups": 16}}) for i in range(1, 5)]
    few, many = ({"a": 1000 - num, "b": num} for num in (30, 500))
    # 30 of 1,000 problems would have 2 of 64 groups, too few to tell; 500 would have 32.
    for sizes, names in ((few, []), (many, ["starving_domain"])):
        lines = [status("curator", domain_rates={"a": 0.5, "b": 0.4}, domain_problems=sizes), *only]
        assert [alarm.name for alarm in raised(alarms(), lines)] == names


def test_held_out_problems_that_are_forgotten() -> None:
    lines = [evaluation(10, 0.8, 0.7, 0.9), evaluation(20, 0.75, 0.65, 0.85), evaluation(30, 0.55, 0.45, 0.65)]
    (alarm,) = raised(alarms(), lines)
    # 0.65 at most is below 0.7 at least, that of the best before.
    assert (alarm.name, alarm.step) == ("heldout_drop", 0)
    assert "fell to 55.0% (at most 65.0%), from 80.0% (at least 70.0%)" in alarm.sentence


def test_a_row_of_few_held_out_problems_is_no_evidence() -> None:
    # A domain of one problem, right once and then not: its intervals have no width.
    def lines(num_problems: int) -> list[dict[str, Any]]:
        found = ((10, 1.0, 1.0, 1.0), (20, 0.0, 0.0, 0.0))
        return [evaluation(*figures, num_problems=num_problems, row="geometry") for figures in found]

    assert raised(alarms(), lines(1)) == raised(alarms(), lines(15)) == []
    assert [alarm.name for alarm in raised(alarms(), lines(16))] == ["heldout_drop"]


def test_an_alarm_is_raised_once_and_again_only_after_a_window_without_it() -> None:
    watch = alarms()
    bad = {"end_share": {"length": 1.0}}
    first = raised(watch, (step(i, **bad) for i in range(1, 40)))
    assert [alarm.step for alarm in first] == [5]
    # The means over 5 steps are below the limit from step 40 on: at 39 + 10 it has cleared.
    assert raised(watch, (step(i) for i in range(40, 49))) == []
    assert watch.raised == {"truncated"}
    assert raised(watch, [step(49)]) == []
    assert watch.raised == frozenset()
    assert [alarm.step for alarm in raised(watch, (step(i, **bad) for i in range(50, 60)))] == [54]


def test_after_a_restore_steps_are_seen_as_they_are_made_again() -> None:
    watch = alarms()
    assert raised(watch, (step(i, end_share={"length": 1.0}) for i in range(1, 5))) == []
    # Steps 2 to 6 are made again and are sound: of the bad ones only step 1 is left.
    assert raised(watch, (step(i) for i in range(2, 7))) == []


VALUES = st.one_of(st.none(), st.floats(0, 2))
LINES = st.one_of(
    st.builds(
        lambda number, values: {"event": "step", "step": number, **values},
        st.integers(1, 30),
        st.fixed_dictionaries({}, optional={name: VALUES for name in HEALTHY if name[:2] not in ("by", "en")}),
    ),
    st.builds(lambda part: {"event": "status", "part": part}, st.sampled_from(["buffer", "curator", "sampler-0"])),
    st.builds(curator, st.integers(0, 200), st.integers(0, 200)),
    st.builds(lambda num: status("buffer", groups_without_signal=num), st.integers(0, 500)),
    st.builds(lambda closes: status("buffer", ledger={"closes": closes}), st.booleans()),
    st.builds(evaluation, st.integers(1, 30), *[st.sampled_from([0.0, 0.5, 1.0])] * 3),
    st.just({"event": "warning", "source": "x", "message": "y"}),
)


@given(st.lists(LINES, max_size=60))
def test_lines_with_missing_figures_break_nothing_and_no_alarm_is_raised_twice_at_once(lines: list[Any]) -> None:
    watch = Alarms(Limits(window=4), "float32")
    for line in lines:
        before = watch.raised
        found = watch.take(line)
        assert not before & {alarm.name for alarm in found}
        assert watch.raised <= CHECKS.keys()


@given(st.lists(LINES, max_size=60))
def test_a_line_that_an_alarm_does_not_look_at_changes_nothing_for_it(lines: list[Any]) -> None:
    everything = dict.fromkeys(CHECKS, frozenset({"step", "buffer", "curator", "sampler", "evaluation"}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stream_grpo.alarms.LOOKED_AT", everything)
        wanted = raised(Alarms(Limits(window=4), "float32"), lines)
    assert raised(Alarms(Limits(window=4), "float32"), lines) == wanted


def test_a_check_that_fails_ends_the_alarms_and_not_the_run() -> None:
    said: list[str] = []
    watch = SafeAlarms(alarms(), said.append)
    bad = {"end_share": {"length": 1.0}}
    assert [alarm.name for i in range(1, 6) for alarm in watch.take(step(i, **bad))] == ["truncated"]
    for i in range(6, 9):
        assert watch.take(step(i, entropy=0.4, end_share={"length": "many"})) == []
    assert said == ["alarms are off, the run goes on: TypeError: " + said[0].split(": ", 2)[2]]


def test_every_alarm_is_on_the_page() -> None:
    page = (Path(__file__).parents[1] / "docs" / "alarms.md").read_text(encoding="utf-8")
    assert [name for name in (*CHECKS, "guard:NAME") if f"| `{name}` |" not in page] == []
    assert LOOKED_AT.keys() == CHECKS.keys()
    assert [name for name in Limits.model_fields if f"`{name}`" not in page] == []


def test_the_line_of_an_alarm_has_what_its_readers_look_for() -> None:
    assert Alarm("x", "that is so", "that is why", 3).as_fields() == {
        "name": "x", "sentence": "that is so", "cause": "that is why", "step": 3,
    }  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_limits_that_make_no_sense_are_refused(dtype: str) -> None:
    for bad in ({"window": 3}, {"entropy_fall": 1.0}, {"nonsense": 1}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            Limits(**bad)  # type: ignore[arg-type]
