"""The command line, as a user meets it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path

import pytest

from kvbaton.cli import main, make_parser, node_config
from kvbaton.cluster.config import ClusterConfig, shares
from kvbaton.cluster.placement import LocalPlacement
from kvbaton.config import attribute_docs, from_args, human_int, words_of
from kvbaton.connectors.transfer.config import HandoverConfig
from kvbaton.engine.config import EngineConfig
from kvbaton.errors import ConfigError
from kvbaton.router.config import RouterConfig
from kvbaton.server.config import MediaConfig, NodeConfig
from tests.support.checkpoints import main as make_model
from tests.support.processes import is_alive, processes_with
from tests.support.waiting import until

UNREADABLE = "/" + "n" * 256
"""A path at which the kernel gives an error, as at a folder of another user (also to root)."""


def kvbaton(*words: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvbaton", *words], capture_output=True, text=True, timeout=timeout
    )


@pytest.fixture
def broken_model(tmp_path: Path) -> str:
    """A folder that looks like a model until a node reads it."""
    (tmp_path / "config.json").write_text('{"architectures": ["NoSuchModel"]}')
    return str(tmp_path)


def failure(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    try:
        status: object = main(words)
    except SystemExit as stop:
        status = stop.code
    assert status == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    return lines[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["prefill"], "--model: is missing"),
        (["prefill", "--model", "/nope"], "--model: '/nope' is no model folder"),
        (["serve", "/nope", "--port", "0"], "--model: '/nope' is no model folder"),
        (["up", "some-org/some-model"], "config.json; to have it from Hugging Face: hf download"),
        (["up", "--model", "/nope"], "--model: '/nope' is no model folder"),
        (["decode", "--model", "x", "--dtype", "int3"], "--dtype: invalid choice: 'int3'"),
        (["decode", "--model", "x", "--block-size", "many"], "--block-size: 'many' is no number"),
        (["decode", "--model", "x", "--port", "70000"], "--port: 70000 is no port"),
        (["up", "--model", "x", "--prefill", "-1"], "--prefill: -1 is negative"),
        (["decode", "--model", "x", "--max-transfers", "5"], "unrecognized arguments: --max-tr"),
        (["encode", "--model", "x", "--num-blocks", "5"], "unrecognized arguments: --num-blocks"),
        (["encode", "--model", "/nope"], "--model: '/nope' is no model folder"),
        (["prefill", "--model", "x", "--encoder-only"], "unrecognized arguments: --encoder-only"),
        (["router", "--max-ttft", "nan"], "--max-ttft: 'nan' is no number (like 0.5)"),
        (["router", "--max-itl", "0"], "--max-itl: 0.0 is not positive"),
        (["router", "--workers", "0", "--model", "/nope"], "--workers: 0 is not between 1 and 256"),
        (["router", "--workers", "100000", "--model", "/nope"], "--workers: 100000 is not between"),
        (["router", "--port", "9" * 400], "--port: 99999999999999999999... is a number beyond"),
        ([], "required: COMMAND, one of up, serve, prefill, "),
        (["bench"], "required: WHAT, one of transfer, serve"),
        (["simulate"], "required: --trace"),
        (["router", "--shiny"], "unrecognized arguments: --shiny"),
        (["serve", "x", "--max-num-batch-tokens=5"], "did you mean --max-num-batched-tokens?"),
        (["serve", "x", "--kv-transfer-config", "{}"], "; there are --transport, --store"),
        (["serve", "x", "--data-parallel-size=2"], "--data-parallel-size=2; start more nodes"),
        (["serve", "x", "--tokenizer", "y"], "--tokenizer y; the model's folder has it"),
        (["serve", "x", "-dp", "2"], "unrecognized arguments: -dp 2; start more nodes"),
        (["serve", "x", "--disaggregation-mode", "prefill"], "prefill; there is --role"),
        (["bench", "serve", "--url", "x", "--request-rate=4"], "4; there is --rate"),
        (["bench", "serve", "--base-url", "http://x"], "are required: --url; there is --url"),
        (["simulate", "--tracee", "x"], "are required: --trace; did you mean --trace?"),
        (["router", "--enable-ssl-refresh"], "refresh; leave it out: that is on"),
        (["up", "x", "--enable-auto-tool-choice"], "auto-tool-choice; leave it out: that is on"),
        (["router", "--port", "0", "--model", "/nope"], "/nope/tokenizer.json: is missing"),
        (["serve", UNREADABLE], f"--model: can't look into {UNREADABLE}: File name too long"),
        (["router", "--port", "0", "--model", UNREADABLE], "config.json: can't be read"),
    ],
)
def test_wrong_settings_are_named_in_one_line(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    line = failure(capsys, *words)
    assert line.startswith("kvbaton: error: ")
    assert message in line


@pytest.mark.parametrize(
    "flag", ["--max-logprobs", "--compilation-config", "--guided-decoding-backend", "--root-path"]
)
def test_no_flag_of_another_meaning_is_proposed(
    capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    assert failure(capsys, "serve", "x", flag, "5").endswith(f"unrecognized arguments: {flag} 5")


def test_a_folder_of_gguf_files_tells_which_to_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """As ``hf download`` brings them: many sizes of one model, and no config.json."""
    for size in ("Q4_K_M", "Q8_0"):
        (tmp_path / f"m-{size}.gguf").touch()
    line = failure(capsys, "serve", str(tmp_path))
    assert f"it has no config.json; name one of its GGUF files, as {tmp_path}/m-Q4_K_M.gguf" in line


def test_node_settings_that_do_not_fit_are_named(
    capsys: pytest.CaptureFixture[str], broken_model: str
) -> None:
    node = ["decode", "--model", broken_model]
    assert "--host: 10.1.2.3 is not loopback" in failure(capsys, *node, "--host", "10.1.2.3")
    for host in ("0.0.0.0", "::", ""):
        line = failure(capsys, *node, "--host", host, "--cluster-key", "k" * 40)
        assert "--host: must be an address that others can dial" in line
    assert "--peer: 'tcp://x' is not of the form" in failure(capsys, *node, "--peer", "tcp://x")
    assert "--router: 'here' is no http URL" in failure(capsys, *node, "--router", "here")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--served-model-name", ""], "--served-model-name: is empty"),
        (["--api-key", ""], "--api-key: is empty"),
        (["--api-key", "right", "correct horse"], "--api-key: has white space"),
        (["--api-key", "caf\udce9"], "--api-key: is not UTF-8"),
        (["--operator-key", " key"], "--operator-key: has white space"),
        (["--cluster-key", "\udce9"], "--cluster-key: is not UTF-8"),
        (["--host", "\udce9"], "--host: is not UTF-8"),
        (["--cluster-key", "", "--host", "10.1.2.3"], "--cluster-key: is empty"),
        (["--block-size", "0"], "--block-size: 0 is too small"),
        (["--num-blocks=-1"], "--num-blocks: -1 is too small"),
        (["--max-num-seqs", "0"], "--max-num-seqs: 0 is too small"),
        (["--max-num-batched-tokens", "0"], "--max-num-batched-tokens: 0 is too small"),
        (["--max-num-seqs", "1T"], "--max-num-seqs: 1099511627776 is too large; at most 65536"),
        (["--num-threads", "0"], "--num-threads: 0 is too small"),
        (["--num-threads", "100000"], "--num-threads: 100000 is too large; at most 1024"),
        (["--tensor-parallel-size", "100000"], "--tensor-parallel-size: 100000 is too large"),
        (["--store-load-timeout", "nan"], "--store-load-timeout: 'nan' is no number (like 0.5)"),
        (["--gpu-memory-utilization", "5"], "--gpu-memory-utilization: 5.0 is no share"),
        (["--transport", "pigeon"], "--transport: unknown transport 'pigeon'"),
        (["--transport", "tcp:{"], "--transport: '{' after tcp is not JSON"),
        (["--speculative-config", "{"], "--speculative-config: '{'"),
        (["--kv-events-config", "[]"], "--kv-events-config: '[]'"),
        (["--kv-events-config", "\udcff"], "--kv-events-config: is not UTF-8"),
    ],
)
@pytest.mark.parametrize("command", ["serve", "up"])
def test_what_no_model_makes_right_is_refused_before_one_is_loaded(
    capsys: pytest.CaptureFixture[str],
    broken_model: str,
    command: str,
    words: list[str],
    message: str,
) -> None:
    # Were the model looked at, its missing tokenizer would be what is named.
    assert message in failure(capsys, command, "--model", broken_model, "--port", "0", *words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--policy", "whoever"], "--policy: unknown policy 'whoever'; known are cost, "),
        (["--policy", "breaks:Policy"], "can't load breaks:Policy: SyntaxError: invalid"),
        (["--prefill", "ftp://x"], "--prefill: 'ftp://x' is no http URL"),
        (["--decode", "127.0.0.1:8200"], "--decode: '127.0.0.1:8200' is no http URL"),
        (["--api-key", "right", ""], "--api-key: is empty"),
        (["--node-api-key", " "], "--node-api-key: is empty"),
        (["--node-api-key", "a b"], "--node-api-key: has white space"),
        (["--chat-template", "/nope"], "/nope: can't be read"),
        (["--chat-template", "wrong.jinja"], "chat_template: does not compile"),
        (["--otlp-traces-endpoint", "here"], "--otlp-traces-endpoint: 'here' is no http URL"),
        (["--fd", "-1"], "--fd: -1 is no socket"),
        (["--fd", "9" * 40], "--fd: " + "9" * 40 + " is no socket"),
    ],
)
def test_a_router_refuses_what_is_wrong_before_it_waits_for_nodes(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("breaks.py").write_text("class Policy(:")
    Path("wrong.jinja").write_text("{% if %}")
    assert message in failure(capsys, "router", "--port", "0", *words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--any", "0"], "--any: give 1 or more, or --prefill and --decode"),
        (["--max-tokens", "0"], "--max-tokens: 0 is not positive"),
        (["--start-timeout", "-1"], "--start-timeout: -1 is no time to wait"),
        (["--start-timeout", "5m"], "--start-timeout: '5m' is no number (like 0.5)"),
        (["--min-encode-rows", "-1"], "--min-encode-rows: -1 is negative"),
    ],
)
def test_what_up_can_not_do_is_refused_before_it_starts_anything(
    capsys: pytest.CaptureFixture[str], broken_model: str, words: list[str], message: str
) -> None:
    line = failure(capsys, "up", "--model", broken_model, "--port", "0", "--prompt", "x", *words)
    assert message in line


@pytest.mark.parametrize(
    "words",
    [
        ("drain", "--cluster-key", "\udce9"),
        ("router", "--host", "\udce9"),
        ("bench", "serve", "--model", "\udce9"),
        ("chat", "--system", "\udce9"),
    ],
)
def test_what_is_not_utf8_is_refused_by_name(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    assert f"error: {words[-2]}: is not UTF-8" in failure(capsys, *words)


def test_keys_of_blanks_leave_no_endpoint_open(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVBATON_API_KEY", " \n")
    assert "--api-key: is empty" in failure(capsys, "router", "--port", "0")


@pytest.mark.parametrize("command", ["router", "serve", "drain"])
def test_the_line_end_of_a_file_is_no_part_of_a_cluster_key(
    monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """As a Secret made of a file has it, and a key that someone types has not."""
    monkeypatch.setenv("KVBATON_CLUSTER_KEY", "two words\n")
    assert make_parser().parse_args([command]).cluster_key == "two words"


def test_ray_that_cannot_be_had_is_said_so(
    capsys: pytest.CaptureFixture[str], broken_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["up", "--model", broken_model, "--ray"]
    assert "--ray: a ray:// client is no part" in failure(capsys, *words, "ray://head:10001")
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    assert "--ray: a ray:// client is no part" in failure(capsys, *words)
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    assert "--ray: needs the package ray: pip install 'kvbaton[ray]'" in failure(
        capsys, *words, "10.0.0.1:6379"
    )


def test_a_port_in_use_is_said_so(capsys: pytest.CaptureFixture[str], broken_model: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for words in (["router", "--port", port], ["up", "--port", port]):
            line = failure(capsys, *words, "--model", broken_model)
            assert f"--port: 127.0.0.1:{port} is in use" in line


def test_the_module_runs_like_the_command() -> None:
    done = kvbaton("version")
    assert (done.returncode, done.stdout.strip()) == (0, "0.1.0")
    done = kvbaton("prefill", "--help")
    assert "--kv-load-failure-policy" in done.stdout
    assert "debug" not in done.stdout.replace("{debug,info,warning,error}", "")


@pytest.mark.parametrize(
    ("said", "host"), [("[::1]", "::1"), ("LocalHost", "localhost"), ("[FE80::1]", "fe80::1")]
)
def test_a_host_may_be_spelled_as_in_a_url(said: str, host: str) -> None:
    args = make_parser().parse_args(["router", "--host", said])
    assert from_args(RouterConfig, args).host == host


def test_the_maker_of_random_models_has_a_help_text(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["checkpoints", "--help"])
    with pytest.raises(SystemExit, match="0"):
        make_model()
    assert "FOLDER" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_every_engine_setting_has_a_flag_and_a_help_text() -> None:
    docs = attribute_docs(EngineConfig)
    assert {field.name for field in fields(EngineConfig)} == set(docs)
    words = ["decode", "--model", "m", "--no-enable-prefix-caching", "--max-model-len", "4K"]
    config = from_args(EngineConfig, make_parser().parse_args(words))
    assert config == EngineConfig(model="m", enable_prefix_caching=False, max_model_len=4096)


def test_up_passes_engine_flags_on_to_nodes() -> None:
    words = ["--model", "m", "--dtype", "float32", "--enforce-eager", "--num-blocks", "9"]
    parser = make_parser()
    args = parser.parse_args(["up", *words, "--no-enable-prefix-caching"])
    engine = from_args(EngineConfig, args)
    again = from_args(EngineConfig, parser.parse_args(["prefill", *words_of(engine)]))
    assert again == engine
    assert again.num_blocks == 9


def test_an_encoder_node_knows_only_what_it_heeds(broken_model: str) -> None:
    parse = make_parser().parse_args
    model = ["--model", broken_model]
    args = parse(["encode", *model, "--encoder-cache-tokens", "4K", "--max-transfers", "7"])
    config = node_config(args)
    assert (config.engine.encoder_only, config.engine.encoder_cache_tokens) == (True, 4096)
    assert (config.role, config.handover.max_transfers) == ("encode", 7)
    other = parse(["decode", *model, "--language-model-only", "--encoder-cache-tokens", "64"])
    engine = node_config(other).engine
    assert (engine.encoder_only, engine.language_model_only) == (False, True)


def test_up_starts_encoders_with_the_flags_that_they_know() -> None:
    words = ["up", "--model", "m", "--encode", "2", "--num-blocks", "9", "--language-model-only"]
    args = make_parser().parse_args([*words, "--encoder-cache-tokens", "64", "--seed", "3"])
    cluster = from_args(ClusterConfig, args)
    assert cluster.node_names[-2:] == [("encode", "encode-0"), ("encode", "encode-1")]
    assert cluster.num_pairs == (2, 4)
    given = cluster.node_words("encode", "encode-0", "http://r", ["--gpu-memory-utilization=0.5"])
    parsed = make_parser().parse_args(given)
    assert (parsed.encoder_cache_tokens, parsed.seed, parsed.node_id) == (64, 3, "encode-0")
    other = make_parser().parse_args(cluster.node_words("prefill", "p", "http://r", []))
    engine = from_args(EngineConfig, other)
    assert (engine.num_blocks, engine.language_model_only, engine.encoder_only) == (9, True, False)


def test_up_starts_nodes_of_the_roles_that_are_asked_for() -> None:
    def up(*words: str) -> ClusterConfig:
        return from_args(ClusterConfig, make_parser().parse_args(["up", "--model", "m", *words]))

    assert up().node_names == [("any", "any-0"), ("any", "any-1")]
    mixed = up("--any", "2", "--prefill", "1", "--decode", "3")
    assert mixed.num_pairs == (3 * 5 - 2, 0), "a node hands nothing over to itself"
    assert [role for role, _ in up("--prefill", "1", "--decode", "1").node_names] == [
        "prefill",
        "decode",
    ]
    for role, name in mixed.node_names:
        words = mixed.node_words(role, name, "http://r", [])
        assert make_parser().parse_args(words).role == role
        assert mixed.node_env(name)["KVBATON_NODE_ID"] == name


def test_up_tells_router_and_nodes_what_images_are_taken() -> None:
    given = ["--allow-private-media", "--limit-images=3", "--allowed-media-domains", "a.b", "c.d"]
    config = from_args(MediaConfig, make_parser().parse_args(["up", "--model=m", *given]))
    assert config == MediaConfig(
        allowed_media_domains=("a.b", "c.d"), allow_private_media=True, max_images=3
    )
    cluster = ClusterConfig(engine=EngineConfig(model="m"), media=config)
    for words in (cluster.router_words(0), cluster.node_words("decode", "d", "http://r", [])):
        assert from_args(MediaConfig, make_parser().parse_args(words)) == config
    plain = from_args(MediaConfig, make_parser().parse_args(["router"]))
    assert plain == MediaConfig()


@pytest.mark.parametrize(
    ("text", "value"), [("4096", 4096), ("4k", 4000), ("4K", 4096), ("1.5G", 3 << 29), ("-1", -1)]
)
def test_numbers_with_units(text: str, value: int) -> None:
    assert human_int(text) == value


def test_the_machine_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cpu = EngineConfig(model="m", device="cpu")
    assert shares(cpu, 3, [], 8) == [(["--num-threads=2"], {})] * 3
    assert shares(cpu, 4, [], 2)[0] == (["--num-threads=1"], {})
    ranks = EngineConfig(model="m", device="cpu", tensor_parallel_size=2)
    assert shares(ranks, 2, [], 8)[0] == (["--num-threads=2"], {})
    chosen = EngineConfig(model="m", device="cpu", num_threads=5)
    assert shares(chosen, 3, [], 8)[0] == ([], {})
    gpu = EngineConfig(model="m", tensor_parallel_size=2)
    four = shares(gpu, 3, ["0", "1", "2", "3"], 8)
    assert [env["CUDA_VISIBLE_DEVICES"] for _, env in four] == ["0,1", "2,3", "0,1"]
    assert [flags for flags, _ in four] == [["--gpu-memory-utilization=0.4500"]] * 3


def test_keys_do_not_show() -> None:
    config = NodeConfig(
        engine=EngineConfig(model="m"),
        role="decode",
        node_id="d",
        cluster_key="hush",
        api_keys=("hush",),
        operator_keys=("hush",),
    )
    assert "hush" not in repr(config) + repr(config.handover)


@pytest.mark.parametrize("name", ["", "a/b", "x" * 257, "a\nb", "n\udcff"])
def test_a_node_id_that_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="--node-id: must have 1 to 256"):
        NodeConfig(engine=EngineConfig(model="m"), role="decode", node_id=name)


@contextmanager
def up_with_children(model: str) -> Iterator[subprocess.Popen[bytes]]:
    (Path(model) / "tokenizer.json").write_text(TOKENIZER)
    words = [sys.executable, "-m", "kvbaton", "up", "--model", model, "--port", "0"]
    pipe, heed = subprocess.PIPE, partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)
    with subprocess.Popen(words, stdout=pipe, stderr=pipe, preexec_fn=heed) as up:  # despite nohup
        until(lambda: len(processes_with(model)) > 1, "children")
        yield up


def test_killing_up_kills_its_children(broken_model: str) -> None:
    with up_with_children(broken_model) as up:
        up.send_signal(signal.SIGKILL)
    until(lambda: processes_with(broken_model) == [], "no children")


def test_up_ends_what_it_started_when_its_terminal_goes(broken_model: str) -> None:
    with up_with_children(broken_model) as up:
        up.send_signal(signal.SIGHUP)
        _, told = up.communicate(timeout=60)
    assert (up.returncode, b"stopping" in told) == (0, True)
    assert processes_with(broken_model) == []


SIMULATE = "simulate --trace code --rate 1 --seconds 2"
PRINTS = (["version"], ["connectors", "list", "tcp"], SIMULATE.split())


@pytest.mark.parametrize("words", PRINTS, ids=lambda words: words[0])
def test_an_output_that_takes_nothing_is_no_traceback(words: list[str]) -> None:
    def run(*before: str, stdout: int = subprocess.DEVNULL) -> tuple[str, int]:
        command = [*before, sys.executable, "-m", "kvbaton", *words]
        done = subprocess.run(
            command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
        return done.stderr, done.returncode

    reads, gone = os.pipe()
    os.close(reads)
    full = os.open("/dev/full", os.O_WRONLY)
    for output, told in ((gone, "32] Broken pipe"), (full, "28] No space left on device")):
        assert run(stdout=output) == (f"kvbaton: error: standard output: [Errno {told}\n", 1)
        os.close(output)
    assert run("sh", "-c", 'exec "$@" >&-', "-") == ("", 0)


def test_an_answer_that_a_terminal_can_not_show_is_shown_in_part() -> None:
    text = """
