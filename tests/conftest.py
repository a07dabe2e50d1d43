"""What holds for every test."""

from __future__ import annotations

import os
from collections.abc import Iterator

import onnxruntime
import pytest

from quark.devices import CUDA_PROVIDER, driver


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where none can be used."""
    trouble = driver().trouble
    if not trouble and CUDA_PROVIDER not in onnxruntime.get_available_providers():
        trouble = f"this ONNX Runtime has no {CUDA_PROVIDER}"
    for item in items if trouble else ():
        if item.get_closest_marker("cuda") is not None:
            item.add_marker(pytest.mark.skip(reason=trouble))


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing is kept in the cache of the person who runs the tests."""
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = before
