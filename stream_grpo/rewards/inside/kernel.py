"""The few Linux calls that Python 3.11 lacks, each as one function that raises OSError with the call's name."""

from __future__ import annotations

import ctypes
import os
import resource

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000

_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
_MNT_DETACH = 2
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
_CAPABILITY_VERSION_3 = 0x20080522
_SYS_MOUNT_SETATTR = 442  # the same on every architecture
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Leave the namespaces named by `flags`; a process namespace holds for children only."""
    _call("unshare", ctypes.c_int(flags))


def mount_tmpfs(path: str, *, num_bytes: int, mode: str = "0755") -> None:
    """Mount an empty file system in memory at `path`, bounded in bytes and, by one file per 4 KiB, in files."""
    options = f"size={num_bytes},nr_inodes={max(64, num_bytes // 4096)},mode={mode}"
    flags = ctypes.c_ulong(_MS_NOSUID | _MS_NODEV)
    _call("mount", b"tmpfs", path.encode(), b"tmpfs", flags, options.encode())


def make_mounts_private() -> None:
    """Keep every later mount out of the namespace that this one was copied from."""
    _call("mount", None, b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None)


def bind(source: str, target: str) -> None:
    """Show `source` and what is mounted below it at `target` too."""
    _call("mount", source.encode(), target.encode(), None, ctypes.c_ulong(_MS_BIND | _MS_REC), None)


class _MountAttributes(ctypes.Structure):
    _fields_ = (
        ("set", ctypes.c_uint64),
        ("clear", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("user_namespace_fd", ctypes.c_uint64),
    )


def make_read_only(path: str) -> None:
    """Refuse writes, setuid bits and device files at the mount `path` and at every mount below it (Linux 5.12)."""
    attributes = _MountAttributes(set=_MS_RDONLY | _MS_NOSUID | _MS_NODEV)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    number, at, flags = ctypes.c_long(_SYS_MOUNT_SETATTR), ctypes.c_int(_AT_FDCWD), ctypes.c_uint(_AT_RECURSIVE)
    _call("syscall", number, at, path.encode(), flags, ctypes.byref(attributes), size)


def remount_read_only(path: str) -> None:
    """Refuse writes at the mount `path` alone, which this process made."""
    flags = ctypes.c_ulong(_MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)
    _call("mount", None, path.encode(), None, flags, None)


def pivot_root(new_root: str, old_root: str) -> None:
    """Make the mount `new_root` the root; the one before stays visible at `old_root`, a folder below it."""
    _call("pivot_root", new_root.encode(), old_root.encode())


def detach(path: str) -> None:
    """Take the mount away from `path` at once; it is destroyed with its last user."""
    _call("umount2", path.encode(), ctypes.c_int(_MNT_DETACH))


def set_no_core_access() -> None:
    """Let no other process of the same user trace this one or read its memory."""
    _call("prctl", ctypes.c_int(_PR_SET_DUMPABLE), ctypes.c_ulong(0))


def die_with_parent(signal_number: int) -> None:
    """Send this process the signal when its parent ends."""
    _call("prctl", ctypes.c_int(_PR_SET_PDEATHSIG), ctypes.c_ulong(signal_number))


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent ends."""
    _call("prctl", ctypes.c_int(_PR_SET_CHILD_SUBREAPER), ctypes.c_ulong(1))


def drop_privileges(uid: int | None) -> None:
    """Give up every capability for good and, where `uid` is given, become that user."""
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    _call("prctl", ctypes.c_int(_PR_SET_NO_NEW_PRIVS), *(ctypes.c_ulong(n) for n in (1, 0, 0, 0)))
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _call("capset", ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)()))


def set_limit(kind: int, value: int, hard: int | None = None) -> None:
    """Lower one resource limit, never above the hard limit that holds already."""
    _, present = resource.getrlimit(kind)
    hard = value if hard is None else hard
    if present != resource.RLIM_INFINITY:
        value, hard = min(value, present), min(hard, present)
    resource.setrlimit(kind, (value, hard))
