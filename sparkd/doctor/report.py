"""The doctor's report: each node's findings, what differs between nodes, failed models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sparkd.condition import Condition
from sparkd.config.config import Config
from sparkd.doctor import memory, storage, system
from sparkd.doctor.host import Host
from sparkd.fabric.checks import FAIL, OK, WARN, Finding, unanswered, worst
from sparkd.state.model_state import ModelState
from sparkd.state.snapshot import ModelView


@dataclass(frozen=True, slots=True)
class Report:
    """The doctor's findings.

    nodes: those that answered.
    """

    nodes: list[str]
    findings: tuple[Finding, ...]
    verdict: str


def report(readings: Mapping[str, Mapping[str, Any] | None], models: Iterable[Finding] = ()) -> Report:
    """
    readings: by a node's name, what `workers.host.inspection.sample` answered; None without an answer.
    models: findings on failed models.
    """
    hosts = [Host(name, raw) for name, raw in readings.items() if raw is not None]
    silent = [name for name, raw in readings.items() if raw is None]
    findings = (
        *map(unanswered, silent),
        *(finding for host in hosts for part in (system, memory, storage) for finding in part.findings(host)),
        *_differences(hosts),
        *models,
    )
    return Report([host.name for host in hosts], findings, worst(findings))


def examined(
    readings: Mapping[str, Mapping[str, Any] | None],
    config: Config,
    views: Iterable[ModelView],
    unguarded: Iterable[Condition] = (),
) -> Report:
    """The report of a running daemon: with the time-outs that it waits for, nodes that no memory guard watches, and its failed models."""
    start_s = {"health_check_timeout_s": config.health_check_timeout_s}
    start_s |= {f"models.{name}": config.start_deadline_s(model) for name, model in config.models.items() if model.health_check_timeout_s}
    with_limits = {name: raw and {**raw, "start_s": start_s} for name, raw in readings.items()}
    absent = [Finding("guard", FAIL, condition.node or "this node", "memory guard", condition.message) for condition in unguarded]
    failed = [
        Finding("model", FAIL, view.node or "this node", view.name, view.reason or "failed", view.message or "")
        for view in views
        if view.state is ModelState.FAILED
    ]
    return report(with_limits, absent + failed)


def _differences(hosts: list[Host]) -> Iterator[Finding]:
    """Nodes that share a model must run the same: kernels and drivers come in pairs, and a plugin of another build reads other weights."""
    if len(hosts) < 2:
        return
    everyone = " - ".join(host.name for host in hosts)
    for about, of, cure in (
        ("kernel", lambda host: host.text("proc/sys/kernel/osrelease").strip(), "Boot the same kernel everywhere."),
        ("driver", lambda host: host.gpu[1] if len(host.gpu) > 1 else "", "Install the same driver everywhere."),
        ("sparkd", lambda host: str(host.raw.get("plugin") or ""), "Install the same sparkd everywhere: their builds differ."),
        ("vllm", lambda host: str(host.raw.get("vllm") or ""), "Install the same vLLM everywhere."),
    ):
        values = {host.name: of(host) for host in hosts if of(host)}
        evidence = ", ".join(f"{name} {value}" for name, value in values.items())
        if len(set(values.values())) > 1:
            yield Finding("equal", FAIL if about in ("sparkd", "vllm") else WARN, everyone, about, evidence, cure)
        elif len(values) > 1:
            yield Finding("equal", OK, everyone, about, evidence)
