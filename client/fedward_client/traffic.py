"""The bytes that the link hands to gRPC, counted as they go: what the journal has to account for."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class Calls:
    """Calls of one method of the Fleet API.

    bytes: serialised requests and their headers, without what a message's line in the journal accounts for already.
    """

    calls: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class Count:
    """What was sent since the count before.

    control: method -> calls. withheld: message id -> bytes that its line announced and that never left.
    total: all bytes of this process so far. unsent: announced bytes that have not left so far.
    """

    control: Mapping[str, Calls] = field(default_factory=dict)
    withheld: Mapping[str, int] = field(default_factory=dict)
    total: int = 0
    unsent: int = 0


class Traffic:
    """Running counters. Safe for several threads.

    A message's bytes are announced (journalled) before they leave. At any time and over all counts taken:
    announced + control - withheld = total + unsent.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._control: dict[str, Calls] = {}
        self._withheld: dict[str, int] = {}
        self._total = 0
        self._unsent = 0

    @property
    def idle(self) -> bool:
        """Nothing happened since the count before."""
        with self._lock:
            return not self._control and not self._withheld

    def call(self, method: str, size: int, announced: int = 0) -> None:
        """A request of `size` bytes goes out; `announced` of them stand in a message's line."""
        with self._lock:
            calls = self._control.setdefault(method, Calls())
            calls.calls += 1
            calls.bytes += size - announced
            self._total += size
            self._unsent -= announced

    def headers(self, method: str, size: int) -> None:
        """`size` bytes of headers go out with a call."""
        with self._lock:
            self._control.setdefault(method, Calls()).bytes += size
            self._total += size

    def withhold(self, message: str, size: int) -> None:
        """`size` announced bytes of a message will not leave: the server has them, or nobody wants them any more."""
        with self._lock:
            self._withheld[message] = self._withheld.get(message, 0) + size
            self._unsent -= size

    def take(self, announced: int = 0) -> Count:
        """Count and start anew; from now on `announced` more bytes are to leave."""
        with self._lock:
            self._unsent += announced
            count = Count(self._control, self._withheld, self._total, self._unsent)
            self._control, self._withheld = {}, {}
            return count

    def give_back(self, count: Count, announced: int = 0) -> None:
        """Undo a `take` whose count could not be written down."""
        with self._lock:
            self._unsent -= announced
            for method, calls in count.control.items():
                now = self._control.setdefault(method, Calls())
                now.calls += calls.calls
                now.bytes += calls.bytes
            for message, size in count.withheld.items():
                self._withheld[message] = self._withheld.get(message, 0) + size
