"""The audit finds what it is there to find: every fault is planted in a journal that is sound without it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from kills.audit import Audit, age, audit, reach

from stream_grpo.buffer.journal import Journal
from stream_grpo.buffer.layout import LOG_NAME
from stream_grpo.buffer.transitions import TRANSITION_SCHEMA, Kind, Transition, decode_transitions, encode_transitions
from stream_grpo.learner.checkpoint import write_checkpoint
from stream_grpo.types import PolicyVersion
from tests.buffer.fakes import Buffer, as_branching, group_by_rollout

FORK = {1: (0, 2)}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with a crash: steps 1 to 3, a restore from the checkpoint of step 2, then steps 3 and 4 on branch 1.

    2 groups a step of 2 rollouts of 4 tokens; the age is at most 2. 10 groups come in, the model has 8 of them.
    """
    journal = Journal(tmp_path / "journal", segment_bytes=1 << 20)
    buffer = Buffer(journal)  # type: ignore[arg-type]
    buffer.start()
    for step in range(3):
        buffer.fill(PolicyVersion(0, step), 2)
        buffer.train(PolicyVersion(0, step))
        journal.commit()
    buffer.start(PolicyVersion(1, 2), _1=PolicyVersion(0, 2))
    buffer.train(PolicyVersion(1, 2))  # the two groups of step 3 of branch 0, available again
    buffer.fill(PolicyVersion(1, 3), 4)
    buffer.train(PolicyVersion(1, 3))
    journal.commit()
    journal.close()
    write_checkpoint(tmp_path / "checkpoints", PolicyVersion(1, 4), lambda folder: None)
    (tmp_path / "config.toml").write_text("[stream]\nmax_policy_age = 2\n")
    return tmp_path


def plant(run: Path, change: Callable[[list[Transition]], list[Transition]]) -> Audit:
    """Write the log anew with other rows, every one with a sound checksum, and audit it."""
    path = run / "journal" / LOG_NAME
    rows = [row for batch in pa.ipc.open_stream(path.read_bytes()) for row in decode_transitions(batch)]
    path.write_bytes(TRANSITION_SCHEMA.serialize().to_pybytes() + encode_transitions(change(rows)))
    return audit(run)


def changed(rows: list[Transition], kind: Kind, group_id: str, **values: object) -> list[Transition]:
    """The rows of one kind of a group with other values."""
    is_meant = [row.kind is kind and row.group_id == group_id for row in rows]
    assert any(is_meant)
    return [replace(row, **values) if meant else row for row, meant in zip(rows, is_meant, strict=True)]  # type: ignore[arg-type]


def test_a_sound_run_is_found_sound(run: Path) -> None:
    found = audit(run, witnessed=[f"g{n:08d}" for n in range(1, 11)])
    assert found.findings == []
    assert (found.lost, found.trained_twice, found.age_violations, found.steps_missing) == (0, 0, 0, 0)
    assert (found.groups_accepted, found.groups_trained, found.final) == (10, 8, (1, 4))
    # 10 groups of 8 tokens, 8 of them trained, 2 waiting.
    assert {fate: count for fate, count in found.tokens.items() if count} == {
        "generated": 80, "trained": 64, "buffered": 16
    }  # fmt: skip
    assert found.ledger_closes


def test_an_acknowledged_group_that_is_not_there_is_lost(run: Path) -> None:
    found = audit(run, witnessed=["g00000010", "g00000011"])
    assert found.lost == 1
    assert found.findings == ["g00000011: was acknowledged and is not in the journal"]


def test_a_damaged_record_is_lost(run: Path) -> None:
    segment = run / "journal" / "segment-000001.arrow"
    data = bytearray(segment.read_bytes())
    data[-9] ^= 1
    segment.write_bytes(data)
    assert audit(run).lost == 1


def test_a_ticket_that_the_log_has_forgotten_is_lost(run: Path) -> None:
    found = plant(run, lambda rows: [row for row in rows if row.group_id != "g00000009"])
    assert found.lost == 1
    assert found.findings == ["g00000009: the log does not have this ticket"]


def test_groups_of_a_branch_that_was_given_up_and_never_available_again_are_lost(run: Path) -> None:
    """Without `restored` and what followed, the two groups of step 3 are in no model."""
    found = plant(run, lambda rows: _without_what_follows_the_restore(rows, {"g00000005", "g00000006"}))
    assert found.lost == 2
    assert "trained by 0.3, which the final model does not contain" in found.findings[0]
    assert found.steps_missing == 1  # step 3 of branch 1 had been trained on them


