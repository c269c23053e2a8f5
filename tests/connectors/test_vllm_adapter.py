"""Connectors written for vLLM as stores: the example, an asynchronous one, and refused ones."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvbaton.connectors.registry import load_store
from kvbaton.connectors.store import Store
from kvbaton.errors import ConfigError, StoreError
from tests.support.store_objects import find, make_objects, pieces, read, save, wait
from tests.support.waiting import PATIENCE_S, until

EXAMPLE = Path(__file__).parents[2] / "examples" / "vllm_connector"
BLOCK_BYTES = 4096
SIZES = (0, 1, BLOCK_BYTES - 24, BLOCK_BYTES - 23, 3 * BLOCK_BYTES, 40 * BLOCK_BYTES)


@pytest.fixture(autouse=True)
def example_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLE)


def spec(connector: str, path: Path, **options: Any) -> str:
    words = {"connector": connector, "extra_config": {"path": str(path)}} | options
    small = {"block_bytes": BLOCK_BYTES, "staging_bytes": 8 * BLOCK_BYTES}
    return f"vllm:{json.dumps(small | words)}"


@pytest.fixture
def opened() -> Iterator[Any]:
    stores = list[Store]()

    def make(connector: str, path: Path, **options: Any) -> Store:
        store = load_store(spec(connector, path, **options))
        stores.append(store)
        store.open()
        return store

    yield make
    for store in stores:
        store.close()


def objects_of(seed: int) -> dict[bytes, bytes]:
    return {k: v for i, n in enumerate(SIZES) for k, v in make_objects(1, n, seed + i).items()}


@pytest.mark.parametrize("planes", [False, True])
@pytest.mark.parametrize("tokens", [16, 64])
def test_what_one_life_saved_another_loads(
    opened: Any, tmp_path: Path, planes: bool, tokens: int
) -> None:
    options = {"planes": planes, "block_tokens": tokens}
    if planes:  # the example has blocks in the first dimension only
        connector = f"{__name__}:Planes"
    else:
        connector = "kv_files:KVFilesConnector"
    first = opened(connector, tmp_path, **options)
    objects = objects_of(1)
    assert find(first, list(objects)).present == (False,) * len(SIZES)
    assert save(first, objects) == [True] * len(SIZES)
    first.close()
    second = opened(connector, tmp_path, **options)
    assert find(second, [*objects, bytes(32)]).present == (True,) * len(SIZES) + (False,)
    assert read(second, objects) == list(objects.values())


def test_what_is_refused_is_shut_down(tmp_path: Path) -> None:
    """It may have threads and connections, which nobody else could end."""
    Clinging.ended.clear()
    store = load_store(spec(f"{__name__}:ClingsAndShakesHands", tmp_path))
    with pytest.raises(ConfigError, match="get_handshake_metadata"):
        store.open()
    assert Clinging.ended == ["WORKER", "SCHEDULER"]


def test_a_side_that_fails_to_shut_down_does_not_spare_the_other(tmp_path: Path) -> None:
    Clinging.ended.clear()
    store = load_store(spec(f"{__name__}:Clinging", tmp_path))
    store.open()
    with pytest.raises(RuntimeError, match="not yet"):
        store.close()
    assert Clinging.ended == ["WORKER", "SCHEDULER"]


def test_a_block_that_is_gone_is_a_miss_and_is_saved_anew(opened: Any, tmp_path: Path) -> None:
    store = opened("kv_files:KVFilesConnector", tmp_path)
    [(key, data)] = objects = make_objects(1, 5 * BLOCK_BYTES, 2).items()
    before = set(tmp_path.iterdir())
    assert save(store, dict(objects)) == [True]
    gone = sorted(set(tmp_path.iterdir()) - before)[3]
    gone.unlink()
    assert read(store, {key: data}) == [None]
    assert save(store, {key: data}) == [True]
    assert gone.exists()
    assert read(store, {key: data}) == [data]


def test_what_it_raises_is_told_and_costs_no_blocks(opened: Any, tmp_path: Path) -> None:
    store = opened("kv_files:KVFilesConnector", tmp_path / "kv")
    objects = make_objects(8, BLOCK_BYTES - 24, 3)
    assert save(store, objects) == [True] * 8
    (tmp_path / "kv").rename(tmp_path / "away")
    (tmp_path / "kv").symlink_to(tmp_path / "kv")
    for _ in range(3):
        with pytest.raises(StoreError, match=r"kv_files:KVFilesConnector: .*symbolic links"):
            read(store, objects)
        with pytest.raises(StoreError):
            save(store, make_objects(8, 100, 4))
    assert "symbolic links" in (store.health() or "")
    (tmp_path / "kv").unlink()
    (tmp_path / "away").rename(tmp_path / "kv")
    assert read(store, objects) == list(objects.values())
    assert store.health() is None


def test_it_may_say_not_yet_and_load_and_save_between_steps(opened: Any, tmp_path: Path) -> None:
    store = opened(f"{__name__}:Late", tmp_path)
    objects = objects_of(5)
    assert save(store, objects) == [True] * len(SIZES)
    assert find(store, list(objects)).present == (True,) * len(SIZES)
    assert read(store, objects) == list(objects.values())


def test_a_load_that_never_ends_gives_up_and_keeps_its_block(opened: Any, tmp_path: Path) -> None:
    store = opened(f"{__name__}:Late", tmp_path, timeout_s=0.5)
    [(key, data)] = make_objects(1, 100, 6).items()
    assert save(store, {key: data}) == [True]
    worker, driver = store.backend._driver._worker, store.backend._driver
    free = len(driver._free)
    worker.hold.clear()
    with pytest.raises(StoreError, match=r"get_finished names no load that has ended for 0\.5 s"):
        wait(store.load([key], [pieces(bytes(100))]))
    assert len(driver._free) == free - 1
    worker.hold.set()
    assert read(store, {key: data}) == [data]
    until(lambda: find(store, [key]).present[0] and len(driver._free) == free, "its block is back")


@pytest.mark.parametrize(
    ("connector", "says"),
    [
        ("kv_files:Nothing", "can't load kv_files:Nothing"),
        ("no_such_module:X", "No module named 'no_such_module'"),
        ("kv_files:Moves", "no class over vLLM's KVConnectorBase_V1"),
        (f"{__name__}:Unfinished", "it lacks wait_for_save"),
        (f"{__name__}:Handshakes", "get_handshake_metadata"),
        (f"{__name__}:HandsOver", "request_finished"),
        (f"{__name__}:CrossLayer", "prefer_cross_layer_blocks"),
        (f"{__name__}:OtherLayout", "get_required_kvcache_layout asks for 'BLHNC'"),
        (f"{__name__}:ReadsMore", r"VllmConfig\.compilation_config is not there"),
        (f"{__name__}:Forgets", "get_num_new_matched_tokens does not find what was saved"),
        (f"{__name__}:LoadsNothing", "start_load_kv does not load what was saved"),
    ],
)
def test_what_can_be_no_store_is_refused_by_name(
    opened: Any, tmp_path: Path, connector: str, says: str
) -> None:
    with pytest.raises((ConfigError, StoreError), match=says):
        opened(connector, tmp_path)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"block_tokens": 17}, "block_tokens: must be a multiple of 16"),
        ({"block_bytes": 100}, "block_bytes: must be a multiple of 64"),
        ({"staging_bytes": 100}, "staging_bytes: must hold a block"),
    ],
)
def test_wrong_options_are_named(tmp_path: Path, options: dict[str, int], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_store(spec("kv_files:KVFilesConnector", tmp_path, **options))


def test_an_installed_vllm_is_never_shadowed(tmp_path: Path) -> None:
    """Its names win, and one that is not installed has only those of the contract."""
    for package in ("distributed/kv_transfer/kv_connector/v1", "v1"):
        (tmp_path / "vllm" / package).mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text("__version__ = 'theirs'\n")
    code = (
        "from kvbaton.connectors.vllm_adapter.names import provide_names; provide_names();"
        "import vllm; print(vllm.__version__)"
    )

    def run(code: str, **env: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", code], env=os.environ | env, capture_output=True, text=True
        )
        return (done.stdout + done.stderr).strip().splitlines()[-1]

    assert run(code, PYTHONPATH=str(tmp_path)) == "theirs"
    importing = code.replace("import vllm;", "import vllm; from vllm.config import get_hash;")
    if importlib.util.find_spec("vllm.engine") is None:
        assert run(code) == "0.32.0+kvbaton"
        assert run(importing).startswith("ImportError: cannot import name 'get_hash'")


# --- connectors ---


def _example() -> Any:
    from kvbaton.connectors.vllm_adapter.names import provide_names

    provide_names()
    sys.path.insert(0, str(EXAMPLE))
    try:
        return importlib.import_module("kv_files")
    finally:
        sys.path.remove(str(EXAMPLE))


Example: Any = _example().KVFilesConnector


class Planes(Example):  # type: ignore[misc]
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches({name: x.transpose(0, 1) for name, x in kv_caches.items()})


class Late(Example):  # type: ignore[misc]
    """Looks up, loads and saves in a thread; a lookup says None first."""

    def __init__(self, *words: Any) -> None:
        super().__init__(*words)
        self._asked = set[str]()
        self._blocks: dict[str, tuple[int, str]] = {}
        self._saving: dict[str, Any] = {}
        self._ready: list[tuple[str, Any]] = []
        self.hold = threading.Event()
        self.hold.set()
        self._pool = ThreadPoolExecutor(2)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        if request.request_id not in self._asked:
            self._asked.add(request.request_id)
            return None, False
        count, _ = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return count, count > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            [name] = self._files(request.prompt_token_ids)
            self._blocks[request.request_id] = (blocks.get_block_ids()[0][0], name)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        moves = super().build_connector_meta(scheduler_output)
        moves.late, self._blocks = self._blocks, {}
        moves.names = [new.req_id for new in scheduler_output.scheduled_new_reqs]
        return moves

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for name, move in self._get_connector_metadata().late.items():
            self._ready.append((name, self._pool.submit(self._load, move)))

    def _load(self, move: tuple[int, str]) -> None:
        import torch

        self.hold.wait(PATIENCE_S)
        block, name = move
        for cache in self._caches.values():
            data = bytearray((self._folder / name).read_bytes())
            cache[block].copy_(torch.frombuffer(data, dtype=cache.dtype).view(cache[block].shape))

    def wait_for_save(self) -> None:
        """Saved while the request is over already: its block must stay."""
        moves = self._get_connector_metadata()
        for name, move in zip(moves.names, moves.saves, strict=False):
            self._saving[name] = self._pool.submit(self._save, move)

    def _save(self, move: tuple[int, str]) -> None:
        import torch

        block, name = move
        part = self._folder / f"{threading.get_ident()}.part"
        [cache] = self._caches.values()
        part.write_bytes(cache[block].contiguous().view(torch.uint8).numpy().tobytes())
        part.replace(self._folder / name)

    def request_finished(self, request: Any, block_ids: list[int]) -> Any:
        return request.num_computed_tokens == 0 and bool(block_ids), None

    def get_finished(self, finished_req_ids: set[str]) -> Any:
        loaded = {name for name, future in self._ready if future.done()}
        self._ready = [row for row in self._ready if row[0] not in loaded]
        self._over = getattr(self, "_over", set()) | (finished_req_ids & self._saving.keys())
        saved = {name for name in self._over if self._saving[name].done()}
        self._over -= saved
        return saved, loaded

    def shutdown(self) -> None:
        self.hold.set()
        self._pool.shutdown()


class Clinging(Example):  # type: ignore[misc]
    """A worker that can't be shut down, and a scheduler that can."""

    ended: ClassVar[list[str]] = []

    def shutdown(self) -> None:
        self.ended.append(self.role.name)
        if self.role.name == "WORKER":
            raise RuntimeError("not yet")


