"""Puts an engine together from its settings: model, ranks, scheduler, role, loop."""

from __future__ import annotations

from dataclasses import dataclass

from kvbaton.connectors.keys import IdentityRecord
from kvbaton.engine.config import EngineConfig
from kvbaton.engine.core import EngineCore, Mailbox
from kvbaton.engine.local import LocalExecutor
from kvbaton.engine.model_config import load_model_config, resolve_max_model_len
from kvbaton.engine.process import RoleFactory, Surroundings
from kvbaton.engine.scheduler import Scheduler
from kvbaton.wire import NodeId


@dataclass(frozen=True)
class Engine:
    """An engine that is ready to run, and what its clients want to know of it."""

    core: EngineCore
    num_blocks: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    identity: bytes
