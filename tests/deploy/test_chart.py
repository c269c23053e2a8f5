"""The Helm chart and the manifests made from it: what Kubernetes and our commands make of them."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from aiohttp import web

from kvbaton.cli import make_parser
from kvbaton.router.api import routes
from kvbaton.server.node_app import node_routes
from tests.support.store_servers import need

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "kvbaton"
MANIFESTS = ROOT / "deploy" / "manifests" / "kvbaton.yaml"
VERSIONS = ("1.27", "1.32", "1.37")
"""Of Kubernetes: the oldest that the chart takes, and the newest of the schemas."""
EVERYTHING = (
    *("nodes.any.enabled=true", "nodes.encode.enabled=true", "nodes.encode.gpus=0"),
    *("nodes.decode.tensorParallelSize=2", "nodes.decode.gpus=2", "nodes.decode.rdma=2"),
    *("secrets.existingSecret=", "secrets.clusterKey=0123456789abcdef", "secrets.apiKeys=a b"),
    *("router.autoscaling.enabled=false", "nodes.prefill.extraArgs={--block-size=32}"),
    *("networkPolicy.clients[0].podSelector.matchLabels.app=web",),
    *("networkPolicy.metrics[0].namespaceSelector.matchLabels.name=monitoring",),
    *("nodes.prefill.nodeSelector.gpu=h200", "router.podAnnotations.a=b", "tls.secret=routers-tls"),
)
ADDRESSES = {"$(POD_NAME)": "kvbaton-prefill-0", "$(POD_IP)": "10.1.2.3"}
KEYS = {"KVBATON_CLUSTER_KEY", "KVBATON_API_KEY", "KVBATON_OPERATOR_KEY"}
GIVEN = {"POD_NAME", "POD_IP", "HOME", *KEYS}

Objects = list[dict[str, Any]]
Render = Callable[..., str]


@pytest.fixture(scope="module")
def render() -> Render:
    """``helm template`` with these values."""
    found = shutil.which("helm", path=str(Path(sys.executable).parent)) or shutil.which("helm")
    need("helm", found, "make helm")
    assert found is not None

    def template(*values: str) -> str:
        words = [word for value in values for word in ("--set", value)]
        done = run_helm(found, "template", "kvbaton", str(CHART), *words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return template


def run_helm(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, timeout=60)


@pytest.fixture(scope="module", params=["manifests", "everything"])
def objects(request: pytest.FixtureRequest) -> Objects:
    if request.param == "manifests":
        return list(filter(None, yaml.safe_load_all(MANIFESTS.read_text())))
    text: str = request.getfixturevalue("render")(*EVERYTHING)
    return list(filter(None, yaml.safe_load_all(text)))


def of_kind(objects: Objects, *kinds: str) -> Objects:
    return [one for one in objects if one["kind"] in kinds]


def workloads(objects: Objects) -> Objects:
    return of_kind(objects, "Deployment", "StatefulSet")


def pod(workload: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = workload["spec"]["template"]["spec"]
    return spec


def container(workload: dict[str, Any]) -> dict[str, Any]:
    (only,) = pod(workload)["containers"]
    assert isinstance(only, dict)
    return only


def words_of(workload: dict[str, Any]) -> list[str]:
    """The command line of its container, as Kubernetes fills it in."""
    words = []
    for word in container(workload)["args"]:
        for name, value in ADDRESSES.items():
            word = word.replace(name, value)
        words.append(word)
    return words


def scheme_of(workload: dict[str, Any]) -> str:
    """With which it is asked."""
    return "https" if make_parser().parse_args(words_of(workload)).ssl_certfile else "http"


def drain_of(workload: dict[str, Any]) -> list[str]:
    """What ``preStop`` runs, after its shell."""
    command = container(workload)["lifecycle"]["preStop"]["exec"]["command"]
    if command[0] != "sh":
        return list(command)
    env = {"POD_IP": "fd00::1"}
    shell = command[2].replace("exec kvbaton", "echo kvbaton")
    done = subprocess.run(
        ["sh", "-c", shell], capture_output=True, text=True, env=env, timeout=30, check=True
    )
    return shlex.split(done.stdout)


# --- Helm and Kubernetes ---


def test_lint(render: Render) -> None:
    found = shutil.which("helm", path=str(Path(sys.executable).parent)) or "helm"
    done = run_helm(found, "lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_manifests_are_made_from_the_chart(render: Render) -> None:
    assert MANIFESTS.read_text() == render(), "run `make manifests`"


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_takes_every_object(objects: Objects, version: str) -> None:
    for one in objects:
        kubernetes_validate.validate(one, version, strict=True)
        name = one["metadata"]["name"]
        assert re.fullmatch(r"[a-z]([a-z0-9-]{0,51}[a-z0-9])?", name), name


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("nodes.prefill.replicaz=3", "replicaz"),
        ("nodes.prefill.role=both", "role"),
        ("nodes.prefill.gpus=2", "nodes.prefill: gpus is 2, but tensorParallelSize 1"),
        ("nodes.Prefill.role=prefill", "Prefill"),
        ("nodes.routers.role=any", "routers"),  # its Service would be that where nodes register
        ("router.drainSeconds=0", "drainSeconds"),
        ("secrets.existingSecret=", "secrets"),
    ],
)
def test_a_wrong_value_is_named(render: Render, value: str, named: str) -> None:
    found = shutil.which("helm", path=str(Path(sys.executable).parent)) or "helm"
    done = run_helm(found, "template", "kvbaton", str(CHART), "--set", value)
    assert done.returncode != 0
    assert named in done.stderr


def test_a_name_of_which_no_pod_can_be_made_is_refused(render: Render) -> None:
    """A StatefulSet's name and a hash are a label of its pods, of at most 63 characters."""
    found = shutil.which("helm", path=str(Path(sys.executable).parent)) or "helm"
    pool = "--set=nodes.long-context-batches.role=any"
    for release, fits in (("m" * 21, True), ("m" * 40, False)):
        done = run_helm(found, "template", release, str(CHART), pool)
        assert (done.returncode == 0) is fits, done.stderr
        assert fits or "nodes.long-context-batches: " in done.stderr


