"""The engine core as a process of its own: what runs in the child."""

from __future__ import annotations

import ctypes
import logging
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvbaton.engine.config import EngineConfig
from kvbaton.engine.mailbox import CoreMailbox
from kvbaton.errors import ConfigError
from kvbaton.messages.engine import Dead, Ready
from kvbaton.types import NodeId, clip_text

if TYPE_CHECKING:
    from kvbaton.engine.executor import Executor
    from kvbaton.engine.role import Role
    from kvbaton.engine.scheduler import Scheduler

PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Surroundings:
    """What a role may want to know of the engine beyond executor and scheduler.

    Attributes:
        config: the engine's settings.
        node: this life of this node.
        identity: digest of the identity record, 32 bytes.
        record: the identity record, readable.
    """

    config: EngineConfig
    node: NodeId
    identity: bytes
    record: dict[str, str]


class RoleFactory(Protocol):
    """Makes a role inside the core's process; crosses into it by pickle, from parent to child."""

    @property
    def sends_blocks(self) -> bool:
        """Whether blocks are handed over from this node, so that their digests must be kept."""
        ...

    @property
    def items(self) -> RoleFactory:
        """Makes the role of the encoder beside a language model, which receives outputs."""
        ...

    def __call__(
        self, executor: Executor, scheduler: Scheduler, surroundings: Surroundings
    ) -> Role:
        """Make the role and start what it needs."""
        ...


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent dies (prctl(2), PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def core_main(
    config: EngineConfig,
    node: NodeId,
    role_factory: RoleFactory,
    inbound: str,
    outbound: str,
    log_level: str,
) -> None:
    """Entry point of the child process; returns when the core was shut down."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    mailbox = CoreMailbox(inbound, outbound)
    try:
        _serve(config, node, role_factory, mailbox)
    except ConfigError as error:
        text = str(error).removeprefix(f"{error.field}: ")
        mailbox.send(Dead(error=clip_text(text), field=error.field))
    except BaseException as error:
        # Clients see this line; the traceback goes to standard error with the exception.
        mailbox.send(Dead(error=clip_text(f"{type(error).__name__}: {error}")))
        raise
    finally:
        mailbox.close()


def _serve(
    config: EngineConfig, node: NodeId, role_factory: RoleFactory, mailbox: CoreMailbox
) -> None:
    # Torch comes in here, in the child, and nowhere else.
    from kvbaton.engine.build import build_engine

    engine = build_engine(config, node, role_factory, mailbox)
    try:
        mailbox.send(
            Ready(
                node=node,
                control_address=engine.core.role.control_address,
                num_blocks=engine.num_blocks,
                block_size=engine.block_size,
                max_model_len=engine.max_model_len,
                eos_token_ids=engine.eos_token_ids,
                vocab_size=engine.vocab_size,
                tp_size=config.tensor_parallel_size,
                identity=engine.identity,
                encoder_identity=engine.encoder_identity,
            )
        )
        engine.core.run()
    finally:
        engine.core.close()
