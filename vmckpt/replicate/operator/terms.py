"""The operator's side of a replication: have a host settle the term of a killed service.

The host asks the arbiter, which the operator's own machine may not reach.
"""

from vmckpt.errors import HostDownError, OperationFailedError, TimedOutError
from vmckpt.hosts.host import Host
from vmckpt.replicate.arbiter import ARBITER_S
from vmckpt.replicate.operator.sides import BEGIN_S, last_status, while_there_is
from vmckpt.replicate.request import ServiceFiles
from vmckpt.replicate.status import ReplicaStatus

# How long a standby's host has to give its term up, if the arbiter answers.
ABANDON_S = 2 * ARBITER_S


async def take_back_term(host: Host, name: str, *, standby_is_dead: bool = False) -> ReplicaStatus:
    """Have the host of a killed primary take its term back; returns what it says then.

    A term that a standby took is taken back only if the operator declares the standby dead.
    """
    files = ServiceFiles.of(host, name)
    log = files.path / "release.log"
    command = [*await host.own_command(), "replica", "release", str(files.path)]
    process = await host.spawn([*command, *["--standby-is-dead"] * standby_is_dead], log)
    without = (
        "If the arbiter is gone for good, and the standby's host is off: "
        f"vmckpt replicate stop {name} --standby-is-dead"
    )
    late = TimedOutError(
        f"the term of '{name}' was not taken back within {BEGIN_S:g} s",
        why="the arbiter does not answer, or another command works on the VM",
        remedy=f"restore access to the arbiter: {host.name} keeps trying; then repeat the "
        f"command. {without}",
    )
    await while_there_is(lambda: host.is_alive(process), late)
    status = await last_status(host, files)
    if status is None or not status.has_ended:
        words = (await host.read_text(log) or "").strip().splitlines()
        raise OperationFailedError(
            f"the term of '{name}' was not taken back",
            why="; ".join(words[-3:]) or "its process ended without a message",
            remedy=f"fix that, and try again: until then a standby may take over. {without}",
        )
    return status


async def give_up_term(host: Host, name: str) -> str:
    """Have the host of a killed standby give up a term that it took in vain; returns why it did
    not: the arbiter does not answer.

    Then nothing can use that term, and a guest that is at home there stays paused.
    """
    directory = ServiceFiles.of(host, name).path
    command = [*await host.own_command(), "replica", "abandon", str(directory)]
    try:
        done = await host.run(command, ABANDON_S)
    except HostDownError as exc:
        await host.require_up()
        return f"the arbiter does not answer: {exc.why}"
    if not done.returncode:
        return ""
    return "; ".join(done.stderr.strip().splitlines()) or f"exit {done.returncode}"
