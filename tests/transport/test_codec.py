"""Groups survive the trip to Arrow and back; broken bytes are refused."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_grpo.transport.codec import GROUP_SCHEMA, decode_group, encode_group, group_to_batch, read_batch
from stream_grpo.types import EndReason, PolicyVersion, Rollout, RolloutGroup, StepScore
from tests.fakes import make_group


def assert_same(a: RolloutGroup, b: RolloutGroup) -> None:
    for name in RolloutGroup.__dataclass_fields__:
        if name != "rollouts":
            assert getattr(a, name) == getattr(b, name)
    for x, y in zip(a.rollouts, b.rollouts, strict=True):
        for name in Rollout.__dataclass_fields__:
            left, right = getattr(x, name), getattr(y, name)
            if isinstance(left, np.ndarray):
                assert left.dtype == right.dtype
                np.testing.assert_array_equal(left, right)
            else:
                assert left == right


@given(
    rewards=st.lists(st.one_of(st.none(), st.floats(0, 1)), min_size=1, max_size=8),
    num_response=st.integers(0, 9),
    end_reason=st.sampled_from(EndReason),
)
def test_a_group_comes_back_as_it_was(rewards: list[float | None], num_response: int, end_reason: EndReason) -> None:
    group = make_group(rewards=rewards, num_response=num_response, end_reason=end_reason)
    assert_same(decode_group(encode_group(group)), group)


def test_steps_come_back_rollout_by_rollout() -> None:
    group = make_group(rewards=[1.0, 0.0])
    steps = (StepScore(2, 0.9), StepScore(4, 1e-9))
    first, second = group.rollouts
    group = replace(group, rollouts=(replace(first, reward=replace(first.reward, steps=steps)), second))
    assert [r.reward.steps for r in decode_group(encode_group(group)).rollouts] == [steps, ()]


def with_steps(ends: list[list[int]], scores: list[list[float]]) -> bytes:
    """A group of responses of 4 tokens with these steps."""
    batch = group_to_batch(make_group(rewards=[1.0] * len(ends)))
    for name, values in (("step_ends", ends), ("step_scores", scores)):
        field = GROUP_SCHEMA.field(name)
        batch = batch.set_column(batch.schema.get_field_index(name), field, pa.array(values, field.type))
    data: bytes = batch.serialize().to_pybytes()
    return data


@pytest.mark.parametrize(
    ("ends", "scores", "reason"),
    [
        ([[2]], [[]], "step_scores: lengths differ from step_ends"),
        ([[2, 2]], [[0.5, 0.5]], "rollout 0 ends at token 2 with score 0.5: expected rising ends from 1 to 4"),
        ([[], [4], [3, 5]], [[], [0.1], [0.2, 0.3]], "rollout 2 ends at token 5 with score 0.3"),
        ([[0]], [[0.5]], "rollout 0 ends at token 0"),
        ([[4]], [[float("nan")]], "with score nan"),
    ],
)
def test_steps_that_are_none_are_refused(ends: list[list[int]], scores: list[list[float]], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_batch(with_steps(ends, scores))


def test_steps_of_one_rollout_need_not_rise_above_those_of_another() -> None:
    group = decode_group(with_steps([[1, 4], [], [1, 2]], [[0.1, 0.2], [], [0.3, 0.4]]))
    assert [[end for end, _ in r.reward.steps] for r in group.rollouts] == [[1, 4], [], [1, 2]]


def test_versions_of_tokens_come_back() -> None:
    versions = [PolicyVersion(0, 3), PolicyVersion(0, 3), PolicyVersion(1, 4), PolicyVersion(1, 5)]
    group = decode_group(encode_group(make_group(version=versions)))
    assert group.versions() == set(versions)
    # Branch 1 forks at step 3: the oldest token is (0, 3), two steps before (1, 5).
    assert group.age(PolicyVersion(1, 5), {1: PolicyVersion(0, 3)}) == 2


def test_a_missing_reward_is_neither_zero_nor_nan() -> None:
    group = decode_group(encode_group(make_group(rewards=[None, 0.0])))
    assert [r.reward.reward for r in group.rollouts] == [None, 0.0]
    assert [r.valid for r in group.rollouts] == [False, True]


def test_a_segment_of_schema_and_messages_is_a_plain_arrow_stream() -> None:
    groups = [make_group(f"g{i}", [1.0, 0.0, 0.5]) for i in range(3)]
    stream = GROUP_SCHEMA.serialize().to_pybytes() + b"".join(encode_group(g) for g in groups)
    table = pa.ipc.open_stream(stream).read_all()
    assert table.num_rows == 9
    assert table.column("group_id").unique().to_pylist() == ["g0", "g1", "g2"]


@pytest.mark.parametrize("data", [b"", b"rubbish", encode_group(make_group())[:40]])
def test_rubbish_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="not a rollout group"):
        read_batch(data)


def test_two_groups_in_one_batch_are_refused() -> None:
    table = pa.Table.from_batches([group_to_batch(make_group("a")), group_to_batch(make_group("b"))])
    data = table.combine_chunks().to_batches()[0].serialize().to_pybytes()
    with pytest.raises(ValueError, match="group_id: rows of one group differ"):
        read_batch(data)
