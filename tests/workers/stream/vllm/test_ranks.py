"""What ranks share before they load: in one tensor-parallel group of threads here, and of two real processes under `make test-all`."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.support.waiting import HUNG_S
from workers.stream.vllm import ranks

ROOT = Path(__file__).resolve().parents[4]
RANK = """
import json, sys, warnings
warnings.simplefilter("ignore")
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from workers.stream.input_scales import InputScales
from workers.stream.vllm.ranks import of_first_rank

store, rank = sys.argv[1], int(sys.argv[2])
made = []

def make():
    made.append(rank)
    return InputScales({"model.layers.0.self_attn.q_proj": 3.0})

with set_current_vllm_config(VllmConfig()):
    init_distributed_environment(2, rank, f"file://{store}", rank, "gloo")
    initialize_model_parallel(2, 1)
    scales = of_first_rank(make)
print(json.dumps([made, scales.of("model.layers.0.self_attn.q_proj")]))
"""


class Group:
    """As much of vLLM's group as ranks use: each thread is a rank by its name, and gets what the first one hands out."""

    def __init__(self) -> None:
        self.handed: queue.Queue[object] = queue.Queue()

    @property
    def rank_in_group(self) -> int:
        return int(threading.current_thread().name)

    def broadcast_object(self, value: object) -> object:
        if self.rank_in_group == 0:
            self.handed.put(value)
            return value
        assert value is None
        return self.handed.get()


def test_the_first_rank_makes_it_and_the_other_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    group, made, got = Group(), [], {}
    monkeypatch.setattr(ranks, "symbol", lambda _module, _name: lambda: group)

    def rank() -> None:
        name = threading.current_thread().name
        got[name] = ranks.of_first_rank(lambda: made.append(name) or f"made by {name}")

    threads = [threading.Thread(target=rank, name=str(number)) for number in (1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (made, got) == (["0"], {"0": "made by 0", "1": "made by 0"})


@pytest.mark.rest
def test_one_rank_measures_and_the_other_gets_its_figures(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RANK, str(tmp_path / "store")]
    children = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True, cwd=ROOT) for rank in (0, 1)]
    try:
        answers = [json.loads(child.communicate(timeout=HUNG_S)[0].splitlines()[-1]) for child in children]
    finally:
        for child in children:
            child.kill()
    assert answers == [[[0], 256.0], [[], 256.0]]
