"""The exception tree of sparkd and the one error body that users see.

* SparkdError
  x ConfigError                 the configuration file, an environment variable or a flag is wrong
  x StateError                  the state directory or its database cannot be used
  x CheckpointError             a checkpoint that cannot be read, quantized or cached as it is
    - CheckpointIncomplete      a part of it is not there
    - CheckpointUncounted       its weights are in files that only an engine reads
    - CheckpointUnread          the system or its hub did not give a file's bytes: another try may
  x MissingSymbol               a release of vLLM that lacks what the plugin needs
  x ClusterError                Ray or a node
    - RayUnavailable            Ray cannot be started or joined
    - AgentLost                 a node's agent does not answer
    - CodeDiffers               a node has another sparkd than the daemon's, so its agent is not used
    - HubUnreachable            a model is not on this machine, and its hub gave no answer
    - DoesNotFit                no node has the unified memory that was asked for
      - NoRoom                  and one would, without the models that are there
        . MemoryReturns         and one will, once memory of an engine that ended is back
    - NodeRefused               a node's system would not: a full disk, a read-only folder, no more descriptors
    - RankError                 a rank could not be started, found or stopped
      - LoadRefused             its loader would not take the checkpoint in that format
      - ModelUnusable           the entry's path or id is missing or is no model: its owner must fix it
  + RequestError                4xx: the caller can fix it
    - BadRequest 400            - Unauthorized 401         - Forbidden 403
    - NotFound 404              - RouteNotServed 404
      . UnknownModel 404        . UnknownRoute 404
    - MethodNotAllowed 405      - RequestTimeout 408       - Conflict 409
    - RequestCancelled 410
    - BodyTooLarge 413          - UnsupportedMediaType 415 - TooManyRequests 429
      . UnsupportedEncoding 415
    - HeadersTooLarge 431       - NoToolParser 400         - UpgradeNotServed 426
  + Unavailable 503             try again later; carries Retry-After
    - ModelLoading              the model is on its way; carries a loading object
    - ModelFailed               the model failed and waits for its next try
      . ModelCannotLoad 424     another try does not help
    - Draining                  the daemon or the model is going down
  + EngineError 502             the engine broke the exchange
    - EngineGone                its socket is closed or it died
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

# In the body of an error: a list of 20 problems has some 4,000.
MOST_MESSAGE_CHARS = 8000


class SparkdError(Exception):
    """Root of the tree. `status` is the HTTP status, `type` and `code` are the OpenAI fields, `exit_code` is the command line's.

    reason: what conditions and code compare (sparkd.condition); without it the name of the class.
    param: the key of the request or the entry that it is about, dotted below a section.
    message: for the operator, who reads it in the log, the admin API and the command line; of errors that clients cause, for them.
    client_message: the part of an error of the daemon's that a client may read, or None. It names no path of this machine and no token.
    explanation: the message without the file or tensor that it begins with.
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str] = "internal_error"
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, reason: str | None = None, param: str | None = None, client_message: str | None = None) -> None:
        super().__init__(message)
        self.message = self.explanation = message
        self.reason = reason or type(self).__name__
        self.param = param
        self.client_message = client_message

    @property
    def clause(self) -> str:
        """The message for a longer sentence: without its full stop."""
        return clause(self.message)

    def headers(self) -> dict[str, str]:
        """Extra response headers, lower-case names."""
        return {}

    def extra(self) -> dict[str, Any]:
        """Members that stand beside `error` in the body."""
        return {}


def clause(sentence: str) -> str:
    """Without its full stop, for a longer sentence."""
    return sentence.rstrip(".")


class ConfigError(SparkdError):
    """A configuration that cannot be used. The message begins with `file:line:` where both are known."""

    status = 422
    type = "invalid_request_error"
    code = "invalid_config"
    exit_code = 2

    def __init__(self, message: str, *, file: str | None = None, line: int | None = None, param: str | None = None) -> None:
        place = f"{file}:{line}: " if file and line else f"{file}: " if file else ""
        super().__init__(place + message, param=param)
        self.explanation = message
        self.file = file
        self.line = line


class CheckpointError(SparkdError):
    """A checkpoint, or one tensor of it, that cannot be used. The message names the file, the tensor and the cure, where they are known."""

    status = 422
    type = "invalid_request_error"
    code = "checkpoint_unusable"
    exit_code = 2

    def __init__(self, message: str, *, file: str | None = None, tensor: str | None = None, cure: str | None = None) -> None:
        place = ": ".join(part for part in (file, tensor) if part)
        explanation = f"{clause(message)}." + (f" {clause(cure)}." if cure else "")
        super().__init__(f"{place}: {explanation}" if place else explanation, param="model")
        self.explanation = explanation
        self.problem = message
        self.file = file
        self.tensor = tensor
        self.cure = cure


class CheckpointIncomplete(CheckpointError):
    """A part of it is not there: a download that broke off, or goes on."""


class CheckpointUncounted(CheckpointError):
    """Its weights are in files that sparkd does not read. An engine may serve them all the same."""


