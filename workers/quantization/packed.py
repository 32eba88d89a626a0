"""Maps experts that a checkpoint packs into one tensor [experts, ., .] to single weights and vLLM's names for them. Imports no torch.

Three layouts are known. Most models keep gate behind up in one matrix and vLLM takes the experts one by one (`experts.0.gate_proj.weight`).
gpt-oss interleaves their rows, has biases, and its class takes both halves as one (`experts.0.w13_weight`, models/gpt_oss.py of 0.32,
`_get_streamed_expert_info`). Granite calls the first `block_sparse_moe.input_linear` and the second `output_linear`, and vLLM takes them
under the names of the first layout (models/granitemoehybrid.py, `get_expert_mapping`; models/granitemoe.py of 0.32).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from sparkd.checkpoint import Checkpoint, TensorRef, text_config
from sparkd.errors import CheckpointError

_PACKED = re.compile(r"((?:.*\.)?experts)\.(gate_up_proj|down_proj)(?:\.weight)?$")
_GRANITE = re.compile(r"((?:.*\.)?block_sparse_moe)\.(input_linear|output_linear)(?:\.weight)?$")
_WHICH = {"input_linear": "gate_up_proj", "output_linear": "down_proj"}
# Joins a module's path and a suffix such as `weight_scale` where vLLM's parameter belongs to the experts, not to a module.
JOINED = "_"
_JOINED_NAMES = {"gate_up_proj": "w13", "down_proj": "w2"}


@dataclass(frozen=True, slots=True)
class Packed:
    """The parts of a packed tensor's name.

    module: its path, the key of its format.
    experts: vLLM's path of the experts.
    which: gate_up_proj or down_proj.
    upright: its matrices are known to be [N, K], as in torch's linear layers.
    """

    module: str
    experts: str
    which: str
    upright: bool = False


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """One weight of a packed tensor: matrix number `expert`, or `row_count` rows of its [N, K] form from `row_start` on.

    transposed: the matrix is stored as [K, N].
    joint: the text between `module` and a part's suffix.
    """

    module: str
    expert: int
    transposed: bool
    row_start: int = 0
    row_count: int | None = None
    joint: str = "."


def packed_of(name: str) -> Packed | None:
    """The parts of the name of a three-dimensional tensor, or of its module; None for an unknown layout."""
    module = name.removesuffix(".weight")
    if match := _PACKED.match(name):
        return Packed(module, match[1], match[2])
    if match := _GRANITE.match(name):
        return Packed(module, f"{match[1]}.experts", _WHICH[match[2]], upright=True)
    return None


def in_vllm(module: str) -> str:
    """vLLM's path for a module of packed experts (`..block_sparse_moe.experts.gate_up_proj`); any other path unchanged."""
    packed = packed_of(module)
    return module if packed is None else f"{packed.experts}.{packed.which}"


def packed_weights(ref: TensorRef, packed: Packed, checkpoint: Checkpoint) -> list[PackedWeight]:
    """The weights of a packed tensor. packed: the parts of its name.

    The shape and the model's hidden size H decide whether a matrix is transposed: [2I, H] and [H, I] are torch's linear layout, [H, 2I]
    and [I, H] its transpose. A square one has the orientation of its sibling. Raises CheckpointError where none of this decides.
    """
    experts, which = packed.experts, packed.which
    transposed = not packed.upright and _transposed(ref, which, checkpoint)
    count, rows, cols = ref.shape
    if is_interleaved(checkpoint, experts):
        return [PackedWeight(f"{experts}.{expert}.{_JOINED_NAMES[which]}", expert, transposed, joint=JOINED) for expert in range(count)]
    if which == "down_proj":
        return [PackedWeight(f"{experts}.{expert}.down_proj", expert, transposed) for expert in range(count)]
    half = (cols if transposed else rows) // 2
    return [
        PackedWeight(f"{experts}.{expert}.{name}", expert, transposed, start, half)
        for expert in range(count)
        for name, start in (("gate_proj", 0), ("up_proj", half))
    ]


def is_interleaved(checkpoint: Checkpoint, experts: str) -> bool:
    """Whether these are gpt-oss's experts: packed, with a bias beside each packed tensor."""
    return checkpoint.config.get("model_type") == "gpt_oss" and f"{experts}.gate_up_proj_bias" in checkpoint.tensors


def _transposed(ref: TensorRef, which: str, checkpoint: Checkpoint) -> bool:
    _, rows, cols = ref.shape
    hidden = text_config(checkpoint.config).get("hidden_size")
    if hidden not in (rows, cols):
        raise CheckpointError(
            f"packed experts of shape {list(ref.shape[-2:])} each do not have the model's hidden size {hidden}",
            file=ref.path,
            tensor=ref.name,
            cure="Keep them as they are: add 'experts' to `keep`",
        )
    stands = _stands_transposed(ref, which, hidden)
    if stands is None:  # square: gate_up_proj and down_proj of one layer stand the same way, and only one of them can be square
        other = "down_proj" if which == "gate_up_proj" else "gate_up_proj"
        sibling = checkpoint.tensors.get(ref.name.replace(which, other))
        stands = None if sibling is None or len(sibling.shape) != 3 else _stands_transposed(sibling, other, hidden)
    if stands is None:
        raise CheckpointError(
            "packed experts whose blocks are square do not say which way round they stand",
            file=ref.path,
            tensor=ref.name,
            cure="Keep them as they are: add 'experts' to `keep`",
        )
    return stands


def _stands_transposed(ref: TensorRef, which: str, hidden: int) -> bool | None:
    """Whether a packed matrix is the transpose of torch's linear layout; None where it is square."""
    _, rows, cols = ref.shape
    return None if rows == cols else (cols if which == "gate_up_proj" else rows) != hidden
