"""Takes a new configuration into a running daemon: whole or not at all, one at a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from sparkd.config.config import Config
from sparkd.errors import ConfigError, SparkdError
from sparkd.systemd import Systemd
from sparkd.unexpected import unexpected

log = logging.getLogger("sparkd")

# The keys that only the next start looks at.
_AT_START = ("listen", "state_dir", "runtime_dir", "cluster", "memory")


class Reloader:
    """Reads the configuration anew for signals and for the admin API.

    load: reads files and blocks.
    judge: raises ConfigError for entries with which READY models would not start again.
    take: applies the configuration on the loop, and returns names of models by key: added, removed, restarted, adjusted.
    refused: receives the reason why a configuration was refused, and None once one is accepted.
    """

    def __init__(
        self,
        config: Config,
        systemd: Systemd,
        *,
        load: Callable[[], Config],
        judge: Callable[[Config], Awaitable[None]],
        take: Callable[[Config], Mapping[str, list[str]]],
        refused: Callable[[str | None], None],
    ) -> None:
        self._config = self._started_with = config
        self._systemd = systemd
        self._load = load
        self._judge = judge
        self._take = take
        self._refused = refused
        self._asked = asyncio.Event()
        self._one_at_a_time = asyncio.Lock()

    def ask(self) -> None:
        """For a signal: many of them that come while one is being followed are one more."""
        self._asked.set()

    async def run(self) -> None:
        """Follow signals until cancelled. An error is logged and reported by `refused`."""
        while True:
            await self._asked.wait()
            self._asked.clear()
            try:
                await self.now()
            except SparkdError:
                continue

    async def now(self) -> dict[str, Any]:
        """The changes since the file was last read: keys of it, and names of models: added, removed, restarted, adjusted.

        `later`: the keys that are not in force, changed now or before, because the daemon was started with another value.

        Raises ConfigError with every problem of the file, or of entries with which READY models would not start again, and StateError; the
        old configuration stays then.
        """
        async with self._one_at_a_time:
            self._systemd.reloading("reading the configuration")
            try:
                config = await self._accepted()
            except SparkdError as error:
                log.error("the new configuration was refused and the old one stays: %s", error.message)
                self._refused(error.message)
                self._systemd.ready("the last reload failed, the old configuration stays")
                raise
            changed = [name for name in Config.model_fields if name != "models" and getattr(config, name) != getattr(self._config, name)]
            later = [name for name in _AT_START if _waits(name, config, self._started_with)]
            for name in later:
                log.warning("%s was changed since this daemon started: it takes effect at the next start", name)
            self._config = config
            try:
                models = self._take(config)
            except BaseException:
                # systemd waits for this word, and ends a service that does not say it.
                self._systemd.ready("the last reload failed, and it is not known which changes are in force")
                raise
            self._refused(None)
            self._systemd.ready("serving")
            return {"changed": changed, "later": later, **models}

    async def _accepted(self) -> Config:
        """Turns any error of reading the files into a ConfigError, because the daemon and its streams must survive it."""
        try:
            config = await asyncio.to_thread(self._load)
            await self._judge(config)
        except SparkdError:
            raise
        except Exception as error:
            log.exception("the configuration could not be read")
            raise ConfigError(f"The configuration was not read: {unexpected(error).message}") from error
        return config


def _waits(name: str, config: Config, started_with: Config) -> bool:
    """Whether a changed key waits for the next start. The agents take the guard's settings in `memory` at once."""
    if name == "memory":
        now, then = config.memory, started_with.memory
        return (now.sample_s, now.os_reserve_gib) != (then.sample_s, then.os_reserve_gib)
    return bool(getattr(config, name) != getattr(started_with, name))
