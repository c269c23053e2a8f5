"""``kvbaton encode``: a node that encodes items and hands their outputs over.

Its engine's prompts are items and its blocks hold encoder outputs, so its role is that of a prefill
node, and so is all that crosses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvbaton.prefill.node import PrefillFactory

if TYPE_CHECKING:
    from kvbaton.server.node_config import NodeConfig


def main(config: NodeConfig) -> int:
    """Run the node until it is told to stop; returns the exit status."""
    from kvbaton.server.encoder_app import encoder_face
    from kvbaton.server.node import run_node

    return run_node(config, (PrefillFactory(config.handover),), encoder_face)
