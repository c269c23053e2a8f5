"""Fixtures for all rooms: small models, a driver of executors, and transformers as reference."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support.making import making

if TYPE_CHECKING:
    from tests.support.driver import Driver

settings.register_profile(
    "kvbaton", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("kvbaton")
"""The same examples each time, which may take as long as they do on a machine that is busy."""

NEEDS = {
    "gguf": ("engine/test_gguf.py", "e2e/test_chat.py", "e2e/test_up.py"),
    "cryptography": ("e2e/test_https.py", "server/test_tls.py", "router/test_model_lookup.py"),
}
collect_ignore = [file for name, files in NEEDS.items() if not find_spec(name) for file in files]
"""Not collected without a package of `dev`: GPU machines lack it, and no GPU test needs it."""

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As shells have it for what they start in the background; what is tested must hear of Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)

KEPT_GPU_BYTES = 1 << 30
"""A worker's, between two tests: up to 14 of them share a GPU."""

if (worker := os.environ.get("PYTEST_XDIST_WORKER")) and "KVBATON_TESTS_SPREAD" in os.environ:
    # Before anything asks CUDA what there is.
    from kvbaton.cluster.config import visible_gpus

    gpus = visible_gpus()
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus[int(worker.removeprefix("gw")) % len(gpus)]


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Look for garbage neither while tests are collected nor, later, among what that made.

    It is a million objects, which stay; each look at them takes as long as many a test.
    """
    gc.disable()
    try:
        import_from_elsewhere(session.config)
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def import_from_elsewhere(config: pytest.Config) -> None:
    """Import what will be collected, each worker from another place of the list on.

    In a fresh clone pytest compiles each file anew, which takes 10 s in all: so each worker
    compiles a share and finds the others' in the cache. What can't be imported says so later.
    """
    worker, count = map(os.environ.get, ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT"))
    if not worker or not count or config.args != config.getini("testpaths"):
        return
    files = sorted(config.rootpath.glob("tests/**/test_*.py"))
    start = int(worker.removeprefix("gw")) * len(files) // int(count)
    for file in files[start:] + files[:start]:
        with suppress(Exception, pytest.skip.Exception):
            import_module(".".join(file.relative_to(config.rootpath).with_suffix("").parts))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """See `Scheduling`."""
    from tests.support.scheduling import Scheduling

    return Scheduling(config, log)


@pytest.fixture(autouse=True)
def gpu_memory_goes_back() -> Iterator[None]:
    """Other workers share the GPU: what a test took, its allocator would keep for ever."""
    yield
    torch = sys.modules.get("torch")
    if torch and torch.cuda.is_initialized() and torch.cuda.memory_reserved() > KEPT_GPU_BYTES:
        torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a small random model folder of `FamilySpec(**arguments)`, once per arguments."""
    from tests.support.families import FamilySpec, make_family

    made: dict[str, Path] = {}

    def make(**arguments: Any) -> Path:
        spec = FamilySpec(**arguments)
        if repr(spec) not in made:
            made[repr(spec)] = make_family(tmp_path_factory.mktemp(spec.family) / "model", spec)
        return made[repr(spec)]

    return make


@pytest.fixture
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kit's remote processes are forked: importing torch or NIXL anew takes each 1.5 s.

    That they start as they do for users, `tests/doctor` and one test of `tests/bench` see.
    """
    from kvbaton.testing import remote
    from tests.support.forked_remote import popen

    monkeypatch.setattr(remote, "Popen", popen)


@pytest.fixture
def drive() -> Iterator[Callable[..., Driver]]:
    """Makes drivers, and closes them."""
    from tests.support.driver import Driver

    with making(Driver, lambda driver: driver.executor.close()) as make:
        yield make


@pytest.fixture(scope="session")
def reference() -> Callable[..., Any]:
    """The transformers model of a folder, loaded once per dtype."""
    import torch
    import transformers

    loaded: dict[tuple[Path, str], Any] = {}

    def load(folder: Path, dtype: str = "float32") -> Any:
        if (folder, dtype) not in loaded:
            loaded[folder, dtype] = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=getattr(torch, dtype)
            )
        return loaded[folder, dtype]

    return load
