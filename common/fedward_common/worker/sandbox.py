"""What a process may still do once it is to run task code: Landlock for files, a seccomp filter for sockets.

Both work without privileges and cannot be undone. Landlock also keeps the process from tracing processes outside
(so their memory and environment stay closed), and from ABI 6 on from signalling them. The filter is needed beside
it: Landlock knows TCP only, so UDP (a DNS query is a message to the outside) and the sockets of local daemons
would stay open.

Facts: Documentation/userspace-api/landlock.rst and seccomp_filter.rst of the Linux kernel.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import platform
import resource
import signal
import struct
import sys
from collections.abc import Iterable, Sequence
from errno import EACCES, EPERM
from pathlib import Path

from fedward_common.errors import FedwardError

_SYS_CREATE_RULESET, _SYS_ADD_RULE, _SYS_RESTRICT_SELF = 444, 445, 446
_CREATE_RULESET_VERSION = 1
_RULE_PATH_BENEATH = 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_REMOVE_AND_MAKE = sum(1 << bit for bit in range(4, 13))
_MAKE_CHAR, _MAKE_BLOCK = 1 << 6, 1 << 11
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_NET_TCP = 0b11
_SCOPE_ALL = 0b11
_FILE_ONLY = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV

_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 22, 4, 38
_SECCOMP_MODE_FILTER = 2

# machine -> (AUDIT_ARCH, number of socket(2))
_MACHINES = {"x86_64": (0xC000003E, 41), "aarch64": (0xC00000B7, 198)}
_SYS_IO_URING_SETUP = 425
_X32_BIT = 0x40000000

_SYSTEM = (
    "/usr", "/lib", "/lib64", "/bin", "/sbin",
    "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives", "/etc/localtime",
    "/etc/passwd", "/etc/group", "/etc/nsswitch.conf", "/etc/mime.types", "/etc/fonts",
    "/proc/self", "/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/proc/version", "/proc/filesystems",
    "/proc/sys/vm", "/proc/sys/kernel/ngroups_max",
    "/sys/devices/system",
    "/dev/urandom", "/dev/random", "/dev/zero",
)  # fmt: skip
_CUDA_READ = ("/proc/driver/nvidia", "/proc/devices", "/proc/modules", "/sys/bus/pci", "/sys/devices", "/sys/module")


class SandboxError(FedwardError):
    """The sandbox cannot be put up as asked."""


_libc = ctypes.CDLL(None, use_errno=True)


def _call(what: str, number: int, *arguments: object) -> int:
    result = int(_libc.syscall(ctypes.c_long(number), *arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise SandboxError(f"{what} failed: {os.strerror(code)}.")
    return result


def _prctl(what: str, *arguments: int) -> None:
    if _libc.prctl(*(ctypes.c_ulong(argument) for argument in arguments)) != 0:
        raise SandboxError(f"prctl({what}) failed: {os.strerror(ctypes.get_errno())}.")


def available() -> int:
    """The kernel's Landlock ABI, 0 if there is none (an old kernel, or Landlock is not enabled at boot)."""
    if not sys.platform.startswith("linux"):
        return 0
    version = _libc.syscall(
        ctypes.c_long(_SYS_CREATE_RULESET), None, ctypes.c_size_t(0), ctypes.c_uint(_CREATE_RULESET_VERSION)
    )
    return max(0, int(version))


def system_read(cuda: bool = False) -> list[Path]:
    """What Python, NumPy and torch read: the interpreter, installed packages, shared libraries, CPU facts."""
    found = [Path(name) for name in _SYSTEM + (_CUDA_READ if cuda else ())]
    found += [Path(sys.prefix), Path(sys.base_prefix)]
    found += [Path(entry) for entry in sys.path if entry]
    # An editable install may import through a finder that sys.path does not show.
    for name in ("fedward_common", "fedward_client", "fedward_server"):
        spec = importlib.util.find_spec(name)
        if spec is not None:
            found += [Path(place) for place in spec.submodule_search_locations or ()]
    return [path for path in found if path.exists()]


def system_write(cuda: bool = False) -> list[Path]:
    """Devices that may be written: the null device, and NVIDIA's if `cuda`."""
    found = [Path("/dev/null")]
    if cuda:
        found += sorted(Path("/dev").glob("nvidia*"))
    return found


def check_private(allowed: Iterable[Path], private: Iterable[Path]) -> None:
    """Raises `SandboxError` if one of the `allowed` paths is `private`, lies below a private one or holds one."""
    hidden = [path.resolve() for path in private]
    for path in allowed:
        real = path.resolve()
        for secret in hidden:
            if secret.is_relative_to(real) or real.is_relative_to(secret):
                raise SandboxError(
                    f"{secret} is private to the node, but task code is to read {path}. "
                    "Name another file or a smaller folder, or move one of the two."
                )


