"""Owns the bodies that a request to the admin API may carry, and the body of a refusal. Never acts on any of it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator

from sparkd.schema.yaml_file import check_depth
from workers.host.hub_cache import is_revision


def _revision(value: str) -> str:
    if not is_revision(value):
        raise ValueError("a branch, a tag or a commit of the hub is expected")
    return value


MAX_NAME = 128


def _shallow(spec: dict[str, Any]) -> dict[str, Any]:
    """Refuse an entry that is nested more deeply than a configuration file may be."""
    check_depth(spec)
    return spec


class NewModel(BaseModel):
    """A model that the configuration file does not have. `spec` has the keys of a model in sparkd.yaml."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=MAX_NAME)
    spec: dict[str, Any]
    load: bool = True

    _shallow = field_validator("spec")(_shallow)


class ChangedModel(BaseModel):
    """The keys of an added model from now on; a new name is added. load: request RUNNING. A running engine is started again."""

    model_config = ConfigDict(extra="forbid")

    spec: dict[str, Any]
    load: bool = False

    _shallow = field_validator("spec")(_shallow)


class Loading(BaseModel):
    """How a model is loaded. recipe: NAME, NAME@VARIANT or NAME@REGISTRY of the recipes on this machine; null for what the model has."""

    model_config = ConfigDict(extra="forbid")

    recipe: str | None = Field(default=None, min_length=1, max_length=256)


class Pulling(BaseModel):
    """Where a model's files shall be. nodes: `all` in sight, or their addresses; revision: of a hub id, null for what the model has."""

    model_config = ConfigDict(extra="forbid")

    nodes: Literal["all"] | Annotated[list[Annotated[str, Field(max_length=64)]], Field(min_length=1, max_length=64)] = "all"
    revision: Annotated[str, AfterValidator(_revision)] | None = None


class Measuring(BaseModel):
    """Between which nodes a rate is measured. nodes: `all` in sight, or two or more addresses; force: although a model uses them."""

    model_config = ConfigDict(extra="forbid")

    nodes: Literal["all"] | Annotated[list[Annotated[str, Field(max_length=64)]], Field(min_length=2, max_length=16)] = "all"
    force: bool = False


class Problem(BaseModel):
    """Why a request was refused. `src` tells that sparkd says so, not an engine."""

    message: str
    type: str
    param: str | None
    code: str
    src: str
    request_id: str | None = None


class Refusal(BaseModel):
    """The body of every 4xx and 5xx."""

    error: Problem