class CheckpointUnread(CheckpointError):
    """The system or the hub did not give a file's bytes. It says nothing of what the file holds, and another try may get them."""


class MissingSymbol(SparkdError):
    """A release of vLLM lacks a symbol that sparkd uses. The message names it, the release and the cure; `symbol` is its dotted name."""

    status = 422
    code = "engine_unsupported"

    def __init__(self, message: str, *, symbol: str) -> None:
        super().__init__(message)
        self.symbol = symbol


class StateError(SparkdError):
    code = "state_unusable"
    exit_code = 3


class ClusterError(SparkdError):
    status = 503
    code = "cluster_error"
    exit_code = 4


class RayUnavailable(ClusterError):
    code = "ray_unavailable"


class AgentLost(ClusterError):
    """reached: the call may have come to it, and may be under way; False where it surely did not."""

    code = "agent_lost"

    def __init__(self, message: str, *, reached: bool = True) -> None:
        super().__init__(message)
        self.reached = reached


class CodeDiffers(ClusterError):
    code = "code_differs"


class HubUnreachable(ClusterError):
    code = "hub_unreachable"


class DoesNotFit(ClusterError):
    """lasts: no node in sight could hold it if it were empty, so that only another entry or another node helps."""

    code = "does_not_fit"

    def __init__(self, message: str, *, lasts: bool = False, reason: str | None = None) -> None:
        super().__init__(message, reason=reason)
        self.lasts = lasts


class NoRoom(DoesNotFit):
    """`gib` on each of `nodes` nodes were asked for. only: the one node that the model can be on, None where any will do."""

    def __init__(self, message: str, gib: int, nodes: int, only: str | None = None) -> None:
        super().__init__(message)
        self.gib = gib
        self.nodes = nodes
        self.only = only


class MemoryReturns(NoRoom):
    """The memory is booked for no model, but not free yet."""


class NodeRefused(ClusterError):
    """It may go well another time: room on a disk comes back."""

    code = "node_refused"


class RankError(ClusterError):
    code = "rank_error"


class LoadRefused(RankError):
    """Raised before an engine is started, because the loader would fail for the same reason."""


class ModelUnusable(RankError):
    code = "model_unusable"


# A model that failed so does not exist, or cannot be reached.
ABSENT = frozenset(kind.__name__ for kind in (HubUnreachable, ModelUnusable))


def refused_by(error: OSError, who: str) -> NodeRefused:
    """The error for a call that a node's system refused, with the file that the system names. who: "Node X", or another name for it."""
    of = f" ({error.filename})" if error.filename else ""
    reason = error.strerror or str(error) or type(error).__name__
    message = f"{who} refused the call: {reason}{of}. Run `df` and `sparkd doctor` there; sparkd tries again."
    return NodeRefused(message)


class RequestError(SparkdError):
    status = 400
    type = "invalid_request_error"
    code = "bad_request"
    exit_code = 5


class BadRequest(RequestError):
    pass


class UpgradeNotServed(RequestError):
    """A WebSocket. Clients that have another way, such as Codex, take it after a 426."""

    status = 426
    code = "upgrade_not_served"

    def headers(self) -> dict[str, str]:
        return {"upgrade": "HTTP/1.1", "connection": "upgrade, close"}  # RFC 9110 15.5.22


