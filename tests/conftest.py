"""What holds for every test."""

import pytest
from hypothesis import HealthCheck, settings

from gateway.runtime.interpreter import is_compiled

settings.register_profile("any_machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any_machine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Compiled classes take no replaced methods and nobody who stands for another."""
    if is_compiled():
        for item in items:
            if item.get_closest_marker("source_only"):
                item.add_marker(pytest.mark.skip(reason="replaces what is compiled"))
