"""``docs/connectors.md`` is true: its code runs, its commands work, its tables are up to date."""

from __future__ import annotations

import inspect
import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from kvbaton.cli import main
from kvbaton.connectors.base import Capabilities, FenceScope, RangeColumn, Status, Transport
from kvbaton.connectors.protocol.notice import MIN_NOTICE_BYTES
from kvbaton.connectors.registry import STORES, TRANSPORTS, Kind

PAGE = Path(__file__).parents[2] / "docs" / "connectors.md"
TEXT = PAGE.read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the files that the page writes."""
    folder = tmp_path_factory.mktemp("page")
    for block in blocks("python"):
        if named := re.match(r"# (\w+\.py)\n", block):
            (folder / named[1]).write_text(block)
    return folder


def run(folder: Path, *words: str, status: int = 0) -> str:
    env = os.environ | {"PYTHONPATH": f"{folder}:{PAGE.parents[1]}"}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def test_the_python_of_the_page_runs(folder: Path) -> None:
    files = sorted(path.name for path in folder.glob("*.py"))
    assert files == ["looped.py", "shelf.py", "shelf_door.py"]
    rest = [block for block in blocks("python") if not re.match(r"# \w+\.py\n", block)]
    assert len(rest) == 3
    run(folder, "-W", "error", "-c", "\n".join(rest))


WHOLE_KITS = (
    "kvbaton connectors check tcp --kind transport",
    """kvbaton connectors check 'shelf:ShelfStore:{"path": "{tmp}"}'""",
)
"""What they run by the command, others run in part, and `make test` runs of TCP by pytest."""


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, marks=[pytest.mark.slow] if command.strip() in WHOLE_KITS else [])
        for command in blocks("sh")
    ],
)
def test_the_commands_of_the_page_work(folder: Path, command: str) -> None:
    name, *words = shlex.split(command)
    assert name == "kvbaton"
    if "--kind" in words:
        assert run(folder, "-m", "kvbaton", *words).splitlines()[-1].endswith(": certified")
        return
    said = run(folder, "-m", "kvbaton", *words, status=4 if "check" in words else 0)
    if "check" in words:
        assert "0 failed" in said
        assert "passed, not certified: " in said.splitlines()[-1]
        assert ("skipped L1.what-is-kept-is-what-was-stored" in said) == (
            "--back-door" not in words
        )
    if "--plot" in words:
        assert (folder / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_the_mistake_that_the_page_tells_of_is_caught(folder: Path, tmp_path: Path) -> None:
    right = (folder / "shelf.py").read_text()
    check = "        if self._holds(key, source):\n            return True\n"
    assert check in right
    (tmp_path / "shelf.py").write_text(right.replace(check, ""))
    words = ["connectors", "check", 'shelf:ShelfStore:{"path": "{tmp}"}', "--level", "1"]
    said = run(tmp_path, "-m", "kvbaton", *words, status=1)
    assert re.findall(r"FAILED +(\S+)", said) == re.findall(r"FAILED (\S+)`", TEXT)


FILL = """
import os
from kvbaton.connectors import load_store

store = load_store('shelf:ShelfStore:{"path": "objects"}')
store.open()
keys = [bytes([n]) * 32 for n in range(8)]
print([store.store([key], [[memoryview(bytes(900_000))]]).result()[0] for key in keys])
print([name.endswith(".part") for name in os.listdir("objects")])
"""


FAIL = """
import asyncio, threading
import looped
from kvbaton.connectors import StoreError, load_store

class Client(looped.Client):
    async def get(self, key):
        if key == bytes(32):
            failed.set()
            raise {error}
        await asyncio.to_thread(late.wait)
        return await super().get(key)

failed, late, seen = threading.Event(), threading.Event(), []
looped.Client = Client
store = load_store("looped:LoopedStore")
store.open()
keys, data = [bytes(32), b"k" * 32], b"d" * 100
assert store.store(keys[1:], [[memoryview(data)]]).result() == [True]
targets = [bytearray(100), bytearray(100)]
future = store.load(keys, [[memoryview(target)] for target in targets])
future.add_done_callback(lambda _: seen.append(bytes(targets[1])))
failed.wait()
for _ in range(10):  # turns of the loop, in which the error goes up
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), store._loop).result()
late.set()
try:
    print(future.result(10))
except StoreError:
    store.close()
    print(seen == [bytes(targets[1])])
"""


@pytest.mark.parametrize("error", ["OSError('gone')", "asyncio.CancelledError"])
def test_no_buffer_is_touched_when_a_call_has_failed(folder: Path, error: str) -> None:
    """One object fails at once, another comes later: the call ends when neither can."""
    assert run(folder, "-c", FAIL.replace("{error}", error)) == "True\n"


def test_a_full_disk_is_no_error_and_nothing_of_it_stays(folder: Path) -> None:
    """What a write has begun would else keep the disk full: on 4 MiB there are four objects."""
    mount = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size=4m none "$0" && exec "$@"']
    where = str(folder / "objects")
    (folder / "objects").mkdir(exist_ok=True)
    if subprocess.run([*mount, where, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody mount a tmpfs")
    env = os.environ | {"PYTHONPATH": f"{folder}:{PAGE.parents[1]}"}
    words = [*mount, where, sys.executable, "-c", FILL]
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{[True] * 4 + [False] * 4}\n{[False] * 4}\n"


def test_the_contract_of_a_transport_is_whole() -> None:
    """Each method with its signature, each field, column and state is in the section."""
    _, _, rest = TEXT.partition("## The contract of a transport")
    told = rest.partition("\n## ")[0]
    for name in vars(Transport):
        method = getattr(Transport, name)
        if not name.startswith("_") and callable(method):
            words = (
                str(inspect.signature(method))
                .replace("(self, ", "(")
                .replace("(self)", "()")
                .replace("'", "")
            )
            assert f"| `{name}{words}`" in told
    for named in fields(Capabilities):
        assert f"| `{named.name}: " in told
    for member in [*RangeColumn, *Status, *FenceScope]:
        assert f"`{member.name}`" in told
    assert f"at least {MIN_NOTICE_BYTES} |" in told
    assert f"`max_ranges: int = {Capabilities.max_ranges}`" in told


def options(markdown: str) -> dict[str, str]:
    """Per connector, its part of the text."""
    found = re.findall(r"^### (\w+ `\w+`)\n(.*?)(?=^###|\Z)", markdown, re.MULTILINE | re.DOTALL)
    return {head: text.strip() for head, text in found}


@pytest.mark.parametrize("kind", [STORES, TRANSPORTS], ids=lambda kind: str(kind.noun))
def test_the_options_of_the_page_are_those_of_the_classes(
    kind: Kind, capsys: pytest.CaptureFixture[str]
) -> None:
    """`kvbaton connectors list --markdown` writes them anew."""
    told = options(TEXT.partition("<!-- options:begin -->")[2].partition("<!-- options:end -->")[0])
    assert main(["connectors", "list", "--markdown"]) == 0
    right = options(capsys.readouterr().out)
    for name in kind.built_in:
        head = f"{kind.noun} `{name}`"
        assert "Not here" not in told[head]
        if "Not here" not in right[head]:
            assert told[head] == right[head], f"{head} is not as the page says"
