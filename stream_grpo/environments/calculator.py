"""A Python tool for arithmetic: an action calls it, or is the answer, which the row's verifier scores."""

from __future__ import annotations

import ast
import json
import operator
from collections.abc import Callable
from typing import Any, Literal

from stream_grpo.environments.calls import CallFormat, Malformed, find_call
from stream_grpo.environments.protocol import End, Start, Step
from stream_grpo.rewards.messages import ProblemRow
from stream_grpo.rewards.sandbox import Limits, Sandbox, required_level

NAME, VERSION = "calculator", "1"
TOOL = "python"
_OUTPUT_BYTES = 1 << 16
# Beyond it an integer is left to the sandbox, which has limits.
_MAX_BITS = 4096
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Div: operator.truediv,
}


class Calculator:
    """Runs the code of each call in a sandbox of its own and shows what it prints; it keeps no state."""

    def __init__(
        self,
        problem: ProblemRow,
        *,
        open: str = "<tool_call>",
        close: str = "</tool_call>",
        body: Literal["json", "plain"] = "json",
        time_limit_s: float = 2.0,
        memory_limit_bytes: int = 1 << 28,
        allow_weaker_sandbox: bool = False,
    ) -> None:
        """`open`, `close`, `body`: see `calls.CallFormat`. Code that runs into a limit is told so: it is the policy's.

        Raises ValueError for marks that cannot be.
        """
        self._form = self.call_format(open=open, close=close, body=body)
        self._problem, self._allow_weaker = problem, allow_weaker_sandbox
        self._limits = Limits(
            wall_s=time_limit_s,
            cpu_s=max(1.0, time_limit_s),
            memory_bytes=memory_limit_bytes,
            output_bytes=_OUTPUT_BYTES,
        )

    @staticmethod
    def call_format(
        *,
        open: str = "<tool_call>",
        close: str = "</tool_call>",
        body: Literal["json", "plain"] = "json",
        **_: Any,
    ) -> CallFormat:
        """How a call is written with these options. Raises ValueError for marks that cannot be."""
        return CallFormat(open=open, close=close, body=body, tools={TOOL: "code"})

    def reset(self, seed: int, snapshot: bytes | None) -> Start:
        """Every start is the same: of the problem alone."""
        return Start(snapshot=json.dumps({"problem": self._problem.problem_id}).encode())

    def step(self, action: str) -> Step:
        """What the code prints, or its error; an action without a call ends the trajectory as the answer.

        Raises SandboxError where this machine cannot isolate a program.
        """
        call = find_call(action, self._form)
        if call is None:
            return Step(end=End.ANSWERED)
        if isinstance(call, Malformed):
            return Step(observation=f"error: {call.reason}", failed=True)
        observation = self._run(call.arguments["code"])
        return Step(observation=observation, tool=call.tool, failed=observation.startswith("error: "))

    def _run(self, code: str) -> str:
        expression = _expression(code)
        try:
            value = None if expression is None else _value(expression)
        except RecursionError:  # nested too deep for this stack; the sandbox has one of its own
            value = None
        if value is not None:
            return str(value)
        program = code if expression is None else f"print((\n{code.strip()}\n))"
        level = required_level(allow_weaker=self._allow_weaker)
        with Sandbox(program, limits=self._limits, level=level) as sandbox:
            run = sandbox.run("")
        if run.end != "exit":
            return f"error: the code reached its limit ({'time' if run.end == 'wall' else run.end})"
        if run.status != 0:
            lines = run.stderr.strip().splitlines()
            return f"error: {lines[-1] if lines else f'the code ended with status {run.status}'}"
        return run.stdout.removesuffix("\n")


def _expression(code: str) -> ast.expr | None:
    """The code as one expression, whose value is shown without a print; None where it is none."""
    try:
        return ast.parse(code.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr) -> int | float | None:
    """What the sandbox would print of a short sum of numbers, at a thousandth of its cost; None: ask the sandbox."""
    if isinstance(node, ast.Constant):
        number = node.value
        if isinstance(number, bool) or not isinstance(number, int | float):
            return None
        return number if isinstance(number, float) or number.bit_length() <= _MAX_BITS else None
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _value(node.operand)
        return None if value is None else -value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _value(node.left), _value(node.right)
        if left is None or right is None:
            return None
        try:
            value = _OPERATORS[type(node.op)](left, right)
        except ArithmeticError:
            return None
        is_short = not isinstance(value, int) or value.bit_length() <= _MAX_BITS
        return value if is_short else None
    return None
