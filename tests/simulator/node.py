"""A node in the simulator: the real core, scheduler, connector, transfer worker and machine.

A node may have an encoder beside it, whose core takes part in the loop of its own as one of its
connectors: that is a node like any other here, with memory, transports and a machine, and with the
life of its host. Only what is outside of them is made up: the ranks' steps, the transports, the
control channel, the HTTP process, and the threads, whose turns the world calls for when something
happens.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import msgspec

from kvbaton.connectors.base import Transport
from kvbaton.connectors.channel import ControlChannel
from kvbaton.connectors.keys import block_keys, prompt_key, root_key
from kvbaton.connectors.protocol import events
from kvbaton.connectors.protocol.source import Source
from kvbaton.connectors.protocol.target import Target
from kvbaton.connectors.transfer.source_worker import SourceWorker
from kvbaton.connectors.transfer.target_worker import TargetWorker
from kvbaton.connectors.transfer.thread import TransferThread
from kvbaton.decode.target_connector import PrefixConnector, TargetConnector
from kvbaton.engine.block_pool import BlockPool
from kvbaton.engine.config import SchedulerConfig, SpeculativeConfig
from kvbaton.engine.core import EngineCore
from kvbaton.engine.encoder.cache_manager import Answers, EncoderCacheManager
from kvbaton.engine.executor import Executor
from kvbaton.engine.kv_cache_manager import GroupSpec
from kvbaton.engine.kv_connector import KVConnector
from kvbaton.engine.scheduler import Scheduler
from kvbaton.errors import RequestError, TransportError
from kvbaton.messages.control import Complete, RankCard
from kvbaton.messages.engine import (
    AbortRequest,
    AddRequest,
    Command,
    FromCore,
    Item,
    Metrics,
    Output,
    Outputs,
    PrefixAt,
    Rejected,
    SamplingParams,
    Shutdown,
    ToCore,
    TransferSpec,
)
from kvbaton.prefill.source_connector import SourceConnector
from kvbaton.types import Attempt, TransferTimers
from tests.simulator.executor import (
    BROKEN,
    MARKS,
    PLAIN,
    VOCABULARY,
    SimulatedExecutor,
    next_token,
)
from tests.simulator.links import HEARTBEATS_S, EngineLink
from tests.simulator.machine_invariants import check_machine
from tests.simulator.world import (
    SimulatedChannel,
    SimulatedProcess,
    SimulatedTransport,
    SimulatedWorld,
    ViolationError,
)

MAX_MODEL_LEN = 48
IDLE_S = 15.0
TIMERS = TransferTimers(
    resend=0.4,
    progress_deadline=1.5,
    total=8.0,
    lease=2.0,
    quarantine_limit=2.0,
    tombstone=8.0,
)
CALM_TIMERS = replace(TIMERS, total=60.0, lease=6.0)
"""Those of calm weather: however slow a source is, its target waits."""

FOR_ENGINE = {
    *(events.Engage, events.Release, events.StopSource, events.EvictSource),
    *(events.RefuseAnnounce, events.Deliver, events.Fail, events.Unquarantine),
}

REFUSED = 0.1
"""Of requests that are to go on at another node."""

VALIDATE_EVERY = 4
"""Events of a machine after which its own invariants are checked: what is wrong stays so."""


def identity_of(model: int) -> bytes:
    """Identity digest of the nodes that serve a model."""
    return model.to_bytes(32, "little")


@dataclass(frozen=True)
class SimulatedPrompt:
    """A prompt that the router sends to a pair of nodes, or to one that fetches its prefix.

    Attributes:
        tokens: the prompt, with marks in the place of tokens that stand for items.
        max_tokens: to generate.
        choices: how many.
        deadline_s: of its requests.
        items: images in it.
        fetched: tokens that a peer is said to have, if it is not handed over; else 0.
        sampling: how tokens are chosen; None is plainly.
        resumed: tokens that were generated elsewhere.
    """

    attempt: Attempt
    tokens: tuple[int, ...]
    max_tokens: int = 2
    choices: int = 1
    deadline_s: float = 8.0
    items: tuple[Item, ...] = ()
    fetched: int = 0
    sampling: SamplingParams | None = None
    resumed: tuple[int, ...] = ()

    def next_token(self, got: Sequence[int], choice: int, model: int) -> int:
        """What must follow after all that was got."""
        tokens, params = (*self.tokens, *self.resumed, *got), self.sampling or PLAIN
        return next_token(tokens, choice, model, params, len(self.tokens))

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The prompt as nodes are given it."""
        return tuple(token if token < MARKS else 0 for token in self.tokens)


