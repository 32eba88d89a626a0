"""Describes what a model can do: tasks by its architecture, routes by its engine."""

from __future__ import annotations

from dataclasses import dataclass

GENERATE, POOL, TRANSCRIBE = "generate", "pool", "transcribe"


@dataclass(frozen=True, slots=True)
class RequestNeeds:
    """The needs of a request.

    path: at the engine
    task: behind the path; None if every model has the path
    tools: the model is given functions that it may call
    """

    path: str
    task: str | None
    tools: bool = False


@dataclass(frozen=True, slots=True)
class Abilities:
    """None is not known.

    tasks: of GENERATE, POOL and TRANSCRIBE
    routes: the paths that its engine has
    max_model_len: tokens
    """

    tasks: frozenset[str] | None = None
    routes: frozenset[str] | None = None
    max_model_len: int | None = None

    def has(self, need: RequestNeeds) -> bool:
        """True where nothing is known."""
        if self.routes is not None:
            return need.path in self.routes
        return self.tasks is None or need.task is None or need.task in self.tasks
