"""What can go wrong with a request, by what the caller can do about it.

Each kind has one status name, that of gRPC. The HTTP front translates it by ``HTTP_STATUS``, the gRPC front takes it
as it is; a worker's own status comes back by the same names. This is the only such table.
"""

from typing import ClassVar

from common.grpc_text import sendable

TOO_LONG = "context_length_exceeded"  # OpenAI's code for prompts, or answers asked for, that the context cannot hold


class RouterError(Exception):
    """A request failed. The message says what happened, to what, and what the caller can do."""

    status: ClassVar[str] = "INTERNAL"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.param = param  # the request field that is to blame
        self.code = code or self.status.lower()  # of OpenAI's error object: its own name where it has one
        self.retry_after_s = retry_after_s

    @property
    def message(self) -> str:
        """The text for the client, which may repeat some of what it sent, but no more than can be sent."""
        return sendable(str(self.args[0]))


class InvalidRequestError(RouterError):
    """The request is wrong and will be as wrong next time."""

    status = "INVALID_ARGUMENT"


class UnsupportedError(RouterError):
    """The request asks for something by a name that is known and not offered."""

    status = "UNIMPLEMENTED"


class NotFoundError(RouterError):
    """No such model, adapter, replica or path."""

    status = "NOT_FOUND"


class BodyTooLargeError(RouterError):
    """The body is longer than this router reads."""

    status = "OUT_OF_RANGE"


class BodyTooSlowError(RouterError):
    """The request did not arrive whole in time."""

    status = "ABORTED"


class ClientLeftError(RouterError):
    """The client has gone; nobody reads this."""

    status = "CANCELLED"


class StalledError(RouterError):
    """The client takes nothing of its answer."""

    status = "ABORTED"


class NoReplicaReadyError(RouterError):
    """Every replica is starting, draining or gone. Retrying later may help."""

    status = "UNAVAILABLE"


class OverloadedError(RouterError):
    """All queues are full. Retrying after ``retry_after_s`` may help."""

    status = "RESOURCE_EXHAUSTED"


class DeadlineError(RouterError):
    """The request's time is over."""

    status = "DEADLINE_EXCEEDED"


class WorkerFailedError(RouterError):
    """The replica that answered failed and the answer could not be moved to another one."""

    status = "UNAVAILABLE"


# Status name -> HTTP status and the ``type`` of OpenAI's error object.
HTTP_STATUS: dict[str, tuple[int, str]] = {
    "INVALID_ARGUMENT": (400, "invalid_request_error"),
    "UNIMPLEMENTED": (400, "invalid_request_error"),
    "FAILED_PRECONDITION": (409, "invalid_request_error"),
    "UNAUTHENTICATED": (401, "authentication_error"),
    "NOT_FOUND": (404, "invalid_request_error"),
    "OUT_OF_RANGE": (413, "invalid_request_error"),
    "ABORTED": (408, "invalid_request_error"),
    "RESOURCE_EXHAUSTED": (429, "rate_limit_error"),
    "CANCELLED": (499, "cancelled"),
    "INTERNAL": (500, "server_error"),
    "UNAVAILABLE": (503, "server_error"),
    "DEADLINE_EXCEEDED": (504, "server_error"),
}


def error_of_status(status: str, message: str, retry_after_s: float | None = None) -> RouterError:
    """The error that stands for a status name a worker answered with."""
    kinds = (InvalidRequestError, UnsupportedError, NotFoundError, NoReplicaReadyError, OverloadedError, DeadlineError)
    for kind in kinds:
        if kind.status == status:
            return kind(message, retry_after_s=retry_after_s)
    return RouterError(message)
