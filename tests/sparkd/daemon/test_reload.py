"""A new configuration: taken whole or not at all, one at a time, and what the supervisor makes of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparkd.config.config import Config, load_config
from sparkd.control.registry import replaced
from sparkd.daemon.daemon import Daemon, Options
from sparkd.daemon.reload import Reloader
from sparkd.errors import ConfigError
from sparkd.gateway.server import bind
from sparkd.state.nouns import Desired, Want
from sparkd.state.store import Store
from sparkd.systemd import Systemd
from tests.sparkd.control.test_supervisor import make_ready
from tests.support.checkpoints import dense, write
from tests.support.fakes import Scene, stage
from tests.support.published_tensors import tensors_of


class Taker:
    """What a Reloader works on: `given` is what the file says next, an error where it cannot be used."""

    def __init__(self, **flags: Any) -> None:
        self.given: Callable[[], Config] = lambda: config(**flags)
        self.taken: list[Config] = []
        self.refused: list[str | None] = []
        self.over = asyncio.Event()
        self.faults: list[Exception] = []
        self.reloader = Reloader(
            config(**flags),
            Systemd(),
            load=lambda: self.given(),
            judge=self._judge,
            take=self._take,
            refused=lambda why: self.refused.append(why),
        )

    async def _judge(self, given: Config) -> None:
        if self.faults:
            raise self.faults.pop()

    def _take(self, given: Config) -> dict[str, list[str]]:
        self.taken.append(given)
        self.over.set()
        return {"added": [], "removed": [], "restarted": []}


def config(**flags: Any) -> Config:
    return load_config(None, flags={name.replace("__", "."): value for name, value in flags.items()}, environ={})


async def test_what_changed_is_told_and_what_waits_for_the_next_start() -> None:
    made = Taker()
    made.given = lambda: config(global_ttl_s=9, listen="127.0.0.1:9", memory__sample_s=2)
    assert await made.reloader.now() == {
        "changed": ["listen", "global_ttl_s", "memory"], "later": ["listen", "memory"], "added": [], "removed": [], "restarted": [],
    }  # fmt: skip
    made.given = lambda: config(global_ttl_s=9, listen="127.0.0.1:9", memory__sample_s=2, memory__guard="watch")
    found = await made.reloader.now()
    assert (found["changed"], found["later"]) == (["memory"], ["listen", "memory"]), "what was changed before is not in force yet"
    made.given = lambda: config(memory__guard="watch")
    found = await made.reloader.now()
    assert (found["changed"], found["later"]) == (["listen", "global_ttl_s", "memory"], []), "as it was started"
    assert made.refused == [None] * 3


@pytest.mark.parametrize("left", ["", " \n\n"])
async def test_a_file_of_which_nothing_is_left_removes_no_model(tmp_path: Path, left: str) -> None:
    file = tmp_path / "sparkd.yaml"
    file.write_text("models: {m: {model: /models/m}}\n")
    options = {"state_dir": str(tmp_path / "state"), "runtime_dir": str(tmp_path / "run")}
    started, store = load_config(file, flags=options, environ={}), Store(tmp_path / "state" / "state.db")
    with bind("127.0.0.1", 0) as listening:
        daemon = Daemon(started, Options(file, options), Systemd(), store, [listening], {})
        file.write_text(left)
        with pytest.raises(ConfigError, match=rf"{file} is empty.*`models: {{}}`"):
            await daemon._reloader.now()
        assert set(daemon._registry.records) == {"m"}

        file.write_text("models: {}\n")
        assert (await daemon._reloader.now())["removed"] == ["m"]
        file.write_text(left)
        await daemon._reloader.now()
    daemon._cluster._here.guard.stop()
    await daemon._requests.close()
    daemon._live_page.series.close()
    store.close()


async def test_a_bad_one_is_refused_and_the_next_good_one_taken() -> None:
    made = Taker()
    made.given = lambda: config(modles={})
    with pytest.raises(ConfigError, match="modles"):
        await made.reloader.now()
    assert (made.taken, len(made.refused)) == ([], 1)
    made.given = config
    await made.reloader.now()
    assert (len(made.taken), made.refused[-1]) == (1, None)


async def test_systemd_hears_the_end_of_a_reload_that_failed_half_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends a service whose reload never ends."""
    made, told = Taker(), list[str]()
    monkeypatch.setattr(Systemd, "reloading", lambda self, why: told.append("reloading"))
    monkeypatch.setattr(Systemd, "ready", lambda self, why: told.append("ready"))

    def stumbles(given: Config) -> dict[str, list[str]]:
        raise KeyError("x")

    made.reloader._take = stumbles
    with pytest.raises(KeyError):
        await made.reloader.now()

    assert told == ["reloading", "ready"]


