"""Every exception that kvbaton raises on purpose, as one tree.

::

    KvbatonError
    ├── ConfigError            a flag or a plugin spec is wrong
    │   └── ModelError           a model folder, or a file of it
    ├── RequestError           a client's request is wrong or can't be served
    ├── EngineDeadError        the engine process is gone
    ├── StoreError             an operation of a store failed
    └── TransferError          a hand-over ended without its bytes
        ├── LocalProtocolError   our own side broke the protocol (a bug)
        ├── RemoteProtocolError  the peer broke the protocol
        ├── LayoutMismatchError  two layouts can't describe the same bytes
        └── TransportError       moving bytes failed
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPTED = 130
"""Exit status after Ctrl-C."""
SHUTTING_DOWN = "shutting_down"
"""Error code of requests that end because a node or router stops; another one can serve them."""


class KvbatonError(Exception):
    """Base of all errors that kvbaton raises on purpose."""


class ConfigError(KvbatonError, ValueError):
    """A setting is wrong.

    Attributes:
        field: The flag or file that is wrong, as the user wrote it (``--block-size``).
        reason: What is wrong with it.
    """

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field, self.reason = field, reason


class ModelError(ConfigError):
    """A model folder, or a file of it, is wrong or not supported; the field is ``--model``."""

    def __init__(self, reason: str) -> None:
        super().__init__("--model", reason)


def import_failure(error: BaseException) -> str:
    """Text of an exception from an import, with its type if the text does not tell it."""
    known = isinstance(error, ImportError | AttributeError)
    return str(error) if known else error_text(error)


def error_text(error: BaseException) -> str:
    """Type and text of an exception from a plug-in; to make that text may itself raise."""
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException as worse:
        return f"{type(error).__name__}, whose text raises {type(worse).__name__}"


@contextmanager
def writing(flag: str) -> Iterator[None]:
    """Turn an `OSError` from writing the file of a flag into a `ConfigError`."""
    try:
        yield
    except OSError as error:
        raise ConfigError(flag, f"can't be written: {error}") from error


def stand_in(data: bytes) -> str:
    """End of an error message that says what lies in place of a file; empty if unknown."""
    if data.startswith(b"version "):
        return ": it is a pointer of Git LFS; `git lfs pull` fetches the file itself"
    if data.lstrip().startswith(b"<"):
        return ": it is a web page (HTML); download the file itself"
    return ""


class RequestError(KvbatonError):
    """A request can't be served as sent.

    Attributes:
        message: What is wrong and what would be right.
        param: The offending field of the request body, if there is one.
        status: The HTTP status to answer with.
        code: A short machine-readable name (``context_length_exceeded``).
        retry_after_s: Seconds after which a retry may succeed, for 429 and 503; None is soon.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        status: int = 400,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s


class EngineDeadError(KvbatonError):
    """The engine process is gone; no request can be served."""


class StoreError(KvbatonError):
    """An operation of a store failed (full, unreachable, torn object)."""


class TransferError(KvbatonError):
    """A hand-over, or a part of it, ended without its bytes."""


class LocalProtocolError(TransferError):
    """Our own side broke the hand-over protocol: always a bug in kvbaton."""


class RemoteProtocolError(TransferError):
    """The peer sent something that the hand-over protocol does not allow."""


class LayoutMismatchError(TransferError, ValueError):
    """Two layouts can't describe the same bytes; the message names both values."""


class TransportError(TransferError):
    """A transport could not move bytes."""