import argparse, sys
from kvbaton import cli
class Parser:
    def parse_args(self, argv):
        return argparse.Namespace(run=lambda args: print("pr\\u00eat \\u4f60") or 0)
cli.make_parser = Parser
sys.exit(cli.main())
"""
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, timeout=60, check=False,
        env=os.environ | {"PYTHONIOENCODING": "latin-1"},
    )  # fmt: skip
    assert (done.stderr, done.returncode, done.stdout) == (b"", 0, b"pr\xeat ?\n")


@pytest.mark.parametrize("error", [BrokenPipeError("of a child"), OSError(28, "of a file")])
def test_another_error_is_not_taken_for_that_of_standard_output(
    error: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(args: object) -> int:
        raise error

    monkeypatch.setattr("kvbaton.cli.run_version", fail)
    with pytest.raises(OSError, match="of a"):
        main(["version"])


def test_a_child_whose_parent_died_before_it_asked_ends_at_once() -> None:
    ask = f"from kvbaton.signals import die_with_parent; die_with_parent({os.getpid()} + %d)"
    ends = [
        subprocess.run([sys.executable, "-c", ask % more], timeout=60, check=False).returncode
        for more in (0, 1)
    ]
    assert ends == [0, -signal.SIGKILL]


CHILD = """
import multiprocessing, os, time
from kvbaton.signals import begin_child