def test_objects_find_each_other(objects: Objects) -> None:
    pods = [one["spec"]["template"]["metadata"]["labels"] for one in workloads(objects)]

    def chosen(selector: dict[str, str]) -> int:
        return sum(selector.items() <= labels.items() for labels in pods)

    for one in workloads(objects):
        selector = one["spec"]["selector"]["matchLabels"]
        assert chosen(selector) == 1
        assert selector.items() <= one["spec"]["template"]["metadata"]["labels"].items()
    services = {one["metadata"]["name"]: one for one in of_kind(objects, "Service")}
    for service in services.values():
        assert chosen(service["spec"]["selector"]) == 1
    budgets = of_kind(objects, "PodDisruptionBudget")
    assert len(budgets) == len(pods)
    for budget in budgets:
        assert chosen(budget["spec"]["selector"]["matchLabels"]) == 1
    covered = 0
    for policy in of_kind(objects, "NetworkPolicy"):
        covered += chosen(policy["spec"]["podSelector"]["matchLabels"])
        (inside,) = policy["spec"]["ingress"][0]["from"]
        assert chosen(inside["podSelector"]["matchLabels"]) == len(pods)
    assert covered == len(pods)
    for workload in of_kind(objects, "StatefulSet"):
        headless = services[workload["spec"]["serviceName"]]
        assert headless["spec"]["clusterIP"] == "None"
    scalers = of_kind(objects, "HorizontalPodAutoscaler")
    (router,) = of_kind(objects, "Deployment")
    assert ("replicas" in router["spec"]) == (not scalers), "one of the two says how many"
    for scaler in scalers:
        assert scaler["spec"]["scaleTargetRef"]["name"] == router["metadata"]["name"]


