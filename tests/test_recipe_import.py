"""eugr's and sparkrun's recipes: placeholders, precedence, what becomes of each key, and that nothing of them is ever run."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

from sparkd.errors import ConfigError
from sparkd.recipe_book import AsWritten, Book
from sparkd.recipe_check import checked, load
from sparkd.recipe_file import parse_recipe
from sparkd.recipe_import import Imported, imported, substituted

# SPACES: blanks behind a backslash, which people leave there.
ONE = """
recipe_version: "1"
name: A model
description: one Spark
model: owner/model
container: vllm-node
solo_only: true
defaults: {port: 8000, host: 0.0.0.0, tensor_parallel: 1, max_model_len: 32000, gpu_memory_utilization: 0.85}
env: {VLLM_USE_FLASHINFER_MOE_FP4: 0, A: plain}
command: |
  # serve it
  vllm serve owner/model \\
      --port {port} --host {host} \\
      -tp {tensor_parallel} \\SPACES
      --max-model-len {max_model_len} \\
      --gpu-memory-utilization {gpu_memory_utilization} \\
      --limit-mm-per-prompt '{{"video": 1, "image": {{"count": 2}}}}' \\
      --enable-auto-tool-choice --tool-call-parser qwen3_coder --trust-remote-code \\
      --enable-prefix-caching --swap-space 0 --max-num-seqs=4
""".replace("SPACES", "  ")
TWO = """
model: owner/model
model_revision: abc123
runtime: vllm
container: vllm/vllm-openai:nightly
min_nodes: 2
max_nodes: 4
metadata: {description: from the metadata, model_params: 8B}
defaults:
  port: 8000
  tensor_parallel: 2
  max_model_len: 8192
  served_model_name: short
  trust_remote_code: true
  enable_prefix_caching: false
  enforce_eager: false
  tool_call_parser: hermes
  max_num_seqs: 6
  speculative_config: '{"method": "dflash", "model": "owner/draft", "num_speculative_tokens": 15}'
  moe_backend: marlin
