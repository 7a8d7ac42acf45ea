"""vmckpt pki: init, issue, show."""

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vmckpt.cli.options.listing import ListOptions
from vmckpt.cli.options.together import together
from vmckpt.cli.output import Json, run, show

if TYPE_CHECKING:
    from vmckpt.hosts.host import Host
    from vmckpt.hosts.pki.certificate import Certificate

app = typer.Typer(
    help="Certificates for encrypted migrations.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

# Below this many days `show` reports that a certificate expires soon.
SOON_DAYS = 30
MOST_DAYS = 36_500
Days = Annotated[
    int, typer.Option("--days", help="Validity, in days.", min=1, max=MOST_DAYS, metavar="DAYS")
]


@app.command()
def init(
    days: Days = 3650,
    json: Json = False,
) -> None:
    """Create a certificate authority (CA).

    Its key never leaves this machine.
    """
    from vmckpt.hosts.inventory.directories import state_dir
    from vmckpt.hosts.pki.ca import make_ca

    ca = make_ca(state_dir(), days=days)
    text = f"created the CA '{ca.subject}', fingerprint {ca.fingerprint}"
    text += "\nnow issue every host's certificates: vmckpt pki issue HOST ..."
    show(_facts(ca), text, as_json=json)


@app.command()
def issue(
    hosts: Annotated[list[str], typer.Argument(help="Names of the hosts.", metavar="HOST...")],
    days: Days = 365,
    json: Json = False,
) -> None:
    """Issue new certificates to hosts, replacing existing ones."""
    from vmckpt.hosts.inventory.directories import state_dir
    from vmckpt.hosts.inventory.inventory import find_host
    from vmckpt.hosts.pki.ca import issue as issue_to

    issued, lines = [], []
    for host in [find_host(name) for name in hosts]:
        run(host.require_up())
        facts = _facts(run(issue_to(state_dir(), host, days=days)).server)
        issued.append({"host": host.name, **facts})
        lines.append(f"{host.name}: for {', '.join(facts['names'])}, until {facts['not_after']}")
    show({"hosts": issued}, "\n".join(lines), as_json=json)


@app.command("show")
@together
def show_(
    hosts: Annotated[
        list[str] | None,
        typer.Argument(help="Names of the hosts. [default: all]", metavar="HOST..."),
    ] = None,
    *,
    listing: ListOptions,
) -> None:
    """List the certificates of the CA and all hosts."""
    from vmckpt.hosts.inventory.directories import state_dir
    from vmckpt.hosts.inventory.inventory import all_hosts, find_host
    from vmckpt.hosts.pki.ca import read_ca

    ca = read_ca(state_dir())
    chosen = [find_host(name) for name in hosts] if hosts else all_hosts()
    found = [_host_facts(host, ca) for host in chosen]
    header = ("host", "state", "days left", "names", "fingerprint")
    rows = [_row("(CA)", _state(ca), _facts(ca))] if ca else []
    rows += [_row(facts["host"], facts["state"], facts.get("server")) for facts in found]
    text = "" if ca else "there is no CA here; create one: vmckpt pki init"
    result = {"authority": _facts(ca) if ca else None, "hosts": found}
    listing.layout().show(result, header, rows, wide=("fingerprint",), text=text)


def _host_facts(host: "Host", ca: "Certificate | None") -> dict[str, Any]:
    from vmckpt.errors import HostDownError, UsageError
    from vmckpt.hosts.pki.certificate import is_issued_by
    from vmckpt.hosts.pki.identity import read_identity

    try:
        identity = run(read_identity(host))
    except UsageError as exc:
        return {"host": host.name, "state": "damaged", "why": exc.why}
    except HostDownError as exc:
        return {"host": host.name, "state": "unreachable", "why": f"{exc.what}: {exc.why}"}
    if identity is None:
        return {"host": host.name, "state": "none"}
    state = _state(min(identity.server, identity.client, key=lambda c: c.not_after_unix_s))
    if ca and not is_issued_by(identity.server, ca):
        state = "other authority"
    elif not identity.server.is_for(host.migration_address):
        state = "other address"
    return {
        "host": host.name,
        "state": state,
        "server": _facts(identity.server),
        "client": _facts(identity.client),
        "authority": identity.ca.fingerprint,
    }


def _state(certificate: "Certificate") -> str:
    if certificate.fault(time.time()):
        return "expired" if _days(certificate) < 0 else "not yet valid"
    return "ends soon" if _days(certificate) < SOON_DAYS else "ok"


def _days(certificate: "Certificate") -> int:
    return certificate.days_left(time.time())


def _row(name: str, state: str, facts: dict[str, Any] | None) -> tuple[str, ...]:
    if facts is None:
        return name, state, "", "", ""
    return name, state, str(facts["days_left"]), " ".join(facts["names"]), facts["fingerprint"]


def _facts(certificate: "Certificate") -> dict[str, Any]:
    return {
        "subject": certificate.subject,
        "names": sorted(certificate.names),
        "not_after": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(certificate.not_after_unix_s)),
        "days_left": _days(certificate),
        "fingerprint": certificate.fingerprint,
    }
