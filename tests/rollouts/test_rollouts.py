"""The commands that read a journal: what a person sees, also while the run goes on."""

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from rich.console import Console as RichConsole
from typer.testing import CliRunner

from stream_grpo.buffer.book import Book
from stream_grpo.buffer.intake import Intake
from stream_grpo.buffer.journal import Journal
from stream_grpo.buffer.leases import Leases
from stream_grpo.cli import app
from stream_grpo.console import Console
from stream_grpo.errors import ConfigError
from stream_grpo.rollouts import commands
from stream_grpo.rollouts.missing import what_is_missing
from stream_grpo.rollouts.text import group_text
from stream_grpo.rollouts.views import Filters, Groups, find, newest_lines
from stream_grpo.transport.codec import encode_group
from stream_grpo.types import PolicyVersion, RewardResult, RolloutGroup
from tests.buffer.fakes import as_branching, group_for, rules

V0, V1 = PolicyVersion(0, 0), PolicyVersion(0, 1)
LATER = 1_700_000_000.0


class Run:
    """A run folder whose journal is written as the buffer writes it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.journal = Journal(path / "journal", segment_bytes=1 << 20, log_bytes=1)
        self.book = Book(self.journal, rules(max_policy_age=4), now=LATER)
        self.intake, self.leases = Intake(self.book, now=0.0), Leases(self.book)

    def insert(self, version: PolicyVersion, **group: Any) -> str:
        ((ticket,), _) = self.intake.issue("s0", version, 1, f"request-{len(self.book.taken)}", LATER)
        change = group.pop("change", lambda group: group)
        made: RolloutGroup = change(group_for(ticket, version, **group))
        self.intake.insert("me", encode_group(made), LATER)
        self.journal.commit()
        return ticket.group_id

    def train(self, version: PolicyVersion) -> None:
        batch = self.leases.lease(version, 2, LATER)
        tokens = {held.group_id: {"trained": held.num_tokens} for held in batch.groups}
        self.leases.trained(PolicyVersion(0, version.step + 1), list(tokens), tokens, LATER)
        self.journal.commit()

    def begin_log(self) -> None:
        self.journal.begin_log(self.book.snapshot(LATER, closes_log=self.journal.log_number))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Three groups with signal, two of them trained in step 0; one without; one that waits and is two steps old."""
    run = Run(tmp_path / "run")
    run.leases.start(V0, {}, LATER)
    run.insert(V0)
    run.insert(V0, rewards=(1.0, 1.0))
    run.insert(V0, change=lambda group: replace(group, domain="geometry"))
    run.insert(V0, rewards=(1.0, 0.0, None))
    run.train(V0)
    run.insert(V1)
    return run


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, [*arguments])
    return result.exit_code, result.output


def test_groups_are_listed_oldest_first_with_what_became_of_them(run: Run) -> None:
    lines = newest_lines(run.path / "journal", Filters(), limit=20)
    found = [(line.view.group_id[-1], line.view.state, line.view.reason, line.age, line.facts.spread) for line in lines]
    # Group 4 waits, sampled at 0.0: at learner 0.1 it is one step old.
    assert found == [
        ("1", "trained", "", 0, 1.0),
        ("2", "no_signal", "all_right", 0, 0.0),
        ("3", "trained", "", 0, 1.0),
        ("4", "accepted", "", 1, 1.0),
        ("5", "accepted", "", 0, 1.0),
    ]
    assert [line.view.made for line in lines][:3] == [V1, None, V1]


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        (Filters(state="trained"), "13"),
        (Filters(state="accepted", min_age=1), "4"),
        (Filters(domain="geometry"), "3"),
        (Filters(problem="problem-of-g0000000[25]"), "25"),
        (Filters(problem="problem-of-g00000004"), "4"),
        (Filters(min_age=2), ""),
    ],
)
def test_filters_join(run: Run, filters: Filters, expected: str) -> None:
    lines = newest_lines(run.path / "journal", filters, limit=20)
    assert "".join(line.view.group_id[-1] for line in lines) == expected


