"""What makes a start another engine than the one that a profile is of."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.late import Late
from workers.kv.profiles import key_of
from workers.kv.release import forget_files

multimodal = Late("vllm.config.multimodal")
identity = Late("workers.vllm.kv.engine_identity")
COMMITS = "a" * 40, "b" * 40


def hub(cache: Path, name: str, *commits: str) -> None:
    """The last of them is `main`."""
    folder = cache / f"models--{name.replace('/', '--')}"
    for commit in commits:
        snapshot, blob = folder / "snapshots" / commit, folder / "blobs" / f"of-{commit}"
        snapshot.mkdir(parents=True)
        blob.parent.mkdir(exist_ok=True)
        blob.write_bytes(commit.encode())
        (snapshot / "model.safetensors").symlink_to(blob)
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / "main").write_text(commits[-1])


def config(model: str = "/no/such/folder", *, draft: str | None = None, **more: Any) -> Any:
    """As much of a VllmConfig as is looked at."""
    parts: dict[str, dict[str, Any]] = {part: {} for part, _ in identity.FIELDS}
    parts["model_config"] |= {"model": model, "revision": None, "dtype": "bfloat16", "max_model_len": 4096, "enforce_eager": True}
    parts["model_config"] |= {"multimodal_config": None}
    parts["cache_config"] |= {"cache_dtype": "auto"}
    parts["scheduler_config"] |= {"max_num_seqs": 4, "max_num_batched_tokens": 2048}
    parts["parallel_config"] |= {"tensor_parallel_size": 2, "pipeline_parallel_size": 1}
    parts["load_config"] = {"load_format": "auto", "model_loader_extra_config": {}, "download_dir": None}
    for name, value in more.items():
        part, _, field = name.partition("__")
        parts[part][field] = value
    made = SimpleNamespace(**{part: SimpleNamespace(**fields) for part, fields in parts.items()})
    drafted = SimpleNamespace(model=draft, revision=None)
    speculative = SimpleNamespace(
        method="draft_model", num_speculative_tokens=2, model=draft, draft_model_config=drafted, **parts["speculative_config"]
    )
    made.speculative_config = None if draft is None else speculative
    made.compute_hash = lambda: "hash"
    return made


def key(made: Any, rank: int = 0) -> str:
    return key_of(identity.identity_of(made, "cpu", rank))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    return tmp_path


OTHERS: dict[str, Any] = {
    "model_config__multimodal_config": SimpleNamespace(limit_per_prompt={"image": 4}),
    "cache_config__enable_prefix_caching": True,
    "lora_config__max_cpu_loras": 9,
    "draft": "/no/such/draft",
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_setting_that_changes_what_is_in_memory_is_another_engine(name):
    assert key(config(**{name: OTHERS[name]})) != key(config())
    assert key(config(**{name: OTHERS[name]})) == key(config(**{name: OTHERS[name]}))
    assert key(config(), rank=1) != key(config())


def test_how_a_draft_is_judged_is_another_engine():
    """Probabilities of drafts are [tokens, vocabulary] in float32."""
    names = [name for part, name in identity.FIELDS if part == "speculative_config"]
    made = [config(draft="/no/such/draft", **{f"speculative_config__{name}": "another"}) for name in names]
    assert names and len({key(one) for one in [config(draft="/no/such/draft"), *made]}) == 1 + len(names)


def test_the_fields_are_vllms_own():
    """A name with a slip in it is always None and makes no engine another one."""
    theirs = {part: "".join(word.capitalize() for word in part.split("_")) for part, _ in identity.FIELDS} | {"lora_config": "LoRAConfig"}
    classes = {part: getattr(Late("vllm.config"), name) for part, name in theirs.items()}
    known = {part: {*dir(made), *(one.name for one in dataclasses.fields(made))} for part, made in classes.items()}
    known["model_config"].add("runner_type")  # set of an instance
    assert [(part, name) for part, name in identity.FIELDS if name not in known[part]] == []


def test_the_limits_of_a_request_with_images_are_vllms_own_fields():
    plain, same, many = (multimodal.MultiModalConfig(**limits) for limits in ({}, {}, {"limit_per_prompt": {"image": 8}}))
    assert identity.multimodal_of(None) is None
    assert identity.multimodal_of(plain) == identity.multimodal_of(same) != identity.multimodal_of(many)
    known = [name for name in identity.MULTIMODAL if hasattr(plain, name)]
    assert len(known) >= len(identity.MULTIMODAL) - 2, "one release calls some otherwise"


@pytest.mark.parametrize(
    ("name", "value"),
    [("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"), ("VLLM_MAX_IMAGE_PIXELS", "1000")],
)
def test_a_variable_that_changes_what_is_in_memory_is_another_engine(monkeypatch, name, value):
    monkeypatch.delenv(name, raising=False)
    before = identity.environment_of(os.environ)
    monkeypatch.setenv(name, value)
    assert identity.environment_of(os.environ) != before


@pytest.mark.parametrize("name", ["VLLM_API_KEY", "SPARKD_KV"])
def test_a_variable_that_does_not_is_none(monkeypatch, name):
    before = identity.environment_of(os.environ)
    monkeypatch.setenv(name, "1234")
    assert identity.environment_of(os.environ) == before


def test_another_revision_of_a_hub_id_is_another_checkpoint(cache):
    hub(cache, "owner/name", COMMITS[0])
    first = key(config("owner/name"))
    assert key(config("owner/name")) == first
    hub(cache, "owner/name", COMMITS[1])
    assert key(config("owner/name")) != first, "main has moved"
    assert key(config("owner/name", model_config__revision=COMMITS[0])) == first
    assert key(config("owner/name", load_config__download_dir=str(cache))) == key(config("owner/name"))
    assert key(config("owner/name", load_config__download_dir=str(cache / "other"))) != first


def test_the_files_of_a_hub_id_and_of_a_draft_are_forgotten(cache, monkeypatch):
    hub(cache, "owner/name", COMMITS[0])
    hub(cache, "owner/draft", COMMITS[1])
    told: list[str] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, *_range: told.append(os.readlink(f"/proc/self/fd/{fd}")))
    forget_files(identity.folders_of(config("owner/name", draft="owner/draft")))
    assert sorted(Path(path).name for path in told) == [f"of-{commit}" for commit in COMMITS]
    assert identity.folders_of(config("owner/nowhere")) == []
