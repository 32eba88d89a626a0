"""The last boundary: logs, counts and reports an unexpected error of sparkd itself, and everything else goes on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from traceback import walk_tb
from typing import Any

from sparkd import metrics
from sparkd.condition import Condition
from sparkd.errors import NodeRefused, SparkdError
from sparkd.unexpected import lack_of_machine, unexpected
from workers.host.interpreter import PACKAGE_DIR

log = logging.getLogger("sparkd.boundary")

# A condition tells of an error for so long after it happened last.
KEPT_S = 600.0
# A lasting fault raises with every tick: its traceback is logged so often.
LOG_EVERY_S = 60.0
# Before a task of the daemon that ended by an error begins again.
PAUSE_S = 5.0
_OUR_FILES = (f"{PACKAGE_DIR}/sparkd/", f"{PACKAGE_DIR}/workers/")


@dataclass(slots=True)
class _Caught:
    """Errors of one kind at one place.

    at_s: of the last
    logged_s: of the last whose traceback was logged
    """

    times: int
    at_s: float
    logged_s: float


class Boundary:
    """Everything that the daemon does on its own runs within one of `around`, `spawn` and `keep`. `clock` is monotonic, seconds.

    A task that is cancelled ends. A CancelledError from inside, without a cancellation of the task, is an error like any other: asyncio
    would end the task for it without a message.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # By place, model, kind, and whether the machine's.
        self._caught: dict[tuple[str, str, str, bool], _Caught] = {}
        # By the name of its class: when an error of a library's own work was logged last.
        self._foreign_logged_s: dict[str, float] = {}

    def caught(self, where: str, error: BaseException, model: str = "", context: str = "") -> None:
        """Note an error.

        where: one word, the same for all models
        context: more text for the log, without data of a user
        """
        metrics.INTERNAL_ERRORS.labels(where).inc()
        lack = lack_of_machine(error)
        now_s, kind = self._clock(), (where, model, lack or type(error).__name__, lack is not None)
        caught = self._caught.setdefault(kind, _Caught(0, now_s, float("-inf")))
        if now_s - caught.at_s > KEPT_S:
            caught.times = 0
        caught.times, caught.at_s = caught.times + 1, now_s
        if now_s - caught.logged_s >= LOG_EVERY_S:
            caught.logged_s = now_s
            place = f"{where}{f' of {model}' if model else ''}{f': {context}' if context else ''}"
            log.error(f"{f'this machine refused ({lack})' if lack else 'sparkd made an error'} in %s", place, exc_info=error)

    @property
    def condition(self) -> Condition | None:
        """The condition for the operator; None once no error has come for KEPT_S. Names kinds only: an error's text may hold anything."""
        now_s = self._clock()
        self._caught = {kind: error for kind, error in self._caught.items() if now_s - error.at_s <= KEPT_S}
        if ours := self._places(of_machine=False):
            return Condition("InternalError", f"sparkd made an error in {ours}. It goes on; please report what its log says.")
        if refused := self._places(of_machine=True):
            message = f"This node refused what sparkd needs in {refused}. It goes on; run `df` and `sparkd doctor` here."
            return Condition(NodeRefused.__name__, message)
        return None

    def _places(self, *, of_machine: bool) -> str:
        return ", ".join(
            f"{where}{f' of {model}' if model else ''} ({name}{f', {error.times} times' if error.times > 1 else ''})"
            for (where, model, name, machines), error in self._caught.items()
            if machines is of_machine
        )

    @contextmanager
    def around(self, where: str, model: str = "", failed: Callable[[SparkdError], None] | None = None) -> Iterator[None]:
        """Nothing that is raised within it goes on from here. failed: hears what is told of the one model that is concerned."""
        try:
            yield
        except BaseException as error:
            if is_end(error):
                raise
            self.caught(where, error, model)
            if failed is not None:
                with self.around(where, model):
                    failed(unexpected(error))

    def spawn(
        self, tasks: asyncio.TaskGroup | asyncio.AbstractEventLoop, name: str, work: Coroutine[Any, Any, object]
    ) -> asyncio.Task[None]:
        """A task that no error ends. name: one word, the same for all models, and the model."""
        where, _, model = name.partition(" ")
        task = tasks.create_task(self.guarded(where, work, model), name=name)
        # A task that is cancelled before its first step never enters its coroutine.
        task.add_done_callback(lambda _: work.close())
        return task

    def heard(self, loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
        """The loop's exception handler: for callbacks, and for tasks that nothing waits for. An error that passed through none of our code
        is a library's own, and only logged."""
        error = context.get("exception")
        # asyncio shows a callback with its arguments, which may be anything: a key, too.
        message = str(context.get("message")).partition("(")[0]
        if not isinstance(error, Exception):
            loop.default_exception_handler(dict(context))
        elif _is_ours(error):
            self.caught("loop", error, context=message)
        else:
            self._log_foreign(message, error)

    async def guarded(self, where: str, work: Awaitable[object], model: str = "") -> None:
        with self.around(where, model):
            await work

    async def keep(self, where: str, work: Callable[[], Awaitable[None]]) -> None:
        """Until it returns, or this is cancelled: what ends by an error begins again after PAUSE_S."""
        ended = False
        while not ended:
            with self.around(where):
                await work()
                ended = True
            if not ended:
                await asyncio.sleep(PAUSE_S)

    def _log_foreign(self, message: str, error: Exception) -> None:
        now_s, kind = self._clock(), type(error).__name__
        if now_s - self._foreign_logged_s.get(kind, float("-inf")) >= LOG_EVERY_S:
            self._foreign_logged_s[kind] = now_s
            log.warning("a library that sparkd uses made an error: %s", message, exc_info=error)


def _is_ours(error: Exception) -> bool:
    return any(frame.f_code.co_filename.startswith(_OUR_FILES) for frame, _ in walk_tb(error.__traceback__))


def is_end(error: BaseException) -> bool:
    """Whether this ends the task on purpose: a cancellation of the task, or the end of the process."""
    if not isinstance(error, asyncio.CancelledError):
        return not isinstance(error, Exception)
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0
