"""Prometheus' configurations: valid, of the job that the alerts name, and of the chart's pods."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
CONFIGS = sorted((DEPLOY / "prometheus").glob("[!a]*.yml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_the_job_is_that_of_the_alerts(path: Path) -> None:
    alerts = (DEPLOY / "prometheus" / "alerts.yml").read_text()
    (job,) = yaml.safe_load(path.read_text())["scrape_configs"]
    assert set(re.findall(r'job="(\w+)"', alerts)) == {job["job_name"]}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="prometheus is not installed")
@pytest.mark.parametrize("commented", [True, False], ids=["plain", "tls"])
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_prometheus_takes_it(path: Path, commented: bool, tmp_path: Path) -> None:
    pods = "kubernetes_sd_configs:\n      - role: pod"  # which Debian's build leaves out
    text = path.read_text().replace(pods, "static_configs: [{targets: [pod]}]")
    if not commented:  # the lines for TLS, which are indented as what follows them
        text = re.sub(r"^( +)# (- source|  |tls_config:)", r"\1\2", text, flags=re.MULTILINE)
    (copy := tmp_path / "prometheus.yml").write_text(text)
    shutil.copy(DEPLOY / "prometheus" / "alerts.yml", tmp_path)
    done = subprocess.run(
        ["promtool", "check", "config", str(copy)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_pod_of_the_chart_is_found() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus" / "kubernetes.yml").read_text())
    (keep,) = (
        rule
        for rule in config["scrape_configs"][0]["relabel_configs"]
        if rule.get("action") == "keep"
    )
    label, port = (name.removeprefix("__meta_kubernetes_pod_") for name in keep["source_labels"])
    assert (label, port) == ("label_app_kubernetes_io_name", "container_port_name")
    manifests = yaml.safe_load_all((DEPLOY / "manifests" / "kvbaton.yaml").read_text())
    pods = [one["spec"]["template"] for one in manifests if "template" in one.get("spec", {})]
    assert len(pods) >= 3, "routers, prefill and decode nodes"
    for pod in pods:
        (container,) = pod["spec"]["containers"]
        name = pod["metadata"]["labels"]["app.kubernetes.io/name"]
        found = [port for port in container["ports"] if f"{name};{port['name']}" == keep["regex"]]
        assert len(found) == 1
