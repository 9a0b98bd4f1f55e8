"""The key that clients send in the header Authorization. Read next: `server.py`."""

import hmac
from collections.abc import Sequence


class ApiKey:
    """Admits clients that send `Authorization: <scheme> <key>`; all clients if `key` is None."""

    def __init__(self, key: str | None, scheme: str):
        self._expected = None if key is None else f"{scheme} {key}".encode()

    def admits(self, given: Sequence[bytes]) -> bool:
        """Whether a client with these Authorization headers may come in. With several of them it may not."""
        if self._expected is None:
            return True
        return len(given) == 1 and hmac.compare_digest(given[0], self._expected)