def test_who_reads_metrics_reaches_routers_and_nodes(render: Render) -> None:
    """Both answer ``/metrics``; deploy/prometheus asks both."""
    prometheus = {"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}
    policies = of_kind(list(yaml.safe_load_all(render(*EVERYTHING))), "NetworkPolicy")
    for policy in policies:
        rules = [rule for rule in policy["spec"]["ingress"] if prometheus in rule["from"]]
        assert [rule["ports"] for rule in rules] == [[{"port": "http"}]]
    assert len(policies) == 2


def test_what_the_page_tells_to_type(render: Render, tmp_path: Path) -> None:
    """But for the cluster: ``helm template`` in place of ``install``, and kubectl's dry run."""
    page = (ROOT / "docs" / "deployment.md").read_text()
    (block,) = re.findall(r"^```\n(kubectl.*?)^```", page, re.MULTILINE | re.DOTALL)
    _, secret, install = block.splitlines()
    folder = str(Path(sys.executable).parent)

    def typed(line: str) -> Objects:
        env = {"PATH": f"{folder}:{os.environ['PATH']}", "HOME": str(tmp_path)}
        done = subprocess.run(
            ["bash", "-c", line], cwd=ROOT, capture_output=True, text=True, timeout=60, env=env
        )
        assert done.returncode == 0, done.stderr
        return list(filter(None, yaml.safe_load_all(done.stdout)))

    (made,) = typed(f"{secret} --dry-run=client -o yaml")
    objects = typed(install.replace("helm install", "helm template"))
    for workload in workloads(objects):
        args = make_parser().parse_args(words_of(workload))
        assert (args.model, args.served_model_name) == ("/models/llama", ["llama"])
        wanted = [one["valueFrom"] for one in container(workload)["env"] if "KEY" in one["name"]]
        for source in wanted:
            key = source["secretKeyRef"]
            assert key["name"] == made["metadata"]["name"]
            assert key["key"] in made["data"] or key["optional"]


# --- our commands ---


def test_every_command_is_understood_and_tells_no_secret(objects: Objects) -> None:
    for workload in workloads(objects):
        args = make_parser().parse_args(words_of(workload))
        assert args.cluster_key is None
        assert [*(args.api_key or ()), *(args.operator_key or ())] == []
        env = {one["name"]: one for one in container(workload)["env"]}
        assert env.keys() <= GIVEN
        ours = {name for name in env if name.startswith("KVBATON_")}
        assert ours == KEYS
        assert all("secretKeyRef" in env[name]["valueFrom"] for name in ours)
        ports = {one["name"]: one["containerPort"] for one in container(workload)["ports"]}
        assert ports["http"] == args.port
        if workload["kind"] == "StatefulSet":
            assert (ports["control"], ports["engine"]) == (args.control_port, args.engine_port)
            limits = container(workload)["resources"].get("limits", {})
            gpus = limits.get("nvidia.com/gpu", 0)
            assert gpus in (0, getattr(args, "tensor_parallel_size", 1))


def test_nodes_register_with_every_replica_of_the_router(objects: Objects) -> None:
    services = {one["metadata"]["name"]: one["spec"] for one in of_kind(objects, "Service")}
    (deployment,) = of_kind(objects, "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    for workload in of_kind(objects, "StatefulSet"):
        (url,) = make_parser().parse_args(words_of(workload)).router
        found = re.fullmatch(rf"{scheme_of(deployment)}://(.*):(\d+)", url)
        assert found is not None, url
        host, port = found.groups()
        service = services[host]
        assert service["clusterIP"] == "None", "its name stands for all addresses"
        assert service["publishNotReadyAddresses"], "a router without nodes is not ready"
        assert service["selector"].items() <= labels.items()
        assert service["ports"][0]["port"] == int(port)


def test_probes_ask_what_is_answered(objects: Objects) -> None:
    def paths(found: list[web.RouteDef]) -> set[str]:
        return {route.path for route in found if route.method == "GET"}

    for workload in workloads(objects):
        known = paths(routes() if workload["kind"] == "Deployment" else node_routes())
        asked = {}
        for name in ("startupProbe", "livenessProbe", "readinessProbe"):
            probe = container(workload)[name]
            assert probe["httpGet"]["port"] == "http"
            assert probe["httpGet"].get("scheme", "HTTP").lower() == scheme_of(workload)
            asked[name] = probe["httpGet"]["path"]
        assert set(asked.values()) <= known
        # What is drained, or has no nodes, is not to be restarted.
        assert (asked["livenessProbe"], asked["readinessProbe"]) == ("/live", "/health")


def test_files_of_tls_are_there_and_a_nodes_pod_has_no_key(render: Render) -> None:
    found = list(filter(None, yaml.safe_load_all(render("tls.secret=routers-tls"))))
    for workload in workloads(found):
        args = make_parser().parse_args(words_of(workload))
        (volume,) = (one["secret"] for one in pod(workload)["volumes"] if one["name"] == "tls")
        files = {item["path"] for item in volume.get("items", ())} or {"tls.crt", "tls.key"}
        (mount,) = (one for one in container(workload)["volumeMounts"] if one["name"] == "tls")
        named = {args.ssl_certfile, args.ssl_keyfile, args.ssl_ca_certs} - {None}
        assert named == {f"{mount['mountPath']}/{name}" for name in files}
        assert volume["secretName"] == "routers-tls"


def test_a_pod_may_finish_what_it_has(objects: Objects) -> None:
    """What tests/e2e/test_rolling_update.py shows is what the chart does."""
    for workload in workloads(objects):
        program, *words = drain_of(workload)
        assert program == "kvbaton"
        drain, args = make_parser().parse_args(words), make_parser().parse_args(words_of(workload))
        where = "127.0.0.1" if workload["kind"] == "Deployment" else "[fd00::1]"
        assert drain.url == f"{scheme_of(workload)}://{where}:{args.port}"
        # SIGTERM comes when preStop has ended; of a node the engine and its workers may take 10 s
        # longer than its requests.
        takes = drain.timeout + args.shutdown_timeout + 10
        assert pod(workload)["terminationGracePeriodSeconds"] > takes
        if workload["kind"] == "Deployment":
            assert 0 < drain.settle < drain.timeout
            rolling = workload["spec"]["strategy"]["rollingUpdate"]
            assert rolling["maxUnavailable"] == 0


def test_a_busy_router_gets_another_replica() -> None:
    """A worker takes little more than a core: half of two were never the 70 % that it takes."""
    objects = list(filter(None, yaml.safe_load_all(MANIFESTS.read_text())))
    (scaler,), (router,) = (
        of_kind(objects, kind) for kind in ("HorizontalPodAutoscaler", "Deployment")
    )
    (metric,) = scaler["spec"]["metrics"]
    share = metric["resource"]["target"]["averageUtilization"] / 100
    cores = float(container(router)["resources"]["requests"]["cpu"])
    assert share * cores < make_parser().parse_args(words_of(router)).workers


def test_containers_may_do_little(objects: Objects) -> None:
    for workload in workloads(objects):
        assert pod(workload)["securityContext"]["runAsNonRoot"]
        assert not pod(workload)["automountServiceAccountToken"]
        mine = container(workload)["securityContext"]
        assert mine["readOnlyRootFilesystem"]
        assert mine["capabilities"]["drop"] == ["ALL"]
        mounts = {one["mountPath"]: one for one in container(workload)["volumeMounts"]}
        assert mounts["/models"]["readOnly"]
        assert "/tmp" in mounts