@dataclass(frozen=True)
class NodeShape:
    """What a node is in all of its lives.

    Attributes:
        is_source: it prefills for others.
        is_target: others prefill for it.
        model: that it serves.
        groups: per KV group, block size, blocks of the pool that all share, and window.
        step_s: seconds that a step takes about.
        batch: most tokens of a step.
        depth: steps in flight.
        drafts: most tokens of a draft.
        items: its prompts are items.
        encoder: what the encoder beside it is, if it has one.
    """

    is_source: bool
    is_target: bool
    model: int
    ranks: int
    groups: tuple[tuple[int, int, int], ...]
    step_s: float
    batch: int
    depth: int = 1
    drafts: int = 0
    items: bool = False
    encoder: NodeShape | None = None


@dataclass
class ClientRequest:
    """A request that a node was given, as its client sees it.

    Attributes:
        job: what was asked.
        is_source: for another node.
        link: by which a router asked it, if one did.
        name: what that router calls it.
        got: tokens by choice.
        finished: why each choice ended.
        rejected: it was refused.
    """

    job: SimulatedPrompt
    is_source: bool
    link: EngineLink | None = None
    name: str = ""
    got: list[list[int]] = field(init=False)
    finished: list[str | None] = field(init=False)
    rejected: bool = False

    def __post_init__(self) -> None:
        self.got = [[] for _ in range(self.job.choices)]
        self.finished = [None] * self.job.choices

    @property
    def over(self) -> bool:
        """Whether its client has its last answer."""
        return self.rejected or all(self.finished)


class SimulatedTransferThread(TransferThread):
    """The transfer thread's body; the world is its thread."""

    wake: Callable[[], None]

    def start(self) -> None:
        """Do nothing: turns are called for."""

    def submit(self, *items: Any) -> None:
        """As `TransferThread.submit`."""
        super().submit(*items)
        self.wake()

    def turn(self, told: bool = True, heard: bool = True) -> None:
        """As `TransferThread.turn`, without asking the kernel in vain."""
        super().turn(told and bool(self._inbox), heard)


class Turns:
    """When a thread of a node has its next turn: the world has it when something happens."""

    def __init__(self, node: SimulatedProcess, turn: Callable[[], None]) -> None:
        self._node, self._turn, self._at = node, turn, math.inf

    def call(self, seconds: float = 0.0) -> None:
        """Let it have one by then."""
        world = self._node.world
        at = world.now + seconds
        if at < self._at:
            at += world.rng.random() * 0.003
            if at < self._at:
                self._at = at

                def take() -> None:
                    node = self._node
                    if node.world.now == self._at and node.alive and not node.stopped:
                        self._at = math.inf
                        node.world.offset = node.offset
                        self._turn()

                world.at(at, take)

    def forget(self) -> None:
        """The one that it waits for is called anew."""
        self._at = math.inf


