"""The account of an entry as the tests ask for it: parsed and with its headers read, then counted as sparkd.capacity does."""

from __future__ import annotations

from collections.abc import Mapping

from sparkd.capacity import account as accounts
from sparkd.capacity import advice as advices
from sparkd.capacity import entry_faults
from sparkd.capacity.account import Account, candidate_of, candidates_of, machine
from sparkd.capacity.estimate import kv_layout
from sparkd.capacity.evidence import NOTHING, Evidence, Ways
from sparkd.capacity.headers import headers_here
from sparkd.capacity.kv_cache import KvCost, Serving
from sparkd.capacity.requirement import Requirement
from sparkd.checkpoint.shape import Shape
from sparkd.config.engine_args import decided, engine_args
from sparkd.config.model import ModelConfig
from sparkd.errors import CheckpointError
from sparkd.hardware import Hardware
from sparkd.units import GIB

Env = Mapping[str, str]


def account(
    spec: ModelConfig,
    hardware: Hardware,
    env: Env,
    evidence: Evidence = NOTHING,
    ways: Ways = (1, 1),
    *,
    guesses: bool = False,
) -> Account | None:
    args = engine_args(spec, env)
    headers = headers_here(args)
    candidate = None if headers is None else candidate_of(args, headers)
    return None if candidate is None else accounts.account(candidate, hardware, evidence, ways, guesses=guesses)


def resolved(
    spec: ModelConfig,
    hardware: Hardware,
    env: Env,
    free_bytes: int,
    *,
    beside: bool = False,
) -> ModelConfig:
    args = engine_args(spec, env)
    headers = headers_here(args)
    candidates = () if headers is None else candidates_of(args, headers, beside=beside)
    if not candidates:
        return decided(spec, args.undecided())
    return decided(spec, accounts.resolved(candidates, hardware, free_bytes).args)


def advice(spec: ModelConfig, hardware: Hardware, env: Env, offered_bytes: int, ways: Ways = (1, 1)) -> str:
    args = engine_args(spec, env)
    return advices.advised(advices.advice(args, headers_here(args), hardware, offered_bytes, ways))


def too_large(need: Requirement, most_gib: int, where: str = "this node") -> str | None:
    refusal = advices.too_large(need, most_gib, where)
    return None if refusal is None else refusal.message


def needed_gib(
    spec: ModelConfig, platform: str, node_gib: float, env: Env, offered_gib: float | None = None, known: Account | None = None
) -> int:
    return accounts.needed_gib(engine_args(spec, env), machine(platform, int(node_gib * GIB), 0), offered_gib, known)


def needing(spec: ModelConfig, platform: str, gib: int, known: Account | None, ways: Ways = (1, 1)) -> Requirement:
    """On a node of 121.6 GiB."""
    args = engine_args(spec, {})
    return Requirement(spec, args, machine(platform, int(121.6 * GIB), 0), "x", gib, known, ways=ways, headers=headers_here(args))


def kv_cost(shape: Shape, serving: Serving) -> KvCost:
    return kv_layout(shape, serving).cost(serving.max_model_len)


def fault(spec: ModelConfig, env: Env) -> CheckpointError | None:
    return entry_faults.file_fault(engine_args(spec, env))
