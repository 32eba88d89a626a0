import sys
import threading
import types

import pytest

from tests.support.waiting import HUNG_S
from workers.vllm.load import warmup


@pytest.fixture
def hashed(monkeypatch):
    """Set once Triton hashes itself."""
    done = threading.Event()
    cache = types.ModuleType("triton.runtime.cache")
    cache.triton_key = done.set
    for name in ("triton", "triton.runtime"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "triton.runtime.cache", cache)
    return done


@pytest.fixture
def child(monkeypatch):
    monkeypatch.setattr(warmup.multiprocessing, "parent_process", lambda: "somebody")


def test_triton_is_made_ready_here_and_in_the_processes_that_are_started(hashed, child):
    environ: dict[str, str] = {}
    warmup.make_ready(environ)
    assert hashed.wait(HUNG_S)
    hashed.clear()
    warmup.make_ready_if_told(environ)
    assert hashed.wait(HUNG_S)


def test_nothing_is_hashed_where_nothing_is_quantized(hashed, child):
    before = set(threading.enumerate())
    warmup.make_ready_if_told({})
    assert set(threading.enumerate()) <= before
    assert not hashed.is_set()


def test_a_process_that_only_inherited_the_variable_hashes_nothing(hashed):
    before = set(threading.enumerate())
    warmup.make_ready_if_told({warmup.VARIABLE: "1"})
    assert set(threading.enumerate()) <= before
    assert not hashed.is_set()


def test_a_triton_that_has_it_elsewhere_hashes_later(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton.runtime.cache", None)
    environ: dict[str, str] = {}
    warmup.make_ready(environ)
    assert environ == {warmup.VARIABLE: "1"}
