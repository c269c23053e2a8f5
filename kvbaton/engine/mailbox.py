"""The sockets between a node's HTTP process and its engine core: ZMQ, MessagePack, local only."""

from __future__ import annotations

import msgspec
import zmq

from kvbaton.messages.engine import FromCore, ToCore, Undecodable, decode_to_core

_encoder = msgspec.msgpack.Encoder()


class CoreMailbox:
    """The core's end: connects to the two endpoints that the HTTP process has bound.

    Args:
        inbound: endpoint that messages to the core come from.
        outbound: endpoint that messages of the core go to.
    """

    def __init__(self, inbound: str, outbound: str) -> None:
        self._context = zmq.Context()
        self._in = self._context.socket(zmq.PULL)
        self._out = self._context.socket(zmq.PUSH)
        self._in.set_hwm(0)
        self._out.set_hwm(0)
        self._out.setsockopt(zmq.LINGER, 2000)
        self._in.connect(inbound)
        self._out.connect(outbound)
        self._poller = zmq.Poller()
        self._poller.register(self._in, zmq.POLLIN)
        self._wake_fd = -1

    def receive(self, timeout: float, wake_fd: int) -> list[ToCore | Undecodable]:
        """Messages that have arrived; waits up to `timeout` seconds for one or for `wake_fd`."""
        if wake_fd != self._wake_fd:
            self._poller.register(wake_fd, zmq.POLLIN)
            self._wake_fd = wake_fd
        self._poller.poll(int(timeout * 1000))
        messages: list[ToCore | Undecodable] = []
        while self._in.poll(0):
            messages.append(decode_to_core(self._in.recv(zmq.NOBLOCK)))
        return messages

    def send(self, message: FromCore) -> None:
        """Send to the HTTP process."""
        self._out.send(_encoder.encode(message))

    def close(self) -> None:
        """Send what is queued, for at most two seconds, and close."""
        self._in.close(0)
        self._out.close()
        self._context.term()
