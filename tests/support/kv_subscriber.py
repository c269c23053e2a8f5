"""An indexer of KV events, written only from their description in `docs/kv_events.md`."""

from __future__ import annotations

from typing import Any

import msgspec
import zmq

ANSWER_MS = 20_000
QUIET_MS = 300


class Stored(msgspec.Struct, array_like=True, tag="BlockStored"):
    """The fields of an early vLLM; later fields are at the end, and skipped."""

    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[tuple[str, ...] | None] | None = None
    group_idx: int = 0


class Removed(msgspec.Struct, array_like=True, tag="BlockRemoved"):
    block_hashes: list[int | bytes]
    medium: str | None = None
    group_idx: int = 0


class Cleared(msgspec.Struct, array_like=True, tag="AllBlocksCleared"):
    pass


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[Stored | Removed | Cleared]
    data_parallel_rank: int | None = None


decode = msgspec.msgpack.Decoder(Batch).decode


class Index:
    """Blocks of a node by its events: per group, the tokens of each block and its parent.

    `strict` rejects removals of unknown blocks. These may occur after a snapshot, which can be
    ahead of the events.
    """

    def __init__(self, *, strict: bool = True) -> None:
        self.strict = strict
        self.blocks: dict[int, dict[int | bytes, tuple[int | bytes | None, list[int]]]] = {}
        self.elsewhere: dict[str, set[int | bytes]] = {}
        self.salts: set[str] = set()
        self.cleared = 0

    def apply(self, payload: bytes) -> None:
        for event in decode(payload).events:
            if isinstance(event, Cleared):
                self.blocks.clear()
                self.cleared += 1
            elif event.medium != "GPU":
                assert isinstance(event, Stored), "a store never says what it gives up"
                self.elsewhere.setdefault(event.medium or "", set()).update(event.block_hashes)
            elif isinstance(event, Removed):
                for block in event.block_hashes:
                    lost = self.blocks.get(event.group_idx, {}).pop(block, None)
                    assert lost or not self.strict, "a block that was never there is removed"
            else:
                self._store(event)

    def _store(self, event: Stored) -> None:
        blocks, size = self.blocks.setdefault(event.group_idx, {}), event.block_size
        assert len(event.token_ids) == size * len(event.block_hashes)
        parent = event.parent_block_hash
        for i, block in enumerate(event.block_hashes):
            assert block not in blocks or not self.strict, "a block is stored twice"
            blocks[block] = (parent, event.token_ids[i * size : (i + 1) * size])
            parent = block
        for extra in event.extra_keys or ():
            self.salts.update(extra or ())

    def hashes(self, group: int = 0) -> set[int | bytes]:
        return set(self.blocks.get(group, {}))


class Subscriber:
    """Follows a publisher, and requests replays of missed batches."""

    def __init__(self, endpoint: str, replay: str | None, topic: str = "") -> None:
        self.index = Index()
        self.last = -1
        self.gaps = 0
        self._context = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.setsockopt_string(zmq.SUBSCRIBE, topic)
        self._sub.connect(endpoint)
        self._ask = self._context.socket(zmq.DEALER)
        self._ask.setsockopt(zmq.RCVTIMEO, ANSWER_MS)
        if replay is not None:
            self._ask.connect(replay)

    def close(self) -> None:
        self._context.destroy(0)

    def missed(self) -> list[tuple[int, bytes]]:
        """Drop received batches without applying them, as if they had been lost; the batches."""
        return [(number, payload) for _, number, payload in self._arrived()]

    def _arrived(self) -> list[tuple[str, int, bytes]]:
        batches = []
        while self._sub.poll(QUIET_MS):
            topic, number, payload = self._sub.recv_multipart()
            batches.append((topic.decode(), int.from_bytes(number, "big"), payload))
        return batches

    def follow(self, until: int) -> None:
        """Apply batches up to number `until`; request replays of missing ones."""
        while self.last < until:
            assert self._sub.poll(ANSWER_MS), f"only {self.last} of {until} batches came"
            _, number, payload = self._sub.recv_multipart()
            self.take(int.from_bytes(number, "big"), payload)

    def take(self, number: int, payload: bytes) -> None:
        if number > self.last + 1:
            self.gaps += 1
            for missing, batch in self.ask((self.last + 1).to_bytes(8, "big")):
                self._apply(missing, batch)
        self._apply(number, payload)

    def _apply(self, number: int, payload: bytes) -> None:
        if number > self.last:
            assert number == self.last + 1, f"batch {self.last + 1} is lost for good"
            self.index.apply(payload)
            self.last = number

    def load(self) -> None:
        """Load a snapshot."""
        self.index = Index(strict=False)
        for number, payload in self.ask(b"snapshot"):
            self.index.apply(payload)
            self.last = number

    def ask(self, *frames: Any) -> list[tuple[int, bytes]]:
        """Send a request on the replay socket; all replies before the one that marks the end."""
        self._ask.send_multipart((b"", *frames))
        replies: list[tuple[int, bytes]] = []
        while True:
            _, number, payload = self._ask.recv_multipart()
            if number == b"\xff" * 8:
                assert payload == b""
                return replies
            replies.append((int.from_bytes(number, "big"), payload))
