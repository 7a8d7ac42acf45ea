"""A client that counts in the guest over one connection, and checks every answer."""

import asyncio
import random

from vmckpt.errors import VmckptError
from vmckpt.lab.guests.guest import KvClient

ANSWER_S = 60.0


class Counting:
    """Counts until its end, each answer one more than the last."""

    def __init__(self, client: KvClient) -> None:
        self._client, self.answers, self.longest_ms = client, 0, 0.0
        self._key = f"count{random.getrandbits(32)}"
        self._task = asyncio.ensure_future(self._count())

    async def _count(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            asked_s = loop.time()
            assert await self._client.incr(self._key) == self.answers + 1
            self.longest_ms = max(self.longest_ms, (loop.time() - asked_s) * 1e3)
            self.answers += 1

    async def more_than(self, answers: int) -> None:
        async with asyncio.timeout(ANSWER_S):
            while self.answers <= answers:
                if self._task.done():
                    self._task.result()
                await asyncio.sleep(0.02)

    async def end(self) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})
        if not self._task.cancelled() and (error := self._task.exception()):
            assert isinstance(error, VmckptError), error  # a guest that is lost
        await self._client.close()
