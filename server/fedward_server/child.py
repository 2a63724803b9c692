"""Become another program that is killed when the process that started it dies.

Run as a plain script (`python -I -S child.py PARENT-PID PROGRAM ARGUMENTS…`), so that it costs next to nothing and
no Python code runs between fork and exec in the supervisor. Linux only, like the server.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Ask the kernel for SIGKILL at the parent's death, then exec."""
    parent, program = int(arguments[0]), arguments[1:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("the parent died before its child began")
    os.execvp(program[0], program)


if __name__ == "__main__":
    main(sys.argv[1:])
