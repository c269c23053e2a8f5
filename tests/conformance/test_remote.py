"""What the kit knows of a process at the far side."""

import sys

from kvbaton.testing.remote import RemoteProcess

SAYS = "print('begin 0\\ndone 0\\nbegin 1\\ndone 1\\nhalf a', end='', flush=True); input()"


def test_lines_that_were_skipped_or_never_asked_for_count_as_said() -> None:
    with RemoteProcess([sys.executable, "-c", SAYS], 30.0) as process:
        assert process.line("begin") == ["begin", "0"]
        assert process.line("begin") == ["begin", "1"]
        process.kill()
        said = [["begin", "0"], ["done", "0"], ["begin", "1"], ["done", "1"]]
        assert process.all_lines() == process.all_lines() == said
