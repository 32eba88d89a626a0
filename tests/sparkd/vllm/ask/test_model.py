"""The answers of the installed vLLM: what the child is asked, what the disk keeps, and what happens when the child will not."""

from __future__ import annotations

import json
import os
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparkd.checkpoint import read_checkpoint
from sparkd.errors import EngineError
from sparkd.vllm.ask.answers import SPARK, ModelAnswer, ModelQuestion
from sparkd.vllm.ask.model import InquiryRuntime, ask
from tests.support.checkpoints import dense, write
from tests.support.kept_answer import kept
from tests.support.published_tensors import tensors_of
from workers.vllm.ask.model_question import DRAFT

LAYER = {
    "name": "model.layers.0.self_attn.attn", "spec": "FullAttentionSpec", "block": 16, "page_bytes": 65536, "token_bytes": 4096.0,
    "window": None, "chunk": None,
}  # fmt: skip
STATE = {"name": "model.layers.1.mixer", "spec": "MambaSpec", "block": 400, "page_bytes": 1000, "state_bytes": 900}
STAGE = {
    "rank": 0, "layers": [LAYER, STATE], "parameters": [["model", "w", [2, 3], "bfloat16"]], "parameter_bytes": 12, "buffer_bytes": 128,
}  # fmt: skip
GROUPS = [{"spec": "FullAttentionSpec", "block": 16, "page_bytes": 65536, "layers": ["model.layers.0.self_attn.attn"]}]
REFUSAL = {"step": "model", "type": "ValueError", "message": "9 heads do not split by 2", "certain": True}
UNSURE = {"step": "model", "type": "Absence", "message": "a kernel is not in this process", "certain": False}
LLAMA = b'{"architectures": ["LlamaForCausalLM"]}'


def answer(**fields: Any) -> dict[str, Any]:
    pool = {"groups": GROUPS, "stages": [{"block_bytes": 66536, "requests": [[1, 66536], [4096, 17000000]]}]}
    whole = {"vllm": "0.32.0", "platform": "cuda:12.1", "stand_in": True, "seconds": 1.0, "refusal": None, "max_model_len": 4096}
    return {**whole, "stages": [STAGE], "cache": pool, **fields}


class Engine(InquiryRuntime):
    """An interpreter with a vLLM beside it, whose program says what it is given here and writes down what it was asked. It puts the places
    of the first question's model and draft for THE FOLDER and THE DRAFT."""

    __slots__ = ()

    def __init__(self, root: Path) -> None:
        (root / "bin").mkdir()
        (root / "lib/python3.12/site-packages/vllm-0.32.0.dist-info").mkdir(parents=True)
        python = root / "bin/python"
        python.write_text(
            f"#!{sys.executable} -S\n"
            "import json, os, pathlib, sys, time\n"
            "root = pathlib.Path(__file__).parent.parent\n"
            "request = json.load(sys.stdin)\n"
            "request['argv'], request['files'] = sys.argv[1:], {}\n"
            "for q in request['questions']:\n"
            "    for p in filter(pathlib.Path.is_file, pathlib.Path(q['folder']).rglob('*')):\n"
            "        request['files'][p.name] = p.open('rb').read(100000).decode(errors='replace')\n"
            "lines = (root / 'lines').read_text().replace('THE FOLDER', request['questions'][0]['folder'])\n"
            "configs = [json.loads(a) for q in request['questions'] for a in q.get('args', []) if a.startswith('{')]\n"
            "drafts = [pathlib.Path(c['model']) for c in configs if c.get('model', '').startswith('/')]\n"
            "lines = lines.replace('THE DRAFT', str(next(iter(drafts), '')))\n"
            "request['drafts'] = {p.name: p.open('rb').read(100000).decode(errors='replace') for d in drafts for p in d.iterdir()}\n"
            "request['environment'] = dict(os.environ)\n"
            "with open(root / 'asked', 'a') as log: log.write(json.dumps(request) + chr(10))\n"
            "print(json.dumps({'progress': 'importing'}), flush=True)\n"
            "for line in json.loads(lines).get(request['platform'], []):\n"
            "    if line == 'wait': (root / 'pid').write_text(str(os.getpid())); time.sleep(3600)\n"
            "    print(line if isinstance(line, str) else json.dumps(line), flush=True)\n"
        )
        python.chmod(0o755)
        super().__init__(python, [root / "kept"])
        self.says()

    @property
    def root(self) -> Path:
        return self.folders[0].parent

    def says(self, **lines: list[Any]) -> None:
        (self.root / "lines").write_text(json.dumps({SPARK if platform == "spark" else platform: said for platform, said in lines.items()}))

    def asked(self) -> list[dict[str, Any]]:
        path = self.root / "asked"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    # vLLM sets some where another test imports it.
    for name in [name for name in os.environ if name.startswith("VLLM_")]:
        monkeypatch.delenv(name)
    return Engine(tmp_path)