@pytest.mark.parametrize("fault", [ConfigError("models.m.quantize: 576 columns"), TypeError("unhashable")])
async def test_an_entry_that_would_not_start_again_refuses_the_file(fault: Exception) -> None:
    made = Taker()
    made.faults.append(fault)
    with pytest.raises(ConfigError):
        await made.reloader.now()
    assert (made.taken, len(made.refused)) == ([], 1)
    await made.reloader.now()
    assert (len(made.taken), made.refused[-1]) == (1, None)


async def test_signals_that_come_while_one_is_followed_are_one_more_and_a_bad_file_ends_nothing() -> None:
    made, reading, go_on = Taker(), threading.Semaphore(0), threading.Semaphore(0)

    def slow() -> Config:
        reading.release()
        go_on.acquire()
        return config(modles={}) if not made.refused else config()

    made.given = slow
    running = asyncio.create_task(made.reloader.run())
    made.reloader.ask()
    await asyncio.to_thread(reading.acquire)
    for _ in range(50):
        made.reloader.ask()
    go_on.release()
    await asyncio.to_thread(reading.acquire)
    go_on.release()
    await made.over.wait()
    assert len(made.taken) == 1
    assert made.refused[0] is not None
    running.cancel()


def of(made: Scene, **models: dict[str, Any]) -> Config:
    given = {"models": {name: {"model": made.config.models["m"].model} | keys for name, keys in models.items()}}
    return load_config(None, flags=given | {"state_dir": str(made.config.state_dir)}, environ={})


async def test_models_come_go_and_change_with_it(tmp_path: Path) -> None:
    async with stage(tmp_path) as made:
        changes = made.supervisor.reconfigure(of(made, m={}, new={"preload": True}, other={}))
        assert changes == {"added": ["new", "other"], "removed": [], "restarted": ["m"], "adjusted": []}, "it has lost an alias"
        assert {name: view.want for name, view in made.supervisor.snapshot().models.items()} == {
            "m": Want.STOPPED, "new": Want.RUNNING, "other": Want.STOPPED,
        }  # fmt: skip
        made.supervisor.want("new", Want.STOPPED, "admin")
        changes = made.supervisor.reconfigure(of(made, m={"ttl": 7}, new={"preload": True}))
        assert changes == {"added": [], "removed": ["other"], "restarted": [], "adjusted": ["m"]}
        assert made.supervisor.snapshot().models["new"].want is Want.STOPPED, "an operator's unload stands"
        told = [
            (one.kind, one.model, one.data["origin"]) for one in made.store.history.events() if one.kind in ("added", "changed", "removed")
        ]
        assert told == [
            ("added", "new", "file"), ("added", "other", "file"), ("changed", "m", "file"), ("changed", "m", "file"),
            ("removed", "other", "file"),
        ]  # fmt: skip


async def test_only_the_new_entries_of_ready_models_would_restart_an_engine(tmp_path: Path) -> None:
    async with stage(tmp_path) as made:
        registry, changed = made.supervisor.registry, of(made, m={"quantize": "nf4"}, other={})
        assert replaced(registry, changed) == [], "nothing runs"
        await make_ready(made)
        assert replaced(registry, changed) == [changed.models["m"]]
        assert replaced(registry, of(made, m={"aliases": ["gpt-4o"], "ttl": 7})) == [], "its engine does not see that"
        assert replaced(registry, of(made, other={})) == [], "it goes without a restart"


