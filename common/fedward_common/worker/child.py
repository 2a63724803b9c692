"""The worker process: `python -P -m fedward_common.worker.child <socket fd> <parent pid>`.

First the sandbox, then torch, then (with the first work) the task. Frames go over the socket; what is printed goes
to the node's log file. The order matters: the sandbox covers only threads that start after it.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from fedward_common.errors import FedwardError
from fedward_common.worker import sandbox
from fedward_common.worker.frames import (
    Channel,
    ChannelClosed,
    Frame,
    done_to_frame,
    error_to_frame,
    work_from_frame,
)
from fedward_common.worker.setup import Setup

if TYPE_CHECKING:
    from fedward_common.local import LocalRunner
    from fedward_common.work import Done, Work


def enter_sandbox(setup: Setup) -> int:
    """Give up what task code must not have. Returns the Landlock ABI (0: not sandboxed). Raises `SandboxError`."""
    sandbox.limit_resources()
    if not setup.sandboxed:
        return 0
    cuda = setup.device != "cpu" and Path("/dev/nvidiactl").exists()
    own = [*setup.read, *([setup.bundle] if setup.bundle is not None else [])]
    read = [*sandbox.system_read(cuda), *own]
    sandbox.check_private([*read, setup.scratch], setup.private)
    sandbox.restrict(read, [*sandbox.system_write(cuda), setup.scratch], setup.network)
    return sandbox.available()


def resolve_device(name: str) -> str:
    """"auto" becomes "cuda" where torch sees one, else "cpu"; other names stay."""
    import torch

    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def error_kind(error: BaseException) -> str:
    """The kind, from the fixed list, of what task code raised."""
    import torch

    from fedward_common.task import NoDataError

    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return "out_of_memory"
    # torch's CPU allocator has no exception class of its own.
    if isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error):
        return "out_of_memory"
    return "no_data" if isinstance(error, NoDataError) else "task_error"


class _Runner:
    """Builds the task's runner with the first work, so that an import that fails is that work's error."""

    def __init__(self, setup: Setup, device: str) -> None:
        self._setup = setup
        self._device = device
        self._runner: LocalRunner | None = None

    def do(self, work: Work) -> Done:
        from fedward_common.config import RunConfig
        from fedward_common.local import LocalRunner
        from fedward_common.task import load_task

        if self._runner is None:
            config = RunConfig.model_validate_json(self._setup.config)
            task = load_task(config.task, self._setup.bundle)
            self._runner = LocalRunner(config, task, self._setup.node, self._setup.data, self._device)
        return self._runner.do(work)


def serve(channel: Channel, do: Callable[[Work], Done]) -> None:
    """Answer work until the parent closes the channel."""
    while True:
        try:
            frame = channel.receive()
        except ChannelClosed:
            return
        try:
            answer = done_to_frame(do(work_from_frame(frame)))
            channel.send(answer)
        except ChannelClosed:
            return
        except BaseException as error:  # noqa: BLE001 - task code may raise anything, sys.exit() included
            channel.send(error_to_frame(error_kind(error), traceback.format_exc()))


def main(descriptor: int, parent: int) -> None:
    """The whole life of a worker."""
    channel = Channel(socket.socket(fileno=descriptor))
    sandbox.die_with_parent(parent)
    setup = Setup.from_frame(channel.receive())
    try:
        abi = enter_sandbox(setup)
    except FedwardError as error:
        channel.send(Frame({"refused": str(error)}))
        return
    import torch

    import fedward_common.local  # noqa: F401 - paid for here, not in the first work

    torch.set_num_threads(setup.threads)
    device = resolve_device(setup.device)
    channel.send(Frame({"ready": True, "device": device, "landlock": abi}))
    serve(channel, _Runner(setup, device).do)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
    # Nothing to save: skip the slow end of torch and CUDA.
    sys.stdout.flush()
    os._exit(0)
