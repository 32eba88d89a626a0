"""So many requests of so many tokens with drafts: vLLM's own scheduler never has to preempt one for want of a block."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparkd.capacity.kv_cache import KvLayout, Serving, sized
from tests.support.late import Late
from workers.kv.arithmetic import CacheCosts
from workers.kv.request import CacheRequest
from workers.kv.settings import CacheSettings
from workers.vllm.kv.costs import lookahead_of

arg_utils, interface, outputs = (Late(f"vllm.{name}") for name in ("engine.arg_utils", "v1.kv_cache_interface", "v1.outputs"))
BLOCK_TOKENS, MAX_MODEL_LEN = 16, 512
SEQUENCES = 3
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "vocab_size": 64,
    "max_position_embeddings": MAX_MODEL_LEN,
}


@pytest.fixture
def config(tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    """Of an engine with so many drafts by n-grams."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    drafts = request.param
    return arg_utils.EngineArgs(
        model=str(tmp_path),
        skip_tokenizer_init=True,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=SEQUENCES,
        max_num_batched_tokens=2048,
        block_size=BLOCK_TOKENS,
        enforce_eager=True,
        enable_prefix_caching=False,
        speculative_config={"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_max": 3} if drafts else None,
    ).create_engine_config()


def preempted(config: Any, blocks: int, at: int, *, ahead: bool, written: int, drafts: int) -> int:
    """How often, while SEQUENCES requests that begin at once come to `at` tokens; no draft is ever right. ahead: a step begins before the
    result of the one before is there."""
    kind = Late("vllm.v1.core.sched.async_scheduler").AsyncScheduler if ahead else Late("vllm.v1.core.sched.scheduler").Scheduler
    spec = interface.FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=16, dtype=torch.float32)
    cache = interface.KVCacheConfig(blocks, kv_cache_tensors=[], kv_cache_groups=[interface.KVCacheGroupSpec(["layer"], spec)])
    config.cache_config.num_gpu_blocks = blocks
    scheduler = kind(config, cache, Late("vllm.v1.structured_output").StructuredOutputManager(config), BLOCK_TOKENS)
    scheduler.num_lookahead_tokens = written
    for number in range(SEQUENCES):
        wish = Late("vllm").SamplingParams(max_tokens=at - 8, ignore_eos=True)
        wish.update_from_generation_config({}, 1)
        scheduler.add_request(Late("vllm.v1.request").Request(str(number), [5] * 8, wish, None))
    counted, flying = 0, list[Any]()
    for _ in range(4 * at):
        if not scheduler.has_requests():
            return counted
        step = scheduler.schedule()
        counted += len(step.preempted_req_ids or ())
        flying.append(step)
        if ahead and len(flying) < 2:
            continue
        done = flying.pop(0)
        ids = list(done.num_scheduled_tokens)
        places = {one: place for place, one in enumerate(ids)}
        output = outputs.ModelRunnerOutput(req_ids=ids, req_id_to_index=places, sampled_token_ids=[[7]] * len(ids))
        scheduler.update_from_output(done, output)
        if drafts and not ahead:
            scheduler.update_draft_token_ids(outputs.DraftTokenIds(ids, [[9] * drafts] * len(ids)))
    raise AssertionError("they never ended")


CASES = [
    (drafts, ahead, written, at)
    for drafts in (0, 4)
    for ahead in (False, True)
    for written in ((0, drafts) if drafts else (0,))
    for at in (64, 65)
]


@pytest.mark.parametrize(("config", "ahead", "written", "at"), CASES, indirect=["config"])
def test_no_request_waits_for_a_block_and_none_is_too_many(config, ahead, written, at):
    config.scheduler_config.async_scheduling = ahead
    drafts = config.num_speculative_tokens
    counted = SimpleNamespace(
        speculative_config=config.speculative_config, scheduler_config=config.scheduler_config, num_lookahead_tokens=written
    )

    def of(tokens: int) -> int:
        return -(-tokens // BLOCK_TOKENS)

    whole = of(MAX_MODEL_LEN)
    need = CacheCosts(whole, whole + 1, MAX_MODEL_LEN, of=of, lookahead=lookahead_of(counted))
    wanted = CacheRequest(CacheSettings(sequences=SEQUENCES, at=at), lambda: 0).asked(need)
    assert wanted is not None
    serving = Serving(MAX_MODEL_LEN, batches_in_flight=1 + ahead, speculative_tokens=drafts, draft_layers=bool(written))
    layout = KvLayout(1, ((BLOCK_TOKENS, None, False),), serving)
    assert sized({"sequences": SEQUENCES, "at": at}, layout, MAX_MODEL_LEN) == wanted, "the plan counts as the worker does"

    named = {"ahead": ahead, "written": written, "drafts": drafts}
    assert preempted(config, wanted, at, **named) == 0
    # Without drafts the last token, which is never read, is counted as vLLM counts a request's length.
    assert not drafts or preempted(config, wanted - 1, at, **named) > 0


def test_no_request_has_slots_beyond_the_longest():
    need = CacheCosts(32, 33, 512, of=lambda tokens: -(-tokens // 16), lookahead=9)
    assert [CacheRequest(CacheSettings(sequences=2, at=at), lambda: 0).asked(need) for at in (496, 504, 512, None)] == [65, 65, 65, 65]
