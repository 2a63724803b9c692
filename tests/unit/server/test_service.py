from __future__ import annotations

import asyncio

import pytest
from fedward_common.errors import FedwardError
from fedward_server.service import keep_membership


def test_membership_is_checked_until_it_is_told_to_end(caplog: pytest.LogCaptureFixture) -> None:
    answers: list[int | Exception] = [FedwardError("down"), FedwardError("down"), OSError("disk full"), 2, 0]

    async def scenario() -> None:
        done = asyncio.Event()
        loop = asyncio.get_running_loop()

        def reconcile() -> int:
            answer = answers.pop(0)
            if not answers:
                loop.call_soon_threadsafe(done.set)
            if isinstance(answer, Exception):
                raise answer
            return answer

        task = asyncio.create_task(keep_membership(reconcile, pause=0.0))
        await done.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())
    # Said once, not at every try.
    assert caplog.text.count("cannot be checked now: down") == 1
    assert "disk full" in caplog.text
    assert "2 registrations" in caplog.text