class SimulatedNode(SimulatedProcess):
    """One life of a node.

    Args:
        host: the node beside which this is the encoder, if it is.

    Attributes:
        requests: what its clients asked, by request id.
        links: routers' connections to it.
        draining: it was told to stop.
        encoder: beside it.
        answers: of an encoder beside another node, to that.
    """

    def __init__(
        self,
        world: SimulatedWorld,
        name: str,
        generation: int,
        shape: NodeShape,
        host: SimulatedNode | None = None,
    ) -> None:
        super().__init__(world, name, generation, identity_of(shape.model))
        self.core: EngineCore
        self.executor: SimulatedExecutor
        self.wake_core: Callable[..., None]
        self.shape, self.answers = shape, Answers()
        self.host = name if host is None else host.name
        self.timers = CALM_TIMERS if world.weather.calm else TIMERS
        self.requests: dict[str, ClientRequest] = {}
        self.links: list[EngineLink] = []
        self.draining = False
        self._mail: list[ToCore] = []
        self._num_events = 0
        self._count = 0
        self._core_turns = Turns(self, self._turn_core)
        self._transfer_turns = Turns(self, self._turn_transfers)
        self.wake_core = self._core_turns.call if host is None else host.wake_core
        self.encoder: SimulatedNode | None = None
        if shape.encoder is not None:
            self.encoder = SimulatedNode(world, f"{name}-items", generation, shape.encoder, self)
        self.executor = SimulatedExecutor(
            world,
            model=shape.model,
            rots=shape.is_source,
            ranks=shape.ranks,
            groups=shape.groups,
            step_s=shape.step_s,
            wake_core=self.wake_core,
            wake_transfers=self.wake_transfers,
            in_order=not shape.items,
            encoder=self.encoder.executor if self.encoder else None,
        )
        self.transports: list[SimulatedTransport] = []
        self.machines: dict[str, Source | Target] = {}
        self.address = f"tcp://{name}:{1000 + generation * world.rng.choice([0, 0, 1])}"
        self.channel = SimulatedChannel(world, self, self.address)
        layouts = self.executor.layouts[0]
        groups = tuple(GroupSpec.of(layout, layout.block_size) for layout in layouts)
        most = (layouts[0].num_blocks - 1) * layouts[0].block_size + 1
        drafts = None
        if shape.drafts:
            drafts = SpeculativeConfig(
                method="ngram",
                num_speculative_tokens=shape.drafts,
                prompt_lookup_min=1,
                prompt_lookup_max=2,
            )
        self.scheduler = Scheduler(
            SchedulerConfig(
                groups=groups,
                max_model_len=most if shape.items else MAX_MODEL_LEN,
                max_num_seqs=6,
                max_num_batched_tokens=shape.batch,
                vocab_size=1 if shape.items else VOCABULARY,
                whole_prompts=shape.items,
                speculative=drafts,
            ),
            root_key=lambda salt: root_key(self.identity, salt),
            clock=world.monotonic,
        )
        connectors = self._connect()
        if self.encoder is not None:
            self.items = EncoderCacheManager(
                self.encoder.core, self.encoder.answers, self.scheduler
            )
            self.scheduler.items = self.items
            connectors.append(self.items)
        self.core = EngineCore(
            self._executor,
            self.scheduler,
            self if host is None else self.answers,
            connectors=connectors,
            depth=shape.depth,
        )
        self.scheduler.both_sides = shape.is_source and shape.is_target
        for connector in self.core.connectors:
            connector.contained = False  # a core goes on; here each exception is one too many

    # --- how it is put together ---

    @property
    def _executor(self) -> Executor:
        return cast(Executor, self.executor)

    @property
    def together(self) -> tuple[SimulatedNode, ...]:
        """The node and the encoder beside it."""
        return (self,) if self.encoder is None else (self, self.encoder)

    @property
    def pool(self) -> BlockPool:
        """Its block pool."""
        return self.scheduler.blocks.pool

    def _connect(self) -> list[KVConnector]:
        """What a node of its roles has; see `kvbaton.roles`."""
        sender = self._sender() if self.shape.is_source else None
        receiver = self._receiver() if self.shape.is_target else None
        channel = cast(ControlChannel, self.channel)
        self.transfers = SimulatedTransferThread(channel, sender=sender, receiver=receiver)
        self.transfers.wake = self.wake_transfers
        found: list[KVConnector] = []
        if sender is not None:
            self._watch("source", sender)
            found.append(SourceConnector(self.transfers, self._executor, self.scheduler, self.id))
        if receiver is not None:
            self._watch("target", receiver)
            target = TargetConnector(
                self.transfers,
                self._executor,
                self.scheduler,
                members=(),
                trust_loopback=False,
                poison=True,
            )
            found += [target, PrefixConnector(target)]
        return found

    def _open(self, side: str) -> tuple[list[Transport], events.Identity]:
        """A side's transports, and what it says of itself."""
        cards, opened = [], []
        for rank, memories in enumerate(self.executor.memories):
            transport = SimulatedTransport(self.world, self, side, rank)
            for memory in memories:
                transport.register(memory)
            opened.append(transport)
            layouts = msgspec.msgpack.encode(self.executor.layouts[rank])
            cards.append(RankCard(rank, transport.card(), layouts))
        self.transports += opened
        identity = events.Identity(self.id, self.identity, {}, "simulated", tuple(cards))
        return cast(list[Transport], opened), identity

    def _sender(self) -> SourceWorker:
        transports, identity = self._open("source")
        notice = min(transport.capabilities.max_notice_bytes for transport in transports)
        source = Source(identity, self.timers, max_notice_bytes=notice)
        self.machines["source"] = source
        return SourceWorker(source, transports)

    def _receiver(self) -> TargetWorker:
        transports, identity = self._open("target")
        new_id: Callable[[], bytes] = lambda: self.world.rng.randbytes(16)  # noqa: E731
        target = Target(identity, self.timers, new_id=new_id)
        self.machines["target"] = target
        return TargetWorker(target, transports, self.executor)

    def _watch(self, side: str, worker: Any) -> None:
        """Hold the laws after each event of a side's machine."""
        machine: Any = self.machines[side]
        handle = machine.handle

        def handle_and_check(event: Any, now: float) -> Any:
            actions = handle(event, now)
            self.laws.saw(side, event, actions)
            self._num_events += 1
            if self._num_events % VALIDATE_EVERY == 0:
                check_machine(machine)
            if any(type(action) in FOR_ENGINE for action in actions):
                self.wake_core()
            return actions

        def raised(what: str, *args: object) -> None:
            """A worker counts an exception and goes on; here each is one too many, but this."""
            error = sys.exc_info()[1]
            if isinstance(error, ViolationError):
                raise error
            if not isinstance(error, TransportError):  # whoever is to be reached may be dead
                self.fail(f"{what % args}: {error!r}")
            self.world.note(self.name, error)

        machine.handle, worker.error = handle_and_check, raised

    # --- turns ---

    def wake_transfers(self, seconds: float = 0.0) -> None:
        """Let the transfer thread have a turn by then."""
        self._transfer_turns.call(seconds)

    def _turn_core(self) -> None:
        self.core.turn()
        for node in self.together:
            node.laws.check_pools()
        if self.core.finished():
            self.core.close()
            self.kill()
            return
        patience = self.core.patience()
        self.wake_core(patience if patience < 0.5 else IDLE_S)

    def _turn_transfers(self) -> None:
        self.transfers.turn()
        for worker in self.transfers.workers:
            deadline = worker.settle()
            if deadline is not None:
                self.wake_transfers(max(0.0, deadline - self.clock))

    # --- violence ---

    def stop(self) -> None:
        """As `SimulatedProcess.stop`."""
        for node in self.together:
            node.stopped = True
        for link in self.links:
            self.world.after(HEARTBEATS_S, link.sever_if_stopped)

    def resume(self) -> None:
        """As `SimulatedProcess.resume`."""
        if self.encoder is not None:
            self.encoder.resume()
        self._core_turns.forget()
        self._transfer_turns.forget()
        self.wake_core()
        self.wake_transfers()
        super().resume()

    def jump(self, seconds: float) -> None:
        """The node's clock jumps."""
        self.wake_core()
        for node in self.together:
            node.offset += seconds
            node.wake_transfers()

    def shut_down(self, grace_s: float) -> None:
        """SIGTERM: what runs may come to its end, within the grace given."""
        self.draining = True
        self._post(Shutdown(grace_s=grace_s))

    def kill_rank(self, rank: int) -> None:
        """One rank dies; the core finds out a little later, and dies of it."""
        for transport in self.transports:
            if transport.rank == rank and transport.alive:
                transport.die()
        self.world.after(self.world.rng.uniform(0.0, 0.25), self.kill)

    def kill(self) -> None:
        """SIGKILL."""
        if not self.alive:
            return
        for node in self.together:
            node.alive = False
            for transport in node.transports:
                if transport.alive:
                    transport.die()
            node.channel.close()
        for link in self.links:
            link.sever()

    # --- the HTTP process ---

    def add(self, job: SimulatedPrompt, role: str, peer: str | None = None) -> None:
        """A prompt comes, of which this node is the source or the target, or serves it alone."""
        self._count += 1
        name = f"{job.attempt.transfer_id[0]}/{job.attempt.number}/{self._count}"
        transfer, prefix = None, None
        if role == "fetch":
            assert peer is not None, "somebody is said to have it"
            prefix = PrefixAt(peer=peer, num_tokens=job.fetched)
        elif role != "alone":
            if role == "source" and peer is not None:  # from whom it fetches what that one has
                prefix, peer = PrefixAt(peer=peer, num_tokens=len(job.token_ids)), None
            name_of = job.attempt
            transfer = TransferSpec(
                role=role, transfer_id=name_of.transfer_id, attempt=name_of.number, peer=peer
            )
        params = SamplingParams(max_tokens=job.max_tokens, n=job.choices, seed=1)
        self.requests[name] = ClientRequest(job, role == "source")
        self._post(
            AddRequest(
                request_id=name,
                token_ids=array("I", job.token_ids),
                params=params,
                deadline_s=job.deadline_s,
                transfer=transfer,
                items=job.items,
                prefix=prefix,
            )
        )

    def abort(self, attempt: Attempt) -> None:
        """The client of an attempt has gone."""
        for name, request in self.requests.items():
            if request.job.attempt == attempt and not request.over:
                self._post(AbortRequest(request_id=name))

    def hear(self, link: EngineLink, message: ToCore) -> None:
        """A router says something; its request ids are its own."""
        if isinstance(message, AbortRequest):
            self._post(AbortRequest(request_id=f"{link.number}/{message.request_id}"))
        if not isinstance(message, AddRequest):
            return
        key, part = f"{link.number}/{message.request_id}", message.transfer
        if key in self.requests:
            self.fail(f"request id {key} is used twice")
        if message.resume_ids and message.prefix and self.world.rng.random() < REFUSED:
            error = RequestError("no room for it", status=503, code="full")
            link.tell(Rejected.of(message.request_id, error))
            return
        job = SimulatedPrompt(
            Attempt(bytes(16), 0) if part is None else part.name,
            tuple(message.token_ids),
            choices=message.params.n,
            deadline_s=message.deadline_s,
            sampling=message.params,
            resumed=message.resume_ids,
        )
        tokens, root = (*job.tokens, *job.resumed), root_key(self.identity, "")
        self.world.prompts[prompt_key(root, tokens)] = tokens
        for size, _, _ in self.shape.groups:
            for i, name in enumerate(block_keys(root, tokens, size), 1):
                self.world.prompts[name] = tokens[: i * size]
        is_source = part is not None and part.role == "source"
        self.requests[key] = ClientRequest(job, is_source, link, message.request_id)
        self._post(msgspec.structs.replace(message, request_id=key))

    def lose(self, link: EngineLink) -> None:
        """A router is gone, or can't be reached any more."""
        self.links.remove(link)
        for key, request in self.requests.items():
            if request.link is link and not request.over:
                self._post(AbortRequest(request_id=key))

    def set_members(self, addresses: list[str]) -> None:
        """Whom the router vouches for."""
        self._count += 1
        self._post(Command(command_id=self._count, name="members", argument=addresses))

    def _post(self, message: ToCore) -> None:
        self._mail.append(message)
        self.wake_core()

    def receive(self, timeout: float, wake_fd: int) -> list[ToCore]:
        """As `engine.core.Mailbox.receive`."""
        mail, self._mail = self._mail, []
        return mail

    def send(self, message: FromCore) -> None:
        """As `engine.core.Mailbox.send`."""
        match message:
            case Outputs():
                told: dict[EngineLink, list[Output]] = {}
                for output in message.outputs:
                    self._answer(output)
                    request = self.requests[output.request_id]
                    if request.link is not None:
                        own = msgspec.structs.replace(output, request_id=request.name)
                        told.setdefault(request.link, []).append(own)
                for link, outputs in told.items():
                    link.tell(Outputs(outputs=tuple(outputs)))
            case Rejected():
                self.world.note(self.name, message)
                request = self.requests[message.request_id]
                request.rejected = True
                if request.link is not None:
                    request.link.tell(msgspec.structs.replace(message, request_id=request.name))
                elif self.world.weather.calm:
                    self.fail(f"{message} in calm weather")
            case Metrics():
                wrong = message.gauges["kvbaton_ledger_imbalance"]
                if wrong:
                    self.fail(f"{wrong} blocks are not whose the pool thinks they are")

    def _answer(self, output: Output) -> None:
        request = self.requests[output.request_id]
        got, job = request.got[output.choice], request.job
        if request.rejected or request.finished[output.choice] is not None:
            self.fail(f"{output} comes after the end")
        if output.token_ids and output.index != len(job.resumed) + len(got):
            self.fail(f"{output} comes after {len(got)} tokens")
        for token in output.token_ids:
            wanted = job.next_token(got, output.choice, self.shape.model)
            if token != wanted:
                self.fail(f"{output.request_id} goes on with token {token}, not {wanted}")
            got.append(token)
        request.finished[output.choice] = output.finish_reason
        if output.finish_reason == "error":
            self.world.note(self.name, output)
            broken = any(item.digest[0] >= BROKEN for item in job.items)
            if not broken and "an image can't be used" in (output.error or ""):
                if all(item.data for item in job.items):
                    self.fail(f"{output}, and each of its images is here and good")
            if self.world.weather.calm and not broken and request.link is None:
                self.fail(f"{output} in calm weather")

    def check_first_tokens(self, message: Complete) -> None:
        """Hold what a source says that it sampled against what it must sample."""
        if not message.choices:  # of block keys: nothing was sampled
            return
        name = Attempt(message.transfer_id, message.attempt)
        jobs = [r.job for r in self.requests.values() if r.job.attempt == name]
        told = tuple(choice.token for choice in message.choices)
        model, choices = self.shape.model, range(len(told))
        right = [tuple(job.next_token((), c, model) for c in choices) for job in jobs]
        if told not in right:
            self.fail(f"{message} names the wrong first tokens")
