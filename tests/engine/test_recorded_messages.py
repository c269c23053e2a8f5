"""Messages between engine and frontends as they were once written: they must stay readable.

A field added at the end with a default keeps this true; whatever breaks it raises `ENGINE_VERSION`.
Never change what is recorded here; add the messages of a new version below.
"""

from __future__ import annotations

from array import array

import msgspec
import pytest
from msgspec import Struct

from kvbaton.messages.engine import (
    AbortRequest,
    AddRequest,
    BlockChange,
    CachedBlocks,
    CachedGroup,
    Command,
    Connect,
    Dead,
    Disconnected,
    FromCore,
    Item,
    Metrics,
    Output,
    Outputs,
    Ping,
    Pong,
    Ready,
    Rejected,
    Reply,
    SamplingParams,
    Shutdown,
    ToCore,
    TransferSpec,
    WatchBlocks,
    decode_to_core,
)
from kvbaton.types import NodeId, TokenLogprobs, TopLogprob


def record() -> tuple[dict[str, ToCore], dict[str, FromCore]]:
    """One of each kind, with something in most fields."""
    transfer = TransferSpec(
        role="target", transfer_id=bytes(range(16)), attempt=2, peer="tcp://h:1", peer_node="p1"
    )
    params = SamplingParams(
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        repetition_penalty=1.1,
        logit_bias={5: -1.5},
        seed=7,
        n=2,
        max_tokens=33,
        min_tokens=3,
        stop_token_ids=(4, 5),
        ignore_eos=True,
        logprobs=1,
        prompt_logprobs=0,
    )
    item = Item(start=1, length=2, digest=bytes(32), grid=(1, 4, 8), data=b"png", transfer=transfer)
    node = NodeId("d1", bytes(range(16)))
    scores = TokenLogprobs(-0.5, 1, (TopLogprob(9, -0.5, 1),))
    to_core: dict[str, ToCore] = {
        "connect": Connect(min_version=1, version=1),
        "add": AddRequest(
            request_id="r1",
            token_ids=array("I", (1, 2, 70000)),
            params=params,
            resume_ids=(3,),
            priority=-1,
            cache_salt="salt",
            deadline_s=9.5,
            transfer=transfer,
            items=(item,),
        ),
        "abort": AbortRequest(request_id="r1"),
        "ping": Ping(number=3),
        "command": Command(command_id=4, name="members", argument=["tcp://h:1"]),
        "shutdown": Shutdown(grace_s=2.5),
        "watch_blocks": WatchBlocks(),
    }
    output = Output(
        request_id="r1",
        choice=1,
        index=5,
        token_ids=(8, 9),
        logprobs=(scores, scores),
        prompt_logprobs=(None, scores),
        finish_reason="stop",
        stop_reason=4,
        error="why",
        cached_tokens=16,
        transferred_tokens=32,
        kv_transfer_params={"remote_port": 1},
    )
    from_core: dict[str, FromCore] = {
        "outputs": Outputs(outputs=(output, Output(request_id="r2"))),
        "rejected": Rejected(request_id="r1", message="no", param="n", status=409, code="c"),
        "reply": Reply(command_id=4, result={"a": 1}, error="e"),
        "ready": Ready(
            node=node,
            control_address="tcp://h:2",
            num_blocks=7,
            block_size=16,
            max_model_len=4096,
            eos_token_ids=(1, 2),
            vocab_size=99,
            tp_size=2,
            identity=b"i",
            encoder_identity=b"e",
            engine_address="tcp://h:3",
        ),
        "disconnected": Disconnected(reason="old"),
        "pong": Pong(number=3),
        "metrics": Metrics(counters={"c": 1.0}, gauges={"g": 2.0}),
        "dead": Dead(error="oops", field="--model"),
        "cached_blocks": CachedBlocks(
            number=3,
            groups=((16, 0), (16, 512)),
            changes=(BlockChange(1, True, b"12345678"),),
        ),
    }
    return to_core, from_core


