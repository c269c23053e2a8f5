"""The dashboard and the alerts of `deploy/` ask for what a cluster under load really tells.

Twice: by the names and labels in their queries, and where Prometheus is installed (``make
servers``) by Prometheus itself, which scrapes the cluster and answers them.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from kvbaton.engine.stats import LATENCIES
from tests.support.cluster import Cluster
from tests.support.servers import Node, Router, poll

pytestmark = pytest.mark.e2e

DEPLOY = Path(__file__).parents[2] / "deploy"
ALERTS = DEPLOY / "prometheus" / "alerts.yml"
BY_PROMETHEUS = {"instance", "job", "le"}
"""Labels that a scrape adds, and that of buckets."""
WINDOW = "15s"
READY_S = 60.0
PAUSE_S = 0.1
"""Between two requests of a client: rates need some, and a client without a pause takes a core."""

Watched = tuple[Router, Router, Node, Node, Node]


def alerts() -> dict[str, str]:
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}


def panels() -> list[dict[str, Any]]:
    dashboard = json.loads((DEPLOY / "grafana" / "kvbaton.json").read_text())
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def queries() -> dict[str, str]:
    """All by where they are, with variables and windows filled in; alerts without limits."""
    found = {
        f"{panel['title']} {target['refId']}": target["expr"]
        for panel in panels()
        for target in panel["targets"]
    }
    for name, expression in alerts().items():
        compared = re.fullmatch(r"(.*\S)\s+(?:==|>|<)\s+[\d.]+", expression.strip(), re.DOTALL)
        assert compared, f"{name} compares nothing with a limit: {expression}"
        found[name] = compared[1]
    return {
        name: re.sub(r"\[(\d+m|\$__rate_interval)\]", f"[{WINDOW}]", expression).replace(
            "$instance", ".*"
        )
        for name, expression in found.items()
    }


@pytest.fixture(scope="module")
def watched(cluster: Cluster, main_nodes: tuple[Node, Node, Router]) -> Iterator[Watched]:
    """The nodes that tests share, behind their router and one with a policy that predicts."""
    p, d, main = main_nodes
    # It may compute what it is cheaper to compute.
    own = cluster.start_node("decode", "d-watched", {"store": "memory"})
    cluster.until_up(own)
    flags = ("--policy=cost", f"--prefill={p.url}", f"--decode={own.url}")
    router = cluster.start_router("watched", *flags)
    cluster.until_up(router=router, pairs=1)
    yield main, router, p, d, own
    cluster.stop([router, own])


@contextmanager
def load(routers: Sequence[Router], prompt: Callable[[int], list[int]]) -> Iterator[None]:
    """Requests of all lengths, one after the other, for as long as the context lasts."""
    over, failures = threading.Event(), list[BaseException]()

    def ask(router: Router) -> None:
        lengths = iter(range(40, 10_000))
        try:
            while not over.wait(PAUSE_S):
                length = next(lengths)
                router.complete(prompt(40 + length % 200), max_tokens=6)
        except BaseException as error:
            failures.append(error)

    asking = [threading.Thread(target=ask, args=(router,)) for router in routers]
    for thread in asking:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in asking:
            thread.join()
    assert not failures, failures


SELECTOR = re.compile(r"\b((?:kvbaton_\w+)|up)\b(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)\s*(=~|!=|!~|=)\s*"([^"]*)"')


def fits(labels: dict[str, str], matchers: list[tuple[str, str, str]]) -> bool:
    for name, operator, value in matchers:
        has = labels.get(name, "")
        same = re.fullmatch(value, has) is not None if "~" in operator else has == value
        if name not in BY_PROMETHEUS and same == operator.startswith("!"):
            return False
    return True


def test_all_that_is_asked_for_is_there(
    watched: Watched, prompt: Callable[[int], list[int]]
) -> None:
    routers = watched[:2]
    with load(routers, prompt):
        for router in routers:
            poll("requests", lambda router=router: finished(router) >= 5, READY_S, router.tail)  # type: ignore[misc]
    samples: dict[str, list[dict[str, str]]] = {}
    for server in watched:
        for family in text_string_to_metric_families(server.call("GET", "/metrics").decode()):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append(sample.labels)
    samples["up"] = [{}]
    for where, query in queries().items():
        selectors = SELECTOR.findall(query)
        assert selectors, f"{where} asks for nothing of ours: {query}"
        found: list[dict[str, str]] = []
        for name, text in selectors:
            mine = [
                labels for labels in samples.get(name, ()) if fits(labels, MATCHER.findall(text))
            ]
            assert mine, f"{where}: nothing has {name}{{{text}}}"
            found += mine
        grouped = {
            word.strip()
            for names in re.findall(r"by \(([^)]*)\)", query)
            for word in names.split(",")
        }
        for label in grouped - BY_PROMETHEUS:
            assert any(label in labels for labels in found), f"{where}: nothing has a label {label}"


def finished(router: Router) -> float:
    return router.metrics()("kvbaton_router_requests_total", outcome="finished")


# --- by Prometheus itself ---


class Prometheus:
    """A real one, which scrapes servers every half second."""

    def __init__(self, folder: Path, *servers: Router | Node) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        config = {
            "global": {"scrape_interval": "500ms", "evaluation_interval": "500ms"},
            "rule_files": [str(ALERTS)],
            "scrape_configs": [
                {
                    "job_name": "kvbaton",
                    "static_configs": [{"targets": [urlsplit(s.url).netloc for s in servers]}],
                }
            ],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self.log = folder / "prometheus.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *("prometheus", f"--config.file={folder}/prometheus.yml"),
                    *(f"--storage.tsdb.path={folder}/data", f"--web.listen-address={self.url[7:]}"),
                ],
                stdout=log,
                stderr=log,
            )

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(20)

    def get(self, path: str, **parameters: str) -> Any:
        """Of its API; None while it does not answer yet."""
        assert self.process.poll() is None, self.log.read_text()
        try:
            where = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
            with urllib.request.urlopen(where, timeout=10) as answer:
                return json.load(answer)["data"]
        except OSError:
            return None

    def finite(self, query: str) -> list[float]:
        """Values of a query now that are numbers."""
        answer = self.get("query", query=query)
        series = [] if answer is None else answer["result"]
        return [value for one in series if math.isfinite(value := float(one["value"][1]))]


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")
def test_prometheus_answers_every_query(
    watched: Watched, prompt: Callable[[int], list[int]], tmp_path: Path
) -> None:
    prometheus = Prometheus(tmp_path, *watched)
    asked = queries()
    missing = set(asked)
    try:
        with load(watched[:2], prompt):
            give_up = time.monotonic() + READY_S
            while missing and time.monotonic() < give_up:
                missing = {where for where in missing if not prometheus.finite(asked[where])}
                time.sleep(0.2)
        assert not missing, {where: asked[where] for where in missing}
        rules = prometheus.get("rules")["groups"][0]["rules"]
        assert {rule["name"]: rule["health"] for rule in rules} == dict.fromkeys(alerts(), "ok")
        firing = {rule["name"] for rule in rules if rule["state"] == "firing"}
        assert not firing, "nothing is wrong with the cluster"
    finally:
        prometheus.stop()


# --- without a cluster ---


@pytest.mark.skipif(shutil.which("promtool") is None, reason="prometheus is not installed")
@pytest.mark.parametrize(
    ("nodes", "fires"),
    [
        ({}, True),
        ({"loading": 1}, True),
        ({"ready": 1}, False),
        ({"ready": 1, "loading": 1}, False),
    ],
)
def test_a_router_without_a_node_raises_an_alarm(
    nodes: dict[str, int], fires: bool, tmp_path: Path
) -> None:
    """A router that knows none tells of none, and counts no request that it turns away."""
    series = {"kvbaton_router_retries_total{instance='r'}": 0}
    for state, count in nodes.items():
        series[
            f"kvbaton_router_nodes{{instance='r',node='{state}',role='any',state='{state}'}}"
        ] = count
    said = "r has no node that is ready, and answers 503 to all; GET /nodes says why"
    alarm("KvbatonNoNode", series, {"severity": "critical"} if fires else None, said, tmp_path)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="prometheus is not installed")
@pytest.mark.parametrize("fails", ["none", "open", "unhealthy"])
def test_a_store_that_fails_raises_an_alarm(fails: str, tmp_path: Path) -> None:
    """Either metric, whatever the other one says."""
    name = "{instance='r',store='s3'"
    series = {
        f"kvbaton_store_circuit_open{name},calls='reads'}}": int(fails == "open"),
        f"kvbaton_store_circuit_open{name},calls='writes'}}": 0,
        f"kvbaton_store_unhealthy{name}}}": int(fails == "unhealthy"),
    }
    labels = {"severity": "warning", "store": "s3"} if fails != "none" else None
    said = "r leaves its store s3 alone, since calls fail, or it says that it can't serve"
    alarm("KvbatonStoreFails", series, labels, said, tmp_path)


def alarm(
    name: str,
    series: dict[str, int],
    labels: dict[str, str] | None,
    summary: str,
    folder: Path,
) -> None:
    """Asks Prometheus whether what `r` tells raises an alarm, with such labels; None for none."""
    told = {"exp_labels": {"instance": "r", **(labels or {})}}
    told["exp_annotations"] = {"summary": summary}
    wanted = [] if labels is None else [told]
    case = {
        "interval": "15s",
        "input_series": [{"series": one, "values": f"{value}x40"} for one, value in series.items()],
        "alert_rule_test": [{"eval_time": "5m", "alertname": name, "exp_alerts": wanted}],
    }
    (tests := folder / "tests.yml").write_text(
        yaml.safe_dump({"rule_files": [str(ALERTS)], "tests": [case]})
    )
    words = ["promtool", "test", "rules", str(tests)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_dashboard_can_be_imported() -> None:
    shown = panels()
    assert len({panel["id"] for panel in shown}) == len(shown)
    for panel in shown:
        places = panel["gridPos"]
        assert places["x"] + places["w"] <= 24
        assert panel["datasource"]["uid"] == "${datasource}"
        for target in panel["targets"]:
            assert target["legendFormat"]
            assert 'instance=~"$instance"' in target["expr"]


def test_what_several_tell_of_one_thing_is_not_added_up() -> None:
    """Each router tells of every node, and router, source and target time parts of one request."""
    latencies = (f"{name}_seconds_bucket" for name, *_ in LATENCIES)
    told_by_several = {"kvbaton_router_nodes", *latencies}
    summed = re.compile(r"by \(([^)]*)\) \((?:rate\()?(kvbaton_\w+)")
    found = [
        (where, labels)
        for where, query in queries().items()
        for labels, name in summed.findall(query)
        if name in told_by_several
    ]
    assert len(found) > 5
    for where, labels in found:
        assert {"instance", "node"} & set(labels.split(", ")), where


def test_alerts_say_what_and_how_bad() -> None:
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        for rule in group["rules"]:
            assert rule["labels"]["severity"] in ("warning", "critical")
            assert "$labels.instance" in rule["annotations"]["summary"]
