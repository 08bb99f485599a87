"""What leaves a pool and why: the passes of `dedup` and `contamination`, each over what is left by then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from curator.contamination import DEFAULT_WORDS, ngram_overlaps
from curator.dedup import Match, digest, exact_matches, near_matches, normalised, semantic_matches
from curator.embedding import HASHED, load_embedding

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cleaning:
    """Which passes are made."""

    exact: bool = True
    """Problems that are equal after normalising leave all but one."""
    near: float | None = None
    """Jaccard similarity from which two problems are nearly equal."""
    semantic: float | None = None
    """Cosine from which two problems are alike."""
    embedding: str = HASHED
    same_numbers: bool = True
    """Problems with other numbers are other problems, however alike; runs of words are compared all the same."""
    heldout_near: float | None = 0.8
    heldout_words: int | None = DEFAULT_WORDS
    """Words of a run that a problem may not share with a held-out one."""

    @property
    def is_within_pool(self) -> bool:
        """Whether problems of the pool are compared with one another."""
        return self.exact or self.near is not None or self.semantic is not None

    def __post_init__(self) -> None:
        """Raise ValueError for a threshold outside (0, 1], and for runs of fewer than two words."""
        for name in ("near", "semantic", "heldout_near"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise ValueError(f"{name} = {value:g}: expected a similarity above 0 and at most 1")
        if self.heldout_words is not None and self.heldout_words < 2:
            raise ValueError(f"heldout_words = {self.heldout_words}: expected 2 or more")


class Corpus(NamedTuple):
    """The problems that are cleaned. Texts are asked for when a pass needs them."""

    ids: Sequence[str]
    text_keys: Sequence[bytes]
    """`digest` of the normalised prompts."""
    texts: Callable[[Mask], list[str]]
    """Normalised prompts of a mask."""


class Collision(NamedTuple):
    """A problem that leaves."""

    problem: int
    why: str
    """`exact`, `near`, `semantic`, or these and `words` with `heldout-` before them."""
    other: int
    """The problem that stays, or the place among the held-out ones."""
    similarity: float

    @property
    def is_heldout(self) -> bool:
        """Whether `other` is a held-out problem."""
        return self.why.startswith("heldout-")


def collisions(corpus: Corpus, heldout: Sequence[str], cleaning: Cleaning) -> list[Collision]:
    """What leaves, in the order of the passes. `heldout`: prompts, not normalised yet. Raises PoolError."""
    passes = _Passes(corpus, [normalised(text) for text in heldout])
    if heldout:
        passes.exact(among_pool=False)
        if cleaning.heldout_words is not None:
            passes.words(cleaning.heldout_words)
        if cleaning.heldout_near is not None:
            passes.near(cleaning.heldout_near, cleaning, among_pool=False)
        if cleaning.semantic is not None:
            passes.semantic(cleaning.semantic, cleaning, among_pool=False)
    if cleaning.exact:
        passes.exact(among_pool=True)
    if cleaning.near is not None:
        passes.near(cleaning.near, cleaning, among_pool=True)
    if cleaning.semantic is not None:
        passes.semantic(cleaning.semantic, cleaning, among_pool=True)
    return passes.found


class _Passes:
    def __init__(self, corpus: Corpus, heldout: Sequence[str]) -> None:
        self._corpus, self._heldout = corpus, heldout
        self._is_left = np.ones(len(corpus.ids), bool)
        self.found: list[Collision] = []

    def exact(self, *, among_pool: bool) -> None:
        """Equal after normalising."""
        left = self._left()
        fixed = [] if among_pool else [digest(text) for text in self._heldout]
        keys = [*fixed, *(self._corpus.text_keys[i] for i in left)]
        matches = exact_matches(keys, self._ids(left, len(fixed)), len(fixed))
        # Without held-out ones among the fixed, a match is within the pool, and the other way round.
        self._note("exact", [m for m in matches if among_pool or m.kept < len(fixed)], left, len(fixed))

    def words(self, num_words: int) -> None:
        """A run of words in common with a held-out problem."""
        left = self._left()
        overlaps = ngram_overlaps(self._corpus.texts(self._is_left), self._heldout, num_words=num_words)
        for problem, heldout, num_shared in overlaps:
            self._leave(Collision(left[problem], "heldout-words", heldout, num_shared))

    def near(self, threshold: float, cleaning: Cleaning, *, among_pool: bool) -> None:
        """Nearly equal by letters."""
        left, fixed, texts = self._texts(among_pool)
        matches = near_matches(
            texts,
            self._ids(left, fixed),
            threshold=threshold,
            same_numbers=cleaning.same_numbers,
            num_fixed=fixed,
            among_pool=among_pool,
        )
        self._note("near", matches, left, fixed)

    def semantic(self, threshold: float, cleaning: Cleaning, *, among_pool: bool) -> None:
        """Alike by their vectors."""
        left, fixed, texts = self._texts(among_pool)
        matches = semantic_matches(
            texts,
            self._ids(left, fixed),
            embed=load_embedding(cleaning.embedding),
            threshold=threshold,
            same_numbers=cleaning.same_numbers,
            num_fixed=fixed,
            among_pool=among_pool,
        )
        self._note("semantic", matches, left, fixed)

    def _left(self) -> list[int]:
        left: list[int] = np.flatnonzero(self._is_left).tolist()
        return left

    def _texts(self, among_pool: bool) -> tuple[list[int], int, list[str]]:
        """What is left, how many held-out texts stand before it, and both together."""
        fixed = [] if among_pool else self._heldout
        return self._left(), len(fixed), [*fixed, *self._corpus.texts(self._is_left)]

    def _ids(self, left: Sequence[int], num_fixed: int) -> list[str]:
        return [*[""] * num_fixed, *(self._corpus.ids[i] for i in left)]

    def _note(self, why: str, matches: Sequence[Match], left: Sequence[int], num_fixed: int) -> None:
        for problem, kept, similarity in matches:
            index = left[problem - num_fixed]
            if kept < num_fixed:
                self._leave(Collision(index, f"heldout-{why}", kept, similarity))
            else:
                self._leave(Collision(index, why, left[kept - num_fixed], similarity))

    def _leave(self, collision: Collision) -> None:
        self._is_left[collision.problem] = False
        self.found.append(collision)
