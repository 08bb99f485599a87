"""What an answer says in the end, to count how many different ones a problem is given."""

from __future__ import annotations

from curator.dedup import normalised
from curator.ingest.columns import SEPARATOR, last_boxed
from curator.schema import Problem


def final_answer(text: str, problem: Problem) -> str:
    """The last box; else the line after the problem's own marker or `####`; else the last line. Normalised.

    The marker is `extra["answer_prefix"]`. It is read as people read it, not as a verifier does: an answer counts here
    whether it is right or not.
    """
    boxed = last_boxed(text)
    if boxed is not None:
        return normalised(boxed)
    marker = problem.extra.get("answer_prefix")
    for separator in (marker, SEPARATOR):
        if isinstance(separator, str) and separator and separator in text:
            return normalised(text.rpartition(separator)[2].partition("\n")[0])
    return normalised(text.strip().rpartition("\n")[2])
