"""moto's S3 server, with an access key `append` that may not delete: what a policy does at AWS."""

import sys
from collections.abc import Callable, Iterable
from typing import Any

from moto import server
from moto.moto_server.werkzeug_app import DomainDispatcherApplication

MAY_NOT_DELETE = "append"
_REFUSAL = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"


class Restricted(DomainDispatcherApplication):
    """The application, behind the policy."""

    def __call__(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        """One request."""
        key = environ.get("HTTP_AUTHORIZATION", "").partition("Credential=")[2].partition("/")[0]
        many = environ["REQUEST_METHOD"] == "POST" and "delete" in environ["QUERY_STRING"]
        if key == MAY_NOT_DELETE and (many or environ["REQUEST_METHOD"] == "DELETE"):
            start_response("403 Forbidden", [("Content-Type", "application/xml")])
            return [_REFUSAL]
        # With object lock S3 asks for a checksum; moto knows it by a header that "does not provide
        # any additional functionality if you do not use the SDK" (AWS, PutObject).
        if environ.get("HTTP_X_AMZ_CHECKSUM_SHA256"):
            environ["HTTP_X_AMZ_SDK_CHECKSUM_ALGORITHM"] = "SHA256"
        answer: Iterable[bytes] = super().__call__(environ, start_response)
        return answer


if __name__ == "__main__":
    vars(server)["DomainDispatcherApplication"] = Restricted
    server.main(sys.argv[1:])
