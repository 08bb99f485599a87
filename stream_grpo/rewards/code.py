"""Verifier `code`: passes a response whose program passes every test of the problem, in a sandbox."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import Any

from stream_grpo.rewards.code_tests import (
    AssertTest,
    CodeTest,
    NoProgramError,
    ScriptTest,
    read_program,
    read_tests,
    read_weights,
    same_output,
)
from stream_grpo.rewards.result import MAX_EVIDENCE_CHARACTERS, VerifiableProblem, Verifier
from stream_grpo.rewards.sandbox import AssertRun, Limits, Sandbox, ScriptRun, required_level
from stream_grpo.types import Decision, RewardResult

CODE, CODE_VERSION = "code", "1"


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeSettings:
    """How programs are run and judged; a problem's row may set its own limits."""

    limits: Limits = field(default_factory=Limits)
    """Of each test; `time_limit_s` and `memory_limit_bytes` of a row replace wall and CPU time, and memory."""
    total_s: float = 60.0
    """Of all tests of one program; those that it does not reach count as failed."""
    allow_weaker: bool = False
    """Whether to run where this machine lacks the strongest isolation."""
    float_tolerance: float | None = None
    """Of numbers in what a program prints; None compares them as text."""
    takes_whole_text: bool = False
    """Whether a response without any code block is a program."""
    second_run_share: float = 0.0
    """Of the passing programs, chosen by a hash: those run twice; `check_twice` of a row asks for it too."""
    packages: tuple[str, ...] = ()
    """Folders with packages that programs may import; without any, the standard library alone."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one test gave: whether it passed, why not, and what it would have to give again."""

    passed: bool
    evidence: str
    trace: str | None
    """None where a second run could rightly differ: time was up, or output was cut."""


def make_code_verifier(settings: CodeSettings) -> Verifier:
    """The verifier `code` with these settings."""
    return Verifier(CODE, CODE_VERSION, lambda text, problem, is_cut: check_code(text, problem, is_cut, settings))


def check_code(
    response_text: str, problem: VerifiableProblem, is_cut: bool = False, settings: CodeSettings | None = None
) -> RewardResult:
    """Pass if the response's program passes all tests; reward 1 or 0, or with `partial` the weighted share of tests.

    A program that fails, crashes, or uses up a limit fails its test. Without `partial` the first failure ends the
    check. A program that passes and is chosen for a second run fails if it then gives something else.

    Raises SandboxError if the sandbox is at fault, and ValueError for tests that cannot be run whatever the program.
    """
    settings = settings or CodeSettings()
    tests = read_tests(problem)
    weights = read_weights(problem, len(tests))
    try:
        program = read_program(response_text, is_cut=is_cut, takes_whole_text=settings.takes_whole_text)
    except NoProgramError as error:
        return _result(Decision.FAIL, 0.0, {}, str(error))
    program = f"{_prefix(problem)}{program}"
    is_partial = bool(problem.extra.get("partial"))
    trial = _Trial(program, tests, problem, settings)
    outcomes = trial.run(stops_at_failure=not is_partial, is_second=False)

    components = {f"test_{index}": float(outcome.passed) for index, outcome in enumerate(outcomes)}
    share = sum(w for w, o in zip(weights, outcomes, strict=False) if o.passed) / sum(weights)
    has_all = len(outcomes) == len(tests) and all(outcome.passed for outcome in outcomes)
    if (has_all or (is_partial and share > 0)) and _is_chosen(program, problem, settings.second_run_share):
        difference = _first_difference(outcomes, trial.run(stops_at_failure=False, is_second=True))
        components["deterministic"] = float(difference is None)
        if difference is not None:
            return _result(Decision.FAIL, 0.0, components, difference)
    if has_all:
        return _result(Decision.PASS, 1.0, components, f"passed {len(tests)} of {len(tests)} tests")
    failed = next(index for index, outcome in enumerate(outcomes) if not outcome.passed)
    evidence = f"test {failed} of {len(tests)}: {outcomes[failed].evidence}"
    return _result(Decision.FAIL, share if is_partial else 0.0, components, evidence)


