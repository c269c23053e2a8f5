"""What launchers need of the machine."""

import multiprocessing
import resource

from kvbaton.server.network import MAX_OPEN_FILES, allow_connections


def _limit_after(soft: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    allow_connections()
    most = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, hard)
    allow_connections()  # what is enough stays
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, hard)


def test_a_soft_limit_of_open_files_is_no_limit_of_connections() -> None:
    child = multiprocessing.get_context("spawn").Process(target=_limit_after, args=(256,))
    child.start()
    child.join(60)
    assert child.exitcode == 0
