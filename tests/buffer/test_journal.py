"""The journal: what is acknowledged survives every cut, and no damage goes unseen."""

import errno
import itertools
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from stream_grpo.buffer.chain import is_followed
from stream_grpo.buffer.facts import batch_of_record, facts_of
from stream_grpo.buffer.journal import Journal
from stream_grpo.buffer.layout import (
    LOCK_NAME,
    LOG_NAME,
    SINGLE_LOG_NAME,
    log_name,
    segment_name,
    segments,
    unnamed_name,
)
from stream_grpo.buffer.recovery import LOG_HEADER, SEGMENT_HEADER, retained, rows_of
from stream_grpo.buffer.snapshot import snapshot_row
from stream_grpo.buffer.transitions import TRANSITION_SCHEMA, Kind, Transition, encode_transitions
from stream_grpo.errors import JournalError
from stream_grpo.transport.codec import GROUP_SCHEMA, decode_group, encode_group
from tests.fakes import make_group

SEGMENT_BYTES = 1 << 20


def row(group_id: str, kind: Kind = Kind.ACCEPTED) -> Transition:
    return Transition(kind=kind, time_s=1.5, group_id=group_id, num_tokens=2, reason="ünïcode")


def record(group_id: str) -> bytes:
    return encode_group(make_group(group_id, [1.0, 0.0], num_prompt=1, num_response=1))


def open_journal(directory: Path, segment_bytes: int = SEGMENT_BYTES) -> Journal:
    return Journal(directory, segment_bytes=segment_bytes)


def write(directory: Path, commits: list[list[str]], segment_bytes: int = SEGMENT_BYTES) -> list[tuple[int, int]]:
    """Commit groups; the sizes of segment 1 and of the log before the first and after every commit."""
    journal = open_journal(directory, segment_bytes)
    sizes = [(0, (directory / LOG_NAME).stat().st_size)]
    for group_ids in commits:
        for group_id in group_ids:
            journal.append_group(record(group_id), row(group_id))
        journal.commit()
        sizes.append(((directory / segment_name(1)).stat().st_size, (directory / LOG_NAME).stat().st_size))
    journal.close()
    return sizes


def group_ids_in(journal: Journal) -> list[str]:
    """Groups with a record, each of them read and compared."""
    ids = []
    for transition in journal.replay():
        if transition.location:
            assert journal.read(transition.location) == record(transition.group_id)
            ids.append(transition.group_id)
    return ids


