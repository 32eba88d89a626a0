"""A Pipeline by the names of all its options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from workers.load.pipeline import Needed, Pipeline, Receivers
from workers.load.reader import Reader
from workers.load.virtual import VirtualCheckpoint


def pipeline_of(virtual: VirtualCheckpoint, device: torch.device, reader: Callable[..., Reader], **options: Any) -> Pipeline:
    needed = {name: options.pop(name) for name in ("regions", "once", "for_model") if name in options}
    receivers = {name: options.pop(name) for name in ("sink", "watcher", "direct_targets") if name in options}
    return Pipeline(virtual, device, reader, Needed(**needed), Receivers(**receivers), **options)