class Unauthorized(RequestError):
    """Missing and wrong keys give the identical body, so the message is fixed."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"
    exit_code = 6

    def __init__(self) -> None:
        super().__init__("A valid API key is needed: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'.")

    def headers(self) -> dict[str, str]:
        return {"www-authenticate": "Bearer"}


class Forbidden(RequestError):
    status = 403
    type = "permission_error"
    code = "forbidden"
    exit_code = 6


class NotFound(RequestError):
    status = 404
    type = "not_found_error"
    code = "not_found"


class UnknownModel(NotFound):
    code = "model_not_found"

    def __init__(self, name: str, known: list[str]) -> None:
        shown = ", ".join(sorted(known)[:20]) or "none is configured"
        super().__init__(f"The model {name[:128]!r} is not known here. Known models: {shown}.", param="model")


class UnknownRoute(NotFound):
    code = "route_not_found"


class RouteNotServed(RequestError):
    """A path that the model has not, such as chat of an embedding model. tasks: what it is for, None where only its engine knows."""

    status = 404
    code = "route_not_served"

    def __init__(self, model: str, path: str, tasks: frozenset[str] | None) -> None:
        paths = "; ".join(_PATHS_OF[task] for task in sorted(tasks or ()) if task in _PATHS_OF)
        cure = f"Ask it at {paths}" if paths else "GET /v1/models lists the other models"
        super().__init__(f"The model {model} does not answer {path}: the model has another task. {cure}.", param="model")


_PATHS_OF = {
    "generate": "/v1/chat/completions, /v1/completions, /v1/responses or /v1/messages",
    "pool": "/v1/embeddings, /rerank, /score, /classify or /pooling, depending on its task",
    "transcribe": "/v1/audio/transcriptions or /v1/audio/translations",
}


class NoToolParser(RequestError):
    """A request with tools for a model whose engine has no parser of tool calls. nearest: the one to try."""

    code = "no_tool_parser"

    def __init__(self, model: str, nearest: str | None) -> None:
        cure = f"Set `tool_call_parser: {nearest}`" if nearest else "Set `tool_call_parser`"
        super().__init__(
            f"The model {model} has no parser for tool calls, because none is known for its family and chat template, or its entry says "
            f"none. {cure} in the model's entry of sparkd.yaml, or send the request without tools.",
            param="tools",
        )


class RequestCancelled(RequestError):
    """An operator ended the request. No status that clients retry by themselves: that would undo what the operator did."""

    status = 410
    type = "cancelled_error"
    code = "request_cancelled"

    def __init__(self) -> None:
        super().__init__("An operator of this server cancelled the request. Ask the operator before you send it again.")


class MethodNotAllowed(RequestError):
    status = 405
    code = "method_not_allowed"

    def __init__(self, method: str, allowed: list[str]) -> None:
        super().__init__(f"The method {method[:16]} is not allowed here; allowed: {', '.join(allowed)}.")
        self.allowed = allowed

    def headers(self) -> dict[str, str]:
        return {"allow": ", ".join(self.allowed)}


class RequestTimeout(RequestError):
    status = 408
    code = "request_timeout"


class Conflict(RequestError):
    status = 409
    code = "conflict"


class BodyTooLarge(RequestError):
    status = 413
    code = "body_too_large"


class UnsupportedMediaType(RequestError):
    status = 415
    code = "unsupported_media_type"


class UnsupportedEncoding(UnsupportedMediaType):
    """By its header clients tell it from a wrong media type, and send the body again in another encoding (RFC 9110 12.5.3)."""

    def headers(self) -> dict[str, str]:
        return {"accept-encoding": "gzip, zstd, identity"}


class HeadersTooLarge(RequestError):
    status = 431
    code = "headers_too_large"


class TooManyRequests(RequestError):
    status = 429
    type = "rate_limit_error"
    code = "too_many_requests"

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s

    def headers(self) -> dict[str, str]:
        return {"retry-after": str(self.retry_after_s)}


class Unavailable(SparkdError):
    """held_by: where memory is what lacks, who holds it: rows with model, node, memory_gib, state, in_flight, queued, idle_seconds."""

    status = 503
    code = "unavailable"
    exit_code = 7

    def __init__(self, message: str, *, retry_after_s: int = 5, held_by: Sequence[dict[str, Any]] = ()) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.held_by = list(held_by)

    def extra(self) -> dict[str, Any]:
        return {"held_by": self.held_by} if self.held_by else {}

    def headers(self) -> dict[str, str]:
        return {"retry-after": str(self.retry_after_s)}


class ModelLoading(Unavailable):
    """`loading` has model, state and, where they are known, progress (0 to 1), bytes_done, bytes_total, bytes_per_second, eta_seconds."""

    type = "model_loading"
    code = "model_loading"

    def __init__(self, message: str, *, loading: dict[str, Any], retry_after_s: int = 5, held_by: Sequence[dict[str, Any]] = ()) -> None:
        super().__init__(message, retry_after_s=retry_after_s, held_by=held_by)
        self.loading = loading

    def extra(self) -> dict[str, Any]:
        return {"loading": self.loading, **super().extra()}


class ModelFailed(Unavailable):
    code = "model_failed"
    exit_code = 8


class ModelCannotLoad(ModelFailed):
    """The server is to blame, yet a status of 4xx: many programs ask again after every 5xx, whatever its headers say."""

    status = 424

    def headers(self) -> dict[str, str]:
        return {}


class Draining(Unavailable):
    code = "draining"


class EngineError(SparkdError):
    status = 502
    code = "engine_error"


class EngineGone(EngineError):
    code = "engine_gone"


# Where the scope of a request to the admin API has the id that the gateway gave it.
REQUEST_ID = "sparkd.request_id"
# Where the admin API leaves the asynchronous generators of what an answer goes on with: the gateway sends their texts. A list.
LATER = "sparkd.later"


def error_body(error: SparkdError, request_id: str | None = None) -> dict[str, Any]:
    """The OpenAI error envelope. `src` tells a client that sparkd, not the model's engine, is speaking. A message that repeats a long
    value keeps its beginning and its end, which is the cure."""
    message, most = error.message, MOST_MESSAGE_CHARS
    fields: dict[str, Any] = {
        "message": message if len(message) <= most else f"{message[: most // 2]} ... {message[-most // 2 :]}",
        "type": error.type,
        "param": error.param,
        "code": error.code,
        "src": "sparkd",
    }
    if request_id:
        fields["request_id"] = request_id
    return {"error": fields, **error.extra()}


def message_of_body(body: object) -> str:
    """The message of an error body, of ours or of another server's; empty without one."""
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("message") or "") if isinstance(error, dict) else str(error or "")
