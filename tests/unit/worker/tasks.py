"""The text of a task whose behaviour the test chooses by a file that the worker may read."""

TASK = '''
import ctypes, os, socket, sys, time
from pathlib import Path
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from fedward_common.task import Data


def act(what):
    if what == "raise":
        raise ValueError("patient Jane Doe")
    if what == "leave":
        sys.exit(0)
    if what == "exit":
        os._exit(3)
    if what == "segfault":
        ctypes.string_at(0)
    if what == "memory":
        kept = []
        while True:
            kept.append(bytearray(b"x" * (16 << 20)))
    if what == "child memory":
        if os.fork() == 0:
            act("memory")
        time.sleep(600)
    if what == "torch memory":
        torch.empty(1 << 60, dtype=torch.uint8)
    if what == "loop":
        Path("began").touch()
        while True:
            pass
    if what == "deaf":
        import signal
        signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 64))
        time.sleep(600)


def attempt(what, function):
    """The name of what went through, or nothing."""
    try:
        function()
    except OSError:
        return []
    return [what]


def escapes(data):
    key, outside, parent = data["key"], data["outside"], os.getppid()
    found = attempt("read key", lambda: open(key).read())
    found += attempt("child reads key", lambda: in_child(key))
    found += attempt("read key by link", lambda: (os.symlink(key, "link"), open("link").read()))
    found += attempt("move key here", lambda: os.rename(key, "taken"))
    found += attempt("hard link", lambda: os.link(key, "linked"))
    found += attempt("list state", lambda: os.listdir(os.path.dirname(key)))
    found += attempt("write outside", lambda: open(outside, "w"))
    found += attempt("write bundle", lambda: open(__file__, "a"))
    found += attempt("remove", lambda: os.remove(key))
    found += attempt("tcp", lambda: socket.create_connection(("127.0.0.1", data["port"]), 1))
    found += attempt("udp", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    found += attempt("unix", lambda: socket.socket(socket.AF_UNIX))
    found += attempt("parent environment", lambda: open(f"/proc/{parent}/environ", "rb").read())
    found += attempt("parent memory", lambda: open(f"/proc/{parent}/mem", "rb"))
    found += attempt("parent command", lambda: open(f"/proc/{parent}/cmdline").read())
    found += attempt("processes", lambda: os.listdir("/proc"))
    found += attempt("signal parent", lambda: os.kill(parent, 0))
    found += attempt("io_uring", lambda: io_uring())
    if any("SECRET" in name or "FEDWARD" in name for name in os.environ):
        found.append("environment")
    Path("scratch.txt").write_text("allowed")
    Path(data["readable"]).read_text()
    return found


def io_uring():
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(425, 4, ctypes.create_string_buffer(256)) < 0:
        raise OSError(ctypes.get_errno(), "io_uring_setup")


def in_child(key):
    import subprocess
    if subprocess.run(["/bin/cat", key], capture_output=True).returncode:
        raise OSError("refused")


class Toy:
    tensor_kinds = {}

    def model(self):
        return nn.Linear(4, 2)

    def data(self, config):
        self.config = config
        command = Path(config["act"]).read_text() if config.get("act") else ""
        if command == "no data":
            return Data(TensorDataset(torch.zeros(0, 4), torch.zeros(0, dtype=torch.long)))
        if command == "escape":
            found = escapes(config)
            if found:
                raise AssertionError("went through: " + ", ".join(found))
        x = torch.arange(48, dtype=torch.float32).reshape(12, 4)
        return Data(TensorDataset(x, torch.arange(12) % 2), TensorDataset(x[:4], torch.arange(4) % 2))

    def loss(self, model, batch):
        if self.config.get("act"):
            act(Path(self.config["act"]).read_text())
        x, y = batch
        return F.cross_entropy(model(x), y)

    def metrics(self, model, batch):
        return {}
'''