async def test_a_ready_model_that_was_added_would_restart_for_its_engine_s_settings(tmp_path: Path) -> None:
    async with stage(tmp_path) as made:
        made.operator.add("added", {"model": "/y"})
        await make_ready(made, "added")
        settings = {"models": {"m": {"model": "/x"}}, "state_dir": str(made.config.state_dir)}
        same, other = (load_config(None, flags=settings | {"engine": engine}, environ={}) for engine in ({}, {"env": {"A": "1"}}))
        assert replaced(made.supervisor.registry, same) == []
        assert [spec.name for spec in replaced(made.supervisor.registry, other)] == ["added"]


async def test_a_ready_model_that_was_added_takes_no_entry_that_its_files_refuse(tmp_path: Path) -> None:
    shape = dense(hidden_size=576, num_attention_heads=9, num_key_value_heads=3, intermediate_size=1536)
    folder = write(tmp_path / "uneven", shape, tensors_of(shape))
    async with stage(tmp_path) as made:
        entry = {"model": str(folder), "max_model_len": 4096}
        made.operator.add("added", entry)
        assert await made.operator.unusable("added", entry | {"quantize": "nf4-g128"}) is None, "its start says it"
        await make_ready(made, "added")
        with pytest.raises(ConfigError, match=r"models\.added\.quantize"):
            await made.operator.unusable("added", entry | {"quantize": "nf4-g128"})
        assert await made.operator.unusable("added", entry | {"quantize": "nf4-g64"}) is None
        other = {"model": str(write(tmp_path / "other", shape, tensors_of(shape))), "max_model_len": 4096}
        with pytest.raises(ConfigError, match=r"models\.added\.quantize"):
            await made.operator.unusable("added", other | {"quantize": "nf4-g128"})
        assert await made.operator.unusable("added", other) is None


async def test_why_one_was_refused_stays_to_be_read_until_one_is_taken(tmp_path: Path) -> None:
    async with stage(tmp_path) as made:
        made.supervisor.note_refused("sparkd.yaml:3: modles is unknown.")
        (condition,) = made.supervisor.snapshot().conditions
        assert condition.reason == "ConfigRefused" and "sparkd.yaml:3: modles is unknown." in condition.message
        made.supervisor.note_refused(None)
        assert made.supervisor.snapshot().conditions == ()
        assert [(event.kind, event.model) for event in made.store.history.events()] == [("config", None)]


async def test_a_model_that_comes_back_is_not_loaded_by_an_old_wish(tmp_path: Path) -> None:
    """Before: the wish outlived its model in the database, and loaded the next one of that name at the next start."""
    async with stage(tmp_path) as made:
        made.supervisor.want("m", Want.RUNNING, "admin")
        made.supervisor.reconfigure(of(made, other={}))
        assert made.store.wishes.desired() == {}
        assert made.supervisor.reconfigure(of(made, m={}, other={}))["added"] == ["m"]
        await made.tick(3)
        assert (made.state(), made.cluster.log) == ("STOPPED", [])


@pytest.mark.parametrize("wish", list(Want))
async def test_a_wish_for_a_model_that_went_while_no_daemon_ran_is_forgotten(tmp_path: Path, wish: Want) -> None:
    """Also an operator's unload: it was of the model that has gone, and preload holds for the new one."""
    store = Store(tmp_path / "state" / "state.db")
    store.wishes.save_desired(Desired("gone", wish, 4, "admin", 1.0))
    store.wishes.save_desired(Desired("added", wish, 4, "admin", 1.0))
    # One that this release cannot use stays with its wish for the release that can.
    store.wishes.save_spec("added", {"model": "/x", "of_the_next_release": True})
    store.close()
    async with stage(tmp_path) as made:
        assert set(made.store.wishes.desired()) == {"added"}
        made.supervisor.reconfigure(of(made, gone={"preload": True}))
        assert made.supervisor.snapshot().models["gone"].want is Want.RUNNING