SENT, SAID = record()
RECORDED = {
    "connect": ("83a474797065a7636f6e6e656374ab6d696e5f76657273696f6e01a776657273696f6e01"),
    "add": (
        "de0011a474797065a3616464aa726571756573745f6964a27231a9746f6b656e5f696473c40c010000000200"
        "000070110100a6706172616d73de0010ab74656d7065726174757265cb3fe0000000000000a5746f705f70cb"
        "3feccccccccccccda5746f705f6b28a56d696e5f70cb3fb999999999999ab070726573656e63655f70656e61"
        "6c7479cb3fc999999999999ab16672657175656e63795f70656e616c7479cb3fd3333333333333b272657065"
        "746974696f6e5f70656e616c7479cb3ff199999999999aaa6c6f6769745f626961738105cbbff80000000000"
        "00a47365656407a16e02aa6d61785f746f6b656e7321aa6d696e5f746f6b656e7303ae73746f705f746f6b65"
        "6e5f696473920405aa69676e6f72655f656f73c3a86c6f6770726f627301af70726f6d70745f6c6f6770726f"
        "627300aa726573756d655f6964739103a87072696f72697479ffaa63616368655f73616c74a473616c74aa64"
        "6561646c696e655f73cb4023000000000000a87472616e7366657285a4726f6c65a6746172676574ab747261"
        "6e736665725f6964c410000102030405060708090a0b0c0d0e0fa7617474656d707402a470656572a9746370"
        "3a2f2f683a31a9706565725f6e6f6465a27031a56974656d739186a5737461727401a66c656e67746802a664"
        "6967657374c4200000000000000000000000000000000000000000000000000000000000000000a467726964"
        "93010408a464617461c403706e67a87472616e7366657285a4726f6c65a6746172676574ab7472616e736665"
        "725f6964c410000102030405060708090a0b0c0d0e0fa7617474656d707402a470656572a97463703a2f2f68"
        "3a31a9706565725f6e6f6465a27031a674656e616e74a0a6707265666978c0a574696d6564c2ab7472616365"
        "706172656e74a0a6747466745f73cb0000000000000000a569746c5f73cb0000000000000000a97072656669"
        "6c6c5f73cb0000000000000000"
    ),
    "abort": ("82a474797065a561626f7274aa726571756573745f6964a27231"),
    "ping": ("82a474797065a470696e67a66e756d62657203"),
    "command": (
        "84a474797065a7636f6d6d616e64aa636f6d6d616e645f696404a46e616d65a76d656d62657273a861726775"
        "6d656e7491a97463703a2f2f683a31"
    ),
    "shutdown": ("82a474797065a873687574646f776ea767726163655f73cb4004000000000000"),
    "outputs": (
        "82a474797065a76f757470757473a76f757470757473928da474797065a66f7574707574aa72657175657374"
        "5f6964a27231a663686f69636501a5696e64657805a9746f6b656e5f696473920809a86c6f6770726f627392"
        "93cbbfe000000000000001919309cbbfe00000000000000193cbbfe000000000000001919309cbbfe0000000"
        "00000001af70726f6d70745f6c6f6770726f627392c093cbbfe000000000000001919309cbbfe00000000000"
        "0001ad66696e6973685f726561736f6ea473746f70ab73746f705f726561736f6e04a56572726f72a3776879"
        "ad6361636865645f746f6b656e7310b27472616e736665727265645f746f6b656e7320b26b765f7472616e73"
        "6665725f706172616d7381ab72656d6f74655f706f7274018da474797065a66f7574707574aa726571756573"
        "745f6964a27232a663686f69636500a5696e64657800a9746f6b656e5f69647390a86c6f6770726f6273c0af"
        "70726f6d70745f6c6f6770726f6273c0ad66696e6973685f726561736f6ec0ab73746f705f726561736f6ec0"
        "a56572726f72c0ad6361636865645f746f6b656e7300b27472616e736665727265645f746f6b656e7300b26b"
        "765f7472616e736665725f706172616d73c0"
    ),
    "rejected": (
        "86a474797065a872656a6563746564aa726571756573745f6964a27231a76d657373616765a26e6fa5706172"
        "616da16ea6737461747573cd0199a4636f6465a163"
    ),
    "reply": (
        "84a474797065a57265706c79aa636f6d6d616e645f696404a6726573756c7481a16101a56572726f72a165"
    ),
    "ready": (
        "8da474797065a57265616479a46e6f646582a46e6f6465a26431aa67656e65726174696f6ec4100001020304"
        "05060708090a0b0c0d0e0faf636f6e74726f6c5f61646472657373a97463703a2f2f683a32aa6e756d5f626c"
        "6f636b7307aa626c6f636b5f73697a6510ad6d61785f6d6f64656c5f6c656ecd1000ad656f735f746f6b656e"
        "5f696473920102aa766f6361625f73697a6563a774705f73697a6502a86964656e74697479c40169b0656e63"
        "6f6465725f6964656e74697479c40165a776657273696f6e01ae656e67696e655f61646472657373a9746370"
        "3a2f2f683a33"
    ),
    "disconnected": (
        "84a474797065ac646973636f6e6e6563746564a6726561736f6ea36f6c64ab6d696e5f76657273696f6e01a7"
        "76657273696f6e01"
    ),
    "pong": ("82a474797065a4706f6e67a66e756d62657203"),
    "metrics": (
        "84a474797065a76d657472696373a8636f756e7465727381a163cb3ff0000000000000a667617567657381a1"
        "67cb4000000000000000aa686973746f6772616d7380"
    ),
    "dead": ("83a474797065a464656164a56572726f72a46f6f7073a56669656c64a72d2d6d6f64656c"),
    "watch_blocks": ("81a474797065ac77617463685f626c6f636b73"),
    "cached_blocks": (
        "84a474797065ad6361636865645f626c6f636b73a66e756d62657203a667726f757073929210009210cd0200"
        "a76368616e676573919301c3c4083132333435363738"
    ),
}
"""By tag; some have fields that are not read any more."""