"""


def taken(text: str, **overrides: Any) -> Imported:
    return imported(textwrap.dedent(text).encode(), "their.yaml", overrides)


def settings(text: str, **overrides: Any) -> dict[str, Any]:
    found: dict[str, Any] = dict(taken(text, **overrides).recipe["settings"])
    return found


def with_command(command: str, **keys: Any) -> str:
    lines = "".join(f"{key}: {value}\n" for key, value in keys.items())
    return f'recipe_version: "2"\nmodel: owner/model\n{lines}command: |\n{textwrap.indent(command, "  ")}\n'


def test_eugrs_first_version() -> None:
    found = taken(ONE)

    assert found.recipe == {
        "description": "one Spark",
        "model": "owner/model",
        "sources": {"file": "a recipe of eugr/spark-vllm-docker"},
        "container": {"image": "vllm-node", "kind": "other"},
        "nodes": {"max": 1},
        "settings": {
            "tensor_parallel": 1,
            "max_model_len": 32000,
            "gpu_memory_utilization": 0.85,
            "tool_call_parser": "qwen3_coder",
            "trust_remote_code": True,
            "max_num_seqs": 4,
            "env": {"A": "plain"},
            "extra_args": [
                "--limit-mm-per-prompt", '{"video": 1, "image": {"count": 2}}', "--enable-prefix-caching", "--moe-backend", "marlin",
            ],
        },
    }  # fmt: skip
    assert len(found.notes) == 3, found.notes


def test_sparkruns_second_version_without_a_command() -> None:
    found = taken(TWO)

    assert found.recipe == {
        "description": "from the metadata",
        "model": "owner/model",
        "sources": {"file": "a recipe of sparkrun"},
        "container": {"image": "vllm/vllm-openai:nightly", "kind": "vllm-openai"},
        "nodes": {"min": 2, "max": 4},
        "settings": {
            "tensor_parallel": 2,
            "max_model_len": 8192,
            "trust_remote_code": True,
            "tool_call_parser": "hermes",
            "max_num_seqs": 6,
            "revision": "abc123",
            "served_model_name": ["short"],
            "extra_args": ["--no-enable-prefix-caching", "--moe-backend", "marlin"],
        },
        "speculative": {"default": "dflash", "dflash": {"num_speculative_tokens": 15, "model": "owner/draft"}},
    }
    assert [note for note in found.notes if "--port" in note]


@pytest.mark.parametrize("text", [ONE, TWO])
def test_what_is_imported_is_a_recipe_of_ours_and_can_be_used(text: str, tmp_path: Path) -> None:
    file = tmp_path / "their.yaml"
    file.write_text(text)
    recipe, problems = load(file, AsWritten())
    assert recipe is not None and [problem for problem in problems if problem.severity == "error"] == []

    book = Book(None, AsWritten())
    book.keep(recipe)
    assert [problem for problem in checked(recipe, book).problems if problem.severity == "error"] == []
    again, problems = parse_recipe("their", taken(text).text.encode(), "their.yaml", {})
    assert again is not None and problems == []
    assert again.recipe == recipe.recipe


# Placeholders and precedence


@pytest.mark.parametrize(
    ("text", "values", "collapse", "becomes"),
    [
        ("--port {port}", {"port": 1}, False, "--port 1"),
        ("{a}", {"a": "{b}", "b": "{c}", "c": 3}, False, "3"),
        ("{a}{nobody}", {"a": 1}, False, "1{nobody}"),
        ('{"method":"mtp","n":{n}}', {"n": 3}, False, '{"method":"mtp","n":3}'),
        ('{{"n": {n}}}', {"n": 3}, True, '{"n": 3}'),
        ('{{"n": {n}}}', {"n": 3}, False, '{"n": 3}'),
        ("{{port}}", {"port": 1}, True, "{port}"),
        ("{a}", {"a": "{a}"}, False, "{a}"),
        ("{a}", {"a": {"x": [1]}}, False, '{"x": [1]}'),
    ],
)
def test_placeholders(text: str, values: dict[str, Any], collapse: bool, becomes: str) -> None:
    assert substituted(text, values, collapse) == becomes


def test_the_command_line_wins_over_the_defaults() -> None:
    assert settings(ONE, max_model_len=4096, tensor_parallel=2)["max_model_len"] == 4096
    assert settings(ONE, tensor_parallel=2)["tensor_parallel"] == 2
    assert settings(TWO, max_num_seqs=1, enable_prefix_caching=True)["max_num_seqs"] == 1
    assert "--no-enable-prefix-caching" not in settings(TWO, enable_prefix_caching=True)["extra_args"]


def test_what_only_a_shell_knows_is_left_out_or_named() -> None:
    text = with_command(
        'export B="$HOME/b"\nC=2 vllm serve {model} --api-key $KEY --chat-template $DIR/x.jinja --max-model-len 9',
        env="{A: '$USER/x', T: 1}",
    )
    found = taken(text)

    assert found.recipe["settings"]["env"] == {"A": "${env.USER}/x", "T": "1", "C": "2"}
    assert found.recipe["settings"]["max_model_len"] == 9 and "extra_args" not in found.recipe["settings"]
    told = "\n".join(found.notes)
    assert "B is left out: its value comes from a shell's variable" in told
    assert "--chat-template is left out" in told and "--api-key" in told
    assert "env.A takes USER from the environment" in told
    assert "HF_TOKEN is left out: engines inherit it" in "\n".join(
        taken(with_command("vllm serve m", env="{HF_TOKEN: '${HF_TOKEN}'}")).notes
    )


@pytest.mark.parametrize("hook", ["pre_exec", "post_exec", "post_commands", "mods", "build_args"])
def test_hooks_are_refused_and_it_is_said_so(hook: str, tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    found = taken(ONE + f"{hook}: ['touch {touched}']\n")

    assert any(note.startswith(f"{hook} is refused: it runs shell commands") for note in found.notes)
    assert f"# {hook} is refused" in found.text
    assert "touch" not in found.text and not touched.exists()


@pytest.mark.parametrize(
    ("keys", "nodes"),
    [
        ("", None),
        ("solo_only: true", {"max": 1}),
        ("cluster_only: true", {"min": 2}),
        ("mode: solo", {"max": 1}),
        ("mode: cluster\nmin_nodes: 3", {"min": 3}),
        ("min_nodes: 1\nmax_nodes: 2", {"min": 1, "max": 2}),
        ("solo_only: false\ncluster_only: false\nmode: auto", None),
    ],
)
def test_on_how_many_nodes(keys: str, nodes: dict[str, int] | None) -> None:
    assert taken(f"{keys}\nrecipe_version: '2'\ncommand: vllm serve owner/model\n").recipe.get("nodes") == nodes


@pytest.mark.parametrize(
    ("keys", "overrides", "kept", "words"),
    [
        ("solo_only: true", {}, 1, "tensor_parallel is 1 in place of 2: the recipe is for one node."),
        ("max_nodes: 1", {}, 1, "tensor_parallel is 1 in place of 2"),
        ("solo_only: true", {"tensor_parallel": 2}, 2, None),
        ("solo_only: false", {}, 2, None),
        ("cluster_only: true", {}, 2, None),
        ("cluster_only: true", {"tensor_parallel": 1}, None, "its nodes are the stages of a pipeline, and auto decides"),
    ],
)
def test_over_how_many_ranks(keys: str, overrides: dict[str, Any], kept: int | None, words: str | None) -> None:
    command = "vllm serve owner/model -tp {tensor_parallel} -pp 2"
    found = taken(f"{keys}\nrecipe_version: '1'\ndefaults: {{tensor_parallel: 2}}\ncommand: {command}\n", **overrides)
    assert found.recipe["settings"].get("tensor_parallel") == kept
    assert [note for note in found.notes if "tensor_parallel" in note and words is not None and words in note] or words is None


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("vllm serve owner/a", {}),
        ("python3 -m vllm.entrypoints.openai.api_server --model owner/a --seed 1", {"extra_args": ["--seed", "1"]}),
        ("exec vllm serve owner/a -tp 2 -q fp8", {"tensor_parallel": 2, "quantization": "fp8"}),
        ("vllm serve --port 8000 owner/a --max-model-len 128K", {"max_model_len": "128K"}),
        ("vllm serve owner/a --seed -5 --lora-modules a=/a b=/b -cc.cudagraph_mode=PIECEWISE",
         {"extra_args": ["--seed", "-5", "--lora-modules", "a=/a", "b=/b", "-cc.cudagraph_mode=PIECEWISE"]}),
        ("vllm serve owner/a --kv-cache-memory-bytes 1000 --served-model-name x y",
         {"kv_cache": {"bytes": 1000}, "served_model_name": ["x", "y"]}),
        ("vllm serve owner/a --nnodes 2 --node-rank 0 --headless --distributed-executor-backend ray -pp 1", {}),
        ("vllm serve owner/a --enforce-eager --speculative-config '{\"method\": \"ngram\", \"num_speculative_tokens\": 3}'",
         {"enforce_eager": True, "extra_args": ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}']}),
    ],
)  # fmt: skip
def test_a_command_line_becomes_keys(command: str, expected: dict[str, Any]) -> None:
    found = taken(with_command(command).replace("model: owner/model\n", ""))

    assert found.recipe["model"] == "owner/a"
    assert found.recipe["settings"] == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: o/m\nsettings: {}\n", "in neither of the formats"),
        (ONE.replace('"1"', '"3"'), "recipe_version is '3'"),
        ("recipe_version: '1'\nmodel: o/m\n", "command is missing"),
        ("runtime: sglang\nmodel: o/m\ndefaults: {}\n", "sparkd runs vLLM only"),
        (with_command("sglang serve o/m"), "does not start with `vllm serve`"),
        (with_command("vllm serve o/m && rm -rf /"), "'&&' is for a shell"),
        (with_command("vllm serve o/m > /tmp/log"), "'>' is for a shell"),
        (with_command("vllm serve o/m; echo"), "';' is for a shell"),
        (with_command("vllm serve 'o/m"), "mend its quotes"),
        (with_command("vllm serve a/b\nvllm serve c/d"), "two lines of it start an engine"),
        ("recipe_version: '2'\ndefaults: [1]\nmodel: o/m\n", "defaults must be a map"),
        ("recipe_version: '2'\nmodel: o/m\ninclude: x\n", "as sparkrun prints it"),
        (with_command("vllm serve", ).replace("model: owner/model\n", ""), "model is missing"),
        (with_command("vllm serve o/m --speculative-config '{x'"), "is not JSON"),
        ("recipe_version: '2'\nmodel: [\n", "The YAML is malformed"),
    ],
)  # fmt: skip
def test_what_cannot_be_imported_says_why(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        taken(text)

    assert words in caught.value.message
    assert caught.value.message.startswith("their.yaml")


@pytest.mark.parametrize(
    ("image", "kind"),
    [
        ("vllm/vllm-openai", "vllm-openai"),
        ("docker.io/vllm/vllm-openai:v0.27.1", "vllm-openai"),
        ("registry:5000/vllm/vllm-openai@sha256:00", "vllm-openai"),
        ("me/vllm-openai:v1", "vllm-openai"),
        ("vllm/vllm-openai-rocm:v1", "other"),
        ("nvcr.io/nvidia/vllm:26.04-py3", "ngc"),
        ("nvidia/vllm-of-mine:1", "other"),
    ],
)
def test_how_an_image_takes_its_command(image: str, kind: str) -> None:
    found = taken(with_command("vllm serve owner/model", container=image))
    assert found.recipe["container"] == {"image": image, "kind": kind}


def test_of_a_key_that_stands_twice_the_last_counts_as_for_their_launchers() -> None:
    """eugr's recipe of Nemotron 3 Super names its container twice."""
    found = taken("recipe_version: '1'\ncontainer: a\ncommand: vllm serve owner/model\ncontainer: b\n")
    assert found.recipe["container"]["image"] == "b"
    assert found.notes[0] == "'container' stands more than once: the one on line 4 counts."


def test_what_no_release_understands_is_refused_in_the_notes() -> None:
    found = taken(with_command("vllm serve o/m --rope-scaling x", env="{VLLM_USE_FLASHINFER_MOE_FP8: 0}"))

    assert [note.partition(":")[0] for note in found.notes] == ["refused", "refused"]
    assert "env" not in found.recipe["settings"] and "extra_args" not in found.recipe["settings"]
