"""The flags that an added model may have: every flag of a release's parser, in every spelling."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from sparkd.config import quantize
from sparkd.config.config import load_config, parse_model
from sparkd.config.model import ModelConfig
from sparkd.control import registry as registry_module
from sparkd.control.registry import Registry
from sparkd.errors import ConfigError, Conflict
from sparkd.recipes.admin_flags import ENVIRONMENT, LISTS, MAPPINGS, SWITCHES, VALUES, refuse_flags
from sparkd.recipes.admin_policy import KEYS, MOST_ARGUMENT_CHARACTERS, MOST_ARGUMENTS, MOST_ENTRY_CHARACTERS
from sparkd.recipes.library import RecipeLibrary
from sparkd.state.store import Store
from sparkd.vllm.arg_check import FLAGS_FILE
from sparkd.vllm.reserved_args import owned_args

ALLOWED = SWITCHES | VALUES | MAPPINGS | LISTS
# Keys that an added model may not have: they bring code, another Python or an address.
OF_THE_FILE = {"runtime", "entrypoint", "trust_remote_code", "media"}
VALUES_OF = {"trust_remote_code": True, "media": {"domains": ["a.test"]}}
RECIPE = """
description: a model with code of its own
model: good/model
sources: {paper: a paper}
settings: {SETTINGS}
"""


RELEASE = [(line.split()[0], line.split()[1:]) for line in FLAGS_FILE.read_text().splitlines() if not line.startswith("#")]


def passes(args: list[str]) -> bool:
    if any(True for _ in owned_args(args)):
        return False
    try:
        refuse_flags(args)
    except ConfigError as error:
        assert error.param == "extra_args"
        return False
    return True


def spellings(flag: str) -> Iterator[list[str]]:
    """Every way to write one option, each with a value and without, behind another flag and alone."""
    names = [flag, flag.replace("_", "-"), "--" + flag[2:].replace("-", "_")]
    if flag.startswith("--"):
        names += [flag[:length] for length in range(3, len(flag))]
        names += [f"--no-{flag[2:]}", f"{flag}.key", f"{flag}.key+", f"{flag}+", f"{flag[:-1]}.key"]
    for name in dict.fromkeys(names):
        yield from ([name], [name, "1"], [f"{name}=1"], [f'{name}={{"key": "value"}}'], [name, "1", "2"], ["--seed", "0", name, "1"])


@pytest.mark.parametrize("kind", ["owned", "file", "free"])
def test_every_flag_of_the_parser_is_in_the_list_or_refused_in_each_spelling(kind: str) -> None:
    options = [flags for of, flags in RELEASE if of == kind]
    assert len(options) > 40
    for flags in options:
        listed = {flag for flag in flags if flag[2:].removeprefix("no-") in ALLOWED and flag.startswith("--")}
        assert bool(listed) == (kind == "free"), flags
        for flag in flags:
            for args in spellings(flag):
                rest = args[2:] if args[:1] == ["--seed"] and len(args) > 2 and flag != "--seed" else args
                name = rest[0].partition("=")[0].partition(".")[0].replace("_", "-")
                whole = name[2:].removeprefix("no-") in ALLOWED or name in listed
                if passes(args):
                    assert whole and (kind == "free" or name != flag), args
        for flag in listed:
            if flag.startswith("--"):
                name = flag[2:].removeprefix("no-")
                args = [flag] if name in SWITCHES else [flag, "1"]
                assert passes(args) and passes(["--seed", "0", *args])


@pytest.mark.parametrize(
    "args",
    [
        ["--enforce-eager", "evil/model"],
        ["--max-num-seqs", "4", "evil/model"],
        ["--max-num-seqs"],
        ["--max-num-seqs", "--trust-remote-code"],
        ["--cudagraph-capture-sizes=1", "2"],
        ["--enforce-eager=1"],
        ["--seed.a", "1"],
        ["--limit-mm-per-prompt.a", "-O--uds"],
        ["-O", '{"backend": "my.backend"}'],
        ["-qfp8"],
        ["-q", "fp8"],
        ["-O3"],
        ["--limit-mm-per-prompt.image", "2"],
        ["--", "evil/model"],
        ["", "--seed"],
    ],
)
def test_what_vllm_might_read_as_something_else_is_refused(args: list[str]) -> None:
    assert not passes(args)


@pytest.mark.parametrize(
    "args",
    [
        ["--max_num_seqs", "8", "--enable-auto-tool-choice"], ["--no-enable-prefix-caching"], ["--seed", "-5"],
        ["--cudagraph-capture-sizes", "1", "2", "--seed=1"], ["--limit-mm-per-prompt", '{"image": 2}'],
    ],
)  # fmt: skip
def test_what_tunes_a_model_passes(args: list[str]) -> None:
    assert passes(args)


def test_a_mistyped_flag_is_refused_with_the_one_that_was_meant_and_a_flag_of_vllm_is_no_mistyped_one() -> None:
    refusals = []
    for flag in ("--max-modle-len", "--tokenizer"):
        with pytest.raises(ConfigError) as caught:
            parse_model("m", {"model": "o/m", "extra_args": [flag, "4096"]}, over_admin=True)
        refusals.append("--max-model-len" in caught.value.message or "--tokenizer-mode" in caught.value.message)
    assert refusals == [True, False]


def test_every_key_of_an_entry_is_in_the_list_or_of_the_file() -> None:
    assert set(ModelConfig.model_fields) - KEYS == OF_THE_FILE, "a key is in TuningKeys of model.py or in OF_THE_FILE here"
    for key in OF_THE_FILE:
        with pytest.raises(ConfigError) as caught:
            parse_model("m", {"model": "o/m", key: VALUES_OF.get(key, "/x")}, over_admin=True)
        assert caught.value.param == key


@pytest.mark.parametrize("args", [["--seed=1"] * (MOST_ARGUMENTS + 1), ["--seed", "1" * (MOST_ARGUMENT_CHARACTERS + 1)]])
def test_more_arguments_than_the_loop_judges_at_once_are_refused_before_they_are_judged(args: list[str], monkeypatch: Any) -> None:
    def judge(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(ModelConfig, "model_validate", judge)
    with pytest.raises(ConfigError) as caught:
        parse_model("m", {"model": "o/m", "extra_args": args}, over_admin=True)
    assert caught.value.param == "extra_args"


def test_an_entry_over_the_admin_api_is_no_longer_than_any_that_somebody_writes() -> None:
    long = {"model": "o/m", "metadata": {"a": "x" * MOST_ENTRY_CHARACTERS}}
    assert parse_model("m", long, over_admin=False)
    with pytest.raises(ConfigError, match="65,536"):
        parse_model("m", long, over_admin=True)


def test_so_many_models_are_added_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "MOST_ADDED", 2)
    with closing(Store(tmp_path / "state.db")) as store:
        registry = Registry(load_config(None, environ={}), store, lambda: 0.0, lambda: 0.0)
        for name in ("a", "b"):
            registry.add(name, {"model": "o/m"}, replace=False)
        with pytest.raises(Conflict):
            registry.add("c", {"model": "o/m"}, replace=False)
        assert registry.add("b", {"model": "o/n"}, replace=True) == "changed"
        registry.remove(registry.find("b"))
        assert registry.add("c", {"model": "o/m"}, replace=False) == "added"


def test_adding_a_model_parses_its_entry_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = []

    def counted(name: str, raw: Mapping[str, Any], **how: Any) -> ModelConfig:
        parsed.append(name)
        return parse_model(name, raw, **how)

    with closing(Store(tmp_path / "state.db")) as store:
        store.wishes.save_spec("refused", {"model": "o/m", "no_such_key": 1})
        registry = Registry(load_config(None, environ={}), store, lambda: 0.0, lambda: 0.0)
        for name in ("a", "b"):
            registry.add(name, {"model": "o/m"}, replace=False)
        monkeypatch.setattr(registry_module, "parse_model", counted)
        registry.add("c", {"model": "o/m"}, replace=False)
        registry.add("a", {"model": "o/n"}, replace=True)
        registry.remove(registry.find("b"))
        assert parsed == ["c", "a"]
        assert registry.find("a").spec == parse_model("a", {"model": "o/n"}, over_admin=True)
        assert [(each.reason, each.message[:7]) for each in registry.conditions] == [("ModelLeftOut", "refused")]
        registry.configure(load_config(None, environ={}))
        assert sorted(parsed) == ["a", "a", "c", "c", "refused"]


def test_the_model_that_serve_was_started_with_is_not_said_to_be_in_a_file(tmp_path: Path) -> None:
    config = load_config(None, flags={"models": {"given": {"model": "o/m"}}}, environ={})
    with closing(Store(tmp_path / "state.db")) as store:
        told, origins = [], []
        for of_serve in ((), ("given",)):
            registry = Registry(config, store, lambda: 0.0, lambda: 0.0, of_serve)
            with pytest.raises(Conflict) as removed:
                registry.check_added("given")
            with pytest.raises(Conflict) as changed:
                registry.judged("given", {"model": "o/n"})
            origins.append(registry.find("given").origin)
            told.append([("configuration file" in each.value.message, "--name" in each.value.message) for each in (removed, changed)])
        # Another name cures no removal.
        assert told == [[(True, False), (True, False)], [(False, False), (False, True)]]
        assert origins == ["file", "serve"]


def test_a_model_that_is_added_has_its_own_keys_judged_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(None, environ={}).with_model(parse_model("a", {"model": "o/m"}, over_admin=True))
    judged = []
    monkeypatch.setattr(quantize, "unreachable", lambda spec, env: judged.append(spec.name))
    config.with_model(parse_model("b", {"model": "o/m"}, over_admin=True))
    assert judged == ["b"]


def test_a_text_for_the_calibration_is_of_the_file_so_that_no_caller_probes_which_files_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_model("m", {"model": "o/m", "quantize": {"format": "nvfp4-a4", "calibration": "/etc/passwd"}}, over_admin=True)
    assert caught.value.param == "quantize"
    (tmp_path / "calibrated.yaml").write_text(RECIPE.replace("{SETTINGS}", "{quantize: {format: nvfp4-a4, calibration: /etc/passwd}}"))
    with pytest.raises(ConfigError, match="calibration"):
        parse_model("m", {"recipe": "calibrated"}, over_admin=True, book=RecipeLibrary(tmp_path, {}))
    parse_model("m", {"model": "o/m", "quantize": {"format": "nvfp4-a4"}}, over_admin=True)


def test_no_variable_that_opens_a_log_or_loads_code_may_be_set() -> None:
    assert not [name for name in ENVIRONMENT if "LOGGING" in name or "PLUGIN" in name or "PATH" in name or "PRELOAD" in name]


@pytest.mark.parametrize("load_format", ["pt", "runai_streamer", "anything"])
def test_a_load_format_that_reads_more_than_plain_numbers_is_of_the_file(load_format: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_model("m", {"model": "o/m", "load_format": load_format}, over_admin=True)
    assert caught.value.param == "load_format"
    parse_model("m", {"model": "o/m", "load_format": "safetensors"}, over_admin=True)


# A recipe that trusts the code of its own model.


@pytest.fixture(params=["{trust_remote_code: true}", "{extra_args: [--trust-remote-code]}"])
def book(tmp_path: Path, request: pytest.FixtureRequest) -> RecipeLibrary:
    (tmp_path / "trusting.yaml").write_text(RECIPE.replace("{SETTINGS}", request.param))
    return RecipeLibrary(tmp_path, {})


def test_a_recipe_that_trusts_code_is_taken_as_it_pins_it(book: RecipeLibrary) -> None:
    spec = parse_model("m", {"recipe": "trusting", "max_num_seqs": 4, "extra_args": ["--enforce-eager"]}, over_admin=True, book=book)

    assert spec.model == "good/model" and spec.trust_remote_code


@pytest.mark.parametrize("key, value", [("model", "evil/model"), ("revision", "evil"), ("model", "good/model")])
def test_another_model_or_revision_of_it_is_refused_by_its_key(book: RecipeLibrary, key: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_model("m", {"recipe": "trusting", key: value}, over_admin=True, book=book)

    assert caught.value.param == key


@pytest.mark.parametrize("flag", ["model", "tokenizer", "code-revision", "hf-config-path"])
def test_no_flag_leads_its_code_elsewhere(book: RecipeLibrary, flag: str) -> None:
    for args in spellings(f"--{flag}"):
        with pytest.raises(ConfigError):
            parse_model("m", {"recipe": "trusting", "extra_args": args}, over_admin=True, book=book)


def test_what_an_older_release_took_in_is_judged_again_and_left_out_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = load_config(None, flags={"state_dir": str(tmp_path)}, environ={})
    with closing(Store(tmp_path / "state.db")) as store:
        store.wishes.save_spec("tuned", {"model": "o/m", "max_num_seqs": 4})
        store.wishes.save_spec("elsewhere", {"model": "o/m", "extra_args": ["--tokenizer", "evil/model"]})
        store.wishes.save_spec("loud", {"model": "o/m", "env": {"VLLM_LOGGING_LEVEL": "DEBUG"}})
        store.wishes.save_spec("endless", {"model": "o/m", "extra_args": ["--seed=1"] * (MOST_ARGUMENTS + 1)})
        store.wishes.save_spec("overridden", {"model": "o/m", "extra_args": ["--hf-overrides", json.dumps({"a": 1})]})

        registry = Registry(config, store, lambda: 0.0, lambda: 0.0)

    assert set(registry.records) == {"tuned"}
    assert all(name in caplog.text for name in ("elsewhere", "loud", "endless", "overridden"))
    assert "evil" not in caplog.text


def added(**keys: Any) -> ModelConfig:
    return parse_model("m", {"model": "o/m", **keys}, over_admin=True)


@pytest.mark.parametrize(
    "key", ["revision", "dtype", "kv_cache_dtype", "quantization", "load_format", "tool_call_parser", "reasoning_parser"]
)
def test_the_value_of_a_key_is_no_flag(key: str) -> None:
    for value in ("--trust-remote-code", "-q", "a\x1b[2J", "a\u202eb"):
        with pytest.raises(ConfigError):
            added(**{key: value})
