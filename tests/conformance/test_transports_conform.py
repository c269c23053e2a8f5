"""Every built-in transport passes the kit."""

import pytest

from kvbaton.testing.suite import TransportTests


class TestMemory(TransportTests):
    spec = "memory"


class TestTcp(TransportTests):
    spec = "tcp"


class TestNixl(TransportTests):
    spec = "nixl"


class TestNccl(TransportTests):
    spec = 'nccl:{"backend": "gloo"}'


class TestFaultyMemory(TransportTests):
    spec = 'faulty:{"inner": "memory"}'


@pytest.mark.slow
class TestFaultyTcp(TransportTests):
    spec = 'faulty:{"inner": "tcp", "delay": 0.5, "delay_polls": 20}'


BUILT_IN = (TestMemory, TestTcp, TestNixl, TestNccl, TestFaultyMemory, TestFaultyTcp)