class ClingsAndShakesHands(Clinging):
    def get_handshake_metadata(self) -> Any:
        return object()


class Unfinished(Example.__base__):  # type: ignore[misc]
    def start_load_kv(self, *_: Any, **__: Any) -> None: ...
    def wait_for_layer_load(self, *_: Any) -> None: ...
    def save_kv_layer(self, *_: Any, **__: Any) -> None: ...
    def get_num_new_matched_tokens(self, *_: Any) -> Any: ...
    def update_state_after_alloc(self, *_: Any) -> None: ...
    def build_connector_meta(self, *_: Any) -> Any: ...


class Handshakes(Example):  # type: ignore[misc]
    def get_handshake_metadata(self) -> Any:
        return object()


class HandsOver(Example):  # type: ignore[misc]
    def request_finished(self, request: Any, block_ids: list[int]) -> Any:
        return False, {"do_remote_prefill": True}


class CrossLayer(Example):  # type: ignore[misc]
    prefer_cross_layer_blocks = True


class OtherLayout(Example):  # type: ignore[misc]
    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str:
        return "BLHNC"


class ReadsMore(Example):  # type: ignore[misc]
    def __init__(self, vllm_config: Any, *words: Any) -> None:
        super().__init__(vllm_config, *words)
        self._mode = vllm_config.compilation_config.mode


class Forgets(Example):  # type: ignore[misc]
    def wait_for_save(self) -> None: ...


class LoadsNothing(Example):  # type: ignore[misc]
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...
