"""What is known of a problem before it is sampled, as numbers for the item-response model.

Pure numpy. P: problems; X: numbers of a problem.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from curator.embedding import Embed
from curator.schema import OFFLINE_PASS_RATE, Problem

MAX_DOMAINS = 64
"""Domains with a difficulty of their own; the problems of the others share the last one."""
OFFLINE_ROLLOUTS = 8.0
"""Rollouts that an offline pass rate is taken to rest on: it keeps 0 and 1 finite."""
_BLOCK = 4096


@dataclass(frozen=True, slots=True)
class Features:
    """Domains and numbers of all problems of a pool, by index."""

    domain_P: NDArray[np.int64]
    """Each problem's domain, from 0."""
    number_PX: NDArray[np.float32]
    """Each problem's numbers, centred, of size about 1; may have no columns."""
    is_vector_X: NDArray[np.bool_]
    """Which numbers belong to the text's vector: their weights are many, and move little."""
    expected_bias: float = 0.0
    """Logit of the pass rate that is expected of all numbers 0, before the first group."""
    expected_weight_X: NDArray[np.float64] | None = None
    """What 1 more of each number is expected to add to it; None: nothing."""

    @property
    def num_domains(self) -> int:
        """Domains that are told apart."""
        return int(self.domain_P.max(initial=0)) + 1


def make_features(
    domains: Sequence[str],
    *,
    num_characters_P: ArrayLike | None = None,
    offline_rate_PA: ArrayLike | None = None,
    vector_PV: NDArray[np.float32] | None = None,
) -> Features:
    """Features from columns: domains by name, lengths of prompts, offline pass rates, vectors as `fourier` makes them.

    A column of offline rates (one of A models) becomes the logit of (n rate + 1) / (n + 2), n = OFFLINE_ROLLOUTS, less
    its mean, over its deviation, 0 where it is missing (NaN); and, where some are missing, a second one that says so.
    Before any group the problems are expected to differ as they do for the A models on average, and to be as hard on
    the whole as for the weakest of them: a policy that is still to be trained is likest to that one.

    Raises ValueError for columns of other lengths, and rates outside [0, 1].
    """
    names = {name: number for number, name in enumerate(sorted(set(domains)))}
    return features_of_columns(
        np.array([names[domain] for domain in domains], np.int64),
        num_characters_P=num_characters_P,
        offline_rate_PA=offline_rate_PA,
        vector_PV=vector_PV,
    )


def features_of_columns(
    domain_P: NDArray[np.int64],
    *,
    num_characters_P: ArrayLike | None = None,
    offline_rate_PA: ArrayLike | None = None,
    vector_PV: NDArray[np.float32] | None = None,
) -> Features:
    """As `make_features`, of domains that are numbers already, in the order of their names."""
    columns: list[_Column] = []
    if num_characters_P is not None:
        columns.append(_standard(np.log1p(np.asarray(num_characters_P, np.float64))))
    bias = 0.0
    if offline_rate_PA is not None:
        offline, bias = _offline_columns(np.asarray(offline_rate_PA, np.float64).reshape(len(domain_P), -1))
        columns.extend(offline)
    vectors = np.zeros((len(domain_P), 0), np.float32) if vector_PV is None else vector_PV
    if {len(vectors), *(len(column.number_P) for column in columns)} != {len(domain_P)}:
        raise ValueError(f"features: expected columns of {len(domain_P)} problems")
    numbers = np.concatenate([*(column.number_P[:, None].astype(np.float32) for column in columns), vectors], axis=1)
    weights = np.array([*(column.weight for column in columns), *np.zeros(vectors.shape[1])])
    is_vector_X = np.arange(numbers.shape[1]) >= len(columns)
    return Features(by_frequency(domain_P), numbers, is_vector_X, bias, weights)


