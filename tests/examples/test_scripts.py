"""Each launch script of `examples`, run as it stands on machines of its own, with a small model."""

from __future__ import annotations

import base64
import io
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from compose_spec import PyOptions
from PIL import Image

from tests.support.machines import Machine

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SMALL = ("--num-blocks=64", "--max-model-len=256", "--transport=tcp")
KEY = {"KVBATON_CLUSTER_KEY": "the same secret on both"}
FIRST, SECOND = "10.77.0.1", "10.77.0.2"
MODEL_IN_COMPOSE = "${MODEL:?set it to the folder of the model}"
PROMPT = "The quick brown fox jumps over the lazy dog and runs away from it as fast as it can."

MakeMachine = Callable[[], Machine]


@pytest.fixture
def make_machine(tmp_path: Path) -> Iterator[MakeMachine]:
    made: list[Machine] = []

    def make() -> Machine:
        made.append(Machine(tmp_path))
        return made[-1]

    yield make
    for machine in made[::-1]:
        machine.stop()


@pytest.fixture
def machine(make_machine: MakeMachine) -> Machine:
    return make_machine()


def answers(machine: Machine, router: str, model: str) -> str:
    """What a completion brings."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    body["ignore_eos"] = True
    answer = machine.post(f"{router}/v1/completions", body)
    assert answer["usage"]["completion_tokens"] == 8
    return str(answer["choices"][0]["text"])


def test_one_command(machine: Machine, checkpoint: Callable[..., Path]) -> None:
    model, router = str(checkpoint()), "http://127.0.0.1:8000"
    script = str(EXAMPLES / "one_command.sh")
    machine.start([script, model, *SMALL, "--policy=least-loaded"])
    nodes = machine.until_pairs(router, 4)
    answers(machine, router, model)
    assert machine.transferred(nodes, "kvbaton_prompt_tokens_total", source="transferred") > 0


def test_tensor_parallel(machine: Machine, checkpoint: Callable[..., Path]) -> None:
    model, router = str(checkpoint()), "http://127.0.0.1:8000"
    script = str(EXAMPLES / "tensor_parallel.sh")
    machine.start([script, model, *SMALL, "--policy=least-loaded"])
    nodes = machine.until_pairs(router, 1)
    answers(machine, router, model)
    assert machine.transferred(nodes, "kvbaton_prompt_tokens_total", source="transferred") > 0
    assert [machine.get(f"{node['url']}/node")["tp_size"] for node in nodes["nodes"]] == [2, 2]


def test_encoder_nodes(machine: Machine, checkpoint: Callable[..., Path]) -> None:
    model = str(checkpoint(family="qwen3_vl", max_position_embeddings=2048))
    router = "http://127.0.0.1:8000"
    script = str(EXAMPLES / "encoder_nodes.sh")
    small = [flag.replace("=256", "=1024").replace("=64", "=128") for flag in SMALL]
    machine.start([script, model, *small, "--policy=least-loaded"])
    nodes = machine.until_pairs(router, 1 + 2 * 2)
    picture = io.BytesIO()
    Image.new("RGB", (64, 64), "teal").save(picture, "PNG")
    url = "data:image/png;base64," + base64.b64encode(picture.getvalue()).decode()
    parts = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "What is it?"},
    ]
    body = {"model": model, "messages": [{"role": "user", "content": parts}], "max_tokens": 4}
    assert machine.post(f"{router}/v1/chat/completions", body)["choices"]
    encoders = {"nodes": [node for node in nodes["nodes"] if node["role"] == "encode"]}
    assert len(encoders["nodes"]) == 2
    assert machine.transferred(encoders, "kvbaton_encoder_rows_total") > 0


def test_two_machines(make_machine: MakeMachine, checkpoint: Callable[..., Path]) -> None:
    first, second = make_machine(), make_machine()
    first.connect(second, FIRST, SECOND)
    model, router = str(checkpoint()), f"http://{FIRST}:8000"
    script = str(EXAMPLES / "two_machines.sh")
    first.start([script, "first", model, FIRST, *SMALL], KEY | {"POLICY": "least-loaded"})
    second.start([script, "second", model, SECOND, FIRST, *SMALL], KEY)
    token = _member_token()
    nodes = second.until_pairs(router, 1, "-H", f"Authorization: Bearer {token}")
    assert {node["url"] for node in nodes["nodes"]} == {
        f"http://{FIRST}:8100",
        f"http://{SECOND}:8200",
    }
    answers(second, router, model)
    assert first.transferred(nodes, "kvbaton_prompt_tokens_total", source="transferred") > 0


def _member_token() -> str:
    from kvbaton.server.network import registration_token

    return registration_token(KEY["KVBATON_CLUSTER_KEY"])


# --- Docker ---


def compose(model: str) -> dict[str, Any]:
    text = (EXAMPLES / "docker" / "compose.yaml").read_text()
    assert MODEL_IN_COMPOSE in text
    found: dict[str, Any] = yaml.safe_load(text.replace(MODEL_IN_COMPOSE, model))
    return found


def test_the_compose_file_is_one() -> None:
    text = (EXAMPLES / "docker" / "compose.yaml").read_text().replace(MODEL_IN_COMPOSE, "/folder")
    options = PyOptions()
    options.apply_merge = True
    assert set(options.from_yaml(text).service_names()) == {"router", "prefill", "decode"}
    with pytest.raises(ValueError, match="stop_grace_perio"):
        options.from_yaml(text.replace("stop_grace_period", "stop_grace_perio"))
    for service in compose("/folder")["services"].values():
        timeout = int(service["command"][service["command"].index("--shutdown-timeout") + 1])
        assert int(service["stop_grace_period"].removesuffix("s")) > timeout + 10


def test_what_compose_starts(machine: Machine, checkpoint: Callable[..., Path]) -> None:
    """Its services share the host's network: they run as well without containers."""
    model, router = str(checkpoint()), "http://127.0.0.1:8000"
    services = compose(model)["services"]
    for name, service in services.items():
        (volume,) = service["volumes"]
        source, inside, _ = volume.split(":")
        words = [source if word == inside else word for word in service["command"]]
        more = SMALL if name != "router" else ("--policy=least-loaded",)
        machine.start(["kvbaton", *words, *more])
    nodes = machine.until_pairs(router, 1)
    answers(machine, router, model)
    assert machine.transferred(nodes, "kvbaton_prompt_tokens_total", source="transferred") > 0
    for service in services.values():
        kind, *words = service["healthcheck"]["test"]
        assert kind == "CMD"
        assert subprocess.run([*machine.inside, *words], timeout=60).returncode == 0