def test_the_newest_are_found_over_several_logs_and_no_more_are_read_than_needed(run: Run) -> None:
    run.begin_log()
    run.insert(V1)
    run.train(V1)
    run.begin_log()
    run.insert(PolicyVersion(0, 2))
    directory = run.path / "journal"
    newest = newest_lines(directory, Filters(), limit=1)
    assert [(line.view.group_id, line.age) for line in newest] == [("g00000007", 0)]
    assert list(Groups(directory, 1).views) == ["g00000007"]
    # Group 4 came in under the first log and was trained under the second.
    lines = newest_lines(directory, Filters(state="trained"), limit=2)
    assert [(line.view.group_id, line.view.made, line.age) for line in lines] == [
        ("g00000004", PolicyVersion(0, 2), 1), ("g00000005", PolicyVersion(0, 2), 0)
    ]  # fmt: skip
    assert len(newest_lines(directory, Filters(), limit=100)) == 7


def test_groups_whose_segment_has_left_are_left_out(run: Run) -> None:
    run.begin_log()
    run.insert(V1)
    run.journal.remove_segment(1)
    lines = newest_lines(run.path / "journal", Filters(), limit=100)
    assert [line.view.group_id for line in lines] == ["g00000006"]
    with pytest.raises(
        ConfigError, match=r"group g00000001: no record in .*; there are 6 groups, g00000001 to g00000006"
    ):
        find(run.path / "journal", "g00000001")


def test_the_list_is_plain_where_it_is_piped_and_json_where_asked_for(run: Run) -> None:
    code, output = invoke("rollouts", str(run.path), "--limit", "2")
    header, first, second = output.splitlines()
    assert code == 0
    assert header.split("\t")[:8] == ["group", "problem", "domain", "state", "why", "age", "reward", "spread"]
    assert first.split("\t")[:9] == [
        "g00000004", "problem-of-g00000004", "add-2", "accepted", "", "1", "0.500", "1.000", "12"
    ]  # fmt: skip
    assert second.startswith("g00000005\t")
    code, output = invoke("rollouts", str(run.path), "--json", "--limit", "1")
    found = json.loads(output.splitlines()[-1])
    assert (found["group_id"], found["rewards"], found["versions"]) == ("g00000005", [1.0, 0.0], [[0, 1]])


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--fate", "lost"], "--fate lost: no state of a group that has come in; known: accepted, leased, trained"),
        (["--show", "g9"], "group g9: no record in"),
        (["--parquet", "/nowhere/x.parquet"], "--parquet /nowhere/x.parquet: cannot be written"),
    ],
)
def test_what_is_not_there_is_refused(run: Run, arguments: list[str], reason: str) -> None:
    code, output = invoke("rollouts", str(run.path), *arguments)
    assert (code, reason in output) == (2, True), output


def test_a_folder_without_a_journal_is_refused(tmp_path: Path) -> None:
    for command in ("rollouts", "ledger"):
        code, output = invoke(command, str(tmp_path))
        assert code == 2
        assert "no journal there" in output


WORDS = {5: "What", 6: " is", 7: " 2?", 8: "It", 9: " is", 10: " 41", 11: "."}


def words(ids: Any) -> str:
    return "".join(WORDS[int(token_id)] for token_id in ids)


def test_a_group_is_shown_as_a_person_reads_it(run: Run) -> None:
    def with_evidence(group: RolloutGroup) -> RolloutGroup:
        first, *rest = group.rollouts
        reward = RewardResult(
            decision=first.reward.decision, reward=1.0, verifier="math", verifier_version="2",
            components={"right": 1.0}, evidence="extracted 41, gold 41",
        )  # fmt: skip
        logprobs = np.where(np.arange(7) == 5, -4.0, first.behavior_logprobs).astype(np.float32)
        # The last but one token is what an environment said.
        mask = first.loss_mask & (np.arange(7) != 5)
        branches, steps = (np.where(mask, of, -1) for of in (first.version_branch, first.version_step))
        return replace(
            group, rollouts=(replace(first, reward=reward), replace(rest[0], behavior_logprobs=logprobs),
                             replace(rest[0], loss_mask=mask, version_branch=branches, version_step=steps,
                                     behavior_logprobs=first.behavior_logprobs * mask))
        )  # fmt: skip

    group_id = run.insert(V1, change=with_evidence)
    line, data = find(run.path / "journal", group_id)
    blocks = list(group_text(line, data, words, with_tokens=True))
    texts = [text for style, text in blocks if style != "tokens"]
    assert texts[0] == "group g00000006  accepted"
    assert texts[1] == "problem problem-of-g00000006  domain add-2  sampler sampler-0"
    assert texts[2] == "versions 0.1  age 0 now"
    assert texts[4] == "reward mean 0.333, spread 1.000"
    assert texts[5:7] == ["prompt", "What is 2?"]
    assert texts[7] == "rollout 0  pass  reward 1  4 tokens, ended by eos  versions 0.1"
    assert texts[8:12] == [
        "It is 41.",
        "logprob mean -0.500, lowest -0.500 at token 0 'It'",
        "math 2: extracted 41, gold 41",
        "components right 1",
    ]
    # (3 x -0.5 - 4) / 4 = -1.375, at token 5 of 7 with a prompt of 3.
    assert "logprob mean -1.375, lowest -4.000 at token 2 ' 41'" in texts
    assert [block for block in blocks if block[0] == "context"] == [("context", " 41")]
    tokens = next(text for style, text in blocks if style == "tokens")
    assert tokens.splitlines()[1].split() == ["1", "9", "-0.5000", "0.1", "'", "is'"]


