"""How the fabric looks: each node with its cages and twins, the cables between nodes, findings with their cure."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from sparkd.render.page import all_printable, date
from sparkd.render.table import Table
from sparkd.units import GIB

# A Spark's two sockets, as seen from behind it.
PLACES = {0: "beside the RJ45 socket", 1: "the outer one"}
_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}
_WRAP = 110


def fabric(report: Mapping[str, Any], console: Console) -> None:
    """Print a report of `sparkd.fabric.report.report`."""
    report = all_printable(report)
    double, single = ("══", "──") if console.encoding in ("utf-8", "utf8") else ("==", "--")
    for node in report["nodes"]:
        _node(node, report["cables"], console, double)
    if report["cables"]:
        console.print(Text.assemble(("Cables", "bold"), f"  ({report['topology']})"))
        for cable in report["cables"]:
            _cable(cable, console, double, single)
        console.print()
    _rates(report.get("rates", ()), console)
    offers(report.get("offered", ()), console)
    findings(report["findings"], console)


def nodes(report: Mapping[str, Any], console: Console) -> None:
    """`sparkd nodes`: what `GET /admin/v1/nodes` answers."""
    report = all_printable(report)
    sizes = ("MEMORY", "FREE", "LENT", "HELD")
    table = Table("NODE", "AGENT", *sizes, right=sizes, spare=("LENT",))
    for node in report["nodes"]:
        reading = node["reading"] or {}
        agent = Text("answers", style="green") if node["agent"] else Text("does not answer", style="red")
        amounts = (reading.get("mem_total_bytes"), reading.get("mem_available_bytes"))
        lent = node["unified_memory_gib"]
        table.add(
            node["address"] + (" (daemon)" if node["local"] else ""),
            agent,
            *("-" if amount is None else f"{amount / GIB:.1f} GiB" for amount in amounts),
            "-" if lent is None else f"{lent:g} GiB",
            f"{node['reserved_gib']:g} GiB",
        )
    table.show(console)
    offers(report["offered"], console, report["head"])


def offers(machines: Iterable[Mapping[str, Any]], console: Console, head: str | None = None) -> None:
    """Print the machines that could join.

    head: Ray's address of the head; no machine can join a head on loopback.
    """
    ready = head is not None and not head.startswith("127.")
    how = f"`sparkd join {head}` there" if ready else "`sparkd join` there (`sparkd token` here prints the command)"
    for machine in all_printable(list(machines)):
        console.print(Text(f"offered  {machine['told']}, not joined: run {how}", style="cyan"))


def environment(report: Mapping[str, Any], console: Console) -> None:
    """Each node's variables as a shell takes them, the reason below as a comment."""
    for node, settings in all_printable(report["environment"]).items():
        console.print(Text(f"# {node}", style="bold"), soft_wrap=True)
        for setting in settings:
            if setting["value"] is None:
                console.print(Text(f"# {setting['name']} stays unset", style="dim"), soft_wrap=True)
            else:
                console.print(Text(f"{setting['name']}={shlex.quote(setting['value'])}"), soft_wrap=True)
            source = "" if setting["source"] == "computed" else f"{setting['source']}, "
            width = min(console.width, _WRAP) if console.is_terminal else console.width
            reason = textwrap.fill(source + setting["reason"], width, initial_indent="#   ", subsequent_indent="#   ")
            console.print(Text(reason, style="dim"), soft_wrap=True)
        console.print()


def _node(node: Mapping[str, Any], cables: Iterable[Mapping[str, Any]], console: Console, double: str) -> None:
    console.print(Text.assemble((node["node"], "bold"), f"  {node['host']}" if node["host"] != node["node"] else ""))
    if not node["cages"]:
        console.print("  no ConnectX-7 on the PCI bus: no cable is plugged, or the card is off", style="dim")
    for cage in node["cages"]:
        line = Text(f"  {cage['label']}", style="bold" if cage["linked"] else "dim")
        line.append(f", {PLACES[cage['number']]}" if cage["number"] in PLACES else "", style="dim")
        ends = _far_ends(node["node"], cage["label"], cables)
        empty = ", no cable" if all(twin["up"] for twin in cage["twins"]) else ", switched off"
        line.append(f" {double}{double} {', '.join(ends)}" if ends else "" if cage["linked"] else empty)
        console.print(line)
        if cage["linked"]:
            _twins(cage["twins"], console)
    _others("LAN", node["lan"], console)
    _others("Wi-Fi", node["wifi"], console)
    console.print()


