"""Tests of the sandbox: what programs can do, cannot do and leave behind. Each runs a real program."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import psutil
import pytest

from stream_grpo.errors import SandboxError
from stream_grpo.rewards import sandbox as sandbox_module
from stream_grpo.rewards.inside.box import own_users
from stream_grpo.rewards.sandbox import (
    HOME_PREFIX,
    Isolation,
    Limits,
    Sandbox,
    ScriptRun,
    close_idle,
    isolation,
    required_level,
)

pytestmark = pytest.mark.slow

Level = Literal["namespaces", "process"]
LIMITS = Limits(wall_s=20, cpu_s=10)
MARK = "4711.25"
"""The argument of every `sleep` that a program here starts: by it a process is found wherever it hides."""

needs_namespaces = pytest.mark.skipif(isolation().level != "namespaces", reason="this machine allows no namespaces")
has_own_user = own_users(sees_machine=True) != (None, None)
needs_own_user = pytest.mark.skipif(not has_own_user, reason="programs cannot be given a user of their own")
LEVELS = [pytest.param("namespaces", marks=needs_namespaces), "process"]


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sandbox_module.tempfile, "tempdir", str(tmp_path.parent))
    close_idle()
    before = psutil.Process().children(recursive=True)  # as the tracker that multiprocessing starts for good
    yield
    close_idle()
    assert [child for child in psutil.Process().children(recursive=True) if child not in before] == []
    assert list(tmp_path.parent.glob(HOME_PREFIX + "*")) == []
    assert [p for p in psutil.process_iter(["cmdline"]) if MARK in (p.info["cmdline"] or [])] == []


def run(program: str, level: Level, *, stdin: str = "", limits: Limits = LIMITS) -> ScriptRun:
    with Sandbox(textwrap.dedent(program), limits=limits, level=level) as sandbox:
        return sandbox.run(stdin)


@pytest.mark.parametrize("level", LEVELS)
def test_a_program_reads_its_input_and_its_output_comes_back(level: Level) -> None:
    with Sandbox("print(int(input()) + 1)", limits=LIMITS, level=level) as sandbox:
        assert [sandbox.run(f"{n}\n").stdout for n in (1, 41)] == ["2\n", "42\n"]


@pytest.mark.parametrize("level", LEVELS)
def test_a_program_runs_as_a_script(level: Level) -> None:
    program = """
        import atexit, sys, threading
        atexit.register(lambda: print("last"))
        at_end = threading.Event()
        threading.Thread(target=lambda: (at_end.wait(), print("thread"))).start()
        if __name__ == "__main__":
            print(sys.argv, sys.stdin.read())
            print("why", file=sys.stderr)
            at_end.set()
            sys.exit(3)
    """
    result = run(program, level, stdin="grüße")
    assert (result.end, result.status) == ("exit", 3)
    assert result.stdout == "['solution.py'] grüße\nthread\nlast\n"
    assert result.stderr == "why\n"


@pytest.mark.parametrize("level", LEVELS)
def test_an_exception_is_status_1_with_its_traceback(level: Level) -> None:
    result = run("x = 1\nprint(x // 0)", level)
    assert result.status == 1
    assert 'File "solution.py", line 2' in result.stderr
    assert "launch" not in result.stderr
    assert result.stderr.endswith("ZeroDivisionError: integer division or modulo by zero\n")


@pytest.mark.parametrize("level", LEVELS)
def test_every_run_has_a_fresh_folder_and_the_environment_of_nobody(
    level: Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "s3cret")
    program = "import os; open('mark', 'x').close(); print(sorted(os.listdir()), os.environ.get('SECRET_TOKEN'))"
    with Sandbox(program, limits=LIMITS, level=level) as sandbox:
        assert [sandbox.run("").stdout for _ in range(2)] == ["['mark', 'solution.py'] None\n"] * 2


@pytest.mark.parametrize("level", LEVELS)
def test_ten_gigabytes_are_refused(level: Level) -> None:
    result = run("x = bytearray(10 * 2**30)\nprint(len(x))", level)
    assert (result.status, result.stdout) == (1, "")
    assert "MemoryError" in result.stderr


@pytest.mark.parametrize("level", LEVELS)
def test_an_endless_print_is_stopped_at_the_output_limit(level: Level) -> None:
    result = run("while True: print('x' * 1000)", level, limits=Limits(wall_s=30, output_bytes=100_000))
    assert result.end == "output"
    assert len(result.stdout) == 100_000
    assert result.seconds < 30


@pytest.mark.parametrize("level", LEVELS)
def test_a_loop_is_stopped_at_the_limit_on_processor_time(level: Level) -> None:
    result = run("while True: pass", level, limits=Limits(wall_s=60, cpu_s=1))
    assert (result.end, result.status) == ("exit", -signal.SIGXCPU)


@pytest.mark.parametrize("level", LEVELS)
def test_a_sleep_is_stopped_at_the_wall_limit(level: Level) -> None:
    result = run("import time; print('here', flush=True); time.sleep(100)", level, limits=Limits(wall_s=0.5))
    assert (result.end, result.stdout) == ("wall", "here\n")
    assert 0.5 <= result.seconds < 20


FORK_BOMB = """
    import os, time
    num_forks = 0
    for _ in range(10_000):
        try:
            if os.fork() == 0:
                while True:
                    try:
                        os.fork()
                    except OSError:
                        time.sleep(0.01)
            num_forks += 1
        except OSError:
            break
    print(num_forks, flush=True)
    time.sleep(100)
