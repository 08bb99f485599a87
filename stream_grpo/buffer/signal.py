"""How many groups have signal: the expected share, and the run of groups without any. Folds over transitions."""

from __future__ import annotations

from collections import Counter, deque

from stream_grpo.buffer.transitions import Kind, Transition

WINDOW = 256
"""Groups that the expected share looks back on."""


class SignalWatch:
    """Follows which groups came in with signal."""

    folded = ("_recent", "_without", "_num_truncated")

    def __init__(self) -> None:
        """Nothing seen yet: the expected share is 1/2."""
        self._recent: deque[tuple[str, bool]] = deque(maxlen=WINDOW)
        """Groups, and whether each had signal."""
        self._without: Counter[str] = Counter()
        self._num_truncated = 0

    def apply(self, row: Transition) -> None:
        """Follow a transition: a record that came in, a ticket that passed its deadline, or a start.

        A group that is scored again counts once, as it comes in last.
        """
        if row.kind is Kind.STARTED:
            self._reset()
        elif row.kind is Kind.ACCEPTED:
            self._recent.append((row.group_id, True))
            self._reset()
        elif row.kind is Kind.RESCORED:
            self._recent = deque((seen for seen in self._recent if seen[0] != row.group_id), maxlen=WINDOW)
        elif row.kind is Kind.NO_SIGNAL or (row.kind is Kind.INVALID and row.location):
            self._recent.append((row.group_id, False))
            self._without[row.reason if row.kind is Kind.NO_SIGNAL else "invalid"] += 1
            self._num_truncated += row.num_truncated > 0
        elif row.kind is Kind.STALE and row.reason == "deadline":
            self._recent.append((row.group_id, False))

    def _reset(self) -> None:
        self._without.clear()
        self._num_truncated = 0

    @property
    def expected_share(self) -> float:
        """(with signal + 1) / (groups + 2) over the last WINDOW groups: Laplace's rule, never 0 nor 1."""
        return (sum(has_signal for _, has_signal in self._recent) + 1) / (len(self._recent) + 2)

    @property
    def num_without(self) -> int:
        """Groups in a row without signal since the last one with it, or since the start."""
        return self._without.total()

    @property
    def causes(self) -> dict[str, int]:
        """How many of these had each cause."""
        return dict(self._without)

    def sentence(self) -> str:
        """The run of groups without signal in words, with its counts."""
        causes = ("all_right", "all_wrong", "same_reward", "invalid")
        counts = ", ".join(f"{self._without[cause]} {cause.replace('_', ' ')}" for cause in causes)
        return (
            f"{self.num_without} groups in a row had no signal: {counts}; in {self._num_truncated} of them rollouts "
            f"were truncated at the length limit"
        )