def restrict(read: Sequence[Path], write: Sequence[Path], network: bool) -> None:
    """From here on this process and its children read (and execute) only below `read`, write only below `write`,
    and have no network unless `network`. Paths that do not exist are an error.

    Call it while the process has one thread: other threads would stay free. Raises `SandboxError`; the process is
    then not sandboxed, or only in part, and must not run task code.
    """
    abi = available()
    if abi < 1:
        raise SandboxError(
            "this kernel offers no Landlock (Linux 5.13 or newer, enabled at boot with lsm=landlock,…), so task code "
            "cannot be kept from the node's keys. Enable it, or accept the risk in the node's policy with "
            "allow_unsandboxed_worker = true."
        )
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise SandboxError(f"the process has {threads} threads already; the sandbox would cover only one of them.")
    _prctl("PR_SET_NO_NEW_PRIVS", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _landlock(abi, read, write, network)
    if not network:
        _deny_sockets()


def _landlock(abi: int, read: Sequence[Path], write: Sequence[Path], network: bool) -> None:
    handled = _EXECUTE | _WRITE_FILE | _READ_FILE | _READ_DIR | _REMOVE_AND_MAKE
    handled |= _REFER if abi >= 2 else 0
    handled |= _TRUNCATE if abi >= 3 else 0
    handled |= _IOCTL_DEV if abi >= 5 else 0
    attributes = struct.pack("=Q", handled)
    if abi >= 4:
        attributes += struct.pack("=Q", 0 if network else _NET_TCP)
    if abi >= 6:
        attributes += struct.pack("=Q", _SCOPE_ALL)
    ruleset = _call(
        "landlock_create_ruleset", _SYS_CREATE_RULESET,
        attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint(0),
    )  # fmt: skip
    try:
        for path in read:
            _allow(ruleset, path, _EXECUTE | _READ_FILE | _READ_DIR)
        for path in write:
            _allow(ruleset, path, handled & ~(_MAKE_CHAR | _MAKE_BLOCK))
        _call("landlock_restrict_self", _SYS_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint(0))
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: Path, access: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError as error:
        raise SandboxError(f"{path}: task code was to be given this path, but it cannot be opened: {error.strerror}. "
                           "Correct the path.") from error
    try:
        if not os.path.isdir(f"/proc/self/fd/{descriptor}"):
            access &= _FILE_ONLY
        rule = struct.pack("=Qi", access, descriptor)
        _call(
            f"landlock_add_rule for {path}", _SYS_ADD_RULE,
            ctypes.c_int(ruleset), ctypes.c_int(_RULE_PATH_BENEATH), rule, ctypes.c_uint(0),
        )  # fmt: skip
    finally:
        os.close(descriptor)


def _deny_sockets() -> None:
    """socket(2) of any family fails with EACCES; io_uring, which could open one behind the filter's back, with EPERM.

    socketpair(2) stays: it reaches no one. Calls of another architecture (which have other numbers) end the process.
    """
    machine = platform.machine()
    if machine not in _MACHINES:
        raise SandboxError(f"no network filter for machine type {machine!r}; known are {sorted(_MACHINES)}.")
    architecture, sys_socket = _MACHINES[machine]
    load, equal, at_least, answer = 0x20, 0x15, 0x35, 0x06
    allow, deny, kill = 0x7FFF0000, 0x00050000, 0x80000000
    program = [
        (load, 0, 0, 4),
        (equal, 1, 0, architecture),
        (answer, 0, 0, kill),
        (load, 0, 0, 0),
        (at_least, 4, 0, _X32_BIT),
        (equal, 2, 0, sys_socket),
        (equal, 2, 0, _SYS_IO_URING_SETUP),
        (answer, 0, 0, allow),
        (answer, 0, 0, deny | EACCES),
        (answer, 0, 0, deny | EPERM),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in program))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(code)))
    _prctl("PR_SET_SECCOMP", _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(header), 0, 0)


def die_with_parent(parent: int) -> None:
    """The kernel kills this process when the thread that started it ends. parent: that process's id.

    Raises `SandboxError` if the parent is gone already.
    """
    _prctl("PR_SET_PDEATHSIG", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        raise SandboxError("the parent process ended before the worker was ready.")


def hide_memory() -> None:
    """For the trusted side: no process of the same user may read this one's memory or environment, nor dump it."""
    _prctl("PR_SET_DUMPABLE", _PR_SET_DUMPABLE, 0, 0, 0, 0)


MAX_FILE = 1 << 30
"""Bytes of the largest file that task code may write: an endless print must not fill the node's disk."""


def limit_resources() -> None:
    """No core dumps (they would hold the data), no huge files, and the kernel kills this process first when memory
    runs out."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit = MAX_FILE if hard == resource.RLIM_INFINITY else min(MAX_FILE, hard)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    # Some containers mount /proc read-only; the memory limit of the parent holds without this.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


_KEPT = ("PATH", "LANG", "TZ", "PYTHONPATH", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES",
         "NVIDIA_DRIVER_CAPABILITIES", "CUDA_HOME", "CUBLAS_WORKSPACE_CONFIG")  # fmt: skip


def clean_environment(scratch: Path, threads: int) -> dict[str, str]:
    """The worker's environment: a short list of names from ours, nothing that could be a secret; caches go to
    `scratch`."""
    kept = {name: value for name, value in os.environ.items() if name in _KEPT or name.startswith("LC_")}
    if "PYTHONPATH" in kept:
        # The worker starts in another folder.
        kept["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, kept["PYTHONPATH"].split(os.pathsep)))
    own = str(scratch)
    return {
        **kept,
        "HOME": own, "TMPDIR": own, "XDG_CACHE_HOME": own, "TORCH_HOME": own, "MPLCONFIGDIR": own,
        "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads),
        # NumPy would start OpenBLAS's threads on import, before the sandbox is up.
        "OPENBLAS_NUM_THREADS": "1",
        # Sets and dicts in task code then come in the same order in every process: a resumed run repeats exactly.
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1",
        "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1",
        # For tasks that import Hugging Face's libraries themselves.
        "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1",
    }  # fmt: skip
