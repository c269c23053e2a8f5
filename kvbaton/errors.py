"""Every exception that kvbaton raises on purpose, as one tree.

::

    KvbatonError
    ├── ConfigError            a flag or a plugin spec is wrong
    │   └── ModelError           a model folder, or a file of it
    ├── RequestError           a client's request is wrong or can't be served
    ├── EngineDeadError        the engine process is gone
    ├── StoreError             a store could not do what it was asked
    └── TransferError          a hand-over ended without its bytes
        ├── LocalProtocolError   our own side broke the protocol (a bug)
        ├── RemoteProtocolError  the peer sent what it may not send
        ├── LayoutMismatchError  two sides can't describe the same bytes
        └── TransportError       moving bytes failed
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPTED = 130
"""The exit status after Ctrl-C."""
SHUTTING_DOWN = "shutting_down"
"""The code of what is cut off since a node or router was told to stop: others can serve it."""


class KvbatonError(Exception):
    """Base of all errors that kvbaton raises on purpose."""


class ConfigError(KvbatonError, ValueError):
    """A setting is wrong.

    Attributes:
        field: the flag or file that is wrong, as the user wrote it (``--block-size``).
        reason: what is wrong with it.
    """

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field, self.reason = field, reason


class ModelError(ConfigError):
    """A model folder, or a file of it, is wrong or not supported; the field is ``--model``."""

    def __init__(self, reason: str) -> None:
        super().__init__("--model", reason)


def import_failure(error: BaseException) -> str:
    """What an import raised, with its type where its words do not tell it."""
    known = isinstance(error, ImportError | AttributeError)
    return str(error) if known else error_text(error)


def error_text(error: BaseException) -> str:
    """Kind and text of what a plug-in raised, whose text may be no better than its calls."""
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException as worse:
        return f"{type(error).__name__}, whose text raises {type(worse).__name__}"


@contextmanager
def writing(flag: str) -> Iterator[None]:
    """What can't be written to the file of a flag is a `ConfigError`."""
    try:
        yield
    except OSError as error:
        raise ConfigError(flag, f"can't be written: {error}") from error


def stand_in(data: bytes) -> str:
    """What lies where a file should, by its first bytes, to end a message with; mostly nothing."""
    if data.startswith(b"version "):
        return ": it is a pointer of Git LFS; `git lfs pull` fetches the file itself"
    if data.lstrip().startswith(b"<"):
        return ": it is a web page (HTML); download the file itself"
    return ""


class RequestError(KvbatonError):
    """A request can't be served as sent.

    Attributes:
        message: what is wrong and what would be right.
        param: the offending field of the request body, if one is to blame.
        status: the HTTP status to answer with.
        code: a short machine-readable name (``context_length_exceeded``).
        retry_after_s: when it may be worth another try, for 429 and 503; None is soon.
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
    """A store could not do what it was asked (full, unreachable, torn object)."""


class TransferError(KvbatonError):
    """A hand-over, or a part of it, ended without its bytes."""


class LocalProtocolError(TransferError):
    """Our own side broke the hand-over protocol: always a bug of ours."""


class RemoteProtocolError(TransferError):
    """The peer sent something that the hand-over protocol does not allow."""


class LayoutMismatchError(TransferError, ValueError):
    """Two layouts can't describe the same bytes; the message names both values."""


class TransportError(TransferError):
    """A transport could not move bytes."""
