"""The command `dashboard`, and the page beside a run: an address that is there at once, a process that serves it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from stream_grpo.dashboard.access import is_loopback, new_token
from stream_grpo.errors import ConfigError
from stream_grpo.lifetime import end_with

LOOPBACK = "127.0.0.1"
NICENESS = 5
"""Of the process beside a run: whoever looks does not slow it down."""
STOP_S = 2.0


def dashboard(run_dirs: Sequence[Path], *, host: str, port: int, say: Callable[[str], None]) -> None:
    """Serve the page of these runs until Ctrl-C. Raises ConfigError for a folder without a run, and a bad address."""
    if not host.strip("[] "):
        raise ConfigError(f"--host {host!r}: expected an address: {LOOPBACK} for this machine alone, 0.0.0.0 for all")
    for run_dir in run_dirs:
        if not (run_dir / "config.toml").is_file():
            raise ConfigError(f"{run_dir}: no run there (no config.toml)")
    if len({run_dir.resolve() for run_dir in run_dirs}) < len(run_dirs):
        raise ConfigError("the same run twice; name each once")
    token = None if is_loopback(host) else new_token()
    with listen(host, port) as listener:
        say(f"live page: {address(listener, host, token)}")
        if token:
            say(f"bound to {host}: whoever has this link sees all rollouts; the connection is not encrypted")
        serve(run_dirs, listener, token, read_ahead=True)


def listen(host: str, port: int) -> socket.socket:
    """A socket that takes connections; port 0 is a free one. Raises ConfigError where it cannot."""
    try:
        return socket.create_server((host.strip("[]"), port), family=_family(host))
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"live page at {host}:{port}: {error}; use another --host or --port, 0 for a free one"
        ) from None


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def address(listener: socket.socket, host: str, token: str | None = None) -> str:
    """Where a browser finds the page."""
    port = listener.getsockname()[1]
    name = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(host, host)
    name = f"[{name}]" if ":" in name and not name.startswith("[") else name
    return f"http://{name}:{port}/" + (f"?token={token}" if token else "")


def serve(
    run_dirs: Sequence[Path], listener: socket.socket, token: str | None = None, *, read_ahead: bool = False
) -> None:
    """Serve the page on a socket, until this process is asked to end."""
    import uvicorn  # a run that is not looked at has no use for it

    from stream_grpo.dashboard.server import make_app

    config = uvicorn.Config(
        make_app(run_dirs, token, read_ahead=read_ahead),
        log_level="warning",
        access_log=False,
        server_header=False,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=1,
    )
    uvicorn.Server(config).run(sockets=[listener])


class PageBeside:
    """The page of a run that goes on, served by a child process on loopback. A run never ends for it."""

    def __init__(self, run_dir: Path, port: int, say: Callable[[str], None]) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        try:
            with listen(LOOPBACK, port) as listener, (run_dir / "logs" / "dashboard.log").open("ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", __name__, str(run_dir), str(listener.fileno()), str(os.getpid())],
                    pass_fds=[listener.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # Ctrl-C is for the run, which ends the page when it has stopped
                )
                say(f"live page: {address(listener, LOOPBACK)}")
        except (ConfigError, OSError) as error:
            say(f"no live page, the run goes on without: {error}")

    def stop(self) -> None:
        """End the page."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def main(arguments: Sequence[str]) -> None:
    """What the child process runs: a run folder, a socket that it has inherited, and the process that it ends with."""
    run_dir, descriptor, launcher = arguments
    end_with(int(launcher))
    os.nice(NICENESS)
    with socket.socket(fileno=int(descriptor)) as listener:
        serve([Path(run_dir)], listener)


if __name__ == "__main__":
    main(sys.argv[1:])
