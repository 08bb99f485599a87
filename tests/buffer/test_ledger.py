"""The account: one state for every group, one fate for every token."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_grpo.buffer.ledger import Ledger
from stream_grpo.buffer.transitions import Kind, Transition
from stream_grpo.errors import LedgerError


def entry(kind: Kind, group_id: str = "g1", *, tokens: int = 0, reason: str = "", **trained: int) -> Transition:
    """A row; with `tokens` it brings a record."""
    length = 1 if tokens and kind is not Kind.REFUSED else 0
    fields = {f"{fate}_tokens": count for fate, count in trained.items()}
    return Transition(
        kind=kind,
        time_s=0.0,
        group_id=group_id,
        num_tokens=tokens,
        length=length,
        reason=reason,
        **fields,  # type: ignore[arg-type]
    )


def ledger_of(*rows: Transition) -> Ledger:
    ledger = Ledger()
    for row in rows:
        ledger.apply(row)
        ledger.check()
    return ledger


def nonzero(ledger: Ledger, part: str) -> dict[str, int]:
    return {name: count for name, count in ledger.as_fields()[part].items() if count}


def test_a_group_goes_its_way_and_its_tokens_go_along() -> None:
    rows = [entry(Kind.TICKETED), entry(Kind.ACCEPTED, tokens=10), entry(Kind.LEASED)]
    ledger = ledger_of(*rows)
    assert nonzero(ledger, "groups") == {"leased": 1}
    assert nonzero(ledger, "tokens") == {"generated": 10, "buffered": 10}
    ledger.apply(entry(Kind.TRAINED, trained=7, masked=2, baseline_only=1))
    assert nonzero(ledger, "groups") == {"trained": 1}
    assert nonzero(ledger, "tokens") == {"generated": 10, "trained": 7, "masked": 2, "baseline_only": 1}
    assert ledger.as_fields()["closes"]


def test_every_end_has_its_column() -> None:
    ledger = ledger_of(
        *(entry(Kind.TICKETED, group) for group in "abcdef"),
        entry(Kind.NO_SIGNAL, "a", tokens=1, reason="all_wrong"),
        entry(Kind.INVALID, "b", tokens=2, reason="rollouts: 1 valid"),
        entry(Kind.STALE, "c", tokens=4, reason="age: 3 at insert"),
        entry(Kind.STALE, "d", reason="deadline"),
        entry(Kind.ACCEPTED, "e", tokens=8),
        entry(Kind.REFUSED, "e", tokens=16, reason="duplicate: this group was taken"),
    )
    # 1 + 2 + 4 + 8 + 16 = 31; d never brought a token, f is in flight.
    assert ledger.as_fields()["tokens"]["generated"] == 31
    assert nonzero(ledger, "tokens") == {
        "generated": 31, "no_signal": 1, "invalid": 2, "stale": 4, "buffered": 8, "refused": 16
    }  # fmt: skip
    assert nonzero(ledger, "groups") == {
        "ticketed": 1, "accepted": 1, "stale": 2, "no_signal": 1, "invalid": 1, "refused": 1
    }  # fmt: skip
    assert ledger.ends == {
        "no_signal: all_wrong": 1, "invalid: rollouts": 1, "stale: age": 1, "stale: deadline": 1,
        "refused: duplicate": 1
    }  # fmt: skip


def test_a_restore_takes_the_end_of_a_trained_group_back() -> None:
    trained = [
        entry(Kind.TICKETED), entry(Kind.ACCEPTED, tokens=5), entry(Kind.LEASED), entry(Kind.TRAINED, trained=5)
    ]  # fmt: skip
    assert nonzero(ledger_of(*trained, entry(Kind.RESTORED)), "tokens") == {"generated": 5, "buffered": 5}
    ended = ledger_of(*trained, entry(Kind.STALE, reason="restore"))
    assert nonzero(ended, "tokens") == {"generated": 5, "stale": 5}
    final = ledger_of(*trained)
    final.forget(["g1"])
    with pytest.raises(LedgerError, match="group g1: restored cannot follow nothing"):
        final.apply(entry(Kind.RESTORED))
    assert nonzero(final, "tokens") == {"generated": 5, "trained": 5}


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([Kind.ACCEPTED], "group g1: accepted cannot follow nothing"),
        ([Kind.TICKETED, Kind.LEASED], "group g1: leased cannot follow ticketed"),
        ([Kind.TICKETED, Kind.ACCEPTED, Kind.TRAINED], "group g1: trained cannot follow accepted"),
        ([Kind.TICKETED, Kind.ACCEPTED, Kind.ACCEPTED], "group g1: accepted cannot follow accepted"),
        ([Kind.TICKETED, Kind.STALE, Kind.ACCEPTED], "group g1: accepted cannot follow nothing"),
        ([Kind.TICKETED, Kind.ACCEPTED, Kind.LEASED, Kind.LEASED], "group g1: leased cannot follow leased"),
    ],
)
def test_an_illegal_transition_is_refused(rows: list[Kind], sentence: str) -> None:
    with pytest.raises(LedgerError, match=sentence):
        ledger_of(*map(entry, rows))


def test_a_group_has_one_record() -> None:
    with pytest.raises(LedgerError, match="group g1: it is accepted and has a record, another cannot come"):
        ledger_of(entry(Kind.TICKETED), entry(Kind.ACCEPTED, tokens=10), entry(Kind.INVALID, tokens=3))


def test_tokens_that_do_not_add_up_are_refused_before_anything_is_entered() -> None:
    ledger = ledger_of(entry(Kind.TICKETED), entry(Kind.ACCEPTED, tokens=10), entry(Kind.LEASED))
    with pytest.raises(LedgerError, match="group g1: 10 sampled tokens, the learner accounts for 9"):
        ledger.apply(entry(Kind.TRAINED, trained=7, masked=2))
    assert nonzero(ledger, "tokens") == {"generated": 10, "buffered": 10}


def test_a_gap_is_named() -> None:
    ledger = ledger_of(entry(Kind.TICKETED), entry(Kind.ACCEPTED, tokens=10))
    ledger._tokens["buffered"] -= 3
    with pytest.raises(LedgerError, match="10 tokens were generated, 7 have a fate, a gap of 3"):
        ledger.check()
    assert not ledger.as_fields()["closes"]


def test_a_partial_is_in_flight_and_what_goes_on_from_it_is_counted_once() -> None:
    ledger = ledger_of(entry(Kind.TICKETED), entry(Kind.PARTIAL, tokens=10), entry(Kind.PARTIAL, tokens=15))
    assert nonzero(ledger, "tokens") == {"generated": 15, "in_flight": 15}
    assert nonzero(ledger, "groups") == {"ticketed": 1}
    # Of 15 tokens 4 do not go on, and 9 are new.
    ledger.apply(replace(entry(Kind.PARTIAL, tokens=20), dropped_tokens=4))
    assert nonzero(ledger, "tokens") == {"generated": 24, "in_flight": 20, "stale": 4}
    # Issued again without its prefix; the owner before had 3 more.
    ledger.apply(replace(entry(Kind.TICKETED), dropped_tokens=20, lost_tokens=3))
    assert nonzero(ledger, "tokens") == {"generated": 24, "stale": 24}
    ledger.apply(entry(Kind.ACCEPTED, tokens=7))
    assert nonzero(ledger, "tokens") == {"generated": 31, "stale": 24, "buffered": 7}
    ledger.apply(entry(Kind.RESCORED))
    assert nonzero(ledger, "tokens") == {"generated": 31, "stale": 24, "in_flight": 7}
    assert ledger.as_fields()["lost_in_sampler"] == 3
    assert ledger.as_fields()["closes"]


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([entry(Kind.PARTIAL, tokens=1)], "partial cannot follow nothing"),
        (
            [entry(Kind.TICKETED), replace(entry(Kind.PARTIAL, tokens=5), dropped_tokens=1)],
            "partial drops 1 of 0 tokens in flight",
        ),
        (
            [entry(Kind.TICKETED), entry(Kind.ACCEPTED, tokens=5), replace(entry(Kind.LEASED), dropped_tokens=5)],
            "leased drops 5 of 0 tokens in flight",
        ),
        (
            [entry(Kind.TICKETED), entry(Kind.PARTIAL, tokens=5), entry(Kind.ACCEPTED, tokens=4)],
            "4 tokens cannot hold the 5 that go on",
        ),
    ],
)
def test_a_record_that_cannot_go_on_from_the_partial_is_refused(rows: list[Transition], sentence: str) -> None:
    with pytest.raises(LedgerError, match=sentence):
        ledger_of(*rows)


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from(Kind), st.integers(1, 9), st.integers(0, 3)), max_size=60
    )
)
def test_whatever_is_tried_the_account_closes(steps: list[tuple[str, Kind, int, int]]) -> None:
    ledger, held = Ledger(), dict.fromkeys("abc", 0)
    for group_id, kind, tokens, dropped in steps:
        arrives = kind in (Kind.PARTIAL, Kind.ACCEPTED, Kind.NO_SIGNAL, Kind.INVALID, Kind.REFUSED)
        trained = held[group_id] if kind is Kind.TRAINED else 0
        row = entry(kind, group_id, tokens=tokens if arrives else 0, trained=trained)
        try:
            ledger.apply(replace(row, dropped_tokens=dropped))
        except LedgerError:
            continue
        finally:
            ledger.check()
        if kind is Kind.ACCEPTED:
            held[group_id] = tokens


def evaluated(step: int, tokens: int) -> Transition:
    return Transition(kind=Kind.EVALUATED, time_s=0.0, sampler_id="s0", branch=0, step=step, num_tokens=tokens)


def test_the_tokens_of_evaluations_are_generated_and_of_no_group() -> None:
    ledger = ledger_of(entry(Kind.TICKETED), entry(Kind.ACCEPTED, tokens=10), evaluated(25, 30), evaluated(50, 5))
    assert nonzero(ledger, "groups") == {"accepted": 1}
    assert nonzero(ledger, "tokens") == {"generated": 45, "buffered": 10, "evaluation": 35}
    with pytest.raises(LedgerError, match=r"the evaluation of weights 0\.25 is in the account already"):
        ledger.apply(evaluated(25, 30))
    assert nonzero(ledger, "tokens")["evaluation"] == 35