def _without_what_follows_the_restore(rows: list[Transition], group_ids: set[str]) -> list[Transition]:
    restored = next(i for i, row in enumerate(rows) if row.kind is Kind.STARTED and row.branch == 1)
    return [row for i, row in enumerate(rows) if i < restored or row.group_id not in group_ids]


def test_a_group_trained_by_two_steps_of_the_final_model_is_found(run: Path) -> None:
    def twice(rows: list[Transition]) -> list[Transition]:
        trained = next(row for row in rows if row.kind is Kind.TRAINED and row.group_id == "g00000001")
        return [*rows, replace(trained, branch=1, step=4)]

    found = plant(run, twice)
    assert found.trained_twice == 1
    assert found.findings[0] == "g00000001: trained by [(0, 1), (1, 4)]"


def test_a_model_that_has_a_group_twice_is_found_where_it_remembers(run: Path) -> None:
    trained = [f"g{n:08d}" for n in (1, 2, 3, 4, 5, 6, 7, 8)]
    remembered = run / "checkpoints" / "checkpoint-1.4" / "engine" / "trained.json"
    remembered.parent.mkdir()
    remembered.write_text(json.dumps(trained))
    assert audit(run).is_sound
    remembered.write_text(json.dumps([*trained[:-1], "g00000001"]))
    found = audit(run)
    assert found.trained_twice == 1
    assert found.findings[1:] == ["g00000008: trained by the log or by the model, not both"]


def test_a_token_that_is_too_old_is_found_on_every_branch(run: Path) -> None:
    # Group 5 is of weights 0.2; trained as step 6 of branch 1 it was 3 steps old: from 0.2, the fork, to 1.5.
    found = plant(run, lambda rows: changed(rows, Kind.TRAINED, "g00000005", branch=1, step=6))
    assert found.age_violations == 2  # it has two rows, both changed
    assert "a token 3 steps old was trained from (1, 5)" in found.findings[-1]


def test_tokens_that_the_learner_reported_wrongly_leave_a_gap(run: Path) -> None:
    found = plant(run, lambda rows: changed(rows, Kind.TRAINED, "g00000001", trained_tokens=7))
    assert not found.ledger_closes
    assert found.findings[0] == "g00000001: a row of the log has other tokens than its record"


def test_an_account_that_says_otherwise_is_found(run: Path) -> None:
    theirs = {"generated": 80, "trained": 64, "buffered": 8, "stale": 8}
    (run / "summary.json").write_text(json.dumps({"tokens": theirs}))
    found = audit(run)
    assert not found.ledger_closes
    assert "'stale': (0, 8)" in found.findings[0]


REUSE = """[stream]
max_policy_age = 2
groups_per_step = 3
max_uses = 2
reuse_share = 0.34
"""


@pytest.fixture
def reused(tmp_path: Path) -> Path:
    """A run of 3 groups a step, one of them used again: group 1 by 0.2, group 2 by 0.3, which a restore takes back.

    Step 3 is made again on branch 1, on the same groups. 6 groups come in, of 2 rollouts of 4 tokens.
    """
    journal = Journal(tmp_path / "journal", segment_bytes=1 << 20)
    buffer = Buffer(journal, groups_per_step=3, reused_per_step=1, max_uses=2)  # type: ignore[arg-type]
    buffer.start()
    for step in range(3):
        buffer.fill(PolicyVersion(0, step), 2)
        journal.commit()
        buffer.train(PolicyVersion(0, step))
    buffer.start(PolicyVersion(1, 2), _1=PolicyVersion(0, 2))
    buffer.train(PolicyVersion(1, 2))
    journal.commit()
    journal.close()
    write_checkpoint(tmp_path / "checkpoints", PolicyVersion(1, 3), lambda folder: None)
    (tmp_path / "config.toml").write_text(REUSE)
    (tmp_path / "summary.json").write_text(json.dumps(buffer.book.ledger.as_fields()))
    return tmp_path


def test_further_uses_within_their_bounds_are_sound_and_counted(reused: Path) -> None:
    found = audit(reused)
    assert found.findings == []
    assert (found.groups_trained, found.steps_missing, found.trained_twice) == (6, 0, 0)
    # By 0.2 and by 1.3, of 8 tokens each; that by 0.3 was taken back.
    assert found.reused == {"uses": 2, "tokens": 16}


