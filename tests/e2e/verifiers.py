"""A reward function as a user writes it, in TRL's shape; named `python:tests.e2e.verifiers.ends_right`."""


def ends_right(completions: list[str], answer: list[str]) -> list[float]:
    """1 where what follows the last marker is the answer."""
    return [float(text.rpartition("#")[2].strip() == gold) for text, gold in zip(completions, answer, strict=True)]
