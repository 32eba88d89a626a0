"""Which of vLLM's arguments and variables are refused. The list of flags is that of a real release."""

import pytest

from sparkd.errors import ConfigError
from sparkd.recipes.admin_flags import refuse_flags, refuse_variables
from sparkd.vllm.arg_check import FLAGS_FILE
from sparkd.vllm.reserved_args import owned_args, owned_env
from tests.support.facts import lacking


def release() -> list[tuple[str, list[str]]]:
    lines = [line.split() for line in FLAGS_FILE.read_text().splitlines() if not line.startswith("#")]
    return [(line[0], line[1:]) for line in lines]


def owned(args: list[str]) -> bool:
    return bool(list(owned_args(args)))


def test_every_flag_of_the_release_has_its_place() -> None:
    flags = release()
    assert {kind for kind, _ in flags} >= {"owned"}
    for kind, spellings in flags:
        for spelling in spellings:
            long = spelling.startswith("--")
            for attempt in (spelling, f"{spelling}=x", *(("--" + spelling[2:].replace("-", "_"),) if long else ())):
                assert owned(["--seed=0", attempt]) == (kind == "owned" or not long), attempt
            for attempt in (f"{spelling}.key=1", f"{spelling}.list+=1", f"{spelling}+=1"):
                assert owned(["--seed=0", attempt]), attempt


@pytest.mark.parametrize(
    "args",
    [
        ["--host", "0.0.0.0"],
        ["-n2"],
        ["--ssl-a-flag-of-tomorrow"],
        ["--seed", "0", "--"],
        ["--seed=0", "evil/model"],
    ],
)
def test_refused(args: list[str]) -> None:
    assert owned(args)


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["--max-model-len", "-1"],
        ["--hf-overrides", '{"host": "--host"}'],
        ["--a-flag-of-tomorrow"],
        ["--lora-modules", "a=/loras/a", "b=/loras/b"],
    ],
)
def test_passes(args: list[str]) -> None:
    assert not owned(args)


@pytest.mark.parametrize(
    ("word", "full"),
    [
        ("-sc", "--speculative-config"),
        ("-O3", "--optimization-level"),
        ("-q=fp8", "--quantization"),
        ("-cc.mode", "--compilation-config"),
        ("--limit-mm-per-prompt.image", '--limit-mm-per-prompt and one JSON object, {"image": ..}'),
    ],
)
def test_a_flag_that_is_not_in_full_is_refused_with_what_to_write(word: str, full: str) -> None:
    ((_, message),) = owned_args(["--seed", "0", word])
    assert full in message


def test_the_message_has_flag_reason_and_cure_and_no_value() -> None:
    ((index, message),) = owned_args(["--seed", "0", "--api-key=sk-canary"])

    assert index == 2
    assert lacking(message, "'--api-key'", "extra_args", "'keys:'") == []
    with pytest.raises(ConfigError) as caught:
        refuse_flags(["--middleware=sk-canary"])
    assert "canary" not in str(caught.value)
    assert lacking(str(caught.value), "configuration file") == []


@pytest.mark.parametrize(
    ("name", "owned"),
    [
        ("VLLM_API_KEY", True),
        ("RAY_ADDRESS", True),
        ("SPARKD_RANK", True),
        ("SPARKD_STUB_DELAY", False),
        ("HF_TOKEN", False),
    ],
)
def test_owned_environment(name: str, owned: bool) -> None:
    assert [found for found, _ in owned_env([name])] == ([name] if owned else [])


@pytest.mark.parametrize(
    "name",
    ["LD_PRELOAD", "VLLM_PLUGINS", "NCCL_NET_PLUGIN", "HF_TOKEN", "SPARKD_STUB_DELAY", "VLLM_LOGGING_LEVEL"],
)
def test_environment_over_admin_is_a_list_of_what_may_pass(name: str) -> None:
    with pytest.raises(ConfigError):
        refuse_variables([name])
    refuse_variables(["OMP_NUM_THREADS", "VLLM_CPU_KVCACHE_SPACE"])