class _Trial:
    """One program and its tests."""

    def __init__(
        self, program: str, tests: tuple[CodeTest, ...], problem: VerifiableProblem, settings: CodeSettings
    ) -> None:
        self._program, self._tests, self._settings = program, tests, settings
        self._limits = _limits(problem, settings)
        entry_point = problem.extra.get("entry_point")
        self._entry_point = str(entry_point) if entry_point else None
        self._helpers = _prefix(problem) if entry_point else ""

    def run(self, *, stops_at_failure: bool, is_second: bool) -> list[Outcome]:
        """An outcome for every test, or up to the first that fails. The second run is in an interpreter of its own."""
        outcomes: list[Outcome] = []
        used_s = 0.0
        with Sandbox(
            self._program,
            limits=self._limits,
            level=required_level(allow_weaker=self._settings.allow_weaker),
            readable=self._settings.packages,
            is_fresh=is_second,
        ) as sandbox:
            for test in self._tests:
                if used_s > self._settings.total_s:
                    outcome = Outcome(False, f"not run: {used_s:.1f} s of {self._settings.total_s:g} s used up", None)
                else:
                    run, outcome = self._outcome(sandbox, test)
                    used_s += run.seconds
                outcomes.append(outcome)
                if stops_at_failure and not outcome.passed:
                    break
        return outcomes

    def _outcome(self, sandbox: Sandbox, test: CodeTest) -> tuple[ScriptRun | AssertRun, Outcome]:
        if isinstance(test, AssertTest):
            checked = sandbox.check(test.source, entry_point=self._entry_point, helpers=self._helpers)
            if checked.is_broken:
                raise ValueError(f"the tests cannot be run: {checked.evidence}")
            evidence = checked.evidence if checked.end == "exit" else _stopped(checked.end, self._limits)
            return checked, Outcome(checked.passed, evidence, str(checked.passed) if checked.end == "exit" else None)
        run = sandbox.run(test.stdin)
        return run, _judged(run, test, self._limits, self._settings.float_tolerance)


def _judged(run: ScriptRun, test: ScriptTest, limits: Limits, float_tolerance: float | None) -> Outcome:
    if run.end != "exit":
        return Outcome(False, _stopped(run.end, limits), None)
    trace = f"{run.status} {' '.join(run.stdout.split())}"
    if run.status != 0:
        last = run.stderr.strip().rpartition("\n")[2]
        return Outcome(False, f"{_ending(run.status)}: {last}".rstrip(": "), trace)
    passed = same_output(run.stdout, test.expected, float_tolerance=float_tolerance)
    return Outcome(passed, f"printed {_short(run.stdout)}, expected {_short(test.expected)}", trace)


def _stopped(end: str, limits: Limits) -> str:
    return {
        "wall": f"stopped at the time limit of {limits.wall_s:g} s",
        "output": f"stopped after {limits.output_bytes} bytes of output",
    }[end]


def _ending(status: int) -> str:
    return f"ended by signal {-status}" if status < 0 else f"exit status {status}"


def _first_difference(first: list[Outcome], second: list[Outcome]) -> str | None:
    for index, (before, after) in enumerate(zip(first, second, strict=False)):
        if before.trace is not None and after.trace is not None and before.trace != after.trace:
            return f"test {index} is not deterministic: {_short(before.trace)}, then {_short(after.trace)}"
    return None


def _prefix(problem: VerifiableProblem) -> str:
    """`program_prefix` of the row: what stands before every program, and whose functions its tests may use."""
    prefix = problem.extra.get("program_prefix")
    return f"{prefix}\n" if prefix else ""


def _is_chosen(program: str, problem: VerifiableProblem, share: float) -> bool:
    if problem.extra.get("check_twice"):
        return True
    digest = hashlib.sha256(f"{problem.problem_id}\n{program}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def _limits(problem: VerifiableProblem, settings: CodeSettings) -> Limits:
    changes: dict[str, Any] = {}
    for column, fields in (("time_limit_s", ("wall_s", "cpu_s")), ("memory_limit_bytes", ("memory_bytes",))):
        value = problem.extra.get(column)
        if value is None:
            continue
        if not isinstance(value, int | float) or not value > 0:
            raise ValueError(f"problem {problem.problem_id} has {column} {value!r}; it must be a number above 0")
        changes |= dict.fromkeys(fields, int(value) if column.endswith("bytes") else float(value))
    return replace(settings.limits, **changes)


def _short(text: str) -> str:
    """Enough of both sides of a comparison to fit the evidence."""
    text = text.strip()
    return repr(text if len(text) <= 60 else text[:57] + "...")


def _result(decision: Decision, reward: float, components: dict[str, float], evidence: str) -> RewardResult:
    return RewardResult(
        decision=decision,
        reward=reward,
        verifier=CODE,
        verifier_version=CODE_VERSION,
        components=components,
        evidence=evidence[:MAX_EVIDENCE_CHARACTERS],
    )


VERIFIER = make_code_verifier(CodeSettings())
"""With the usual settings: it refuses to run on a machine without full isolation."""
