"""A connector written for vLLM: it stores the KV of whole blocks as files in a shared folder.

It does not depend on kvbaton. A block's file is named by a hash of all tokens up to its end, so
equal prefixes share files. A file holds the block of every layer, one after the other, and is
renamed into place when it is complete.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.logger import init_logger

logger = init_logger(__name__)


@dataclass
class Moves(KVConnectorMetadata):
    """Loads and saves of a step, as (block id in the cache, file name)."""

    loads: list[tuple[int, str]] = field(default_factory=list)
    saves: list[tuple[int, str]] = field(default_factory=list)


class KVFilesConnector(KVConnectorBase_V1):
    """See the module; ``path`` in the extra configuration names the folder."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._folder = Path(self._kv_transfer_config.get_from_extra_config("path", "/tmp/kv"))
        self._block_size = vllm_config.cache_config.block_size
        self._loading: dict[str, int] = {}
        self._caches: dict[str, torch.Tensor] = {}
        self._failed: set[int] = set()
        if role is KVConnectorRole.WORKER:
            self._folder.mkdir(parents=True, exist_ok=True)

    # --- scheduler side ---

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        """Count the tokens of stored leading blocks, without the last token of the prompt."""
        found = 0
        for name in self._files(request.prompt_token_ids[:-1]):
            if not self._kept(name):
                break
            found += self._block_size
        return max(0, found - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Remember the loads of the next step."""
        if num_external_tokens:
            self._loading[request.request_id] = num_external_tokens // self._block_size

    def build_connector_meta(self, scheduler_output: Any) -> Moves:
        """Announced loads, and saves of the prompts that this step computes completely."""
        moves = Moves()
        for new in scheduler_output.scheduled_new_reqs:
            end = new.num_computed_tokens + scheduler_output.num_scheduled_tokens[new.req_id]
            rows = list(
                zip(new.block_ids[0], self._files(new.prompt_token_ids[:end]), strict=False)
            )
            computed = new.num_computed_tokens // self._block_size
            count = self._loading.pop(new.req_id, 0)
            moves.loads += rows[computed - count : computed]
            moves.saves += [row for row in rows[computed:] if not self._kept(row[1])]
        self._loading.clear()
        return moves

    def request_finished(self, request: Any, block_ids: list[int]) -> Any:
        """Free the blocks at once: they were saved before the step ended."""
        return False, None

    # --- worker side ---

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Keep the layers' caches; their first dimension is the block."""
        self._caches = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Read files into blocks; vLLM recomputes blocks that can't be read."""
        for block, name in self._get_connector_metadata().loads:
            try:
                data = bytearray((self._folder / name).read_bytes())
            except FileNotFoundError:
                self._failed.add(block)
                continue
            rows = [cache[block] for cache in self._caches.values()]
            if len(data) != sum(row.nbytes for row in rows):
                logger.warning("%s has a wrong length: removed", name)
                (self._folder / name).unlink(missing_ok=True)
                self._failed.add(block)
                continue
            for row in rows:
                part, data = data[: row.nbytes], data[row.nbytes :]
                row.copy_(torch.frombuffer(part, dtype=row.dtype).view(row.shape))

    def wait_for_layer_load(self, layer_name: str) -> None:
        """No wait: `start_load_kv` has loaded all layers."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kw: Any) -> None:
        """Nothing here: `wait_for_save` saves all layers together."""

    def wait_for_save(self) -> None:
        """Write the files."""
        for block, name in self._get_connector_metadata().saves:
            part = self._folder / f"{uuid.uuid4()}.part"
            with part.open("wb") as file:
                for cache in self._caches.values():
                    file.write(cache[block].contiguous().view(torch.uint8).numpy().data)
            part.replace(self._folder / name)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Block ids that could not be loaded since the last call."""
        failed, self._failed = self._failed, set()
        return failed

    # --- files ---

    def _files(self, tokens: list[int]) -> list[str]:
        """File names of a prompt's whole blocks."""
        names, digest = [], hashlib.sha256()
        for start in range(0, len(tokens) // self._block_size * self._block_size, self._block_size):
            block = tokens[start : start + self._block_size]
            digest.update(b"".join(token.to_bytes(4, "little") for token in block))
            names.append(f"{digest.hexdigest()}.kv")
        return names

    def _kept(self, name: str) -> bool:
        try:
            os.stat(self._folder / name)
        except FileNotFoundError:
            return False
        return True
