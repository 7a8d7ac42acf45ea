"""Tests whether a standby could take over, when its primary has identified itself.

Otherwise only the failover would reveal that the two hosts read different leases, or that the
fencing agent cannot reach the primary.
"""

from vmckpt.errors import RefusedError
from vmckpt.lease.rule import Holding
from vmckpt.replicate.arbiter import open_arbiter
from vmckpt.replicate.fencing.agent import Agent, Target
from vmckpt.replicate.request import ReplicationRequest
from vmckpt.replicate.wire.messages import Hello


def target_of(request: ReplicationRequest, hello: Hello, holding: Holding) -> Target:
    """The target to fence. The names are the operator's, from the request: HELLO comes from the
    other host, and the host's name becomes part of a command that runs here.
    """
    return Target(request.vm, holding, request.primary.name, hello.machine, hello.emitters)


async def try_means(request: ReplicationRequest, hello: Hello, term: int) -> None:
    """Test the arbiter and the fencing agent; changes nothing.

    Raises HostDownError and StorageError (the arbiter), RefusedError (another holds the term),
    OperationFailedError (the agent).
    """
    options = request.options
    found = await open_arbiter(options).read(request.vm)
    holding = Holding(term, hello.holder)
    if found is None or Holding(found.record.term, found.record.holder) != holding:
        reason = f"term {found.record.term} of {found.record.holder}" if found else "nothing"
        raise RefusedError(
            f"standby and primary read different leases at {options.arbiter}",
            why=f"{hello.holder} holds term {term}; the standby reads {reason}",
            remedy="name a directory that both hosts really share, or an etcd cluster",
        )
    if options.fence:
        await Agent(options.fence).check(target_of(request, hello, holding))
