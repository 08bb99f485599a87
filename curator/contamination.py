"""Which problems of a pool stand in held-out sets too, so that the pool, never the held-out set, loses them.

A problem is contaminated where it equals a held-out one after normalising, is nearly equal to one, or shares a run of
words with one that is not a common phrase of the pool.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from curator.minhash import Hashes, mix

DEFAULT_WORDS = 13
MAX_USES = 10
"""A run of words in more problems of the pool than this is a phrase, such as how to write the answer."""
BATCH_TEXTS = 4096
_WORD = re.compile(r"\w+")
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


class Overlap(NamedTuple):
    """A problem of the pool that shares a run of words with a held-out one."""

    problem: int
    heldout: int
    num_shared: int
    """Distinct runs that it shares with held-out problems."""


def ngram_overlaps(
    texts: Sequence[str], heldout: Sequence[str], *, num_words: int = DEFAULT_WORDS, max_uses: int = MAX_USES
) -> list[Overlap]:
    """Problems that share a run of `num_words` words with a held-out problem, by normalised texts.

    Runs in more than `max_uses` problems of the pool are passed over. A text of fewer words has no run.
    """
    runs_T, owners_T = _runs(heldout, num_words)
    known, first = np.unique(runs_T, return_index=True)
    if not len(known):
        return []
    hits_problem, hits_run = _hits(texts, known, num_words)
    uses = np.bincount(hits_run, minlength=len(known))
    is_rare = uses[hits_run] <= max_uses
    problems, starts, counts = np.unique(hits_problem[is_rare], return_index=True, return_counts=True)
    runs = hits_run[is_rare][starts]
    return [
        Overlap(int(problem), int(owners_T[first[run]]), int(count))
        for problem, run, count in zip(problems, runs, counts, strict=True)
    ]


def _hits(texts: Sequence[str], known: Hashes, num_words: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pairs of a problem and the place of a run in `known` that it has, each once, in the order of problems."""
    problems, runs = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for start in range(0, len(texts), BATCH_TEXTS):
        runs_T, owners_T = _runs(texts[start : start + BATCH_TEXTS], num_words)
        places_T = np.minimum(np.searchsorted(known, runs_T), len(known) - 1)
        is_known = known[places_T] == runs_T
        pairs = np.unique(np.stack([owners_T[is_known] + start, places_T[is_known]], axis=1), axis=0)
        problems.append(pairs[:, 0])
        runs.append(pairs[:, 1])
    return np.concatenate(problems), np.concatenate(runs)


def _runs(texts: Sequence[str], num_words: int) -> tuple[Hashes, NDArray[np.int64]]:
    """Hashes of all runs of words of some texts, and the index of the text of each."""
    words = [[zlib.crc32(word.encode("utf-8", "surrogatepass")) for word in _WORD.findall(text)] for text in texts]
    lengths = np.fromiter(map(len, words), np.int64, len(words))
    words_W = mix(np.fromiter((word for text in words for word in text), np.uint64, int(lengths.sum())))
    num_runs = len(words_W) - num_words + 1
    if num_runs <= 0:
        return np.zeros(0, np.uint64), np.zeros(0, np.int64)
    hashes = np.zeros(num_runs, np.uint64)
    for i in range(num_words):
        hashes = hashes * _MULTIPLIER + words_W[i : i + num_runs]
    owners_W = np.repeat(np.arange(len(texts)), lengths)
    # A run within one text begins and ends in it.
    is_whole = owners_W[:num_runs] == owners_W[num_words - 1 :]
    return mix(hashes)[is_whole], owners_W[:num_runs][is_whole]
