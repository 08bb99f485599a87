"""A file of a journal that is gone, or that another was copied over, is noticed; what is not of it is left alone."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from stream_grpo.buffer.chain import cut_logs, is_followed, missing_logs
from stream_grpo.buffer.layout import log_name, segment_name
from stream_grpo.buffer.recovery import LOG_HEADER, last_row, rows_of
from stream_grpo.buffer.transitions import Kind, encode_transitions
from stream_grpo.errors import JournalError
from tests.buffer.test_journal import Followed, row


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """Three logs, each with a segment of its own."""
    followed = Followed(tmp_path)
    for name in ("g1", "g2"):
        followed.commit(name)
        followed.begin_log()
    followed.commit("g3")
    followed.journal.close()
    return tmp_path


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def remove(*numbers: int) -> Callable[[Path], None]:
    def remove_logs(directory: Path) -> None:
        for number in numbers:
            (directory / log_name(number)).unlink()

    return remove_logs


def copy(source: int, target: int) -> Callable[[Path], None]:
    def copy_log(directory: Path) -> None:
        shutil.copy(directory / log_name(source), directory / log_name(target))

    return copy_log


def cut(number: int) -> Callable[[Path], None]:
    """A copy of a log from before it was closed."""

    def cut_log(directory: Path) -> None:
        path = directory / log_name(number)
        path.write_bytes(LOG_HEADER + encode_transitions(list(rows_of(path))[:-1]))

    return cut_log


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            remove(3),
            r"transitions-000003.arrow: missing; transitions-000002.arrow ends by naming it, .*put back a copy",
        ),
        (remove(2, 3), r"transitions-000002.arrow: missing; transitions-000001.arrow ends by naming it"),
        (remove(1), r": missing: transitions-000001.arrow; transitions-000003.arrow follows .*put back copies"),
        (remove(2), r": missing: transitions-000002.arrow; "),
        (remove(1, 2), r": missing: transitions-000001.arrow, transitions-000002.arrow; "),
        (copy(2, 3), r"transitions-000003.arrow: begins as transitions-000002.arrow does, so that one was copied over"),
        (copy(1, 3), r"transitions-000003.arrow: does not begin with a snapshot, as transitions-000001.arrow does"),
        (copy(1, 2), r"transitions-000002.arrow: does not end by naming the log after it: .* another file was copied"),
        (copy(3, 1), r"transitions-000001.arrow: does not end by naming the log after it"),
        (cut(1), r"transitions-000001.arrow: does not end by naming the log after it: it was cut"),
        (cut(2), r"transitions-000002.arrow: does not end by naming the log after it: it was cut"),
        (lambda directory: (directory / segment_name(2)).unlink(), r"segment-000002.arrow: .* data is missing"),
    ],
)
def test_a_file_that_is_gone_or_another_is_named_and_nothing_is_touched(
    journal: Path, change: Callable[[Path], None], sentence: str
) -> None:
    change(journal)
    before = files_of(journal)
    with pytest.raises(JournalError, match=sentence):
        Followed(journal)
    assert files_of(journal) == before


def test_the_only_log_with_a_later_one_copied_over_it_is_an_error(journal: Path) -> None:
    copy(3, 1)(journal)
    remove(2, 3)(journal)
    with pytest.raises(JournalError, match=r"transitions-000001.arrow: begins as transitions-000003.arrow does"):
        Followed(journal)


def test_a_new_log_without_a_whole_snapshot_is_an_error(journal: Path) -> None:
    (journal / log_name(3)).write_bytes(LOG_HEADER)
    with pytest.raises(
        JournalError, match=r"transitions-000003.arrow: does not begin with a snapshot, it has no whole"
    ):
        Followed(journal)


def test_a_log_that_was_copied_over_before_its_last_row_was_written_gets_none(journal: Path) -> None:
    """Behind a log that is its snapshot alone, where a crash may have left the last row out."""
    Followed(journal).begin_log()
    copy(1, 3)(journal)
    before = files_of(journal)
    with pytest.raises(JournalError, match=r"transitions-000003.arrow: does not begin with a snapshot"):
        Followed(journal)
    copy(2, 3)(journal)
    with pytest.raises(JournalError, match=r"transitions-000003.arrow: begins as transitions-000002.arrow does"):
        Followed(journal)
    assert files_of(journal).keys() == before.keys()


def test_logs_that_may_leave_may_be_gone(journal: Path) -> None:
    followed = Followed(journal)
    followed.remove(1)
    followed.journal.remove_segment(1)
    # A kill between the file and what follows: nothing says that log 1 has left.
    followed.journal.remove_log(1)
    followed.journal.close()
    again = Followed(journal)
    assert missing_logs(journal, again.retention) == cut_logs(journal, again.retention) == []
    # Nor does it matter what stands in its place.
    again.journal.close()
    copy(2, 1)(journal)
    Followed(journal).journal.close()


def test_the_last_row_is_found_from_the_end_alone(tmp_path: Path) -> None:
    path = tmp_path / log_name(1)
    path.write_bytes(LOG_HEADER)
    assert last_row(path) is None
    # 200 rows of one commit are more than is looked at, a commit of one row after them is not.
    rows = encode_transitions([row(f"g{number}") for number in range(200)])
    path.write_bytes(LOG_HEADER + rows)
    assert last_row(path) is None
    last = encode_transitions([row("g200", Kind.LEASED)])
    path.write_bytes(LOG_HEADER + rows + last)
    assert last_row(path) == row("g200", Kind.LEASED)
    assert not is_followed(path, 2)
    path.write_bytes(LOG_HEADER + rows + last[:-1])
    assert last_row(path) is None


def test_files_of_other_names_are_named_and_left_alone(journal: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = ["notes.txt", "segment-000001.arrow.bak", "segment-000000.arrow", "transitions-0000009.arrow", ".mine.tmp"]
    for name in names:
        (journal / name).write_text("mine")
    (journal / f".{log_name(4)}.tmp").write_bytes(LOG_HEADER)
    followed = Followed(journal)
    assert followed.journal.log_number == 3
    assert f"left alone, no journal names a file so: {', '.join(sorted(names))}" in caplog.text
    assert all((journal / name).read_text() == "mine" for name in names)
    assert not (journal / f".{log_name(4)}.tmp").exists()
    followed.commit("g4")
