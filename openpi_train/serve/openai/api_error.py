"""Errors in OpenAI's form. Read next: `text_server.py`."""

from typing import Any

# What a client that retries by itself should wait.
_RETRY_AFTER_S = 1


class ApiError(Exception):
    """An answer with an error: `{"error": {"message", "type", "param", "code"}}` under an HTTP status.

    Args: `param` is the field of the request that is wrong, `code` a word for programs. The statuses 429 and 503 get
    the header Retry-After. `allow` names the methods of a path, for 405.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, allow: str | None = None
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self._allow = allow

    @property
    def body(self) -> dict[str, Any]:
        """The JSON of the answer, which is also that of an error within a stream."""
        kind = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}.get(
            self.status, "invalid_request_error"
        )
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """The headers that belong to the status."""
        found = []
        if self.status in (429, 503):
            found.append((b"retry-after", str(_RETRY_AFTER_S).encode()))
        if self.status == 401:
            found.append((b"www-authenticate", b"Bearer"))
        if self._allow is not None:
            found.append((b"allow", self._allow.encode()))
        return found


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """The error of a request that can never be answered."""
    return ApiError(400, message, param=param, code=code)
