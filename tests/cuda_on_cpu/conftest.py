"""Kernels run plain in make check, in one order of threads. By night every access is looked at, in three orders."""

from pathlib import Path

import emulation
import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """What says nothing else is slow where the build is plain, and nightly where it is not, or not in question."""
    for item in items:
        if item.path.parent == Path(__file__).parent and not any(map(item.get_closest_marker, ("slow", "nightly"))):
            params = item.callspec.params if hasattr(item, "callspec") else {}
            item.add_marker("slow" if params.get("build") == "plain" else "nightly")


@pytest.fixture(params=["plain", *emulation.ORDERS], ids=lambda way: way if way == "plain" else f"checked-{way}")
def build(request, monkeypatch):
    """Plain, or checked with this order of threads, where a call does not say."""
    if request.param != "plain":
        monkeypatch.setattr(emulation, "CHECKED", True)
        monkeypatch.setattr(emulation, "ORDER", request.param)