"""


@pytest.mark.parametrize("level", [LEVELS[0], pytest.param("process", marks=needs_own_user)])
def test_a_fork_bomb_stays_below_the_limit_on_processes(level: Level) -> None:
    result = run(FORK_BOMB, level, limits=Limits(wall_s=2, num_processes=8))
    assert result.end == "wall"
    assert int(result.stdout) < 8


@pytest.mark.parametrize("level", LEVELS)
def test_children_that_ignore_signals_and_leave_the_session_are_killed(level: Level) -> None:
    program = f"""
        import os, signal, subprocess, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        for _ in range(3):
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    os.execv("/usr/bin/sleep", ["sleep", "{MARK}"])
                os._exit(0)
        print("started", flush=True)
        time.sleep(100)
    """
    result = run(program, level, limits=Limits(wall_s=1.5))
    assert (result.end, result.stdout) == ("wall", "started\n")


@pytest.mark.parametrize("level", LEVELS)
def test_children_of_a_program_that_ended_do_not_hold_it_up(level: Level) -> None:
    program = f"import subprocess; subprocess.Popen(['/usr/bin/sleep', '{MARK}']); print('done')"
    result = run(program, level, limits=Limits(wall_s=100))
    assert (result.end, result.status, result.stdout) == ("exit", 0, "done\n")
    assert result.seconds < 50


@pytest.mark.parametrize("level", LEVELS)
def test_too_many_open_files_and_too_large_files_are_refused(level: Level) -> None:
    program = """
        files = []
        try:
            while True: files.append(open("/dev/null"))
        except OSError as error: print(error.errno)
        files.clear()
        import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        try:
            with open("large", "wb", buffering=0) as file:
                while True: file.write(bytes(2**20))
        except OSError as error: print(error.errno)
    """
    result = run(program, level, limits=Limits(num_files=32, disk_bytes=2**23))
    assert result.stdout in ("24\n27\n", "24\n28\n"), result  # EMFILE; EFBIG or ENOSPC


@needs_namespaces
def test_many_files_together_are_bounded_too() -> None:
    program = """
        try:
            for n in range(100):
                with open(f"part{n}", "wb") as file: file.write(bytes(2**20))
        except OSError as error: print(n, error.errno)
    """
    num_files, number = map(int, run(program, "namespaces", limits=Limits(disk_bytes=2**23)).stdout.split())
    assert number == 28  # ENOSPC
    assert num_files < 8


@needs_namespaces
def test_the_files_of_the_machine_are_neither_read_nor_written(tmp_path: Path) -> None:
    (tmp_path / "gold.json").write_text("the answers")
    tmp_path.chmod(0o777)
    program = f"""
        import os
        def attempt(f):
            try: return f() or "done"
            except OSError as error: return type(error).__name__
        here = {str(tmp_path)!r}
        print(attempt(lambda: open(here + "/gold.json").read()))
        print(attempt(lambda: open(here + "/written", "w")))
        for path in ("/written", "/usr/written", "/etc/written", "/dev/written"):
            print(attempt(lambda: open(path, "w")))
        print(sorted(set(os.listdir("/")) & {{"home", "root", "proc", "sys", "var", "work"}} - {{"root", "var"}}))
        print(attempt(lambda: open("/tmp/written", "w") and None))
    """
    lines = run(program, "namespaces").stdout.splitlines()
    assert lines[:2] == ["FileNotFoundError", "FileNotFoundError"]
    assert set(lines[2:6]) <= {"OSError", "PermissionError", "FileNotFoundError"}
    assert lines[6:] == ["[]", "done"]
    assert os.listdir(tmp_path) == ["gold.json"]
    assert not any(Path(path).exists() for path in ("/written", "/usr/written", "/etc/written", "/tmp/written"))


@needs_own_user
def test_without_namespaces_a_user_of_its_own_keeps_a_program_from_the_files_of_others(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    result = run(f"open({str(tmp_path / 'written')!r}, 'w')", "process")
    assert "PermissionError" in result.stderr


@needs_namespaces
def test_there_is_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        program = f"""
            import socket
            for address in (("127.0.0.1", {port}), ("192.0.2.1", 80)):
                try: socket.create_connection(address, timeout=5); print("connected")
                except OSError as error: print(type(error).__name__)
            try: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("192.0.2.1", 53)); print("sent")
            except OSError as error: print(type(error).__name__)
        """
        assert run(program, "namespaces").stdout == "OSError\n" * 3


@needs_namespaces
def test_a_program_has_no_privileges_and_sees_no_process_but_its_own() -> None:
    program = """
        import ctypes, os, signal
        libc = ctypes.CDLL(None)
        print(os.getuid() != 0, libc.ptrace(16, 1, 0, 0), libc.mount(b"x", b"/box", b"tmpfs", 0, None))
        try: os.kill(1, signal.SIGKILL)
        except PermissionError: pass
        try: print(sorted(name for name in os.listdir("/proc")))
        except FileNotFoundError: print("no /proc")
    """
    assert run(program, "namespaces").stdout == "True -1 -1\nno /proc\n"


@needs_namespaces
def test_installed_packages_can_be_used_only_where_they_are_given(tmp_path: Path) -> None:
    (tmp_path / "given.py").write_text("value = 7")
    tmp_path.chmod(0o755)
    program = "import given; print(given.value)"
    assert "ModuleNotFoundError" in run(program, "namespaces").stderr
    with Sandbox(program, limits=LIMITS, level="namespaces", readable=(str(tmp_path),)) as sandbox:
        assert sandbox.run("").stdout == "7\n"
    assert "ModuleNotFoundError" in run("import psutil", "namespaces").stderr


@pytest.mark.parametrize("level", LEVELS)
def test_a_box_ends_with_the_process_that_opened_it(level: Level, tmp_path: Path) -> None:
    opener = f"""
        from stream_grpo.rewards.sandbox import Limits, Sandbox
        program = "import subprocess; subprocess.run(['/usr/bin/sleep', '{MARK}'])"
        with Sandbox(program, limits=Limits(wall_s=1000), level={level!r}) as sandbox:
            sandbox.run("")
    """
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(opener)], env=environment)
    try:
        assert _within(60, lambda: len(_sleepers()) == 1)
    finally:
        process.kill()
        process.wait()
    assert _within(60, lambda: _sleepers() == [])
    # Without namespaces the folder is on the disk, and nobody is left to remove it.
    assert len(list(tmp_path.iterdir())) == (level == "process")


def _sleepers() -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["/usr/bin/sleep", MARK]]


def _within(seconds: float, condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("level", LEVELS)
def test_boxes_are_opened_from_several_threads_at_once(level: Level) -> None:
    printed: dict[int, str] = {}

    def work(number: int) -> None:
        printed[number] = run(f"print({number})", level).stdout

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert printed == {number: f"{number}\n" for number in range(4)}


def test_an_interpreter_that_died_is_replaced() -> None:
    level = isolation().level
    others = psutil.Process().children()  # as the tracker of multiprocessing
    assert run("print(1)", level).stdout == "1\n"
    interpreters = [child for child in psutil.Process().children() if child not in others]
    assert interpreters
    for child in interpreters:
        child.kill()
        _within(10, lambda child=child: child.status() == psutil.STATUS_ZOMBIE)
    assert run("print(2)", level).stdout == "2\n"


def test_a_sandbox_that_does_not_start_is_an_error_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    close_idle()
    monkeypatch.setattr(sandbox_module.sys, "executable", "/no/such/python")
    with pytest.raises(SandboxError, match="/no/such/python does not start"):
        run("print(1)", "process")


def test_a_launcher_that_ends_is_an_error_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    close_idle()
    monkeypatch.setattr(sandbox_module.sys, "executable", "/bin/false")
    with pytest.raises(SandboxError, match="no answer"):
        run("print(1)", "process")


def test_weaker_isolation_is_refused_unless_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    weak = Isolation("process", ("network",), "unshare: Operation not permitted")
    monkeypatch.setattr(sandbox_module, "isolation", lambda: weak)
    assert required_level(allow_weaker=True) == "process"
    with pytest.raises(SandboxError, match=r"cannot isolate network .*unshare: Operation not permitted"):
        required_level(allow_weaker=False)
