"""A slow line between a node and the server, without privileges: a TCP relay that holds bytes back.

It gives the line's latency and bandwidth; what the kernel does on such a line (slow start, losses) it does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

_CHUNK = 8 * 1024


class _Way:
    """One direction, shared by all connections: bytes leave one after another at `rate`, and arrive `delay` later."""

    def __init__(self, delay: float, rate: float) -> None:
        self._delay = delay
        self._rate = rate
        self._free = 0.0

    async def carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        """Until the source ends."""
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        arrivals = asyncio.create_task(self._arrive(under_way, sink))
        try:
            data = b"."
            while data:
                data = await source.read(_CHUNK)
                now = asyncio.get_running_loop().time()
                self._free = max(self._free, now) + len(data) / self._rate
                under_way.put_nowait((self._free + self._delay, data))
                await asyncio.sleep(self._free - now)
            await arrivals
        finally:
            arrivals.cancel()
            sink.close()

    async def _arrive(self, under_way: asyncio.Queue[tuple[float, bytes]], sink: asyncio.StreamWriter) -> None:
        while True:
            when, data = await under_way.get()
            await asyncio.sleep(when - asyncio.get_running_loop().time())
            if not data:
                return
            sink.write(data)
            await sink.drain()


@contextlib.contextmanager
def slow_link(port: int, delay: float, rate: float) -> Iterator[int]:
    """The port of a line to `port` on this machine. delay: seconds each way; rate: bytes a second each way."""
    up, down = _Way(delay, rate), _Way(delay, rate)
    loop = asyncio.new_event_loop()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        # Either end may break off at any time: that ends the other direction too.
        await asyncio.gather(up.carry(reader, far_writer), down.carry(far_reader, writer), return_exceptions=True)

    server = loop.run_until_complete(asyncio.start_server(relay, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        server.close()
        loop.close()
