"""The parts of an admin API under test: those that a test gives, and for the others something that answers nothing."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

from sparkd.admin.app import Parts
from sparkd.admin.starts import Starts


def parts_of(**given: Any) -> Parts:
    absent = SimpleNamespace(starts=Starts(), rates=SimpleNamespace(all=list))
    return Parts(**({part.name: absent for part in fields(Parts)} | given))