def work():
    begin_child()
    with open("/proc/self/status") as status:
        print(os.getpid(), *(line.split()[1] for line in status if "SigIgn" in line), flush=True)
    time.sleep(600)

multiprocessing.get_context("fork").Process(target=work).start()
"""


def test_a_child_outlives_its_terminal_and_not_its_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child, ignored = parent.stdout.readline().split()
        parent.kill()
    for number in (signal.SIGINT, signal.SIGHUP):
        assert int(ignored, 16) & 1 << number - 1
    until(lambda: not is_alive(int(child)), "the child's end")


TOKENIZER = """{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0},
"unk_token": "a"}, "added_tokens": []}"""


def test_limits_of_hand_overs(broken_model: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--model", broken_model]
    parse = make_parser().parse_args
    p = node_config(parse(["prefill", *model, "--max-transfers", "2k"]))
    d = node_config(parse(["decode", *model, "--max-blocks-per-peer", "7"]))
    assert (p.handover.max_transfers, d.handover.max_blocks_per_peer) == (2000, 7)
    assert d.handover.max_transfers == HandoverConfig.max_transfers
    assert "--max-blocks-per-peer: 0 is not" in failure(
        capsys, "decode", *model, "--max-blocks-per-peer", "0"
    )


CONFIG = """
model: m
tensor_parallel_size: 2
num-gpu-blocks-override: 99
enable-prefix-caching: false
enforce_eager: true
allow-private-media: false
kv-events-config: {enable_kv_cache_events: true}
router: [http://a:1, http://b:2]
api-key: [one, two]
port: 8123
"""


def test_a_file_gives_options_and_the_command_line_wins(tmp_path: Path) -> None:
    file = tmp_path / "node.yaml"
    file.write_text(CONFIG)
    said = ["serve", f"--config={file}", "--port", "9", "--router", "http://c:3"]
    args = make_parser().parse_args(said)
    assert (args.model, args.tensor_parallel_size, args.num_blocks) == ("m", 2, 99)
    assert (args.enable_prefix_caching, args.enforce_eager) == (False, True)
    assert args.allow_private_media is False
    assert args.kv_events_config == '{"enable_kv_cache_events": true}'
    assert args.api_key == ["one", "two"]
    assert (args.port, args.router) == (9, ["http://c:3"])
    args = make_parser().parse_args(["serve", "--config", str(file), "-tp", "4"])
    assert args.router == ["http://a:1", "http://b:2"]
    assert args.tensor_parallel_size == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_modl_len: 3", "kvbaton serve has no option 'max_modl_len'; did you mean 'max-model"),
        ("kv_transfer_config: {}", "has no option 'kv_transfer_config'; there are --transport"),
        ("config: other.yaml", "has no option 'config'"),
        ("port: 1\nblock-size: 16\nport: 2", "'port' is there twice, in lines 1 and 3"),
        ("port: 1\nspeculative-config: {method: ngram, method: x}", "'method' is there twice"),
        ("block_size: 16\nblock-size: 32", "'block_size' and 'block-size' are the same option"),
        ("enforce-eager: 3", "'enforce-eager' must be true or false, not 3"),
        ("model:", "'model' must have a value, not null"),
        ("model: true", "'model' must have a value, not true"),
        ("api-key: []", "'api-key' is an empty list"),
        ("- model", "must hold options"),
        ("{", "is no YAML"),
    ],
)
def test_a_file_that_is_wrong_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "node.yaml"
    file.write_text(text)
    line = failure(capsys, "serve", "--config", str(file))
    assert f"--config: {file}" in line
    assert message in line


def test_a_file_that_is_missing_or_holds_a_wrong_value_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert "--config: /nope.yaml can't be read" in failure(
        capsys, "router", "--config", "/nope.yaml"
    )
    assert "--config: expected one argument" in failure(capsys, "router", "--config")
    (tmp_path / "r.yaml").write_text("port: 70000")
    line = failure(capsys, "router", "--config", str(tmp_path / "r.yaml"))
    assert "--port: 70000 is no port" in line


def test_nodes_of_a_router_that_loopback_does_not_reach_have_a_key() -> None:
    engine = EngineConfig(model="m", device="cpu")
    for host, made in (("127.0.0.1", False), ("0.0.0.0", False), ("::", False), ("10.1.2.3", True)):
        placement = LocalPlacement(ClusterConfig(engine=engine, host=host))
        assert bool(placement.config.cluster_key) is made
        given = LocalPlacement(ClusterConfig(engine=engine, host=host, cluster_key="mine"))
        assert given.config.cluster_key == "mine"


def test_the_model_needs_no_flag(broken_model: str, tmp_path: Path) -> None:
    file = tmp_path / "node.yaml"
    file.write_text("model: another\napi-key: [one]")
    for words in (
        ["--port=9", broken_model],
        [broken_model, "--port", "9"],
        [broken_model, "--config", str(file)],
        ["--config", str(file), broken_model],
    ):
        config = node_config(make_parser().parse_args(["serve", *words]))
        assert (config.engine.model, config.served_model_name) == (broken_model, (broken_model,))


def test_a_model_behind_its_name_is_not_another_name(broken_model: str) -> None:
    words = ["serve", "--served-model-name", "one", broken_model]
    config = node_config(make_parser().parse_args(words))
    assert (config.engine.model, config.served_model_name) == (broken_model, ("one",))


def test_a_model_may_have_several_names(broken_model: str, tmp_path: Path) -> None:
    file = tmp_path / "node.yaml"
    file.write_text("served-model-name: [one, two]")
    for words in (["--served-model-name", "one", "two"], ["--config", str(file)]):
        config = node_config(make_parser().parse_args(["serve", broken_model, *words]))
        assert (config.model_name, config.served_model_name) == ("one", ("one", "two"))
    engine = EngineConfig(model=broken_model)
    up = ClusterConfig(engine=engine, served_model_name=("one", "two"))
    for line in (up.router_words(3), up.node_words("any", "any-0", "http://127.0.0.1:1", ())):
        at = line.index("--served-model-name")
        assert line[at + 1 : at + 3] == ["one", "two"]
        assert line[at + 3].startswith("--")


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    told = capsys.readouterr().out
    assert main(["version"]) == 0
    assert told == capsys.readouterr().out != ""
