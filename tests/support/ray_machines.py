"""A Ray cluster of several raylets on this machine, in its own process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]
STOP_S = 30.0
ENV = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}


@contextmanager
def ray_machines(count: int, cpus: int) -> Iterator[str]:
    """Start raylets, each a machine to Ray; yields the address of their cluster.

    Args:
        count: Number of raylets, including the head's.
        cpus: Number of CPUs that each reports.
    """
    # Not in pytest's folders: paths of Unix sockets would be too long.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        # Ray writes the address of its newest cluster in this folder, but doesn't create it.
        (Path(folder) / "ray").mkdir()
        process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, str(count), str(cpus), folder],
            cwd=ROOT,
            env={**os.environ, **ENV, "RAY_TMPDIR": folder},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            assert address, "Ray did not start"
            yield address
            process.communicate(timeout=STOP_S)  # closes its standard input
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def main(count: int, cpus: int, folder: str) -> None:
    """Start the cluster, print its address, and stop it when standard input ends."""
    from ray.cluster_utils import Cluster

    machine = {"num_cpus": cpus, "object_store_memory": 80 << 20, "temp_dir": folder}
    # Detect a dead raylet after 5 s instead of 15.
    health = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 1000}
    # Prestarted workers take a second of CPU time each.
    system = {**health, "prestart_worker_first_driver": False}
    head = {**machine, "include_dashboard": False, "_system_config": system}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(count - 1):
        cluster.add_node(**machine)
    print(cluster.address, flush=True)
    sys.stdin.read()
    cluster.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
