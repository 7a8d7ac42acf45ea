"""Records in etcd: a key per VM, written only over the revision that was seen.

Every request goes to all endpoints at once, again while one has no leader, and the first certain
answer counts: a member that is paused or cut off costs no time. That is safe for writes too: of
several written over one revision one succeeds, and the others get what is stored there.

etcd's own leases are not used: they last whole seconds, and longer after each change of its leader.
etcd only has to agree on one order of writes; the claimant does the waiting (`rule`).
"""

import asyncio
import base64
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from vmckpt.errors import OutcomeUnknownError, StorageError, UsageError
from vmckpt.lease.gateway import NO_SPACE, Gateway, GatewayUnansweredError, NotTakenError
from vmckpt.lease.record import LeaseRecord, decode, encode
from vmckpt.lease.store import ArbiterDownError, Versioned

TIMEOUT_S = 1.0
RETRY_S = 0.05
PREFIX = "/vmckpt/leases/"
Answer = dict[str, Any]
Reading = Callable[[Answer], Versioned | None]


class EtcdStore:
    """Records in the cluster of `endpoints`, which are preferably all of its members.

    Raises UsageError if there is none.
    """

    def __init__(
        self, endpoints: Sequence[Gateway], *, prefix: str = PREFIX, timeout_s: float = TIMEOUT_S
    ) -> None:
        if not endpoints:
            raise UsageError(
                "no endpoint of etcd is given",
                why="records of leases are kept there",
                remedy="name the members' client addresses, e.g. http://127.0.0.1:2379",
            )
        self._endpoints, self._prefix, self._timeout_s = endpoints, prefix, timeout_s

    async def read(self, vm: str) -> Versioned | None:
        """The current record, according to a majority."""
        question = {"key": self._key(vm)}
        found, failures = await self._ask("/v3/kv/range", question, partial(self._found, vm))
        if not found:
            raise self._down(vm, failures)
        return found[0]

    async def replace(self, vm: str, record: LeaseRecord, *, over: int) -> Versioned:
        """Put `record` over version `over`; returns what is stored afterwards."""
        key = self._key(vm)
        value = base64.b64encode(encode(record).encode()).decode()

        def stands(answer: Answer) -> Versioned | None:
            if answer.get("succeeded"):
                return Versioned(record, int(answer["header"]["revision"]))
            return self._found(vm, answer["responses"][0]["response_range"])

        question = {
            "compare": [{"key": key, "target": "MOD", "mod_revision": over}],
            "success": [{"request_put": {"key": key, "value": value}}],
            "failure": [{"request_range": {"key": key}}],
        }
        answers, failures = await self._ask("/v3/kv/txn", question, stands)
        if not answers:
            if any(isinstance(failure, GatewayUnansweredError) for failure in failures.values()):
                raise self._unknown(vm, failures)
            raise self._down(vm, failures)
        (found,) = answers
        if found is None:
            raise StorageError(
                f"the lease of '{vm}' is gone",
                why=f"{self._prefix}{vm} was removed from etcd",
                remedy="stop every protection of the VM, make sure that it runs only once, and "
                "protect it again",
            )
        return found

    async def _ask(
        self, path: str, question: object, read: Reading
    ) -> tuple[list[Versioned | None], dict[str, Exception]]:
        """What `read` makes of the first answer, or None and why each endpoint gave none."""
        failures: dict[str, Exception] = {}
        tasks = [
            asyncio.ensure_future(self._retry(gateway, path, question, read, failures))
            for gateway in self._endpoints
        ]
        try:
            done, _ = await asyncio.wait(
                tasks, timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            return [task.result() for task in list(done)[:1]], failures
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _retry(
        self,
        gateway: Gateway,
        path: str,
        question: object,
        read: Reading,
        failures: dict[str, Exception],
    ) -> Versioned | None:
        """Ask an endpoint until it answers: a new leader is elected within moments."""
        doubt: Exception | None = None
        before = ""
        while True:
            late = GatewayUnansweredError(f"no answer in {self._timeout_s:g} s{before}")
            failures[gateway.url] = doubt or late
            try:
                return read(await gateway.ask(path, question))
            except NotTakenError as exc:
                failures[gateway.url] = doubt or exc
                before = f"; before that: {exc}"
            except GatewayUnansweredError as exc:
                failures[gateway.url] = doubt = exc
            except (LookupError, TypeError, ValueError, AttributeError) as exc:
                doubt = GatewayUnansweredError(
                    f"its answer is malformed: {type(exc).__name__}: {exc}"
                )
                failures[gateway.url] = doubt
            await asyncio.sleep(RETRY_S)

    def _key(self, vm: str) -> str:
        return base64.b64encode(f"{self._prefix}{vm}".encode()).decode()

    def _found(self, vm: str, answer: Answer) -> Versioned | None:
        if not (kvs := answer.get("kvs")):
            return None
        # The gateway omits an empty one.
        value = base64.b64decode(kvs[0].get("value", ""))
        record = decode(value, f"{self._prefix}{vm} in etcd")
        return Versioned(record, int(kvs[0]["mod_revision"]))

    def _down(self, vm: str, failures: dict[str, Exception]) -> ArbiterDownError:
        return ArbiterDownError(
            f"etcd grants nothing for '{vm}'",
            why=_failed(failures),
            remedy="check its URLs, and bring a majority of its members back; until then nothing "
            "is granted or renewed",
        )

    def _unknown(self, vm: str, failures: dict[str, Exception]) -> OutcomeUnknownError:
        remedy = "look again; bring a majority of its members back if they are down"
        if NO_SPACE in (why := _failed(failures)):
            remedy = (
                "compact and defragment etcd, or give it a larger --quota-backend-bytes, then: "
                "etcdctl alarm disarm; until then nothing is granted or renewed"
            )
        return OutcomeUnknownError(
            f"it is not known whether etcd has written the lease of '{vm}'", why=why, remedy=remedy
        )


def _failed(failures: dict[str, Exception]) -> str:
    return "; ".join(f"{url}: {failure}" for url, failure in sorted(failures.items()))
