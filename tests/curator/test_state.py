"""The file of a curator's state: a restart by it is the whole fold, bit for bit, or says why it is not used."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from curator import snapshot, state
from curator.curation import Curation
from curator.pool import Pool
from curator.schema import Outcome
from tests.curator.fakes import make_outcome, make_pool

NUM_PROBLEMS = 6
ESTIMATORS = ["sliding_rate", "last_mean", "beta", "item_response"]


@pytest.fixture(autouse=True)
def _saves_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "SAVE_EVERY", 4)


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("empty") / "pool"
    make_pool(folder, NUM_PROBLEMS).close()
    return folder


def curation_of(path: Path, **rules: Any) -> Curation:
    return Curation(Pool.open(path), **{"group_size": 4, "flush_outcomes": 2, "text_numbers": 4, **rules})


def killed(curation: Curation) -> None:
    """Gone without a word; the kernel drops the lock of a process that dies."""
    curation._pool.close()


def whole_fold(empty: Path, folder: Path, outcomes: list[Outcome], **rules: Any) -> bytes:
    """The file of a curator that was never restarted."""
    shutil.copytree(empty, folder)
    curation = curation_of(folder, **rules)
    curation.report(outcomes)
    curation.close()
    return Pool.open(folder).state_path.read_bytes()


FATES = ["accepted", "no_signal", "stale", "requeued", "invalid"]
A_GROUP = st.tuples(st.integers(0, NUM_PROBLEMS), st.integers(0, 4), st.sampled_from(FATES), st.integers(0, 9))


def outcome_of(sequence: int, group: tuple[int, int, str, int]) -> Outcome:
    problem, passed, fate, lag = group
    made = make_outcome(sequence, f"p{problem:04d}", passed=passed, failed=4 - passed, fate=fate)
    # Some come late, and some after a restore.
    changes = {"mean_step": sequence - lag / 2, "branch": int(lag == 9)}
    return Outcome(**{name: changes.get(name, getattr(made, name)) for name in Outcome.__slots__})


def tear(path: Path, how: str, share: float) -> None:
    """Leave of the file of the state what a bad disk may leave of it."""
    if not path.exists():
        return
    data = bytearray(path.read_bytes())
    at = int(share * (len(data) - 1))
    if how == "cut":
        path.write_bytes(data[:at])
    elif how == "flipped":
        data[at] ^= 1
        path.write_bytes(data)
    elif how == "half written":
        path.with_name(path.name + ".writing").write_bytes(data[:at])
    elif how == "gone":
        path.unlink()


@pytest.mark.parametrize("estimator", ESTIMATORS)
@settings(max_examples=12, deadline=None)
@given(
    groups=st.lists(A_GROUP, min_size=1, max_size=14),
    kills=st.lists(
        st.tuples(
            st.integers(0, 14), st.sampled_from(["whole", "cut", "flipped", "half written", "gone"]), st.floats(0, 1)
        ),
        max_size=3,
    ),
)
def test_a_restart_is_the_whole_fold_bit_for_bit_wherever_it_was_killed_and_whatever_is_left_of_the_file(
    empty: Path,
    tmp_path_factory: pytest.TempPathFactory,
    estimator: str,
    groups: list[tuple[int, int, str, int]],
    kills: list[tuple[int, str, float]],
) -> None:
    folder = tmp_path_factory.mktemp("run")
    outcomes = [outcome_of(sequence, group) for sequence, group in enumerate(groups)]
    expected = whole_fold(empty, folder / "whole", outcomes, estimator=estimator)
    shutil.copytree(empty, folder / "pool")
    curation = curation_of(folder / "pool", estimator=estimator)
    for place, how, share in sorted(kills):
        for outcome in outcomes[curation.position().next_sequence : place]:
            curation.report([outcome])
            curation.next([f"after {outcome.sequence}"])
        killed(curation)
        tear(Pool.open(folder / "pool").state_path, how, share)
        curation = curation_of(folder / "pool", estimator=estimator)
        # What was not in the table the sender sends again.
        assert curation.position().next_sequence == curation.position().durable_sequence
    curation.report(outcomes[curation.position().next_sequence :])
    curation.close()
    # All but what the restart itself is told: the file is the state, byte by byte.
    assert Pool.open(folder / "pool").state_path.read_bytes() == expected


def some(num: int) -> list[Outcome]:
    return [make_outcome(i, f"p{i % NUM_PROBLEMS:04d}", passed=i % 5, failed=4 - i % 5) for i in range(num)]


def closed_after(empty: Path, folder: Path, num: int, **rules: Any) -> Path:
    """The file of a pool with so many outcomes."""
    whole_fold(empty, folder, some(num), **rules)
    return Pool.open(folder).state_path


def test_a_restart_folds_what_came_after_the_file_alone(
    empty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    curation = curation_of(shutil.copytree(empty, tmp_path / "pool"))
    for outcome in some(11):
        curation.report([outcome])
    # Written in twos; a file after 4 and after 8; 10 are in the table, one is lost.
    assert curation.stats()["state"]["saved"] == 8
    killed(curation)
    folded: list[int] = []
    apply = Curation._apply
    monkeypatch.setattr(
        Curation, "_apply", lambda self, outcome: (folded.append(outcome.sequence), apply(self, outcome))[1]
    )
    again = curation_of(tmp_path / "pool")
    assert (folded, again.stats()["state"]["restored"]) == ([8, 9], 8)
    assert again.position() == (10, 10)
    again.close()
    # And the close left a file with all of them.
    assert json.loads(Pool.open(tmp_path / "pool").state_path.read_bytes().split(b"\n")[2])["of"]["next_sequence"] == 10


def test_a_larger_pool_has_its_file_written_less_often(empty: Path, tmp_path: Path) -> None:
    path = shutil.copytree(empty, tmp_path / "pool")
    curation = curation_of(path)
    assert curation._saved._every == 4
    killed(curation)
    # 160 problems at 16 for an outcome: 10.
    make_pool(tmp_path / "larger", 160).close()
    assert curation_of(tmp_path / "larger")._saved._every == 10


def test_what_another_run_had_learned_is_in_the_file_and_not_learned_twice(empty: Path, tmp_path: Path) -> None:
    closed_after(empty, tmp_path / "first", 6)
    rules = {"start_from": tmp_path / "first"}
    expected = whole_fold(empty, tmp_path / "whole", some(9), **rules)
    curation = curation_of(shutil.copytree(empty, tmp_path / "pool"), **rules)
    curation.report(some(5))
    curation.close()
    again = curation_of(tmp_path / "pool", **rules)
    assert (again.stats()["earlier_groups"], again.stats()["state"]["restored"]) == (6, 5)
    again.report(some(9))
    again.close()
    assert Pool.open(tmp_path / "pool").state_path.read_bytes() == expected


def test_a_problem_that_was_picked_first_is_so_again_after_a_restart(empty: Path, tmp_path: Path) -> None:
    curation = curation_of(shutil.copytree(empty, tmp_path / "pool"))
    curation.report([make_outcome(0, "p0003", passed=0, failed=0, fate="requeued")])
    assert curation.next(["a"])[0].problem.problem_id == "p0003"
    curation.close()
    # Which group it was picked for nobody knows any more, as without the file.
    assert curation_of(tmp_path / "pool").next(["b"])[0].problem.problem_id == "p0003"


@pytest.mark.parametrize(
    ("rules", "reason"),
    [
        ({"rate_step": 0.5}, "it is of other settings: rate_step"),
        ({"estimator": "beta", "keep": 0.9}, "it is of other settings: estimator, keep"),
        ({"text_numbers": 0}, "it is of other problems, or of other numbers of their texts"),
    ],
)
def test_a_file_of_other_settings_is_not_used_and_the_reason_said(
    empty: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, rules: dict[str, Any], reason: str
) -> None:
    path = closed_after(empty, tmp_path / "pool", 6)
    with caplog.at_level(logging.WARNING):
        curation = curation_of(tmp_path / "pool", **rules)
    assert caplog.messages == [f"{path}: not used: {reason}; all outcomes are folded instead"]
    assert (curation.position().next_sequence, curation.stats()["state"]["restored"]) == (6, 0)


@pytest.mark.parametrize("rules", [{"exploration": 0.3}, {"choice": "worth"}, {"group_size": 8}, {"seed": 5}])
def test_what_decides_over_picks_alone_leaves_the_file_in_use(
    empty: Path, tmp_path: Path, rules: dict[str, Any]
) -> None:
    closed_after(empty, tmp_path / "pool", 6)
    assert curation_of(tmp_path / "pool", **rules).stats()["state"]["restored"] == 6


def test_a_file_that_does_not_fit_the_pool_is_not_used(empty: Path, tmp_path: Path) -> None:
    path = closed_after(empty, tmp_path / "pool", 6)
    # An older copy of the table: the file knows more than it has.
    older = closed_after(empty, tmp_path / "older", 4)
    older.write_bytes(path.read_bytes())
    curation = curation_of(tmp_path / "older")
    assert curation._saved.why_not_used == "the table of outcomes does not have outcome 5, which is in it"
    assert curation.position().next_sequence == 4
    # Another run's outcomes: the sixth had another group.
    other = [*some(5), make_outcome(5, "p0000", passed=4, failed=0)]
    whole_fold(empty, tmp_path / "other", other)
    Pool.open(tmp_path / "other").state_path.write_bytes(path.read_bytes())
    assert curation_of(tmp_path / "other")._saved.why_not_used == "it is of other outcomes: outcome 5 differs"
    # One more problem, and every index may be another's.
    make_pool(tmp_path / "larger", NUM_PROBLEMS + 1).close()
    larger = curation_of(tmp_path / "larger")
    larger.report(some(6))
    larger.close()
    Pool.open(tmp_path / "larger").state_path.write_bytes(path.read_bytes())
    assert curation_of(tmp_path / "larger")._saved.why_not_used.startswith("it is of other problems")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "its format is b''"),
        (b"curator.state 0\nabc\n{}\n", "its format is b'curator.state 0', not 'curator.state 1'"),
        (b"curator.state 1\nabc\n{}\n", "it is torn: its 3 bytes do not have their checksum"),
        (b"curator.state 1", "it is torn: its 0 bytes do not have their checksum"),
    ],
)
def test_what_is_no_file_of_a_state_is_told(tmp_path: Path, data: bytes, reason: str) -> None:
    (tmp_path / "it").write_bytes(data)
    with pytest.raises(snapshot.SnapshotError) as error:
        snapshot.read(tmp_path / "it")
    assert str(error.value).startswith(reason)


def test_a_file_that_cannot_be_written_is_told_and_costs_nothing_else(
    empty: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = shutil.copytree(empty, tmp_path / "pool")
    Pool.open(path).state_path.mkdir()
    with caplog.at_level(logging.WARNING):
        curation = curation_of(path)
        curation.report(some(6))
        curation.close()
    assert "not used: it cannot be read" in caplog.messages[0]
    assert "cannot be written" in caplog.messages[1]
    assert len(caplog.messages) == 2
    assert curation_of(path).position() == (6, 6)


def test_each_run_of_a_pool_has_a_file_of_its_own(empty: Path, tmp_path: Path) -> None:
    pool = Pool.open(shutil.copytree(empty, tmp_path / "pool"))
    for name, num in (("a", 3), ("b", 5)):
        curation = Curation(pool.of_run(name), group_size=4)
        curation.report(some(num))
        curation.close()
    restored = [Curation(pool.of_run(name), group_size=4).stats()["state"]["restored"] for name in ("a", "b")]
    assert restored == [3, 5]
