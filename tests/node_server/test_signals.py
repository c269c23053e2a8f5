"""A signal that comes while a process ends."""

import signal
import subprocess
import sys

import pytest

SCRIPT = """
import asyncio, asyncio.selector_events, signal, sys
from kvbaton.engine.config import EngineConfig
from kvbaton.server import node

async def nothing(self):
    pass

loop_type = asyncio.selector_events.BaseSelectorEventLoop
closed = loop_type.close

def close(loop):  # its pipe is gone, its handlers are not
    closed(loop)
    signal.raise_signal(int(sys.argv[1]))

loop_type.close = close
node.Node.start = nothing
node.run_node(node.NodeConfig(engine=EngineConfig(model="m"), role="any", node_id="n"), [])
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_while_the_loop_closes_is_no_traceback(number: signal.Signals) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(int(number))], capture_output=True, text=True, timeout=60
    )
    at_once = number == signal.SIGINT
    assert (done.stderr, done.returncode) == ("", 130 if at_once else 0)