@pytest.fixture
def ram(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder without a disk under it where there is one, and fsync switched off: for thousands of openings."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        yield Path(name)


def test_what_was_committed_is_there_after_a_restart(tmp_path: Path) -> None:
    write(tmp_path, [["g1", "g2"], ["g3"]])
    journal = open_journal(tmp_path)
    assert group_ids_in(journal) == ["g1", "g2", "g3"]
    assert [t.reason for t in journal.replay()] == ["ünïcode"] * 3
    assert journal.num_incomplete == 0


def test_what_was_not_committed_is_not_written(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    journal.append_group(record("g1"), row("g1"))
    journal.close()
    assert group_ids_in(open_journal(tmp_path)) == []


def test_both_files_are_plain_arrow_streams(tmp_path: Path) -> None:
    write(tmp_path, [["g1", "g2"], ["g3"]])
    groups = pa.ipc.open_stream((tmp_path / segment_name(1)).read_bytes()).read_all()
    log = pa.ipc.open_stream((tmp_path / LOG_NAME).read_bytes()).read_all()
    assert groups.schema.equals(GROUP_SCHEMA, check_metadata=True)
    assert groups.column("group_id").to_pylist() == ["g1", "g1", "g2", "g2", "g3", "g3"]
    assert log.schema.equals(TRANSITION_SCHEMA, check_metadata=True)
    assert log.column("group_id").to_pylist() == ["g1", "g2", "g3"]
    # The log alone is enough to find a record.
    place = log.slice(2, 1).to_pylist()[0]
    data = (tmp_path / segment_name(place["segment"])).read_bytes()[place["offset"] :][: place["length"]]
    assert decode_group(data).group_id == "g3"


def test_a_segment_is_closed_above_its_size_and_all_are_read(tmp_path: Path) -> None:
    # A record is some 2.5 kB, so every commit of two is above 4 kB and begins a new segment.
    write(tmp_path, [["g1", "g2"], ["g3", "g4"], ["g5", "g6"]], segment_bytes=4096)
    assert [path.name for path in sorted(tmp_path.glob("segment-*"))] == [segment_name(n) for n in (1, 2, 3)]
    journal = open_journal(tmp_path, 4096)
    assert group_ids_in(journal) == ["g1", "g2", "g3", "g4", "g5", "g6"]
    assert journal.num_bytes == sum(path.stat().st_size for path in tmp_path.glob("*.arrow"))


def crash_states(sizes: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """(segment bytes, log bytes, acknowledged commits) after a kill at every byte, in the order of writing."""
    states = [(0, size, 0) for size in range(sizes[0][1])]
    for number, ((segment, log), (segment_after, log_after)) in enumerate(itertools.pairwise(sizes)):
        states += [(size, log, number) for size in range(segment, segment_after)]
        states += [(segment_after, size, number) for size in range(log, log_after)]
    return [*states, (*sizes[-1], len(sizes) - 1)]


@pytest.mark.slow
def test_a_cut_at_every_byte_leaves_exactly_what_was_acknowledged(ram: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    commits = [["g1"], ["g2", "g3"]]
    sizes = write(ram / "whole", commits)
    segment, log = ((ram / "whole" / name).read_bytes() for name in (segment_name(1), LOG_NAME))
    cut = ram / "cut"
    cut.mkdir()
    for segment_size, log_size, num_acknowledged in crash_states(sizes):
        (cut / segment_name(1)).write_bytes(segment[:segment_size])
        (cut / LOG_NAME).write_bytes(log[:log_size])
        journal = open_journal(cut)
        found = [t.group_id for t in journal.replay()]
        journal.close()
        assert found == [name for commit in commits[:num_acknowledged] for name in commit], (
            segment_size,
            log_size,
        )
        # The repaired files hold whole messages alone: they end where a commit ended.
        assert (cut / LOG_NAME).stat().st_size == sizes[num_acknowledged][1]
        if num_acknowledged:
            assert (cut / segment_name(1)).stat().st_size == sizes[num_acknowledged][0]
        for aside in cut.glob("unnamed-*"):
            aside.unlink()


def test_incomplete_groups_are_counted_in_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sizes = write(tmp_path, [["g1"], ["g2", "g3"]])
    # The kill came after both records were written, before their commit was in the log.
    os.truncate(tmp_path / LOG_NAME, sizes[1][1])
    journal = open_journal(tmp_path)
    assert journal.num_incomplete == 2
    assert "2 groups that it does not name" in caplog.text
    assert group_ids_in(journal) == ["g1"]
    journal.append_group(record("g4"), row("g4"))
    journal.commit()
    assert group_ids_in(journal) == ["g1", "g4"]


@pytest.mark.slow
def test_a_flipped_bit_is_found_wherever_it_is(ram: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Every second byte: an error, or, in the head of the last commit, a warning; else nothing has changed."""
    sizes = write(ram / "whole", [["g1"], ["g2"]])
    files = {name: (ram / "whole" / name).read_bytes() for name in (segment_name(1), LOG_NAME)}
    whole = list(open_journal(ram / "whole").replay())
    flipped = ram / "flipped"
    flipped.mkdir()
    num_found = 0
    for name, data in files.items():
        for at in range(0, len(data), 2):
            for other, content in files.items():
                (flipped / other).write_bytes(content)
            (flipped / name).write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
            caplog.clear()
            try:
                journal = open_journal(flipped)
            except JournalError:
                num_found += 1
                continue
            found = list(journal.replay())
            if found != whole:
                assert "repaired" in caplog.text
                assert name == LOG_NAME
                assert at >= sizes[1][1]
            for transition in found:
                assert transition.location
                assert journal.read(transition.location) == record(transition.group_id)
            journal.close()
    # Records are guarded byte by byte; what is left are the padding and the unused fields of schemas and log.
    assert num_found > sum(map(len, files.values())) // 2 * 0.7


def test_damage_in_the_middle_names_segment_offset_and_group(tmp_path: Path) -> None:
    write(tmp_path, [["g1"], ["g2"], ["g3"]])
    open_journal(tmp_path).close()
    path = tmp_path / segment_name(1)
    data = bytearray(path.read_bytes())
    offset = len(GROUP_SCHEMA.serialize().to_pybytes()) + len(record("g1"))
    data[offset + 2500] ^= 4
    path.write_bytes(data)
    with pytest.raises(
        JournalError, match=rf"segment-000001.arrow: the record of group g2 at offset {offset} is damaged"
    ):
        open_journal(tmp_path)


def test_damage_in_a_closed_segment_is_found_when_it_is_read(tmp_path: Path) -> None:
    write(tmp_path, [["g1", "g2"], ["g3"]], segment_bytes=4096)
    path = tmp_path / segment_name(1)
    data = bytearray(path.read_bytes())
    data[-10] ^= 1
    path.write_bytes(data)
    journal = open_journal(tmp_path)
    g1, g2, g3 = (t.location for t in journal.replay())
    assert g1
    assert g2
    assert g3
    assert journal.read(g1) == record("g1")
    assert journal.read(g3) == record("g3")
    with pytest.raises(JournalError, match=f"record of group g2 at offset {g2.offset} is damaged"):
        journal.read(g2, "g2")


def test_a_log_damaged_before_its_last_commit_is_no_torn_tail(tmp_path: Path) -> None:
    sizes = write(tmp_path, [["g1"], ["g2"]])
    data = bytearray((tmp_path / LOG_NAME).read_bytes())
    start = sizes[0][1]
    # The length in the head of the first commit: as it stands now the message reaches beyond the end of the file.
    data[start + 6] ^= 0x10
    (tmp_path / LOG_NAME).write_bytes(data)
    with pytest.raises(
        JournalError, match=f"damaged at offset {start}, and a whole commit follows at offset {sizes[1][1]}"
    ):
        open_journal(tmp_path)


def test_acknowledged_bytes_that_are_gone_are_an_error_not_a_warning(tmp_path: Path) -> None:
    write(tmp_path, [["g1"], ["g2"]])
    path = tmp_path / segment_name(1)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(
        JournalError, match=r"segment-000001.*ends at \d+, but the log names .* acknowledged data is missing"
    ):
        open_journal(tmp_path)


@pytest.mark.parametrize("size", [0, 100])
def test_a_log_that_is_gone_is_no_new_journal(tmp_path: Path, size: int) -> None:
    write(tmp_path, [["g1"]])
    os.truncate(tmp_path / LOG_NAME, size)
    before = (tmp_path / segment_name(1)).read_bytes()
    with pytest.raises(JournalError, match=r"missing, empty or cut within its first \d+ bytes.*put back a copy"):
        open_journal(tmp_path)
    assert (tmp_path / segment_name(1)).read_bytes() == before


@pytest.mark.parametrize(("name", "version"), [(LOG_NAME, "6"), (segment_name(1), "2")])
def test_another_schema_version_is_refused_naming_both(tmp_path: Path, name: str, version: str) -> None:
    write(tmp_path, [["g1"]])
    path = tmp_path / name
    # The version and its padding in the schema's metadata; the length stays, so that the offsets in the log still hold.
    data, here = path.read_bytes(), b"\x01\x00\x00\x00" + version.encode() + b"\x00"
    assert data.count(here) == 1
    path.write_bytes(data.replace(here, b"\x01\x00\x00\x009\x00"))
    sentence = rf"written as stream_grpo\.\w+ version 9 .*, this program reads stream_grpo\.\w+ version {version} "
    with pytest.raises(JournalError, match=sentence):
        open_journal(tmp_path)


def test_nothing_is_in_the_log_before_its_record_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = open_journal(tmp_path)
    journal.append_group(record("g1"), row("g1"))
    events: list[str] = []
    write_, fsync = os.write, os.fsync

    def note(what: str, descriptor: int) -> None:
        events.append(f"{what} {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")

    def noted_write(descriptor: int, data: bytes) -> int:
        note("write", descriptor)
        return write_(descriptor, data)

    def noted_fsync(descriptor: int) -> None:
        note("fsync", descriptor)
        fsync(descriptor)

    monkeypatch.setattr(os, "write", noted_write)
    monkeypatch.setattr(os, "fsync", noted_fsync)
    journal.commit()
    segment = segment_name(1)
    assert events == [
        f"write {segment}",
        f"fsync {segment}",
        f"fsync {tmp_path.name}",
        f"write {LOG_NAME}",
        f"fsync {LOG_NAME}",
    ]
    # Later commits to the same segment: one fsync each.
    journal.append_group(record("g2"), row("g2"))
    journal.append_group(record("g3"), row("g3"))
    events.clear()
    journal.commit()
    assert events == [f"write {segment}", f"fsync {segment}", f"write {LOG_NAME}", f"fsync {LOG_NAME}"]


def test_a_full_disk_says_so_and_loses_nothing_acknowledged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, [["g1"]])
    journal = open_journal(tmp_path)
    journal.append_group(record("g2"), row("g2"))

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(JournalError, match="No space left on device; 1 groups were not acknowledged"):
            journal.commit()
    # A journal that failed once takes nothing more: what is behind the failed write is unknown.
    with pytest.raises(JournalError, match="No space left"):
        journal.commit()
    journal.close()
    assert group_ids_in(open_journal(tmp_path)) == ["g1"]


def test_two_processes_never_write_one_journal(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    with pytest.raises(JournalError, match="another process has this journal open"):
        open_journal(tmp_path)
    journal.close()
    open_journal(tmp_path).close()


WRITER = """
    import sys
    from pathlib import Path
    from stream_grpo.buffer.journal import Journal
    from tests.buffer.test_journal import record, row

    journal = Journal(Path(sys.argv[1]), segment_bytes=1 << 14)
    for number in range(10_000):
        journal.append_group(record(f"g{number}"), row(f"g{number}"))
        journal.commit()
        print(number, flush=True)
"""


def test_whole_numbers_in_columns_of_floats_have_their_checksum(tmp_path: Path) -> None:
    written = Transition(kind=Kind.INVALID, time_s=1, group_id="g1", reward_sum=0)
    journal = open_journal(tmp_path)
    journal.append(written)
    journal.commit()
    journal.close()
    assert list(open_journal(tmp_path).replay()) == [written]


def test_the_rewards_of_a_group_without_any_add_up_to_a_float() -> None:
    facts = facts_of(batch_of_record(encode_group(make_group("g1", [None, None]))))
    assert repr(facts.reward_sum) == "0.0"


def test_a_process_killed_while_it_writes_has_kept_what_it_acknowledged(tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(WRITER), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout
        acknowledged = [next(writer.stdout) for _ in range(40)]
        writer.send_signal(signal.SIGKILL)
        acknowledged += list(writer.stdout)
    found = group_ids_in(open_journal(tmp_path, 1 << 14))
    # One more commit may have become durable that nobody was told of.
    assert len(acknowledged) <= len(found) <= len(acknowledged) + 1
    assert found == [f"g{number}" for number in range(len(found))]


class Followed:
    """A journal and what its log says of the segments, as the book follows it."""

    def __init__(self, directory: Path, *, segment_bytes: int = SEGMENT_BYTES, log_bytes: int = 1) -> None:
        self.directory = directory
        self.journal = Journal(directory, segment_bytes=segment_bytes, log_bytes=log_bytes)
        self.retention = retained(directory / log_name(self.journal.log_number), self.journal.replay())

    def commit(self, *group_ids: str) -> None:
        for group_id in group_ids:
            self.retention.apply(self.journal.append_group(record(group_id), row(group_id)))
        self.journal.commit()

    def begin_log(self) -> None:
        self.retention.close_log(self.journal.log_number)
        following = self.journal.log_number + 1
        self.journal.begin_log(snapshot_row({"retention": self.retention}, 0.0, begins_log=following))

    def remove(self, number: int) -> None:
        removed = Transition(kind=Kind.REMOVED, time_s=0.0, segment=number)
        self.journal.append(removed)
        self.retention.apply(removed)
        self.journal.commit()

    @property
    def files(self) -> list[str]:
        return sorted(path.name for path in self.directory.iterdir() if path.name != LOCK_NAME)


def test_a_log_that_is_full_is_followed_by_one_that_begins_with_a_snapshot(tmp_path: Path) -> None:
    followed = Followed(tmp_path)
    assert not followed.journal.log_is_full
    followed.commit("g1", "g2")
    assert followed.journal.log_is_full
    followed.begin_log()
    assert not followed.journal.log_is_full
    followed.commit("g3")
    followed.journal.close()
    # A log and the segments that it names leave together, so that the segments begin anew with the log.
    assert followed.files == [segment_name(1), segment_name(2), log_name(1), log_name(2)]
    for path in tmp_path.glob("*.arrow"):
        pa.ipc.open_stream(path.read_bytes()).read_all()
    again = Followed(tmp_path)
    assert [t.kind for t in again.journal.replay()] == [Kind.SNAPSHOT, Kind.ACCEPTED]
    assert vars(again.retention) == vars(followed.retention)
    assert again.retention.logs == {1: 1}
    assert again.journal.num_bytes == sum(path.stat().st_size for path in tmp_path.glob("*.arrow"))
    # What was acknowledged under the first log is read as before.
    g1 = next(t for t in rows_of(tmp_path / log_name(1)) if t.group_id == "g1")
    assert g1.location
    assert again.journal.read(g1.location) == record("g1")
    again.commit("g4")
    assert group_ids_in(again.journal) == ["g3", "g4"]


def test_a_start_right_after_a_new_log_begins_another_segment(tmp_path: Path) -> None:
    followed = Followed(tmp_path)
    followed.commit("g1")
    followed.begin_log()
    followed.journal.close()
    again = Followed(tmp_path)
    again.commit("g2")
    assert again.files == [segment_name(1), segment_name(2), log_name(1), log_name(2)]


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.nightly), 307])
def test_a_journal_cut_at_any_byte_around_a_new_log_has_what_was_acknowledged(
    ram: Path, caplog: pytest.LogCaptureFixture, every: int
) -> None:
    """Each kill is in one of four: the hidden file, the last row of the log before, the records after it, their commit.

    The hidden file has its name before the last row is begun.
    """
    caplog.set_level(logging.ERROR)
    whole = Followed(ram / "whole")
    whole.commit("g1")
    earlier = {name: (ram / "whole" / name).read_bytes() for name in whole.files}
    whole.begin_log()
    former, closed = earlier[log_name(1)], (ram / "whole" / log_name(1)).read_bytes()
    assert closed.startswith(former)
    following = (ram / "whole" / log_name(2)).read_bytes()
    whole.commit("g2")
    segment, log = ((ram / "whole" / name).read_bytes() for name in (segment_name(2), log_name(2)))
    hidden = f".{log_name(2)}.tmp"
    kills = [
        *(({hidden: following[:size]}, ["g1"]) for size in range(0, len(following), every)),
        *(
            ({log_name(2): following, log_name(1): closed[:size]}, [])
            for size in range(len(former), len(closed), every)
        ),
        *(({log_name(2): following, segment_name(2): segment[:size]}, []) for size in range(0, len(segment), every)),
        *(({log_name(2): log[:size], segment_name(2): segment}, []) for size in range(len(following), len(log), every)),
        ({log_name(2): log, segment_name(2): segment}, ["g2"]),
    ]
    cut = ram / "cut"
    for files, expected in kills:
        cut.mkdir()
        is_closed = log_name(2) in files
        for name, data in {**earlier, **({log_name(1): closed} if is_closed else {}), **files}.items():
            (cut / name).write_bytes(data)
        after = Followed(cut)
        assert [t.group_id for t in after.journal.replay() if t.length] == expected
        assert sum(segment.num_groups for segment in after.retention.segments.values()) == 1 + (expected == ["g2"])
        assert (cut / log_name(1)).read_bytes().startswith(former)
        assert is_followed(cut / log_name(1), 2) == is_closed
        # Another kill: the repaired journal goes on as if nothing had been.
        after.journal.close()
        again = Followed(cut)
        again.commit("g3")
        assert group_ids_in(again.journal) == [*expected, "g3"]
        again.journal.close()
        shutil.rmtree(cut)


def test_a_removed_segment_may_be_gone_or_not_and_no_other(tmp_path: Path) -> None:
    followed = Followed(tmp_path, segment_bytes=1)
    for name in ("g1", "g2", "g3"):
        followed.commit(name)
    followed.remove(1)
    followed.journal.close()  # a kill between the row and the file
    again = Followed(tmp_path, segment_bytes=1)
    assert again.files == [segment_name(2), segment_name(3), LOG_NAME]
    again.remove(2)
    again.journal.remove_segment(2)
    again.journal.close()
    again = Followed(tmp_path, segment_bytes=1)
    again.remove(3)
    again.journal.remove_segment(3)
    # Numbers are never used again, not even by a journal without segments.
    again.journal.close()
    again = Followed(tmp_path, segment_bytes=1)
    again.commit("g4")
    assert again.files == [segment_name(4), LOG_NAME]
    again.journal.close()
    (tmp_path / segment_name(4)).unlink()
    with pytest.raises(JournalError, match=r"segment-000004.arrow: ends at 0, .* acknowledged data is missing"):
        Followed(tmp_path)


def test_a_new_log_and_all_of_the_earlier_one_may_be_gone_once_its_segments_are(tmp_path: Path) -> None:
    followed = Followed(tmp_path)
    followed.commit("g1")
    followed.begin_log()
    followed.commit("g2")
    assert followed.retention.removable_logs() == []
    followed.remove(1)
    assert followed.retention.removable_logs() == [1]
    followed.journal.remove_segment(1)
    followed.journal.remove_log(1)
    assert followed.journal.num_bytes == sum(path.stat().st_size for path in tmp_path.glob("*.arrow"))
    followed.journal.close()
    assert followed.files == [segment_name(2), log_name(2)]
    assert group_ids_in(Followed(tmp_path).journal) == ["g2"]


def test_records_that_a_crash_left_are_set_aside_whole(tmp_path: Path) -> None:
    """A log that lost its last commit looks as after a crash, so that what it does not name is never deleted."""
    sizes = write(tmp_path, [["g1"], ["g2", "g3"]])
    os.truncate(tmp_path / LOG_NAME, sizes[1][1])
    path = tmp_path / segment_name(1)
    os.truncate(path, path.stat().st_size - 1)
    open_journal(tmp_path).close()
    table = pa.ipc.open_stream((tmp_path / unnamed_name(1)).read_bytes()).read_all()
    assert table.column("group_id").to_pylist() == ["g2", "g2"]
    # A second crash in the same segment adds to it.
    sizes.append((path.stat().st_size, (tmp_path / LOG_NAME).stat().st_size))
    write(tmp_path, [["g4"]])
    os.truncate(tmp_path / LOG_NAME, sizes[-1][1])
    journal = open_journal(tmp_path)
    table = pa.ipc.open_stream((tmp_path / unnamed_name(1)).read_bytes()).read_all()
    assert table.column("group_id").to_pylist() == ["g2", "g2", "g4", "g4"]
    assert journal.num_bytes == sum(path.stat().st_size for path in tmp_path.glob("*.arrow"))


def test_unnamed_records_that_no_crash_explains_are_an_error_and_stay(tmp_path: Path) -> None:
    """Every commit begins a segment, so that a log without its last two leaves two segments that nothing names."""
    write(tmp_path, [["g1"], ["g2"], ["g3"]], segment_bytes=1)
    rows = list(rows_of(tmp_path / LOG_NAME))
    (tmp_path / LOG_NAME).write_bytes(LOG_HEADER + encode_transitions(rows[:1]))
    before = {path: path.read_bytes() for path in segments(tmp_path).values()}
    with pytest.raises(JournalError, match=r"segment-000002.*no log names.* lost acknowledged groups; put back a copy"):
        open_journal(tmp_path)
    assert {path: path.read_bytes() for path in segments(tmp_path).values()} == before


def test_a_log_without_the_snapshot_it_should_begin_with_is_an_error(tmp_path: Path) -> None:
    followed = Followed(tmp_path)
    followed.commit("g1")
    followed.begin_log()
    followed.journal.close()
    (tmp_path / log_name(2)).write_bytes(LOG_HEADER + encode_transitions([row("g1", Kind.LEASED)]))
    with pytest.raises(JournalError, match=r"transitions-000002.arrow: does not begin with a snapshot"):
        Followed(tmp_path)


def test_the_log_of_an_earlier_schema_is_refused_naming_both(tmp_path: Path) -> None:
    metadata = {"schema": "stream_grpo.transition", "schema_version": "3"}
    (tmp_path / SINGLE_LOG_NAME).write_bytes(TRANSITION_SCHEMA.with_metadata(metadata).serialize().to_pybytes())
    with pytest.raises(JournalError, match=r"transitions.arrow: written as .* version 3 .*, this program reads .* 6"):
        open_journal(tmp_path)


@pytest.mark.parametrize(
    ("num_tails", "every"),
    [(1, 97), pytest.param(1, 1, marks=pytest.mark.nightly), pytest.param(5, 1, marks=pytest.mark.nightly)],
)
@pytest.mark.timeout(1800)
def test_twenty_groups_cut_at_every_byte_of_the_log_and_of_what_it_does_not_name(
    ram: Path, caplog: pytest.LogCaptureFixture, num_tails: int, every: int
) -> None:
    """20 groups in 5 commits: at each byte of the log, and of the records of the last `num_tails` commits."""
    caplog.set_level(logging.ERROR)
    commits = [[f"g{4 * i + j}" for j in range(4)] for i in range(5)]
    sizes = write(ram / "whole", commits)
    segment, log = ((ram / "whole" / name).read_bytes() for name in (segment_name(1), LOG_NAME))
    cut = ram / "cut"
    lengths = {name: len(record(name)) for commit in commits for name in commit}
    for segment_size, log_size, num_acknowledged in list(crash_states(sizes))[::every]:
        if log_size == sizes[num_acknowledged][1] and num_acknowledged < len(commits) - num_tails:
            continue  # in the records of an earlier commit
        cut.mkdir()
        (cut / segment_name(1)).write_bytes(segment[:segment_size])
        (cut / LOG_NAME).write_bytes(log[:log_size])
        journal = open_journal(cut)
        found = [t.group_id for t in journal.replay()]
        journal.close()
        assert found == [name for commit in commits[:num_acknowledged] for name in commit], (segment_size, log_size)
        # Records that reached the disk whole are set aside.
        acknowledged = sizes[num_acknowledged][0] or len(SEGMENT_HEADER)
        commit = commits[num_acknowledged] if num_acknowledged < len(commits) else []
        ends = list(itertools.accumulate((lengths[name] for name in commit), initial=acknowledged))
        whole = max(end for end in ends if end <= max(segment_size, acknowledged)) - acknowledged
        aside = cut / unnamed_name(1)
        assert (aside.stat().st_size if aside.exists() else len(SEGMENT_HEADER)) == len(SEGMENT_HEADER) + whole
        shutil.rmtree(cut)
