"""What ranks share before they load: two real processes in one tensor-parallel group."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.support.waiting import HUNG_S

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


def test_one_rank_measures_and_the_other_gets_its_figures(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RANK, str(tmp_path / "store")]
    children = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True, cwd=ROOT) for rank in (0, 1)]
    try:
        answers = [json.loads(child.communicate(timeout=HUNG_S)[0].splitlines()[-1]) for child in children]
    finally:
        for child in children:
            child.kill()
    assert answers == [[[0], 256.0], [[], 256.0]]