def test_a_model_must_have_a_further_use_too(reused: Path) -> None:
    trained = [f"g{n:08d}" for n in (1, 2, 3, 4, 1, 5, 6, 2)]
    remembered = reused / "checkpoints" / "checkpoint-1.3" / "engine" / "trained.json"
    remembered.parent.mkdir()
    remembered.write_text(json.dumps(trained))
    assert audit(reused).findings == []
    remembered.write_text(json.dumps([*trained, "g00000001"]))
    assert audit(reused).findings == ["g00000001: the model was trained on it 3 times"]
    remembered.write_text(json.dumps(trained[:-1]))
    assert audit(reused).findings == ["g00000002: used 2 times by the log, 1 by the model"]


@pytest.mark.parametrize(
    ("config", "finding"),
    [
        (REUSE.replace("max_uses = 2", "max_uses = 1"), "g00000001: used by [(0, 1), (0, 2)], first by [(0, 1)]"),
        (REUSE.replace("0.34", "0.33"), "(0, 2): 1 groups were used again, at most 0 may be"),
    ],
)
def test_further_uses_that_the_configuration_does_not_allow_are_found(reused: Path, config: str, finding: str) -> None:
    (reused / "config.toml").write_text(config)
    found = audit(reused)
    assert found.trained_twice > 0
    assert any(sentence.startswith(finding) for sentence in found.findings)


def test_a_further_use_by_the_same_step_or_without_a_first_is_found(reused: Path) -> None:
    # Group 1 is trained by 0.1 and used again by 0.2: with both by 0.1 one of them is one too many.
    found = plant(reused, lambda rows: changed(rows, Kind.REUSED, "g00000001", step=1))
    assert found.trained_twice == 1
    assert found.findings[0].startswith("g00000001: used by [(0, 1), (0, 1)]")


def test_a_further_use_of_a_group_that_was_not_trained_is_found(reused: Path) -> None:
    def to_another(rows: list[Transition]) -> list[Transition]:
        return [
            replace(row, group_id="g00000007") if row.kind is Kind.REUSED and row.step == 2 else row for row in rows
        ]

    found = plant(reused, to_another)
    assert found.trained_twice == 1
    assert "g00000007: used by [(0, 2)], first by []; max_uses is 2, each in another step" in found.findings


def test_a_further_use_that_was_not_taken_back_is_found(reused: Path) -> None:
    found = plant(reused, lambda rows: [row for row in rows if row.kind is not Kind.UNDONE])
    assert not found.ledger_closes
    assert found.findings[0].startswith("g00000002: uses by [(0, 3)] are in no model and were not taken back")
    assert "summary.json has other further uses: recounted {'uses': 3, 'tokens': 24}" in found.findings[1]


def test_a_further_use_of_what_is_too_old_is_found(reused: Path) -> None:
    # Group 1 is of weights 0.0: from 0.3 to 0.4 it is 3 steps old.
    found = plant(reused, lambda rows: changed(rows, Kind.REUSED, "g00000001", step=4))
    assert found.age_violations == 1
    assert "g00000001: a token 3 steps old was trained from (0, 3)" in found.findings


@pytest.fixture
def baseline(tmp_path: Path) -> Path:
    """Step 4 is made on group 7, of three rollouts of 4 tokens: too old, as old as may be, young without a reward."""
    journal = Journal(tmp_path / "journal", segment_bytes=1 << 20)
    buffer = Buffer(journal, too_old="baseline_only")  # type: ignore[arg-type]
    buffer.start()
    (ticket,) = buffer.issue(PolicyVersion(0, 0), 1)
    for step in range(3):
        buffer.fill(PolicyVersion(0, step), 2)
        buffer.train(PolicyVersion(0, step))
    buffer.insert(group_by_rollout(ticket, [[PolicyVersion(0, n)] * 4 for n in (0, 1, 3)], [1.0, 0.0, None]))
    buffer.fill(PolicyVersion(0, 3), 1)
    batch = buffer.leases.lease(PolicyVersion(0, 3), 2, 0.0)
    tokens = {held.group_id: {"trained": 8} for held in batch.groups}
    tokens[ticket.group_id] = {"trained": 4, "baseline_only": 4, "masked": 4}
    buffer.leases.trained(PolicyVersion(0, 4), [held.group_id for held in batch.groups], tokens, 0.0)
    journal.commit()
    journal.close()
    write_checkpoint(tmp_path / "checkpoints", PolicyVersion(0, 4), lambda folder: None)
    (tmp_path / "config.toml").write_text('[stream]\nmax_policy_age = 2\ntoo_old = "baseline_only"\n')
    return tmp_path


