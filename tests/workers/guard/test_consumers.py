"""How the GPU of a node with an engine is asked, whatever kind of NVIDIA GPU it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from workers.guard import consumers
from workers.guard.consumers import DEVICE_COMMAND, DEVICE_EVERY_S, DEVICE_TIMEOUT_S, GPU_COMMAND, Holders, gpu_of
from workers.host.bounded_child import ProgramOutput

DRAWN = {"gpu_power_w": 120.4, "gpu_busy_percent": 97.0, "gpu_celsius": 41.0}


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("120.40, 97, 41\n", DRAWN),
        ("120.40, 97, 41\n88.00, 0, 30\n", DRAWN),
        ("11.17, 0, 35", {"gpu_power_w": 11.17, "gpu_busy_percent": 0.0, "gpu_celsius": 35.0}),
        ("[N/A], 97, 41", {"gpu_busy_percent": 97.0, "gpu_celsius": 41.0}),
        ("120.40, [N/A], [Unknown Error]", {"gpu_power_w": 120.4}),
        (
            "4.31, 96, 71, 2411, 0x0000000000000064, NVIDIA GB10",
            {
                "gpu_power_w": 4.31,
                "gpu_busy_percent": 96.0,
                "gpu_celsius": 71.0,
                "gpu_clock_mhz": 2411.0,
                "gpu_throttled": ["sw_power_cap", "sw_thermal_slowdown", "hw_thermal_slowdown"],
                "gpu_name": "NVIDIA GB10",
            },
        ),
        (
            "71.65, 0, 36, 345, 0x0000000000000001, NVIDIA H100 80GB HBM3",
            {
                "gpu_power_w": 71.65,
                "gpu_busy_percent": 0.0,
                "gpu_celsius": 36.0,
                "gpu_clock_mhz": 345.0,
                "gpu_throttled": [],
                "gpu_name": "NVIDIA H100 80GB HBM3",
            },
        ),
        ("[N/A], [N/A], [N/A], [N/A], [N/A], [N/A]", {}),
        ("", {}),
        ("No devices were found", {}),
    ],
    ids=["one GPU", "the first of two", "a GB10", "no power", "MIG", "held down", "idle", "it tells nothing", "nothing", "no GPU"],
)
def test_what_nvidia_smi_says_of_the_first_gpu(text: str, values: dict[str, object]) -> None:
    assert gpu_of(text) == values


@pytest.mark.parametrize("unified", [True, False])
def test_any_gpu_is_asked_for_its_power_load_and_temperature(unified: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of each process is asked only where it is the host's."""
    holders, commands, seen = Holders(str(tmp_path), unified=unified), [], []

    def ask(command: tuple[str, ...], timeout_s: float) -> ProgramOutput:
        commands.append(command)
        seen.append(holders.gpu)
        return ProgramOutput("120.40, 97, 41" if command == GPU_COMMAND else "")

    monkeypatch.setattr(consumers, "ask", ask)
    monkeypatch.setattr(consumers, "rank_ids", lambda run_dir: ["m-1"])
    holders.refresh(100.0)

    assert commands == [*([DEVICE_COMMAND] if unified else []), GPU_COMMAND]
    assert (holders.gpu, holders.device_trouble) == (DRAWN, None)

    holders.refresh(100.0 + DEVICE_EVERY_S)
    assert seen[len(seen) // 2 :] == [DRAWN] * (len(seen) // 2), "the last values stay while nvidia-smi works: a scrape finds them"


@pytest.mark.parametrize(
    "answer", [ProgramOutput("", "nvidia-smi failed"), ProgramOutput("", missing=True)], ids=["it fails", "it is gone"]
)
def test_an_answer_that_does_not_come_leaves_no_old_values(answer: ProgramOutput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumers, "rank_ids", lambda run_dir: ["m-1"])
    monkeypatch.setattr(consumers, "ask", lambda command, timeout_s: answer)
    holders = Holders(str(tmp_path), unified=False)
    holders.gpu = DRAWN
    holders.refresh(100.0)

    assert holders.gpu == {}
    assert DEVICE_TIMEOUT_S < DEVICE_EVERY_S
