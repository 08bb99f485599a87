"""The response that a gold stands for: what a verifier is given to see whether it works for a problem at all."""

from __future__ import annotations

from stream_grpo.rewards.messages import ProblemRow

_FORMS = {"math": "\\boxed{{{gold}}}", "choice": "\\boxed{{{gold}}}", "reasoning_gym": "<answer>{gold}</answer>"}
_PROGRAMS = ("reference_solution", "solution", "code")


def gold_response(problem: ProblemRow) -> str:
    """A response that says the gold and nothing else, in the form that the problem's verifier reads.

    For `code` it is the row's reference solution. A verifier that is not ours, or has no gold, is given the answer as
    it is, which need not pass: what is asked is whether the verifier comes to a decision.
    """
    gold = problem.answer.strip()
    if problem.verifier == "code":
        return f"```python\n{_program(problem) or gold}\n```"
    if problem.verifier == "exact":
        return f"{problem.extra.get('answer_prefix', '####')} {gold}\n"
    return _FORMS.get(problem.verifier, "{gold}").format(gold=gold)


def _program(problem: ProblemRow) -> str | None:
    """HumanEval's canonical solution goes on where the prompt ends; other names hold a whole program."""
    extra = problem.extra
    if extra.get("canonical_solution"):
        head = problem.prompt if isinstance(problem.prompt, str) and not extra.get("program_prefix") else ""
        return f"{head}{extra['canonical_solution']}"
    return next((str(extra[name]) for name in _PROGRAMS if extra.get(name)), None)