def test_a_trunk_is_shown_as_sampled_where_it_was_and_never_as_trained(run: Run) -> None:
    group_id = run.insert(V1, change=as_branching)
    line, data = find(run.path / "journal", group_id)
    blocks = list(group_text(line, data, words, with_tokens=True))
    assert [block for block in blocks if block[0] in ("trunk", "text", "context")] == [
        ("text", "What is 2?"),
        ("trunk", "It is"),
        ("text", " 41."),
        ("context", "It is"),
        ("text", " 41."),
    ]
    headings = [text for style, text in blocks if style == "heading"]
    assert "4 tokens (2 of the trunk of its group, not trained), ended by eos" in headings[1]
    assert "2 tokens, ended by eos" in headings[2]
    of_first, of_second = (text.splitlines() for style, text in blocks if style == "tokens")
    assert of_first[0].split() == ["0", "8", "-0.5000", "0.1", "'It'", "trunk,", "not", "trained"]
    assert of_first[2].split() == ["2", "10", "-0.5000", "0.1", "'", "41'"]
    assert of_second[0].split() == ["0", "8", "context", "'It'"]


def test_show_reads_with_the_tokenizer_of_the_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "decoder", lambda path: words)
    code, output = invoke("rollouts", str(run.path), "--show", "g00000001")
    assert code == 0
    assert "\nWhat is 2?\n" in output
    assert output.splitlines()[0] == "group g00000001  trained"
    assert "trained into 0.1" in output


