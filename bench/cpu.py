"""CPU seconds of this process, all threads together: what waiting and other processes' turns do not add to."""

from __future__ import annotations

import time
from types import TracebackType


class Cpu:
    """Adds up the CPU seconds spent in its `with` blocks."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = 0.0

    def __enter__(self) -> Cpu:
        self._began = time.process_time()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.seconds += time.process_time() - self._began