def test_a_token_that_is_too_old_and_in_the_baseline_alone_is_sound(baseline: Path) -> None:
    found = audit(baseline)
    assert found.findings == []
    # 7 groups of 8 tokens and one of 12.
    assert {fate: count for fate, count in found.tokens.items() if count} == {
        "generated": 68, "trained": 60, "baseline_only": 4, "masked": 4
    }  # fmt: skip
    (baseline / "config.toml").write_text("[stream]\nmax_policy_age = 2\n")
    assert audit(baseline).age_violations == 1


@pytest.mark.parametrize("tokens", [(8, 0, 4), (5, 3, 4)])
def test_more_tokens_than_the_young_rollouts_have_are_found(baseline: Path, tokens: tuple[int, int, int]) -> None:
    names = ("trained_tokens", "baseline_only_tokens", "masked_tokens")
    values = dict(zip(names, tokens, strict=True))
    found = plant(baseline, lambda rows: changed(rows, Kind.TRAINED, "g00000001", **values))
    assert found.age_violations == 1
    assert found.findings[0] == "g00000001: a token 3 steps old was trained from (0, 3)"


@pytest.fixture
def branching(tmp_path: Path) -> Path:
    """Step 4 is made on group 1, a branching one of two rollouts with two trained tokens each.

    The first has a trunk of two tokens before them, too old; to the second the trunk is context.
    """
    journal = Journal(tmp_path / "journal", segment_bytes=1 << 20)
    buffer = Buffer(journal, too_old="baseline_only")  # type: ignore[arg-type]
    buffer.start()
    (ticket,) = buffer.issue(PolicyVersion(0, 0), 1)
    for step in range(3):
        buffer.fill(PolicyVersion(0, step), 2)
        buffer.train(PolicyVersion(0, step))
    old, young = PolicyVersion(0, 0), PolicyVersion(0, 3)
    buffer.insert(as_branching(group_by_rollout(ticket, [[old, old, young, young]] * 2, [1.0, 0.0])))
    buffer.fill(young, 1)
    batch = buffer.leases.lease(young, 2, 0.0)
    tokens = {held.group_id: {"trained": 8} for held in batch.groups}
    tokens[ticket.group_id] = {"trained": 2, "baseline_only": 2, "masked": 2}
    buffer.leases.trained(PolicyVersion(0, 4), [held.group_id for held in batch.groups], tokens, 0.0)
    journal.commit()
    journal.close()
    write_checkpoint(tmp_path / "checkpoints", PolicyVersion(0, 4), lambda folder: None)
    (tmp_path / "config.toml").write_text('[stream]\nmax_policy_age = 2\ntoo_old = "baseline_only"\n')
    return tmp_path


def test_the_trunk_of_a_branching_group_is_sampled_once_and_not_trained(branching: Path) -> None:
    found = audit(branching)
    assert found.findings == []
    # 7 groups of 8 tokens, and one of 2 of a trunk and 2 of each rollout. Those of the first, whose trunk is too old,
    # are in the baseline alone.
    assert {fate: count for fate, count in found.tokens.items() if count} == {
        "generated": 62, "trained": 58, "baseline_only": 2, "masked": 2
    }  # fmt: skip
    # The trunk bounds the age of the rollout that sampled it.
    (branching / "config.toml").write_text("[stream]\nmax_policy_age = 2\n")
    assert audit(branching).age_violations == 1


def test_a_trunk_that_is_trained_is_found(branching: Path) -> None:
    values = {"trained_tokens": 4, "baseline_only_tokens": 2, "masked_tokens": 0}
    found = plant(branching, lambda rows: changed(rows, Kind.TRAINED, "g00000001", **values))
    assert found.age_violations == 1


def test_ages_go_over_the_common_ancestor() -> None:
    """Branch 1 forks from (0, 10), branch 2 from (1, 11)."""
    forks = {1: (0, 10), 2: (1, 11)}
    assert reach((2, 13), forks) == {2: 13, 1: 11, 0: 10}
    assert age((0, 13), (1, 12), forks) == 5  # 3 back, 2 on
    assert age((1, 12), (2, 13), forks) == 3  # 1 back to (1, 11), 2 on
    assert age((2, 12), (2, 13), forks) == 1
    assert age((0, 8), (2, 13), forks) == 5


def test_it_knows_nothing_of_the_trainer() -> None:
    """In a fresh interpreter the audit loads no module of ours."""
    code = (
        "import sys; sys.path.insert(0, 'scripts'); import kills.audit;"
        "print([name for name in sys.modules if name.split('.')[0] in ('stream_grpo', 'curator', 'torch', 'numpy')])"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    loaded = json.loads(done.stdout.replace("'", '"'))
    assert not [name for name in loaded if name.startswith(("stream_grpo", "curator", "torch"))]