def test_a_parquet_file_has_the_columns_of_a_segment_and_what_became_of_the_group(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "groups.parquet"
    code, output = invoke("rollouts", str(run.path), "--parquet", str(path), "--fate", "trained")
    assert (code, output.strip()) == (0, f"{path}: 2 groups, a row a rollout")
    table = pq.read_table(path)
    assert table.column("group_id").to_pylist() == ["g00000001"] * 2 + ["g00000003"] * 2
    assert table.column("state").to_pylist() == ["trained"] * 4
    assert table.column("made_step").to_pylist() == [1] * 4
    assert table.column("age").to_pylist() == [0] * 4
    assert table.column("token_ids").to_pylist()[0] == list(range(5, 12))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["groups.parquet", "run"]


def test_the_account_is_read_from_the_newest_log_and_says_whether_it_closes(run: Run) -> None:
    for _ in range(2):
        code, output = invoke("ledger", str(run.path), "--json")
        account = json.loads(output.splitlines()[-1])
        assert code == 0
        assert account["closes"]
        assert account["gap"] == ""
        assert account["learner"] == [0, 1]
        # 5 groups of 2 rollouts of 4 tokens, one of them with a third rollout.
        assert account["tokens"]["generated"] == 5 * 8 + 4
        assert (account["tokens"]["trained"], account["tokens"]["buffered"]) == (16, 8 + 12)
        assert account["ends"] == {"trained": 2, "no_signal: all_right": 1}
        run.begin_log()
    output = invoke("ledger", str(run.path))[1]
    assert "trained\t2\t16\t36.4%" in output
    assert "buffered\t2\t20\t45.5%" in output
    assert output.splitlines()[-1] == "closes"


def three_logs(run: Run) -> Path:
    """Groups 1 to 5 under the first log, 6 under the second, 7 under the third, each with a segment of its own."""
    for _ in range(2):
        run.begin_log()
        run.insert(V1)
    return run.path / "journal"


@pytest.mark.parametrize(
    ("name", "sentence", "groups"),
    [
        (
            "transitions-000003.arrow",
            "is missing: everything is shown as it was when transitions-000002.arrow ended",
            "123456",
        ),
        ("transitions-000002.arrow", "is missing: groups that came in under it are not shown", "123457"),
        ("transitions-000001.arrow", "is missing: groups that came in under it are not shown", "67"),
        ("segment-000001.arrow", "is missing: the 5 groups in it are not shown", "67"),
    ],
)
def test_what_is_missing_of_a_journal_is_said_beside_what_is_shown(
    run: Run, name: str, sentence: str, groups: str
) -> None:
    directory = three_logs(run)
    assert "MISSING" not in invoke("rollouts", str(run.path))[1] + invoke("ledger", str(run.path))[1]
    (directory / name).unlink()
    code, output = invoke("rollouts", str(run.path))
    assert code == 0
    assert f"MISSING: {name} {sentence}" in output
    assert "".join(line.split("\t")[0][-1] for line in output.splitlines() if line.startswith("g0")) == groups
    code, output = invoke("ledger", str(run.path))
    assert (code, f"MISSING: {name} {sentence}" in output) == (1, True)
    assert commands.account_of(run.path)["missing"][0].startswith(f"{name} {sentence}")


def test_a_log_that_was_copied_over_is_said_or_refused(run: Run) -> None:
    directory = three_logs(run)
    data = [(directory / f"transitions-{number:06d}.arrow").read_bytes() for number in (1, 2, 3)]
    # As it was before the last row, which is some 1.6 kB long: an older copy.
    (directory / "transitions-000001.arrow").write_bytes(data[0][: len(data[0]) - 100])
    code, output = invoke("rollouts", str(run.path))
    assert code == 0
    assert "MISSING: transitions-000001.arrow does not end by naming the log after it" in output
    (directory / "transitions-000003.arrow").write_bytes(data[1])
    code, output = invoke("ledger", str(run.path))
    assert code != 0
    assert "transitions-000003.arrow: begins as transitions-000002.arrow does" in output


def test_a_log_that_is_being_begun_is_not_missing(run: Run) -> None:
    """The new log has its name, the one that it follows is not yet closed; or it had just ended when it was listed."""
    directory = run.path / "journal"
    before = (directory / "transitions-000001.arrow").read_bytes()
    run.begin_log()
    (directory / "transitions-000001.arrow").write_bytes(before)
    assert what_is_missing(directory) == []


def test_a_gap_is_exit_code_1(run: Run) -> None:
    run.book.ledger._generated += 3
    run.begin_log()
    code, output = invoke("ledger", str(run.path))
    assert code == 1
    assert "DOES NOT CLOSE: 47 tokens were generated, 44 have a fate, a gap of 3" in output


def test_at_a_terminal_the_list_is_a_table(run: Run, tmp_path: Path) -> None:
    console, out = Console(), io.StringIO()
    console._rich = RichConsole(file=out, force_terminal=True, width=160, color_system=None)
    commands.show_groups(run.path, Filters(), 20, console)
    lines = [line.rstrip() for line in out.getvalue().splitlines() if line.strip()]
    assert lines[0].split()[:3] == ["group", "problem", "domain"]
    assert set(lines[1]) <= {"─", " "}
    assert len(lines) == 7


def test_reading_needs_no_lock_and_disturbs_no_writer(run: Run) -> None:
    readers: list[Callable[[], object]] = [
        lambda: newest_lines(run.path / "journal", Filters(), 5),
        lambda: invoke("ledger", str(run.path)),
    ]
    for read in readers:
        read()
        run.insert(V1)
    # A commit that is being written is not there yet.
    log = run.journal._log.path
    size = log.stat().st_size
    with log.open("ab") as file:
        file.write(b"\xff\xff\xff\xff\x10\x00")
    assert len(newest_lines(run.path / "journal", Filters(), 100)) == 7
    assert log.stat().st_size == size + 6