def one(**fields: Any) -> ModelQuestion:
    return ModelQuestion(**{"files": {"config.json": LLAMA}, **fields})


def answered(engine: Engine, question: ModelQuestion) -> ModelAnswer:
    (found,) = ask([question], engine)
    assert found is not None
    return found


def test_an_answer_is_asked_once_and_then_read(engine: Engine) -> None:
    engine.says(own=[{"question": 0, "answer": answer()}])
    assert kept(one(), engine) is None
    first = answered(engine, one())
    assert (first, kept(one(), engine)) == (answered(engine, one()), first) and len(engine.asked()) == 1
    (stage,) = first.stages
    attention, state = stage.layers
    assert (attention.token_bytes, attention.block, attention.window) == (4096.0, 16, None)
    assert (state.state_bytes, state.page_bytes) == (900, 1000)
    assert (stage.parameters[0].shape, stage.parameter_bytes, stage.buffer_bytes) == ((2, 3), 12, 128)
    assert (stage.block_bytes, stage.requests, dict(first.facts)) == (66536, ((1, 66536), (4096, 17000000)), {"max_model_len": 4096})


@pytest.mark.parametrize(
    "other",
    [
        {"tensor_parallel": 2},
        {"platform": SPARK},
        {"args": ("--kv-cache-dtype", "fp8")},
        {"env": {"VLLM_USE_V2": "1"}},
        {"files": {"config.json": LLAMA + b" "}},
    ],
)
def test_whatever_matters_is_another_question(engine: Engine, other: dict[str, Any]) -> None:
    engine.says(own=[{"question": 0, "answer": answer()}], spark=[{"question": 0, "answer": answer()}])
    ask([one()], engine)
    assert kept(one(**other), engine) is None


def test_the_front_end_and_its_secrets_are_not_asked_about(engine: Engine) -> None:
    engine.says(own=[{"question": 0, "answer": answer()}])
    secret = ("--api-key", "sk-1234", "--port=8000", "--max-num-seqs", "8", "--served-model-name", "a", "b")
    ask([one(args=secret, env={"VLLM_API_KEY": "sk-1234", "VLLM_X": "1", "PATH": "/x"})], engine)
    (asked,) = engine.asked()
    assert "sk-1234" not in json.dumps(asked)
    assert asked["questions"][0] | {"folder": ""} == {
        "folder": "", "args": ["--max-num-seqs", "8"], "env": {"VLLM_X": "1"}, "tensor_parallel": 1, "pipeline_parallel": 1,
    }  # fmt: skip
    assert asked["files"] == {"config.json": LLAMA.decode()} and asked["argv"] == ["-P", "-m", "workers.vllm.ask.model_answer"]
    assert kept(one(args=("--max-num-seqs=8", "--port", "1"), env={"VLLM_X": "1"}), engine) is not None
    assert kept(one(args=("--max-num-seqs", "8", "--port", "1"), env={"VLLM_X": "1"}), engine) is not None


def test_a_draft_that_changes_is_another_question(engine: Engine, tmp_path: Path) -> None:
    engine.says(own=[{"question": 0, "answer": answer()}])
    (draft := tmp_path / "draft").mkdir()
    (draft / "config.json").write_bytes(LLAMA)
    question = one(args=("--speculative-config", json.dumps({"model": str(draft), "num_speculative_tokens": 2})))
    ask([question], engine)
    assert kept(question, engine) is not None
    (draft / "config.json").write_bytes(LLAMA + b" ")
    assert kept(question, engine) is None


def test_a_draft_that_is_on_no_disk_comes_with_the_question(engine: Engine, tmp_path: Path) -> None:
    shape = dense()
    draft = read_checkpoint(str(write(tmp_path / "draft", shape, tensors_of(shape))))
    args = ("--speculative-config", json.dumps({"method": "eagle", "model": DRAFT, "num_speculative_tokens": 2}))
    model = str(write(tmp_path / "m", shape, tensors_of(shape)))
    for number, question in enumerate((one(args=args), ModelQuestion(folder=Path(model), args=args))):
        engine.says(own=[{"question": 0, "answer": answer()}])
        moved = replace(question, draft=replace(draft, folder="hf://o/draft@0"))
        answered(engine, moved)
        there = engine.asked()[number]
        assert json.loads(there["drafts"]["config.json"]) == draft.config and "model.safetensors" in there["drafts"]
        assert not Path(json.loads(there["questions"][0]["args"][1])["model"]).exists() and kept(moved, engine) is not None
        assert kept(replace(moved, draft=replace(draft, config={**draft.config, "num_hidden_layers": 9})), engine) is None


