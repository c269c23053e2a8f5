"""The doctor finds healthy transports healthy, and says what is wrong with others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvbaton.cli import main
from kvbaton.connectors.transports.memory import MemoryTransport
from kvbaton.doctor.main import TransportTrial, look, slow_path, try_transport


def test_healthy_transports(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--transport=memory", "--transport=tcp", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["healthy"]
    assert [trial["transport"] for trial in report["trials"]] == ["memory", "tcp"]
    for trial in report["trials"]:
        assert trial["failed_at"] is None
        assert trial["gib_per_s"] > 0
        assert trial["small_us"] > 0
    assert report["copy_gib_per_s"] > 0
    versions = report["surroundings"]["versions"]
    assert {"kvbaton", "torch", "nixl-cu13", "ucx"} <= versions.keys()
    assert versions["ucx"][0].isdigit()


@pytest.mark.parametrize(
    ("spec", "step", "told"),
    [
        ("nope", "load", "known are"),
        ("tcp:{'", "load", "JSON"),
        ('faulty:{"inner": "tcp", "corrupt": [0]}', "verify", "was sent"),
    ],
)
def test_the_step_that_fails_is_named(spec: str, step: str, told: str) -> None:
    trial = try_transport(spec, "cpu")
    assert not trial.ok
    assert trial.failed_at == step
    assert told in trial.error


class NeverCloses(MemoryTransport):
    """Does all but end well."""

    def shutdown(self) -> None:
        super().shutdown()
        raise RuntimeError("it hangs on")


def test_what_does_not_close_is_not_healthy() -> None:
    trial = try_transport(f"{__name__}:NeverCloses", "cpu")
    assert (trial.failed_at, trial.error) == ("close", "RuntimeError: it hangs on")


def test_a_path_through_the_host_is_told() -> None:
    trial = TransportTrial(transport="tcp", device="cuda", gib_per_s=50.0, host_staged=True)
    assert "through the host, a slow path" in slow_path(trial, 10.0)


def test_failure_is_the_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--transport=nope"]) == 1
    assert "failed to load" in capsys.readouterr().out


def test_a_plug_in_is_shown_by_its_path(capsys: pytest.CaptureFixture[str]) -> None:
    path = f"{__name__}:Nobody"
    assert main(["doctor", "--transport", path, "--store", f"{path}:{{}}"]) == 1
    lines = capsys.readouterr().out.splitlines()
    heads = [line.index("result") for line in lines if line.endswith("result")]
    rows = [line.index("failed to load") for line in lines if line.startswith(f"{path} ")]
    assert rows == heads


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


MELLANOX = "sys/class/infiniband/mlx5_0/node_type"
GPU = "proc/driver/nvidia/gpus/0000:18:00.0/information"


@pytest.mark.parametrize(
    ("files", "env", "told", "silent"),
    [
        ({}, {}, ["no RDMA device", "no NVIDIA GPU", "/dev/shm"], ["CMA", "cuda_ipc"]),
        ({MELLANOX: ""}, {}, ["no NVIDIA GPU"], ["no RDMA"]),
        ({GPU: "Model: \t NVIDIA H200\n", MELLANOX: ""}, {}, ["nvidia_peermem"], ["no NVIDIA"]),
        (
            {GPU: "Model: H200\n", MELLANOX: "", "proc/modules": "nvidia_peermem 1 0\n"},
            {"UCX_TLS": "tcp,sm"},
            ["leaves out cuda_ipc"],
            ["nvidia_peermem"],
        ),
        ({"proc/sys/kernel/yama/ptrace_scope": "1\n"}, {}, ["CMA"], []),
        ({"proc/sys/kernel/yama/ptrace_scope": "0\n"}, {}, [], ["CMA"]),
    ],
)
def test_slow_paths_are_named(
    tmp_path: Path, files: dict[str, str], env: dict[str, Any], told: list[str], silent: list[str]
) -> None:
    for path, text in files.items():
        write(tmp_path, path, text)
    found = look(tmp_path, env)
    warnings = "\n".join(found.warnings)
    assert all(part in warnings for part in told), warnings
    assert not any(part in warnings for part in silent), warnings
    assert found.gpus == (["NVIDIA H200"] if "NVIDIA H200" in str(files) else found.gpus)
    assert found.rdma == (["mlx5_0"] if MELLANOX in files else [])
