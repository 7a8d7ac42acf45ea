"""A real S3 server on this machine: moto's, a process of its own."""

import http.client
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

BUCKET = "vmckpt"
_START_S = 60


@contextmanager
def s3_server(folder: Path, program: str = "moto.server") -> Iterator[str]:
    """The server's URL, for the block; the environment leads there. Its words go to a file."""
    with (folder / "moto.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", program, "-H", "127.0.0.1", "-p", "0"],
            stdout=log,
            stderr=log,
        )
        try:
            port = _port(folder / "moto.log", process)
            _request(port, "PUT", f"/{BUCKET}")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()


def environment(url: str) -> dict[str, str]:
    """What leads a program to that server."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
    }


def new_location() -> str:
    """A prefix that no one has."""
    return f"s3://{BUCKET}/{secrets.token_hex(8)}"


def _port(log: Path, process: "subprocess.Popen[bytes]") -> int:
    """The port that the server says it listens on."""
    until_s = time.monotonic() + _START_S
    while time.monotonic() < until_s and process.poll() is None:
        for line in log.read_text().splitlines():
            if "Running on http://127.0.0.1:" in line:
                return int(line.rpartition(":")[2])
        time.sleep(0.05)
    raise RuntimeError(f"moto does not start: {log.read_text()}")


def make_locked_bucket(url: str, bucket: str) -> None:
    """A bucket with object lock: what is put there is kept for a day, whatever is done to it."""
    port = int(url.rpartition(":")[2])
    _request(port, "PUT", f"/{bucket}", headers={"x-amz-bucket-object-lock-enabled": "True"})
    rule = (
        "<ObjectLockConfiguration><ObjectLockEnabled>Enabled</ObjectLockEnabled><Rule>"
        "<DefaultRetention><Mode>COMPLIANCE</Mode><Days>1</Days></DefaultRetention></Rule>"
        "</ObjectLockConfiguration>"
    )
    _request(port, "PUT", f"/{bucket}?object-lock", body=rule)


def versions(url: str, bucket: str) -> str:
    """What the bucket says of all versions of its objects: XML."""
    return _request(int(url.rpartition(":")[2]), "GET", f"/{bucket}?versions")


def _request(
    port: int, method: str, path: str, body: str = "", headers: Mapping[str, str] | None = None
) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_START_S)
    connection.request(method, path, body or None, dict(headers or {}))
    answer = connection.getresponse()
    said = answer.read().decode()
    connection.close()
    if answer.status != http.client.OK:
        raise RuntimeError(f"moto answers {answer.status} to {method} {path}: {said}")
    return said