def features_of(problems: Iterable[Problem], *, embed: Embed | None = None, num_vector: int = 0) -> Features:
    """Features of problems as a pool has them, read a part at a time.

    Domain, length, the offline pass rate where any has one, and, with `embed`, `num_vector` numbers of the vector of
    the prompt's text.
    """
    domains: list[str] = []
    lengths, rates, vectors = [], [], [np.zeros((0, num_vector), np.float32)]
    for block in _blocks(problems):
        texts = [text_of(problem.prompt) for problem in block]
        domains += [problem.domain for problem in block]
        lengths += [len(text) for text in texts]
        rates += [offline_rate(problem.extra) for problem in block]
        if embed is not None and num_vector:
            vectors.append(fourier(embed(texts), num_vector))
    offline = np.array(rates, np.float64)
    return make_features(
        domains,
        num_characters_P=np.array(lengths, np.float64),
        offline_rate_PA=offline if np.any(~np.isnan(offline)) else None,
        vector_PV=np.concatenate(vectors) if embed is not None and num_vector else None,
    )


def fourier(vector_PV: NDArray[np.float32], num: int, *, seed: int = 0, width: float = 0.7) -> NDArray[np.float32]:
    """Random Fourier features [P, num] of vectors [P, V] of length 1: sqrt(2 / num) cos(W v + b).

    Their inner product is about exp(-|v - v'|^2 / (2 width^2)): a linear model of them expects of a problem what its
    near neighbours showed. Rahimi and Recht, "Random features for large-scale kernel machines", 2007.
    """
    rng = np.random.default_rng(seed)
    weights = (rng.standard_normal((vector_PV.shape[1], num)) / width).astype(np.float32)
    phases = (rng.random(num) * 2 * np.pi).astype(np.float32)
    return np.asarray(np.sqrt(2.0 / num) * np.cos(vector_PV @ weights + phases), np.float32)


def by_frequency(domain_P: NDArray[np.int64]) -> NDArray[np.int64]:
    """Domains numbered anew, the most frequent first, equal ones as before: the same numbers in every process.

    Those beyond MAX_DOMAINS share the last number.
    """
    ranked_D = np.argsort(-np.bincount(domain_P), kind="stable")
    number_D = np.empty_like(ranked_D)
    number_D[ranked_D] = np.minimum(np.arange(len(ranked_D)), MAX_DOMAINS - 1)
    return np.asarray(number_D[domain_P], np.int64)


class _Column(NamedTuple):
    number_P: NDArray[np.float64]
    """With mean 0 and, unless all are equal, deviation 1."""
    weight: float = 0.0
    """Its expected weight."""


def _offline_columns(rate_PA: NDArray[np.float64]) -> tuple[list[_Column], float]:
    """Columns of A models, and the expected logit of their zeros."""
    columns, mean_A = [], []
    for rate_P in rate_PA.T:
        is_known_P = ~np.isnan(rate_P)
        known = rate_P[is_known_P]
        if not np.all((known >= 0) & (known <= 1)):
            raise ValueError("offline pass rate: expected within [0, 1], or NaN where there is none")
        shrunk = (OFFLINE_ROLLOUTS * known + 1.0) / (OFFLINE_ROLLOUTS + 2.0)
        known_logit = np.log(shrunk / (1.0 - shrunk))
        logit_P = np.zeros(len(rate_P))
        logit_P[is_known_P] = _standard(known_logit).number_P
        columns.append(_Column(logit_P, float(known_logit.std()) / rate_PA.shape[1] if known.size else 0.0))
        mean_A.append(float(known_logit.mean()) if known.size else 0.0)
        if not is_known_P.all():
            columns.append(_standard(is_known_P.astype(np.float64)))
    return columns, min(mean_A, default=0.0)


def _standard(column: NDArray[np.float64]) -> _Column:
    centred = column - (column.mean() if column.size else 0.0)
    deviation = float(centred.std()) if column.size else 0.0
    return _Column(centred / deviation if deviation > 1e-9 else np.zeros_like(centred))


def text_of(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """A prompt's text; of messages what they say, a line each."""
    return prompt if isinstance(prompt, str) else "\n".join(str(message.get("content", "")) for message in prompt)


def offline_rate(extra: Mapping[str, Any]) -> float:
    """The offline pass rate among a problem's further columns; NaN where there is none within [0, 1]."""
    rate = extra.get(OFFLINE_PASS_RATE)
    if isinstance(rate, int | float) and not isinstance(rate, bool) and 0 <= rate <= 1:
        return float(rate)
    return float("nan")


def _blocks(problems: Iterable[Problem]) -> Iterator[list[Problem]]:
    remaining = iter(problems)
    while block := list(islice(remaining, _BLOCK)):
        yield block
