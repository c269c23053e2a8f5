"""The Slurm script as a job of a real Slurm: a controller and two nodes on this machine."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from kvbaton.server.network import registration_token
from tests.support.machines import Machine
from tests.support.servers import poll
from tests.support.store_servers import free_port, need

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SCRIPT = Path(__file__).parents[2] / "examples" / "slurm.sbatch"
DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "sinfo")
SMALL = ("--num-blocks=64", "--max-model-len=256", "--transport=tcp")
KEY = "a key that all tasks get from the job's environment"
ADDRESSES = ("10.78.0.1", "10.78.0.2")
"""A machine without any address but loopback's can't look up its own name."""
NODES = ("one", "two")
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
SlurmctldPort={port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
SlurmdParameters=config_overrides
MpiDefault=none
KillWait=20
PartitionName=main Nodes={nodes} Default=YES State=UP
"""


class Slurm:
    """Daemons and their folder, on a machine of their own."""

    def __init__(self, folder: Path, machine: Machine) -> None:
        self.folder, self.machine = folder, machine
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin"
        self.env = {**os.environ, "PATH": path, "SLURM_CONF": str(folder / "slurm.conf")}
        self.env |= {"OMP_NUM_THREADS": "1", "UCX_TLS": "tcp,self"}
        for name in ("state", *NODES):
            (folder / name).mkdir()
        self._configure()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        files = [f"--{what}-file={folder}/munge.{what}" for what in ("key", "pid", "log", "seed")]
        start = partial(machine.start, env=self.env)
        start(["munged", "--foreground", "--force", f"--socket={folder}/munge.sock", *files])
        poll("munge answers", (folder / "munge.sock").exists, 20.0, self.said)
        start(["slurmctld", "-D", "-c"])
        for name in NODES:
            start(["slurmd", "-D", "-N", name])
        poll("the nodes are idle", self._idle, 60.0, self.said)

    def _configure(self) -> None:
        host = platform.node()
        text = CONFIG.format(host=host, folder=self.folder, port=free_port(), nodes=",".join(NODES))
        for name in NODES:
            where = f"NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()}"
            text += f"NodeName={name} {where} CPUs=1\n"
        (self.folder / "slurm.conf").write_text(text)

    def _idle(self) -> bool:
        return self.run("sinfo", "-h", "-o", "%T %D", check=False).stdout.split() == ["idle", "2"]

    def end_jobs(self) -> None:
        self.run("scancel", "--user=root")
        poll("the job ends", lambda: not self.run("squeue", "-h").stdout, 60.0, self.said)

    def run(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        inside = [*self.machine.inside, *words]
        done = subprocess.run(inside, env=self.env, capture_output=True, text=True, timeout=60)
        assert not check or done.returncode == 0, done.stderr + self.said()
        return done

    def said(self) -> str:
        jobs = [path.read_text() for path in self.folder.glob("job*")]
        return "\n".join([self.machine.said(), *jobs])


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    path = f"{os.environ['PATH']}:/usr/sbin"
    found = all(shutil.which(name, path=path) for name in DAEMONS)
    need("slurm", os.geteuid() == 0 and found, "slurmctld, slurmd, slurm-client, munge; as root")
    # Not pytest's folder: a socket's path is short.
    with tempfile.TemporaryDirectory(prefix="slurm") as folder:
        machine, other = Machine(tmp_path), Machine(tmp_path)
        try:
            machine.connect(other, *ADDRESSES)
            slurm = Slurm(Path(folder), machine)
            yield slurm
            slurm.end_jobs()
        finally:
            machine.stop()
            other.stop()


def test_a_job(slurm: Slurm, checkpoint: Callable[..., Path]) -> None:
    model, output = str(checkpoint()), slurm.folder / "job.out"
    words = ["--gpus-per-node=0", f"--output={output}", "--export=ALL"]
    slurm.env["KVBATON_CLUSTER_KEY"] = KEY
    slurm.run("sbatch", *words, str(SCRIPT), model, "1", *SMALL)
    poll("it tells where to ask", lambda: output.exists() and asked(output), 60.0, slurm.said)
    router, machine = asked(output), slurm.machine
    token = ("-H", f"Authorization: Bearer {registration_token(KEY)}")
    nodes = machine.until_pairs(router, 1, *token)
    assert nodes["pairs"] == [["prefill-0", "decode-1"]]
    body = {"model": model, "prompt": "The quick brown fox", "max_tokens": 8, "ignore_eos": True}
    answer = machine.post(f"{router}/v1/completions", body)
    assert answer["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize(
    ("named", "has", "address"),
    [
        ("10.1.2.3 STREAM one\n10.1.2.3 DGRAM", "192.0.2.7 ", "10.1.2.3"),
        ("127.0.1.1 STREAM one", "192.0.2.7 fd00::2 ", "192.0.2.7"),  # Debian's /etc/hosts
        ("127.0.1.1 STREAM one", "fd00::2", "127.0.0.1"),
    ],
)
def test_an_address_that_others_can_reach(
    named: str, has: str, address: str, tmp_path: Path
) -> None:
    """Where a machine's name means loopback to itself, tasks elsewhere found no router there."""
    for command, says in (("getent", named), ("hostname", has)):
        (tmp_path / command).write_text(f"#!/bin/sh\nprintf '{says}\\n'\n")
        (tmp_path / command).chmod(0o755)
    (line,) = re.findall(r"^address\(\) \{.*?^\}", SCRIPT.read_text(), re.MULTILINE | re.DOTALL)
    script = f"set -euo pipefail\n{line}\nfound=$(address)\necho $found"
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (0, [address])


def asked(output: Path) -> str:
    found = re.search(r"^ask (http://\S+)/v1$", output.read_text(), re.MULTILINE)
    return found[1] if found else ""