def test_a_checkpoint_of_its_own_folder_is_read_there(engine: Engine, tmp_path: Path) -> None:
    engine.says(own=[{"question": 0, "answer": answer()}])
    (tmp_path / "config.json").write_bytes(LLAMA)
    question = ModelQuestion(folder=tmp_path)
    ask([question], engine)
    assert engine.asked()[0]["questions"][0]["folder"] == str(tmp_path) and kept(question, engine)
    (tmp_path / "config.json").write_bytes(LLAMA + b" ")
    assert kept(question, engine) is None


def test_another_release_or_plugin_is_asked_anew(engine: Engine) -> None:
    engine.says(own=[{"question": 0, "answer": answer()}])
    ask([one()], engine)
    (engine.root / "lib/python3.12/site-packages/more-1.0.dist-info").mkdir()
    assert kept(one(), engine) is None


def test_a_refusal_is_kept_but_not_a_limit_of_this_machine(engine: Engine) -> None:
    engine.says(own=[{"question": 0, "answer": answer(refusal=REFUSAL, stages=[], cache=None)}])
    found = answered(engine, one())
    assert found.refusal is not None and (found.refusal.type, found.refusal.certain, found.stages) == ("ValueError", True, ())
    assert kept(one(), engine) == found
    slow = {"step": "deadline", "type": "TimeoutError", "message": "no answer within 60 s", "certain": False}
    engine.says(own=[{"question": 0, "answer": answer(refusal=slow, stages=[], cache=None)}])
    assert answered(engine, one(tensor_parallel=2)).refusal is not None and kept(one(tensor_parallel=2), engine) is None


def test_what_the_imitation_of_a_gpu_cannot_say_is_asked_of_no_other_platform(engine: Engine) -> None:
    engine.says(spark=[{"question": 0, "answer": answer(refusal=UNSURE, stages=[], cache=None)}], own=[{"question": 0, "answer": answer()}])
    found = answered(engine, one(platform=SPARK))
    assert found.refusal is not None and not found.refusal.certain and len(engine.asked()) == 1
    assert kept(one(platform=SPARK), engine) == found
    engine.says(spark=[{"failed": "ImportError: no CudaPlatformBase"}], own=[{"question": 0, "answer": answer()}])
    with pytest.raises(EngineError, match="CudaPlatformBase"):
        ask([one(platform=SPARK, tensor_parallel=2)], engine)


def test_a_variable_of_vllm_that_the_asker_has_is_part_of_the_question(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine inherits it, and its entry's own goes before."""
    engine.says(own=[{"question": 0, "answer": answer()}])
    answered(engine, one())
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "HND")
    assert kept(one(), engine) is None
    answered(engine, one(env={"VLLM_KV_CACHE_LAYOUT": "NHD"}))
    assert engine.asked()[-1]["questions"][0]["env"] == {"VLLM_KV_CACHE_LAYOUT": "NHD"}
    assert not any(name.startswith("VLLM_") for name in engine.asked()[-1]["environment"])


@pytest.mark.parametrize("lines", [[{"failed": "ImportError: x"}], ["no json", {"progress": "ready"}]])
def test_no_answer_at_all_is_an_error_that_says_so(engine: Engine, lines: list[Any]) -> None:
    engine.says(own=lines)
    with pytest.raises(EngineError, match="vLLM"):
        ask([one()], engine)


def test_without_vllm_there_is_nobody_to_ask(tmp_path: Path) -> None:
    nobody = InquiryRuntime(tmp_path / "bin/python", [tmp_path / "kept"])
    assert kept(one(), nobody) is None
    with pytest.raises(EngineError, match="no vLLM"):
        ask([one()], nobody)


def test_progress_is_told_and_a_cancelled_child_is_gone(engine: Engine) -> None:
    lines = [{"progress": "asking", "question": 0}, {"question": 0, "answer": answer()}, {"progress": "asking", "question": 1}]
    engine.says(own=[*lines, "wait"])
    cancel, steps = threading.Event(), []

    def progress(step: str, question: int) -> None:
        steps.append((step, question))
        if (step, question) == ("asking", 1):
            cancel.set()

    first, second = ask([one(), one(tensor_parallel=2)], engine, progress=progress, cancel=cancel)
    assert first is not None and second is None
    assert steps == [("importing", -1), ("asking", 0), ("asking", 1)]
    pid = engine.root / "pid"
    assert not pid.exists() or not os.path.exists(f"/proc/{pid.read_text()}")
