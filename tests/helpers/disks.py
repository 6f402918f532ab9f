"""A disk that is full, for tests without root, and files as they are compressed."""

import resource
from contextlib import contextmanager

import pytest


@contextmanager
def limit(size):
    """Inside, no file may grow over so many bytes: what a full disk does, under another number."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def zstd(content):
    """One frame of zstd; skips the test where nothing makes one."""
    return pytest.importorskip("pyarrow").compress(content, "zstd", asbytes=True)
