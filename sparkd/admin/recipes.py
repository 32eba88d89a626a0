"""The admin API's routes of recipes: the list, one of them, and the meaning of MODEL in a command."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from sparkd.admin.answers import answers
from sparkd.admin.bodies import MAX_NAME
from sparkd.admin.operator import Operator
from sparkd.capacity.planned_entry import MODEL_CHARACTERS
from sparkd.config.recipe_check import described, resolve, summary
from sparkd.control.registry import Registry
from sparkd.errors import NotFound
from sparkd.recipes.admin_policy import KEYS
from sparkd.recipes.library import AsWritten, RecipeLibrary


class Meaning(BaseModel):
    """The body of `POST /models` that adds what a user means."""

    name: str
    spec: dict[str, str]
    keys: list[str] = Field(description="The keys that the spec of an added model may have")
    known: str | None = Field(description="The known model that is meant; null for one to add, and where `model` was not asked for")


class _Recipe(BaseModel):
    name: str
    description: str
    model: str
    quantize: Any
    speculative: str
    decode_tokens_per_s: Any
    path: str


class RecipeSummary(_Recipe):
    nodes: int


class Recipes(BaseModel):
    recipes: list[RecipeSummary]
    problems: list[str]


class RecipeChoice(_Recipe):
    """The whole recipe, and what it comes to."""

    nodes: dict[str, Any]
    container: dict[str, Any] | None
    needs_vllm: Any
    spec: dict[str, Any]
    flags: list[str]
    env: dict[str, str]
    sampling: Any
    expected: list[dict[str, Any]]
    sources: dict[str, Any]
    notes: list[str]


def register_recipes(api: APIRouter, registry: Registry, operator: Operator) -> None:
    @api.get("/entry", **answers(Meaning), summary="What a user means by MODEL: a recipe, or a folder or hub id to add")
    async def entry(
        source: Annotated[str, Query(min_length=1, max_length=MODEL_CHARACTERS)],
        model: Annotated[str | None, Query(min_length=1, max_length=MODEL_CHARACTERS)] = None,
        name: Annotated[str | None, Query(min_length=1, max_length=MAX_NAME)] = None,
        changes: bool = False,
    ) -> dict[str, Any]:
        meant = await asyncio.to_thread(operator.meaning, source)
        return {**meant, "keys": sorted(KEYS), "known": None if model is None else operator.known(meant, model, name, changes=changes)}

    @api.get("/recipes", **answers(Recipes), summary="The recipes that a model may name")
    async def recipes() -> dict[str, Any]:
        return await asyncio.to_thread(_recipes, registry.config.recipes_dir)

    @api.get(
        "/recipes/{name:path}",
        **answers(RecipeChoice),
        summary="One recipe, or NAME@REGISTRY, and what it comes to",
    )
    async def recipe(name: str) -> dict[str, Any]:
        book = RecipeLibrary(registry.config.recipes_dir, AsWritten(), registry.config.state_dir)
        if not await asyncio.to_thread(book.has, name):
            raise NotFound(f"{name[:128]!r} is not a known recipe. `sparkd recipes ls` lists the recipes.", param="recipe")
        return await asyncio.to_thread(lambda: described(book.find(name), resolve(name, book)))


def _recipes(folder: Path | None) -> dict[str, Any]:
    book = RecipeLibrary(folder, AsWritten())
    read = [book.read(name) for name in book.names()]
    problems = [str(problem) for _, wrong in read for problem in wrong]
    return {"recipes": [summary(file) for file, _ in read if file], "problems": problems}
