"""A run without vLLM, DeepSpeed and Ray as a target of kills: its processes are forked, which takes milliseconds."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from kills.fake_launcher import fork_launcher, in_child
from kills.fake_parts import make_run
from stream_grpo import failpoints
from stream_grpo.config import Config


class FakeTarget:
    """The forked run. The process that makes it must have started no thread."""

    poll_s = 0.002
    patience_s = 60.0

    def __init__(self, config: Config, **problems: int) -> None:
        """Make the folder of the run; `problems` as `make_run` takes them."""
        self._config, self.run_dir, self.points = config, config.run_dir, config.run.root / "points"
        self.points.mkdir(parents=True)
        self._pid, self._code = 0, 0

        def make() -> int:
            make_run(config, **problems)
            return 0

        # LanceDB's threads would not outlive a fork.
        log = config.run.root / "make.log"
        if os.waitpid(in_child(log, make), 0)[1]:
            raise RuntimeError(log.read_text())
        failpoints.use(self.points)

    def start(self, *, resume: bool) -> int:
        """Fork the launcher; its process id."""
        self._pid, self._code = fork_launcher(self._config), 0
        return self._pid

    def ended(self) -> int | None:
        """Its exit code, or None while it lives."""
        if self._pid:
            done, status = os.waitpid(self._pid, os.WNOHANG)
            if not done:
                return None
            self._pid, self._code = 0, os.waitstatus_to_exitcode(status)
        return self._code

    def stop(self) -> None:
        """As a supervisor of services does."""
        os.kill(self._pid, signal.SIGTERM)

    def output(self) -> str:
        """The end of every log that has one."""
        texts = {path.stem: path.read_text()[-600:] for path in sorted((self.run_dir / "logs").glob("*.log"))}
        return "\n".join(f"-- {name}: {text}" for name, text in texts.items() if text)

    def note(self) -> None:
        """The samplers write down what was acknowledged to them."""

    def witnesses(self) -> list[Path]:
        """Files of the groups that must be in the journal."""
        return sorted(self.run_dir.glob("acknowledged-*.txt"))
