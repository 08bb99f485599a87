"""The room a program sees: its own namespaces, a root of read-only folders, and one fresh folder to write to."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass

from stream_grpo.rewards.inside import kernel

HOME = "/box"
"""The fresh folder at level "namespaces": working folder, HOME and /tmp at once."""

_SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache")
_PACKAGE_FOLDERS = (
    *(f"{path}/{name}" for path in sys.path for name in ("site-packages", "dist-packages")),
    "/usr/lib/python3/dist-packages",
)
"""Not on sys.path (-S), and hidden from reading as well: data sets with their answers are installed there."""
_DEVICES = ("null", "zero", "full", "random", "urandom")
_INNER_ID = 1000  # any number but 0: an exec by user 0 would ask for capabilities again


@dataclass(frozen=True)
class Box:
    """Where programs run and as whom. `program_uid` and `tests_uid` are None where this process may not change user."""

    home: str
    has_namespaces: bool
    program_uid: int | None
    tests_uid: int | None


def enter_namespaces() -> None:
    """Leave the network, processes, mounts, IPC and host name of the machine, by a user namespace where need be."""
    flags = kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0:
        try:
            return kernel.unshare(flags)
        except OSError as error:
            if error.errno != errno.EPERM:
                raise
    kernel.unshare(flags | kernel.CLONE_NEWUSER)
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{_INNER_ID} {uid} 1"),
        ("gid_map", f"{_INNER_ID} {gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def build_root(readable: tuple[str, ...], *, disk_bytes: int) -> None:
    """Replace the root by an empty one that holds the system's libraries, this interpreter and `readable`, read-only.

    Nothing else of the machine can be named from then on: no home folder, no data set, no /proc, no socket file.
    """
    kernel.make_mounts_private()
    kernel.mount_tmpfs("/tmp", num_bytes=2**20)
    os.chdir("/tmp")
    os.mkdir("old")
    kernel.pivot_root(".", "old")
    os.chdir("/")
    for path in (*_SYSTEM_FOLDERS, sys.base_prefix):
        _show(path, path)
    for number, path in enumerate(readable):
        _show(path, packages_path(number))
    for path in _PACKAGE_FOLDERS:
        if os.path.isdir(path):
            kernel.mount_tmpfs(path, num_bytes=4096)
    os.mkdir("/dev")
    for device in _DEVICES:
        os.close(os.open(f"/dev/{device}", os.O_CREAT))
        kernel.bind(f"/old/dev/{device}", f"/dev/{device}")
    for link in ("/tmp", "/dev/shm", "/var/tmp"):
        os.makedirs(os.path.dirname(link), exist_ok=True)
        if not os.path.lexists(link):  # it may hold the interpreter
            os.symlink(HOME, link)
    os.mkdir(HOME)
    kernel.detach("/old")
    os.rmdir("/old")
    kernel.remount_read_only("/")
    kernel.mount_tmpfs(HOME, num_bytes=disk_bytes)


def packages_path(number: int) -> str:
    """Where a box with namespaces shows the `number`th of its readable folders."""
    return f"/packages/{number}"


def _show(outside: str, path: str) -> None:
    source = f"/old{outside}"
    if os.path.lexists(path) or not os.path.lexists(source):
        return
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.islink(source):
        os.symlink(os.readlink(source), path)
        return
    if os.path.isdir(source):
        os.mkdir(path)
    else:
        os.close(os.open(path, os.O_CREAT))
    kernel.bind(source, path)
    kernel.make_read_only(path)


def renew_home(box: Box, *, disk_bytes: int) -> None:
    """Empty the folder that programs write to, and give it to the user they run as."""
    os.chdir("/")
    if box.has_namespaces:
        kernel.detach(HOME)
        kernel.mount_tmpfs(HOME, num_bytes=disk_bytes)
    else:
        os.chmod(box.home, 0o700)  # a program before may have taken it from everybody
        for entry in os.scandir(box.home):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                os.unlink(entry.path)
    if box.program_uid is not None:
        os.chown(box.home, box.program_uid, box.program_uid)
    os.chdir(box.home)


def own_users(*, sees_machine: bool) -> tuple[int, int] | tuple[None, None]:
    """Two user ids that nobody else has, if this process may become another user.

    A user who `sees_machine` as it is must also be able to read this interpreter's library there.
    """
    if os.geteuid() != 0 or (sees_machine and not _is_open_to_all(sys.base_prefix)):
        return None, None
    with open("/proc/self/uid_map") as file:
        num_ids = max(int(line.split()[2]) for line in file)
    start, count = (10**9, 10**6) if num_ids > 2 * 10**9 else (61184, 2000)  # below 65536: what systemd leaves unused
    if num_ids < start + 2 * count:
        return None, None
    first = start + 2 * (os.getpid() % count)
    return first, first + 1


def _is_open_to_all(folder: str) -> bool:
    parts = folder.strip("/").split("/")
    return all(os.stat("/" + "/".join(parts[:n])).st_mode & 1 for n in range(len(parts) + 1))


def kill_all(box: Box) -> None:
    """Kill every process that a program of this box started, whatever its session, group or parent, and reap it.

    With namespaces, -1 names all processes of the box but this one, which is its first. With users of its own, a
    helper that becomes the user does the same. Else all descendants are looked up and stopped until no other is found.
    """
    if box.has_namespaces:
        _kill_everyone()
    for uid in (box.program_uid, box.tests_uid):
        if not box.has_namespaces and uid is not None:
            helper = os.fork()
            if helper == 0:
                try:
                    os.setresuid(uid, uid, uid)
                    _kill_everyone()
                finally:
                    os._exit(0)
            os.waitpid(helper, 0)
    if not box.has_namespaces:
        _kill_descendants(os.getpid())
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _kill_everyone() -> None:
    with suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)


def _kill_descendants(root: int) -> None:
    """Stop them all before the first is killed: who is stopped starts no other."""
    stopped: set[int] = set()
    while found := set(_descendants(root)) - stopped:
        for pid in found:
            _signal(pid, signal.SIGSTOP)
        stopped |= found
    for pid in stopped:
        _signal(pid, signal.SIGKILL)


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as file:
                    parent = int(file.read().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(name))
    found, waiting = [], [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found
