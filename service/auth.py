"""API keys."""

import hmac
from collections.abc import Sequence

from pydantic import SecretStr
from starlette.requests import Request

from service.errors import Unauthorized


def check_key(request: Request, keys: Sequence[SecretStr]) -> None:
    """Compare the request's key with all accepted ones, in a time that doesn't tell which is how near.

    The header is `Authorization: Bearer KEY`; a bare key is taken as well, since some clients send it so.
    Without accepted keys everyone may pass. Raises Unauthorized.
    """
    if not keys:
        return
    header = request.headers.get("authorization", "").strip()
    scheme, _, rest = header.partition(" ")
    # Header bytes reach us decoded as Latin-1.
    given = (rest.strip() if scheme.lower() == "bearer" else header).encode("latin-1")
    matches = [hmac.compare_digest(given, key.get_secret_value().encode()) for key in keys]
    if not any(matches):
        raise Unauthorized("the API key is missing or wrong; send it as Authorization: Bearer KEY")