def _twins(twins: Iterable[Mapping[str, Any]], console: Console) -> None:
    table = Table(*[""] * 6)
    for twin in twins:
        state = "" if twin["carrier"] and twin["up"] else "off" if not twin["up"] else "no link"
        rdma = twin["rdma"] or "no RDMA"
        if twin["rdma"] and twin["rdma_state"] != "ACTIVE":
            rdma += f" {twin['rdma_state']}"
        addresses = " ".join(twin["addresses"]) or "no address"
        gid = "" if twin["gid_index"] is None else f"GID {twin['gid_index']}"
        table.add(f"     {twin['name']}", rdma, state or _speed(twin), f"MTU {twin['mtu']}", addresses, gid)
    table.show(console)


def _others(title: str, interfaces: Iterable[Mapping[str, Any]], console: Console) -> None:
    for interface in interfaces:
        live = interface["up"] and interface["carrier"]
        shown = f"{_speed(interface)} {' '.join(interface['addresses']) or 'no address'}" if live else "not connected"
        console.print(Text(f"  {title:<5}  {interface['name']}  {shown.strip()}", style="" if live else "dim"))


def _far_ends(node: str, label: str, cables: Iterable[Mapping[str, Any]]) -> list[str]:
    ends = []
    for cable in cables:
        for near, far in (("a", "b"), ("b", "a")):
            if (cable[near], cable[f"{near}_cage"]) == (node, label):
                ends.append(f"{cable[far]} {cable[f'{far}_cage']}")
    return ends


def _cable(cable: Mapping[str, Any], console: Console, double: str, single: str) -> None:
    ends = f"  {cable['a']} {cable['a_cage']} {double}{double} {cable['b_cage']} {cable['b']}"
    console.print(Text.assemble(ends, ("" if cable["seen"] else "  (by subnets, not seen yet)", "dim")))
    table = Table(*[""] * 4)
    for rail in cable["rails"]:
        word = rail["problem"] or ("RDMA" if rail["rdma"] else "sockets only")
        style = "red" if rail["problem"] else "green" if rail["rdma"] else "yellow"
        table.add(f"     {rail['a']}", f"{single} {rail['b']}", rail["network"], Text(word, style=style))
    if cable["rails"]:
        table.show(console)
    else:
        console.print("    no subnet in common", style="red")


def _rates(rates: Iterable[Mapping[str, Any]], console: Console) -> None:
    """The rates that were measured between two nodes, beside what is normal."""
    for rate in rates:
        when = date(rate["at_s"])
        beside = f" ({rate['normal_gb_s']} is normal)" if rate["normal_gb_s"] else ""
        line = Text(f"Measured  {rate['a']} - {rate['b']}  {rate['gb_s']:.2f} GB/s{beside}", style=_STYLES[rate["verdict"]])
        console.print(line.append(f"  {rate['network'] or 'sockets'}, {when}", style="dim"))


def findings(rows: Iterable[Mapping[str, Any]], console: Console) -> None:
    """Worst first; what is fine and needs nothing is one line for each node."""
    rows = all_printable(list(rows))
    table = Table("", "", folds={""})
    fine: dict[str, list[str]] = {}
    listed = []
    for finding in rows:
        if finding["verdict"] == "ok" and not finding["cure"]:
            fine.setdefault(finding["node"], []).append(finding["check"])
        else:
            listed.append(finding)
    for finding in sorted(listed, key=lambda finding: ("fail", "warn", "ok").index(finding["verdict"])):
        names = dict.fromkeys((finding["node"], finding["about"], finding["check"]))
        text = Text(f"{', '.join(names)}: {finding['evidence']}")
        text.append(f"\n{finding['cure']}", style="dim" if finding["verdict"] == "ok" else "italic")
        table.add(Text(finding["verdict"], style=_STYLES[finding["verdict"]]), text)
    for node, checks in fine.items():
        table.add(Text("ok", style=_STYLES["ok"]), f"{node}: {', '.join(dict.fromkeys(checks))}")
    table.show(console, _WRAP if console.is_terminal else None)


def _speed(interface: Mapping[str, Any]) -> str:
    speed = interface["speed_mbps"]
    if not speed:
        return ""
    return f"{speed / 1000:g}G" if speed >= 1000 else f"{speed}M"