@pytest.mark.parametrize("name", RECORDED)
def test_what_was_written_is_read_as_it_was_meant(name: str) -> None:
    data = bytes.fromhex(RECORDED[name])
    if name in SENT:
        assert decode_to_core(data) == SENT[name]
    else:
        assert msgspec.msgpack.decode(data, type=FromCore) == SAID[name]


def test_every_message_is_recorded() -> None:
    kinds = {type(message) for message in (*SENT.values(), *SAID.values())}
    assert kinds == set(ToCore.__args__) | set(FromCore.__args__)
    assert set(RECORDED) == set(SENT) | set(SAID)


def test_an_older_router_reads_what_is_cached() -> None:
    class Older(Struct, tag="cached_blocks"):
        number: int
        groups: tuple[tuple[int, int], ...] = ()

    told = CachedBlocks.beginning((CachedGroup(16, 512), CachedGroup(16, 64, chunked=True)))
    assert told.cached_groups()[1].chunked
    old = msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=Older)
    assert old.groups == ((16, 512), (16, 64))


@pytest.mark.parametrize("name", SAID)
def test_a_newer_core_may_say_more(name: str) -> None:
    """Fields at the end that this release does not know are left unread."""
    fields = msgspec.msgpack.decode(bytes.fromhex(RECORDED[name]))
    fields["a_later_field"] = [1, {"x": None}]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=FromCore) == SAID[name]


def test_what_is_left_out_has_its_default() -> None:
    class Oldest(Struct, tag="connect"):
        pass

    assert decode_to_core(msgspec.msgpack.encode(Oldest())) == Connect()
