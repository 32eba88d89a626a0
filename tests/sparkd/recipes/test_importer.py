"""eugr's and sparkrun's recipes: placeholders, precedence, what becomes of each key, and that nothing of them is ever run."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from sparkd.config.recipe_check import checked, load, resolve, summary, validated
from sparkd.errors import ConfigError
from sparkd.recipes.file import parse_recipe
from sparkd.recipes.importer import Imported, imported, substituted
from sparkd.recipes.library import AsWritten, RecipeLibrary
from sparkd.vllm.arg_check import FLAGS_FILE, RefusedArg
from sparkd.vllm.flags import draft_of
from tests.support.facts import lacking

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
      --enable-prefix-caching --mxfp4-backend marlin --max-num-seqs=4
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


def parser_of_the_fixture(args: Sequence[str], _env: Mapping[str, str]) -> tuple[str, list[RefusedArg]]:
    """It refuses what is no name of a flag of vLLM 0.32.0, and the values of three more."""
    text = FLAGS_FILE.read_text()
    names = {name[2:] for line in text.splitlines() if not line.startswith("#") for name in line.split()[1:] if name.startswith("--")}
    flags = [arg[2:].partition("=")[0].partition(".")[0].replace("_", "-") for arg in args if arg.startswith("--")]
    refusals = [RefusedArg(f"--{flag}", "unrecognized argument") for flag in flags if flag not in names]
    refusals += [RefusedArg("--tool-call-parser", "there is no such parser; did you mean qwen3_coder?")] if "qwen3_codr" in args else []
    refusals += [RefusedArg("--seed", "invalid int value: '...'")] if "many" in args else []
    return "0.32.0", refusals + ([RefusedArg("--kernel-config", "invalid JSON")] if "{a:1}" in args else [])


def test_eugrs_first_version() -> None:
    found = taken(ONE)

    assert found.recipe == {
        "description": "one Spark",
        "model": "owner/model",
        "sources": {"file": "a recipe in the format of eugr/spark-vllm-docker"},
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
        "sources": {"file": "a recipe in the format of sparkrun"},
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
            "extra_args": [
                "--no-enable-prefix-caching", "--no-enforce-eager", "--speculative-config",
                '{"method": "dflash", "model": "owner/draft", "num_speculative_tokens": 15}', "--moe-backend", "marlin",
            ],
        },
    }  # fmt: skip
    assert [note for note in found.notes if "--port" in note]


@pytest.mark.parametrize("text", [ONE, TWO])
def test_what_is_imported_is_a_recipe_of_ours_and_can_be_used(text: str, tmp_path: Path) -> None:
    file = tmp_path / "their.yaml"
    file.write_text(text)
    recipe, problems = load(file, AsWritten())
    assert recipe is not None and [problem for problem in problems if problem.severity == "error"] == []

    book = RecipeLibrary(None, AsWritten())
    book.keep(recipe)
    assert checked(recipe, book) == []
    again, problems = parse_recipe("their", taken(text).text.encode(), "their.yaml", {})
    assert again is not None and problems == []
    assert again.recipe == recipe.recipe


# Placeholders and precedence


@pytest.mark.parametrize(
    ("text", "values", "becomes"),
    [
        ("{a}{b}", {"a": "{b}", "b": ""}, "{b}"),
        ("{a}{nobody}", {"a": 1}, "1{nobody}"),
        ('{"method":"mtp","n":{n}}', {"n": 3}, '{"method":"mtp","n":3}'),
        ('{{"a": {{"b": {n}}}}}', {"n": 3}, '{"a": {"b": 3}}'),
        ("${port}", {"port": 1}, "${port}"),
    ],
)
def test_placeholders(text: str, values: dict[str, Any], becomes: str) -> None:
    assert substituted(text, values) == becomes


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

    assert found.recipe["settings"]["env"] == {"T": "1", "C": "2"}
    assert found.recipe["settings"]["max_model_len"] == 9 and "extra_args" not in found.recipe["settings"]
    told = "\n".join(found.notes)
    assert all(re.search(rf"^{name} .*left out", told, re.MULTILINE) for name in ("A", "B", "--chat-template")), told
    assert re.search(r"^left out.*--api-key", told, re.MULTILINE), told
    (note,) = (note for note in taken(with_command("vllm serve m", env="{HF_TOKEN: '${HF_TOKEN}'}")).notes if "HF_TOKEN" in note)
    assert lacking(note, "left out", "inherit") == []


def test_hooks_are_refused_and_it_is_said_so(tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    hooks = ("pre_exec", "post_exec", "post_commands", "mods", "build_args")
    found = taken(ONE + "".join(f"{hook}: ['touch {touched}']\n" for hook in hooks))

    assert {note.partition(" ")[0] for note in found.notes} >= {*hooks} and all(f"# {hook} " in found.text for hook in hooks)
    assert "touch" not in found.text and not touched.exists()


@pytest.mark.parametrize(
    ("keys", "nodes"),
    [
        ("solo_only: true", {"max": 1}),
        ("mode: cluster\nmin_nodes: 3", {"min": 3}),
        ("solo_only: false\ncluster_only: false\nmode: auto", None),
    ],
)
def test_on_how_many_nodes(keys: str, nodes: dict[str, int] | None) -> None:
    assert taken(f"{keys}\nrecipe_version: '2'\ncommand: vllm serve owner/model\n").recipe.get("nodes") == nodes


@pytest.mark.parametrize(
    ("keys", "overrides", "kept", "words"),
    [
        ("solo_only: true", {}, 1, ["tensor_parallel is 1", "2", "one node"]),
        ("solo_only: false", {}, 1, ["one node", "2 nodes", "-o tensor_parallel=2"]),
        ("cluster_only: true", {"tensor_parallel": 1}, None, ["tensor_parallel", "pipeline", "auto"]),
    ],
)
def test_over_how_many_ranks(keys: str, overrides: dict[str, Any], kept: int | None, words: list[str]) -> None:
    command = "vllm serve owner/model -tp {tensor_parallel} -pp 2"
    found = taken(f"{keys}\nrecipe_version: '1'\ndefaults: {{tensor_parallel: 2}}\ncommand: {command}\n", **overrides)
    assert found.recipe["settings"].get("tensor_parallel") == kept
    assert not words or [] in [lacking(note, *words) for note in found.notes], found.notes


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("exec /usr/local/bin/vllm serve --model owner/a --seed 1", {"extra_args": ["--seed", "1"]}),
        ("vllm serve owner/a --seed -5 --lora-modules a=/a b=/b -cc.cudagraph_mode=PIECEWISE -cc.mode 3 -O2 -ep",
         {"extra_args": ["--seed", "-5", "--lora-modules", "a=/a", "b=/b", "--optimization-level", "2", "--enable-expert-parallel",
                         "--compilation-config", '{"cudagraph_mode": "PIECEWISE", "mode": 3}']}),
        ("vllm serve owner/a --speculative_config.method mtp --speculative_config.num_speculative_tokens 2",
         {"extra_args": ["--speculative-config", '{"method": "mtp", "num_speculative_tokens": 2}']}),
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
    ("command", "ranks"),
    [("vllm serve o/m", 1), ("vllm serve o/m -tp 2", 2), ("vllm serve o/m -pp 2", None)],
)
def test_eugrs_version_without_a_cluster_is_one_rank_unless_its_command_says_another_number(command: str, ranks: int | None) -> None:
    text = f"recipe_version: '1'\ndefaults: {{tensor_parallel: 2}}\ncommand: {command}\n"
    assert settings(text).get("tensor_parallel") == ranks
    assert settings(text + "cluster_only: true\n").get("tensor_parallel") == (2 if ranks == 2 else None)


@pytest.mark.parametrize("config", ['{"method": "deepseek_mtp", "num_speculative_tokens": 2}'])
def test_what_a_recipe_says_of_drafts_is_kept_whole_and_comes_to_the_engine(config: str, tmp_path: Path) -> None:
    text = with_command(f"vllm serve owner/model --kv-cache-dtype fp8 --attention-backend flashinfer --speculative-config '{config}'")
    assert settings(text)["extra_args"][-2:] == ["--speculative-config", config]
    (tmp_path / "their.yaml").write_text(text)
    file, _ = load(tmp_path / "their.yaml", AsWritten())
    assert file is not None
    book = RecipeLibrary(None, AsWritten())
    book.keep(file)
    found = resolve("their", book)
    assert found.vllm_flags()[-2:] == ["--speculative-config", config] and found.kv_cache_dtype == "fp8"
    assert found.vllm_flags().count("--attention-backend") == 1 and found.env == {}
    assert summary(file)["speculative"] == draft_of(json.loads(config)).method


def test_variables_that_place_ranks_are_left_out_with_a_word() -> None:
    names = ("RAY_memory_usage_threshold", "NNODES", "MASTER_ADDR", "VLLM_HOST_IP", "WORLD_SIZE")
    env = ", ".join(f"{name}: '1'" for name in names[1:])
    found = taken(with_command("export RAY_memory_usage_threshold=1;\nvllm serve o/m --nnodes $NNODES", env=f"{{{env}, A: b}}"))
    assert found.recipe["settings"] == {"env": {"A": "b"}}
    assert {note.partition(" ")[0] for note in found.notes if "left out: " in note} >= {*names}


def test_what_a_mod_brings_and_the_command_uses_is_told_first_and_apart() -> None:
    command = "vllm serve o/m --chat-template unsloth.jinja --turbo-mode 3 --seed 1"
    text = with_command(command, mods="[mods/a]").encode()
    found = imported(text, "their.yaml", parser=parser_of_the_fixture)
    assert len(found.missing) == 2 and "--chat-template unsloth.jinja" in found.missing[0] and "--turbo-mode" in found.missing[1]
    assert not {*found.missing} & {*found.notes} and all("its mods (mods/a) may bring" in line for line in found.missing)
    lines = found.text.splitlines()
    assert lines[1:6] == ["#", "# MISSING:", *(f"# {line}" for line in found.missing), "#"]
    assert found.recipe["settings"]["extra_args"] == command.split()[3:]
    assert taken(with_command("vllm serve o/m --chat-template /a/b.jinja", mods="[x]")).missing == ()
    assert taken(with_command("vllm serve o/m --chat-template '{{ messages }}'")).missing == ()


@pytest.mark.parametrize(
    ("words", "container"), [("--turbo-mode 3", None), ("--kernel-config {a:1}", "vllm-node"), ("--seed many", "vllm/vllm-openai:v0.25.1")]
)
def test_an_argument_that_vllm_refuses_is_refused_by_the_import(words: str, container: str | None) -> None:
    more = {} if container is None else {"container": container}
    with pytest.raises(ConfigError) as caught:
        imported(with_command(f"vllm serve o/m {words}", **more).encode(), "their.yaml", parser=parser_of_the_fixture)
    assert words.split(maxsplit=1)[0] in caught.value.message


def test_a_parser_that_this_vllm_does_not_have() -> None:
    key, name, near = "tool-call-parser", "qwen3_codr", "qwen3_coder"
    command = f"vllm serve o/m --{key} {name}"
    with pytest.raises(ConfigError) as caught:
        imported(with_command(command).encode(), "their.yaml", parser=parser_of_the_fixture)
    assert f"--{key}" in caught.value.message and f" {near}?" in caught.value.message

    for brought in ({"mods": "[mods/a]"}, {"container": "gb10-glm52:v18.1"}):
        found = imported(with_command(command, **brought).encode(), "their.yaml", parser=parser_of_the_fixture)
        assert len(found.missing) == 1 and near in found.missing[0]
        assert validated(found, "r", "r.yaml")[1] == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: o/m\nsettings: {}\n", ["neither", "formats"]),
        (with_command("vllm serve o/m --max-num-seqs {a}", defaults="{a: '{b}', b: 3}"), ["{b}"]),
        (with_command("vllm serve o/m --compilation-config.pass_config.fuse_norm_quant true"), ["--compilation-config", "JSON"]),
        (with_command("vllm serve o/m --max-model-len {length}"), ["-o length=VALUE"]),
        ("runtime: sglang\nmodel: o/m\ndefaults: {}\n", ["sglang", "vLLM only"]),
        (with_command("vllm serve o/m && rm -rf /"), ["'&&'", "shell"]),
        (with_command("vllm serve a/b\nvllm serve c/d"), ["two lines"]),
        ("recipe_version: '2'\nmodel: o/m\ninclude: x\n", ["include", "sparkrun"]),
        ("recipe_version: '2'\nmodel: [\n", ["YAML", "malformed"]),
    ],
)  # fmt: skip
def test_what_cannot_be_imported_says_why(text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        taken(text)

    assert lacking(caught.value.message, *words) == []
    assert caught.value.message.startswith("their.yaml")


@pytest.mark.parametrize(
    ("image", "kind"),
    [
        ("registry:5000/vllm/vllm-openai@sha256:00", "vllm-openai"),
        ("vllm/vllm-openai-rocm:v1", "other"),
        ("nvcr.io/nvidia/vllm:26.04-py3", "ngc"),
    ],
)
def test_how_an_image_takes_its_command(image: str, kind: str) -> None:
    found = taken(with_command("vllm serve owner/model", container=image))
    assert found.recipe["container"] == {"image": image, "kind": kind}


def test_what_no_release_understands_is_refused_in_the_notes() -> None:
    found = taken(with_command("vllm serve o/m --mxfp4-layers x", env="{VLLM_ATTENTION_BACKEND: XFORMERS}"))

    assert [note.partition(":")[0] for note in found.notes] == ["refused", "refused"]
    assert "env" not in found.recipe["settings"] and "extra_args" not in found.recipe["settings"]


def test_a_default_that_is_no_flag_is_refused() -> None:
    text = TWO + "  cuda_graph_mode_of_another_engine: full\n"
    with pytest.raises(ConfigError, match="--cuda-graph-mode-of-another-engine"):
        imported(text.encode(), "their.yaml", parser=parser_of_the_fixture)
