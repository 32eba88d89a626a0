"""What other launchers would run for a recipe, and what sparkd runs once it is imported: the same, over a recipe of each shape."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from tests.compat.launchers import serving
from tests.compat.recipes import differences, verdict
from tests.sparkd.recipes.test_importer import ONE, TWO

DSPARK = '{"method": "dspark", "num_speculative_tokens": {tokens}, "attention_backend": "B12X_MLA_SPARSE"}'
DOUBLED = DSPARK.replace('{"', '{{"').replace('"}', '"}}')


def recipe(command: str, version: str | None = "1", **keys: Any) -> bytes:
    table = {"recipe_version": version, "name": "n", "model": "owner/model", "container": "c", "command": command, **keys}
    return yaml.safe_dump({key: value for key, value in table.items() if value is not None}).encode()


# Invented, in the shapes that published ones have.
SAME = {
    "eugr": ONE.encode(),
    "sparkrun without a command": TWO.encode(),
    "one node or two": recipe("vllm serve owner/model -tp {tensor_parallel}", defaults={"tensor_parallel": 2}),
    "a cluster": recipe("vllm serve owner/model -tp {tensor_parallel} --nnodes 2", defaults={"tensor_parallel": 2}, cluster_only=True),
    "stages": recipe("vllm serve owner/model -tp 1 -pp {stages}", defaults={"stages": 3}, cluster_only=True),
    "doubled braces": recipe(f"vllm serve owner/model --speculative-config '{DOUBLED}'", defaults={"tokens": 5}),
    "plain braces": recipe(f"vllm serve {{model}} --speculative-config '{DSPARK}'", "2", runtime="vllm", defaults={"tokens": 5}),
    "three braces": recipe('vllm serve {model} --hf-overrides \'{"a": {"b": {"c": 1}}}\'', None, runtime="vllm-ray"),
    "a default that is JSON": recipe(
        "vllm serve owner/model --speculative-config '{spec}'", "4", defaults={"spec": '{"method": "mtp", "num_speculative_tokens": 3}'}
    ),
    "parts": recipe("vllm serve {model} --speculative-config.method dspark --speculative-config.num_speculative_tokens 4", "7"),
    "DFlash with what it cannot live with": recipe(
        "vllm serve {model} --kv-cache-dtype fp8 --attention-backend flash_attn --max-num-seqs 64"
        ' --speculative-config \'{"method": "dflash", "model": "owner/draft", "num_speculative_tokens": 15}\'',
        "2",
        env={"VLLM_USE_DEEP_GEMM": 1},
    ),
    "cut short": recipe("vllm serve {model} --gpu-mem 0.5 --max-model 8K --tensor-parallel 2 --served-model-name a", "3"),
    "a template of a mod": recipe("vllm serve owner/model --chat-template unsloth.jinja", mods=["mods/a"]),
    "blanks behind a backslash": recipe("vllm serve owner/model \\  \n  --seed 1 \\\n"),
    "a script": recipe("# first\nexport A=b;\nC=d vllm serve {model} --trust-remote-code --no-enable-prefix-caching", "2"),
    "Ray's variables": recipe("vllm serve {model}", "2", env={"RAY_memory_usage_threshold": 0.99, "A": True}),
    "GiB": recipe("vllm serve owner/model --gpu-memory-utilization-gb {gpu}", defaults={"gpu": 96}),
}


@pytest.mark.parametrize("shape", SAME)
def test_the_same_command_comes_out(shape: str) -> None:
    for nodes in (1, 2):
        found = verdict(SAME[shape], "their", nodes)
        assert found is not None and found.kind == "same", found
        # What differs here is translated for this release of vLLM, with a note.
        assert not found.told or shape == "eugr"


@pytest.mark.parametrize(
    ("there", "here", "names"),
    [
        ("vllm serve a --seed 1", "vllm serve a --seed=1", []),
        ("vllm serve a --seed 1", "vllm serve b --seed 2", ["model", "seed"]),
        ("vllm serve a --max-model-len 8K --port 1", "vllm serve a --max-model-len 8192", []),
        ("vllm serve a --enable-prefix-caching", "vllm serve a --no-enable-prefix-caching", ["enable-prefix-caching"]),
        ("A=1 vllm serve a", "A=2 B=3 vllm serve a", ["A", "B"]),
        ('vllm serve a -sc \'{"x": 1, "y": 2}\'', 'vllm serve a --speculative_config \'{"y": 2, "x": 1}\'', []),
    ],
)
def test_what_differs_is_seen(there: str, here: str, names: list[str]) -> None:
    assert [name for name, _ in differences(serving(there), serving(here), {})] == names
