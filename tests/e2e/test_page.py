"""The router's page in a real browser, over a cluster that serves: wide and narrow, light and dark.

With ``KVBATON_PAGE_PICTURE=FILE`` (``make page-picture``) a picture of it is written.
"""

from __future__ import annotations

import io
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import pytest

from tests.support.cluster import Cluster
from tests.support.served_pair import POOL, SETTLE_S
from tests.support.servers import Router, poll
from tests.support.store_servers import need

pytestmark = pytest.mark.e2e

PICTURE = os.environ.get("KVBATON_PAGE_PICTURE")
PATIENCE_S = 60.0
WIDE, NARROW = {"width": 1120, "height": 720}, {"width": 390, "height": 720}
SERIOUS = ("serious", "critical")
CLIENTS = 2 if PICTURE is None else 6
PICTURE_COLOURS = 96


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next(filter(None, map(shutil.which, names)), None)
    here = found and find_spec("playwright")
    need("chromium", here, "the page is tried in it, by playwright (make servers)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def served(browser: Any, cluster: Cluster, request: pytest.FixtureRequest) -> Router:
    """A router with a pair of nodes; for a picture with two of each kind."""
    if PICTURE is None:
        router: Router = request.getfixturevalue("main_nodes")[2]
        return router
    router = cluster.start_router("pictured")
    kinds: tuple[Literal["prefill", "decode"], ...] = ("prefill", "decode")
    nodes = [
        cluster.start_node(role, f"{role}-{number}", router=router)
        for role in kinds
        for number in range(2)
    ]
    cluster.until_up(*nodes, router=router, pairs=4)
    return router


@contextmanager
def traffic(router: Router) -> Iterator[None]:
    """Clients that ask again and again."""
    stop = threading.Event()

    def ask(number: int) -> None:
        prompts = ([3 + (turn + number * i) % 380 for i in range(200)] for turn in count())
        while not stop.is_set():  # no prefix is cached
            router.complete(next(prompts), max_tokens=200)

    asking = [POOL.submit(ask, number) for number in range(1, CLIENTS + 1)]
    try:
        yield
    finally:
        stop.set()
        wait(asking, SETTLE_S)
    for one in asking:
        one.result(0)


class View:
    """The page in one window.

    Attributes:
        page: of playwright.
        complaints: what the browser's console has said.
    """

    def __init__(self, browser: Any, url: str, **window: Any) -> None:
        self._context = browser.new_context(**window)
        self._context.set_default_timeout(PATIENCE_S * 1e3)
        self.page = self._context.new_page()
        self.complaints: list[str] = []
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on(
            "console",
            lambda said: self.complaints.append(said.text) if said.type == "error" else None,
        )
        self.page.goto(url)

    def until(self, expression: str) -> None:
        """Poll: what playwright has for this, the page's policy forbids."""
        limit = time.monotonic() + PATIENCE_S
        while not self.page.evaluate(expression):
            assert time.monotonic() < limit, f"{expression}: not in {self.page.content()}"
            self.page.wait_for_timeout(50)

    def hide(self, hidden: bool) -> None:
        """As when another tab is in front."""
        self.page.evaluate(
            """hidden => {
                const told = { get: () => hidden, configurable: true };
                Object.defineProperty(document, "hidden", told);
                document.dispatchEvent(new Event("visibilitychange"));
            }""",
            hidden,
        )

    def serious(self) -> list[str]:
        """What axe finds."""
        from axe_playwright_python.sync_playwright import Axe

        found = Axe().run(self.page).response
        assert len(found["passes"]) > 10, "it looked at nothing"
        return [
            f"{one['id']}: {[node['html'] for node in one['nodes']]}"
            for one in found["violations"]
            if one["impact"] in SERIOUS
        ]

    def close(self) -> None:
        self._context.close()


@pytest.fixture
def opened(browser: Any, served: Router) -> Iterator[Callable[..., View]]:
    """Opens the page in windows; each is closed, and has made the browser complain of nothing."""
    views: list[View] = []

    def open_page(**window: Any) -> View:
        views.append(View(browser, served.url, **window))
        return views[-1]

    yield open_page
    for view in views:
        view.close()
    assert [complaint for view in views for complaint in view.complaints] == []


def number_in(cell: str) -> str:
    """JavaScript for the number that a figure begins with."""
    return f"parseFloat(document.querySelector('{cell}').textContent.replaceAll(',', ''))"


def brightness(view: View) -> float:
    colour = view.page.evaluate("getComputedStyle(document.body).backgroundColor")
    red, green, blue = (int(part) for part in colour.strip("rgb()").split(","))
    return (red + green + blue) / (3 * 255)


def test_the_page_updates_itself_and_anyone_can_read_it(
    opened: Callable[..., View], served: Router
) -> None:
    views = {
        name: opened(viewport=size, color_scheme=scheme, is_mobile=name == "narrow")
        for name, size, scheme in (("wide", WIDE, "light"), ("narrow", NARROW, "dark"))
    }
    for view in views.values():
        view.until("document.querySelector('#link').textContent === 'live'")
        view.page.evaluate("document.body.dataset.mine = 'still the same page'")
    tokens = number_in(".figures div:nth-child(2) small")
    crossed = number_in(".figures div:nth-child(3) .value")
    before = {window: view.page.evaluate(tokens) for window, view in views.items()}
    with traffic(served):  # which takes a core, so no longer than need be
        for window, view in views.items():
            view.until(f"{number_in('.figures .value')} > 0")
            view.until(f"{tokens} > {before[window]}")
            view.until(f"{crossed} > 0")
            view.until(
                "/[1-9]/.test(document.querySelector('[data-label=\"Tokens/s\"]').textContent)"
            )
        if PICTURE is not None:
            write_picture(Path(PICTURE), list(views.values()))
    for name, view in views.items():
        assert view.page.evaluate("document.body.dataset.mine") == "still the same page"
        assert view.page.locator("tbody tr").count() == (2 if PICTURE is None else 4)
        for scheme in ("light", "dark"):
            view.page.emulate_media(color_scheme=scheme)
            assert view.serious() == [], (name, scheme)
            assert (brightness(view) > 0.5) == (scheme == "light")
        assert view.page.evaluate(
            "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
        ), f"{name}: it is wider than its window"
    view = views["wide"]
    view.until(f"{number_in('.figures .value')} === 0")
    assert served.get("/nodes")["traffic"]["sent_bytes"] > 0


def test_the_page_says_the_same_without_scripts(opened: Callable[..., View]) -> None:
    view = opened(java_script_enabled=False)
    assert "as of " in view.page.locator("#link").inner_text()
    assert view.page.locator("tbody th").all_inner_texts()[0].startswith("d")
    assert "running" in view.page.locator(".figures").inner_text()


def test_the_page_leaves_and_finds_its_router(browser: Any, cluster: Cluster) -> None:
    router = cluster.start_router("alone")

    def streams() -> float:
        return router.metrics()("kvbaton_http_requests_in_flight") - 1  # who asks is one

    view = View(browser, router.url)
    try:
        view.until("document.querySelector('#link').textContent === 'live'")
        assert streams() == 1
        view.hide(True)
        poll("a page that nobody sees is silent", lambda: streams() == 0, PATIENCE_S, router.tail)
        view.hide(False)
        poll("it is back", lambda: streams() == 1, PATIENCE_S, router.tail)
        port = urlsplit(router.url).port
        cluster.stop([router])
        view.until("document.querySelector('#link').className === 'lost'")
        router = cluster.start_router("alone-again", f"--port={port}")
        view.until("document.querySelector('#link').className === 'live'")
    finally:
        view.close()
        cluster.stop([router])


def write_picture(file: Path, views: list[View]) -> None:
    """Windows side by side, with few colours."""
    from PIL import Image

    for view in views:  # so that lines have a shape
        view.until("document.querySelector('polyline').points.numberOfItems > 25")
    shots = [Image.open(io.BytesIO(view.page.screenshot())) for view in views]
    gap, height = 16, max(shot.height for shot in shots)
    width = sum(shot.width + gap for shot in shots) - gap
    picture = Image.new("RGB", (width, height), "white")
    left = 0
    for shot in shots:
        picture.paste(shot, (left, 0))
        left += shot.width + gap
    file.parent.mkdir(parents=True, exist_ok=True)
    picture.quantize(PICTURE_COLOURS).save(file, optimize=True)
