"""Downloads a model's files once and copies them to the nodes that lack them."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from sparkd.admin.bodies import ALL, chosen_nodes
from sparkd.admin.jobs import Jobs, Tell, Work, message_of
from sparkd.cluster.cluster import Cluster
from sparkd.config.config import Config
from sparkd.control.journal import Journal
from sparkd.errors import ClusterError, Conflict, RankError, UnknownModel
from sparkd.execution import tool_process
from sparkd.fabric.interfaces import fabrics_of
from sparkd.fabric.links import cables_of
from sparkd.state.nouns import Operation, Progress
from workers.files.manifest import is_loaded, refuse_without_room
from workers.host.hub_cache import cache_places, is_hub_id
from workers.host.interpreter import PACKAGE_DIR, module_command, program_environment

KIND = "pull"
CONNECTIONS = 8
POLL_S = 0.4
ASK_TIMEOUT_S = 30.0
START_TIMEOUT_S = 60.0
# Agents that do not answer for so long have gone, and their copies with them.
SILENT_S = 30.0
RATE_S = 3.0
MOST_NAMES = 4  # of files, in a sentence


class Pulls:
    """Starts a pull as a job, one at a time for each model."""

    def __init__(
        self,
        nodes: Cluster,
        journal: Journal,
        jobs: Jobs,
        config: Callable[[], Config],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._nodes, self._journal, self._jobs = nodes, journal, jobs
        self._config = config
        self._clock = clock
        # By model: the nodes and the revision of its last pull.
        self._requested: dict[str, tuple[list[str], str | None]] = {}

    async def start(self, name: str, nodes: Sequence[str] | str = ALL, revision: str | None = None) -> Operation:
        """Begin a pull, or find the one of this model that is under way.

        Raises UnknownModel, BadRequest for an unknown node, and Conflict if the pull that is under way is to other nodes.
        """
        config = self._config()
        spec, engine = config.lookup(name), config.engine
        if spec is not None:
            model, environ, revision = spec.model, spec.environment(engine), revision or spec.revision
        elif "/" in name and is_hub_id(name):
            model, environ = name, {key: value.get_secret_value() for key, value in engine.env.items()}
        else:
            raise UnknownModel(name, [model.name for model in config.models.values() if not model.unlisted])
        called = spec.name if spec is not None else name
        await self._jobs.wait_for_cancelled(KIND, called)
        chosen = chosen_nodes(nodes, self._nodes.in_sight())
        for operation_id in self._jobs.running(KIND, called):
            earlier_nodes, earlier_revision = self._requested[called]
            if not set(chosen) <= set(earlier_nodes) or earlier_revision != revision:
                problem = f"A pull of {called} to other nodes, or of another revision, is under way: wait for it, or `sparkd cancel"
                raise Conflict(f"{problem} {operation_id}`.")
            return self._journal.operations.find(operation_id)
        self._requested[called] = chosen, revision

        def pull(tell: Tell) -> Awaitable[str]:
            return _Pull(self._nodes, tell, self._clock).run(model, revision, environ, chosen)

        return self._jobs.start(KIND, called, partial(self._log_end, called, pull), remains="Verified files stay.")

    async def _log_end(self, name: str, pull: Work, tell: Tell) -> str:
        """Run a pull, and log an event with its last message."""
        try:
            message = await pull(tell)
        except Exception as error:
            self._journal.say(KIND, name, message_of(error))
            raise
        self._journal.say(KIND, name, message)
        return message


class _Unasked(RankError):
    """The hub did not answer, and this node lacks files of the model. Another node may have all of it."""

    def __init__(self, message: str, why: str) -> None:
        super().__init__(message)
        self.why = why


class _Pull:
    """One pull, from the hub or the node that has the files to every node that shall have them."""

    def __init__(self, nodes: Cluster, tell: Tell, clock: Callable[[], float]) -> None:
        self._nodes, self._tell_progress = nodes, tell
        self._clock = clock
        self._began: tuple[float, int] | None = None

    async def run(self, model: str, revision: str | None, environ: Mapping[str, str], nodes: Sequence[str]) -> str:
        """The outcome, one sentence. Raises ClusterError."""
        places = cache_places(environ)
        commit, note, silent = "", "", None
        if not model.startswith("/"):
            try:
                commit, note = await self._fetch(model, revision, environ)
            except _Unasked as error:
                silent = error
        try:
            source, manifest = await self._source(model, revision, places, nodes, commit)
        except ClusterError as error:
            raise silent or error from None
        if silent is not None:
            note = f"The hub was not contacted ({silent.why}); what {source} has is complete."
        targets = [node for node in nodes if node != source]
        size = sum(file["size"] for file in manifest["files"])
        where = f"{model} ({size / 1e9:.2f} GB)"
        if not targets:
            return f"{where} is on {source}. {note}".strip()
        for node in targets:
            await self._check_room(node, model, manifest, places)
        began_s = self._clock()
        ended = await self._copy(source, targets, manifest, places)
        fetched = sum(int(state["fetched_bytes"]) for state in ended.values())
        took_s = max(self._clock() - began_s, 1e-3)
        note = " ".join(filter(None, (note, *(_left_over(node, source, state) for node, state in ended.items()))))
        sent = f"{fetched / 1e9:.2f} GB were copied in {took_s:.1f} s ({fetched / took_s / 1e9:.2f} GB/s)"
        return f"{where} is on {', '.join([source, *targets])}: {sent if fetched else 'nothing was missing'}. {note}".strip()

    async def _fetch(self, model: str, revision: str | None, environ: Mapping[str, str]) -> tuple[str, str]:
        """Download on this node, and return the commit and a note if the hub could not be asked.

        Raises RankError with the download's reason, and _Unasked.
        """
        quiet = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        env = {**program_environment(os.environ), **environ, **quiet, "PYTHONPATH": PACKAGE_DIR}
        event: dict[str, Any] = {}

        async def heard(line: bytes) -> None:
            event.clear()
            event.update(json.loads(line))
            if "done_bytes" in event:
                self._tell("fetching from the hub", int(event["done_bytes"]), int(event["total_bytes"]))

        order = json.dumps({"hub_id": model, "revision": revision}).encode() + b"\n"
        command = module_command(sys.executable, "sparkd.checkpoint.download")
        try:
            # Its library's words may hold an address with a signature, so sparkd reads none of them.
            await tool_process.run(f"The download of {model}", command, env, Path(os.devnull), heard, order)
        except RankError as error:
            raise RankError(f"{error.clause}. Run the same command again to resume.") from None
        if "unasked" in event:
            raise _Unasked(str(event["error"]), str(event["unasked"]))
        if "error" in event:
            raise RankError(str(event["error"]))
        return str(event["commit"]), str(event["note"])

    async def _source(
        self, model: str, revision: str | None, places: Mapping[str, str], nodes: Sequence[str], commit: str
    ) -> tuple[str, dict[str, Any]]:
        """The node to copy from, and its manifest: the node that has most of the model, this one among equals.

        A copy that differs from this node's whole one does not count: the model was made anew here, and an older copy would overwrite it or
        leave its shards beside the new ones.

        commit: what was fetched to this node; an earlier one on another may be larger.
        """
        candidates = list(dict.fromkeys([self._nodes.node_ip, *nodes, *self._nodes.in_sight()]))
        asking = (self._nodes.ask(node, "staged", model, revision, dict(places), timeout_s=ASK_TIMEOUT_S) for node in candidates)
        answers = dict(zip(candidates, await asyncio.gather(*asking, return_exceptions=True), strict=True))
        there = {node: dict(files) for node, files in answers.items() if isinstance(files, Mapping) and files["files"]}
        own = self._nodes.node_ip
        if fetched := {node: files for node, files in there.items() if commit and files["commit"] == commit}:
            there = {node: files | {"partial": node != own and files.get("partial")} for node, files in fetched.items()}
        whole = {node: files for node, files in there.items() if not files.get("partial")}
        if ours := whole.get(own):
            whole = {node: files for node, files in whole.items() if not _differ(files, ours)}
        if whole:
            source = max(whole, key=lambda node: sum(file["size"] for file in whole[node]["files"]))
            return source, whole[source]
        for failed in answers.values():
            if isinstance(failed, BaseException):
                raise failed
        if there:
            problem = f"{model} is only on {', '.join(there)}, where a copy of it was interrupted"
            raise RankError(f"{problem}: bring back the node that it came from, or use a hub id (owner/name).")
        raise RankError(f"{model} is on none of {', '.join(candidates)}: check the path, or use a hub id (owner/name).")

    async def _check_room(self, node: str, model: str, manifest: Mapping[str, Any], places: Mapping[str, str]) -> None:
        answer = await self._nodes.ask(node, "lacking", dict(manifest), dict(places), timeout_s=ASK_TIMEOUT_S)
        try:
            refuse_without_room(model, answer)
        except RankError as error:
            raise RankError(f"{node}: {error.message}") from None

    async def _copy(
        self, source: str, targets: Sequence[str], manifest: Mapping[str, Any], places: Mapping[str, str]
    ) -> dict[str, Mapping[str, Any]]:
        """The last state of each target's program. Every program that was started is ended, whatever happens."""
        key = secrets.token_hex(32)
        ways = {node: await self._ways(source, node) for node in targets}
        binds = sorted({there for node_ways in ways.values() for there, _ in node_ways})
        started: list[tuple[str, str]] = []
        try:
            serving = await self._start(source, "source", {"manifest": dict(manifest), "binds": binds, "key": key}, places)
            started.append((source, serving["job"]))
            for node in targets:
                own = [[here, there, serving["ports"][there]] for there, here in ways[node]]
                order = {"manifest": dict(manifest), "ways": own, "key": key, "connections": CONNECTIONS}
                started.append((node, (await self._start(node, "sink", order, places))["job"]))
            return await self._watched(source, started)
        finally:
            await asyncio.shield(self._end(started))

    async def _start(self, node: str, program: str, order: Mapping[str, Any], places: Mapping[str, str]) -> dict[str, Any]:
        return dict(await self._nodes.ask(node, "copy", program, dict(order), dict(places), timeout_s=START_TIMEOUT_S))

    async def _watched(self, source: str, started: Sequence[tuple[str, str]]) -> dict[str, Mapping[str, Any]]:
        sinks, states = started[1:], dict[str, Mapping[str, Any]]()
        while True:
            for node, job in started:
                state = await self._nodes.ask(node, "job_state", job, timeout_s=SILENT_S)
                if "error" in state:
                    raise RankError(f"{node}: {state['error']}")
                if node != source:
                    states[node] = state
            done, total = (sum(int(state.get(name, 0)) for state in states.values()) for name in ("done_bytes", "total_bytes"))
            self._tell(f"copying from {source} to {', '.join(node for node, _ in sinks)}", done, total)
            if all(state.get("ended") for state in states.values()):
                return states
            await asyncio.sleep(POLL_S)

    async def _end(self, started: Iterable[tuple[str, str]]) -> None:
        for node, job in started:
            with suppress(ClusterError):
                await self._nodes.ask(node, "end_job", job, timeout_s=ASK_TIMEOUT_S)

    async def _ways(self, source: str, target: str) -> list[tuple[str, str]]:
        """(address of the source, address of the target) of every sound rail between them; the nodes' own addresses without one."""
        readings = {node: raw for node, raw in (await self._nodes.fabric()).items() if raw is not None and not raw["trouble"]}
        pairs = []
        if source in readings and target in readings:
            a, b = fabrics_of({source: readings[source], target: readings[target]}).values()
            for cable in cables_of([a, b]):
                for rail in cable.sound(rdma=False):
                    ends = [next((str(own.ip) for own in end.addresses if own.network == rail.network), None) for end in (rail.a, rail.b)]
                    if ends[0] and ends[1]:
                        pairs.append((ends[0], ends[1]))
        return pairs or [(source, target)]

    def _tell(self, what: str, done: int, total: int) -> None:
        now_s = self._clock()
        if self._began is None or done < self._began[1]:
            self._began = (now_s, done)
        spent_s, moved = now_s - self._began[0], done - self._began[1]
        rate = moved / spent_s if spent_s >= RATE_S and moved else None
        eta_s = (total - done) / rate if rate and total > done else None
        fraction = done / total if total else None
        progress = Progress(phase="copying", fraction=fraction, bytes_done=done, bytes_total=total, bytes_per_s=rate, eta_s=eta_s)
        self._tell_progress(what, progress)


def _left_over(node: str, source: str, state: Mapping[str, Any]) -> str:
    """Sentences about weights on a node that the source lacks."""
    sentences = []
    if removed := state.get("removed"):
        sentences.append(f"Removed from {node}, where an earlier pull put it, because {source} no longer has it: {_some(removed)}.")
    if left := state.get("left"):
        cure = "move or remove them there, or an engine may load them too"
        sentences.append(f"{node} has weights that {source} lacks, and no pull put them there: {_some(left)}; {cure}.")
    return " ".join(sentences)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:MOST_NAMES]) + (f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else "")


def _differ(copy: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether `copy` is another model than `other`: a file that both have differs in size, or a folder has weights beside the other's whole
    set. Files that are left over from an earlier copy do not count."""
    sizes = {file["name"]: file["size"] for file in other["files"]}
    own = {name for name in sizes if is_loaded(name)}
    more = any(is_loaded(file["name"]) and file["name"] not in own for file in copy["files"])
    if more and own and not other.get("lacks") and other["commit"] is None:
        return True
    return any(sizes.get(file["name"], file["size"]) != file["size"] for file in copy["files"])
