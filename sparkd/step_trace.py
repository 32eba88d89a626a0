"""Owns the course of the largest step: what vLLM's layers take and give back, in order, and what torch keeps of it. Never measures.

Read from vLLM 0.26 (vllm/model_executor/models and layers): a frame of Python holds what its names stand for, so the model's loop holds a
layer's input until its output is there, and a layer holds a block's. The most that an H200 hands out, beside cuBLAS's workspace, is met
exactly: of a dense model three rows of `hidden` and three of the MLP's inner width, of Gemma 3 without a compiler nineteen of `hidden`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

from sparkd.caching_allocator import MIB, Block, CachingAllocator
from sparkd.kv_cost import DRAFTED_REQUESTS, Serving
from sparkd.model_shape import Attention, State, text_config
from sparkd.weight_cost import Inventory

# cuBLAS's own workspace, from torch's allocator, as torch sets it for Hopper and later (aten/src/ATen/cuda/CublasHandlePool.cpp,
# parseChosenWorkspaceSize: 8 times 4 MiB).
CUBLAS_BYTES = 32 * MIB
# Rows of logits that prompt log-probabilities are computed for at a time (workers/kv/prompt_logprobs.py).
LOGPROB_ROWS = 128
# Their norms multiply by one plus a weight in float32, which vLLM's kernel does not take: torch's own operations do it, each with a result
# of its own (layernorm.py, GemmaRMSNorm; vllm/ir/ops/layernorm.py).
_FLOAT_NORMS = ("Gemma", "Qwen3Next", "Qwen3_5")
# Norms behind each block too.
_SANDWICHED = ("Gemma2", "Gemma3", "Gemma4")
# Steps after which nothing more is reserved; the layers of a model repeat, and so does what they leave.
STEPS, MOST_LAYERS = 2, 12
# The rows of the sampler's kernel, which keeps a row of float32 for each request, of at most so many processors
# (v1/sample/ops/topk_topp_triton.py).
PROCESSORS = 132
# No width of a published model comes near it.
_MOST = 1 << 24
# Tokens that a scan of states has in one piece, where the configuration has no word on it (fla/ops/chunk.py; Mamba2Config.chunk_size).
_DELTA_CHUNK, _MAMBA_CHUNK = 64, 256


def reserved_bytes(inventory: Inventory, serving: Serving, *, eager: bool, quantized: bool = False) -> int:
    """The most bytes that torch reserves for steps of max_num_batched_tokens, beside weights and cache; reckoned once for each kind of
    step.

    eager: without a compiler, which makes one kernel of what is done in float32 and keeps none of it. quantized: whether linear layers
    multiply by kernels of their own.
    """
    key = serving.max_num_batched_tokens, serving.max_num_seqs, _sampled(serving), serving.tensor_parallel, eager, quantized
    if key not in inventory.steps:
        step = Step(inventory, serving, eager=eager, quantized=quantized)
        step.start()
        for _ in range(STEPS):
            step.run()
        inventory.steps[key] = step.allocator.reserved
    return inventory.steps[key] + context_bytes(inventory, serving)


def context_bytes(inventory: Inventory, serving: Serving) -> int:
    """Latent attention multiplies the latent vectors of earlier tokens into keys and values of all heads, so many at a time
    (mla_attention.py, determine_chunked_prefill_workspace_size and _compute_prefill_context), and keeps a place to gather them in."""
    shape = inventory.shape
    latent = next((one for one in shape.mixers if isinstance(one, Attention) and one.latent), None)
    if latent is None:
        return 0
    tokens = max(min(8 * serving.max_model_len, 64 << 10), serving.max_num_seqs)
    nope, rotary, value = _latent(text_config(inventory.checkpoint.config))
    heads = max(1, shape.heads // serving.tensor_parallel)
    return tokens * shape.dtype_bytes * (heads * (nope + value + nope + rotary) + latent.key_dim)


class Step:
    """One engine's steps, one after the other. allocator: what they leave."""

    def __init__(self, inventory: Inventory, serving: Serving, *, eager: bool, quantized: bool = False) -> None:
        shape = inventory.shape
        self.allocator = CachingAllocator()
        self._shape, self._serving, self._eager = shape, serving, eager
        self._text = text_config(inventory.checkpoint.config)
        self._tokens, self._ranks, self._width = serving.max_num_batched_tokens, serving.tensor_parallel, shape.dtype_bytes
        self._routed = {part.layer for part in inventory.parts if part.kind == "expert"}
        # Nemotron-H: a layer is one block, a mixer or an MLP.
        self._single = bool(self._text.get("hybrid_override_pattern"))
        self._floats = eager and shape.architecture.startswith(_FLOAT_NORMS)
        self._sandwiched = shape.architecture.startswith(_SANDWICHED)
        self._workspace: Block | None = None
        self._cublas: Block | None = None
        self._buffer: Block | None = None
        self._quantized = quantized
        # Before there is a cache, layers with states have nothing to scan, and each of them tries its kernels once.
        self._profiling, self._tried = False, 0
        self._stateful = sum(isinstance(one, State) and not one.key_heads for one in shape.mixers[:MOST_LAYERS])

    def start(self) -> None:
        """The steps before the first request: vLLM profiles itself, one batch is rehearsed with attention, all that nothing holds is given
        back, and the warm-up runs once more without a cache's states.

        With shared experts the first small batch asks for vLLM's stream beside the main one, and with that the main one becomes a stream of
        its own (utils/torch_utils.py, current_stream): nothing that is free until then is used again, and cuBLAS has a workspace for each.
        """
        self._profiling = True
        self.run()
        self.allocator.release()
        self._profiling = False
        self.run()
        self.allocator.release()
        if self._shared_width():
            self._take(CUBLAS_BYTES)
            self.allocator.switch()
            self._cublas = None
        self._profiling = True
        self.run()
        self._profiling = False

    def run(self) -> None:
        """From the embedding to the sampled tokens."""
        hidden, residual = self._row(self._shape.hidden), None
        if self._shape.architecture.startswith("Gemma"):  # whose embeddings are multiplied
            embedded, hidden = hidden, self._row(self._shape.hidden)
            self._free(embedded)
        for blocks in self._blocks():
            hidden, residual = self._layer(hidden, residual, blocks)
        if self._floats and residual is not None:
            normed, other = self._add_float_norm(self._shape.hidden)
            self._free(other, hidden, residual)
            hidden, residual = normed, None
        if residual is not None and residual is not hidden:
            self._free(residual)
        self._sample()
        self._free(hidden)

    def _blocks(self) -> Iterator[list[Callable[[], Block]]]:
        """The steps of each layer in order."""
        for number, mixer in islice(enumerate(self._shape.mixers), MOST_LAYERS):
            feeds = self._experts if number in self._routed else self._mlp
            mixes: Callable[[], Block] | None = None
            if isinstance(mixer, State):
                mixes = lambda mixer=mixer: self._delta(mixer) if mixer.key_heads else self._mamba(mixer)  # noqa: E731
            elif mixer is not None:
                mixes = lambda mixer=mixer: self._mla(mixer) if mixer.latent else self._attention(mixer)  # noqa: E731
            if self._single:
                yield [feeds if mixes is None else mixes]
            else:
                yield [feeds] if mixes is None else [mixes, feeds]

    def _layer(self, hidden: Block, residual: Block | None, blocks: list[Callable[[], Block]]) -> tuple[Block, Block]:
        """(hidden, residual). The model's own frame holds both of the layer's inputs until it returns."""
        held = [one for one in (hidden, residual) if one is not None]
        x = hidden
        for block in blocks:
            if residual is None:
                residual, x = x, self._norm(self._shape.hidden)
            elif self._floats:
                normed, added = self._add_float_norm(self._shape.hidden)
                self._free(*(one for one in (x, residual) if one not in held))
                x, residual = normed, added
            y = block()
            if x not in held:
                self._free(x)
            x = y
            if self._sandwiched:
                x = self._norm(self._shape.hidden)
                self._free(y)
        if residual is None:
            residual = hidden
        self._free(*(one for one in held if one is not residual and one is not x))
        return x, residual

    def _attention(self, mixer: Attention) -> Block:
        heads, own = self._shape.heads // self._ranks, max(1, mixer.heads // self._ranks)
        query = heads * mixer.key_dim
        qkv = self._row(query + own * (mixer.key_dim + mixer.value_dim))
        self._multiply()
        held = [qkv]
        if self._floats:
            held += [self._norm(query), self._norm(own * mixer.key_dim)]
        held.append(self._row(heads * mixer.value_dim))
        out = self._row(self._shape.hidden)
        self._free(*held)
        return out

    def _mla(self, mixer: Attention) -> Block:
        nope, rotary, value = _latent(self._text)
        heads = max(1, self._shape.heads // self._ranks)
        rank = _number(self._text, "q_lora_rank")
        held = [self._row(rank + mixer.key_dim)]
        self._multiply()
        if rank:
            held.append(self._row(rank))
        held += [self._row(heads * (nope + rotary)), self._row(mixer.key_dim - rotary), self._row(heads * value)]
        # Keys and values of all heads, keys once more with their rotary part, and the kernel's result.
        inner = [self._row(heads * (nope + value)), self._row(heads * (nope + rotary)), self._row(heads * value)]
        self._free(*inner)
        out = self._row(self._shape.hidden)
        self._free(*held)
        return out

    def _mamba(self, state: State) -> Block:
        """mamba_mixer2.py and mamba/ops/ssd_combined.py; states in float32."""
        heads, channels = state.heads // self._ranks, state.channels // self._ranks
        groups = max(1, state.groups // self._ranks)
        convolved = channels + 2 * groups * state.group_size
        projected = self._row(channels + convolved + heads)
        self._multiply()
        mixed = self._row(channels)
        if self._profiling:
            if self._tried < self._stateful:
                self._tried += 1
                self.allocator.release()
            self._free(self._row(convolved))
        else:
            self._scan(state, heads, groups, convolved)
        if groups > 1 and self._eager:
            # Only one group has a kernel of its own (Mixer2RMSNormGated).
            gate = self._row(2 * channels)
            silu = self._row(2 * channels)
            self._free(gate)
            x = self._row(2 * channels)
            self._free(silu)
            self._free(self._row(2 * channels))
            grouped = self._row(2 * channels)
            self._free(x)
            narrow = self._row(channels)
            self._free(grouped)
            normed = self._row(channels)
            self._free(narrow)
        else:
            normed = self._row(channels)
        out = self._row(self._shape.hidden)
        self._free(projected, mixed, normed)
        return out

    def _scan(self, state: State, heads: int, groups: int, convolved: int) -> None:
        after = self._row(convolved)
        # The state of each request that goes on, and zeros for the others.
        each = 4 * self._requests() * heads * state.rows * state.columns
        gathered = self._take(each)
        begun = self._take(each)
        self._free(gathered)
        size = _number(self._text, "chunk_size", "mamba_chunk_size") or _MAMBA_CHUNK
        pieces = self._pieces(size)
        steps = [self._take(4 * heads * pieces * size), self._take(4 * heads * pieces * size)]
        states = self._take(4 * pieces * heads * state.rows * state.columns)
        passed = self._take(4 * pieces * heads * state.rows * state.columns)
        self._free(states)
        products = self._take(4 * pieces * groups * size * size)
        ended = self._take(each)
        self._free(*steps, passed, products, after, begun, ended)

    def _delta(self, state: State) -> Block:
        """mamba/gdn/qwen_gdn_linear_attn.py and flash_linear_attention/ops/chunk.py: its projections, their parts in order, and of the
        chunked rule triangles, their inverse, and a matrix for each piece."""
        heads, keys = state.heads // self._ranks, max(1, state.key_heads // self._ranks)
        values, width = heads * state.rows, keys * state.columns
        projected = [self._row(2 * width + 2 * values), self._row(2 * heads)]
        self._multiply()
        mixed, core, after = self._row(2 * width + values), self._row(values), self._row(2 * width + values)
        inner = [self._row(width), self._row(width), self._row(values), self._take(12 * self._tokens * heads)]
        inner.append(self._take(4 * self._requests() * heads * state.rows * state.columns))
        triangles = self._take(4 * self._tokens * heads * _DELTA_CHUNK)
        inner.append(self._row(heads * _DELTA_CHUNK))
        self._free(triangles)
        inner += [self._row(values), self._row(heads * state.columns)]
        inner.append(self._take(self._width * self._pieces(_DELTA_CHUNK) * heads * state.rows * state.columns))
        inner.append(self._take(4 * self._requests() * heads * state.rows * state.columns))
        inner += [self._row(values), self._row(values)]
        self._free(*inner, after)
        normed = self._row(values)
        out = self._row(self._shape.hidden)
        self._free(*projected, mixed, core, normed)
        return out

    def _mlp(self) -> Block:
        return self._feed(self._shape.intermediate, self._gated())

    def _feed(self, width: int, gated: bool) -> Block:
        inner = max(1, width // self._ranks)
        both = self._row(inner * (2 if gated else 1))
        self._multiply()
        active = self._row(inner)
        self._free(both)
        out = self._row(self._shape.hidden)
        self._free(active)
        return out

    def _experts(self) -> Block:
        """fused_moe/modular_kernel.py: a workspace for all layers that is never given back (v1/worker/workspace.py), and the result."""
        hidden, shared = self._shape.hidden, self._shared_width()
        # A router in float32 multiplies tokens in float32 (router/gate_linear.py).
        floats = self._row(2 * hidden) if self._single and self._eager else None
        self._multiply(stored=True)
        if floats is not None:
            self._free(floats)
        beside = self._feed(shared, self._gated()) if shared else None
        out = self._row(hidden)
        if self._workspace is None:
            inner = max(1, self._shape.expert_width // self._ranks)
            # triton_moe.py and marlin_moe.py, workspace_shapes.
            size = max(inner, hidden) + max(2 * inner if self._gated() else inner, hidden)
            self.allocator.release()
            self._workspace = self._row(self._shape.active_experts * size)
        if beside is None:
            return out
        both = self._row(hidden)
        self._free(out, beside)
        return both

    def _sample(self) -> None:
        """Logits in the model's precision and in float32, sorted with their indices, and as probabilities."""
        self._multiply(stored=True)
        if self._buffer is None:
            self._buffer = self._take(4 * min(1 << (self._serving.max_num_seqs - 1).bit_length(), PROCESSORS) * self._shape.vocab)
        for rows in (_sampled(self._serving), LOGPROB_ROWS):
            sizes = (self._width, 4, 4, 8, 4) if rows != LOGPROB_ROWS else (self._width, 4, 4)
            self._free(*[self._take(rows * self._shape.vocab * size) for size in sizes])

    def _norm(self, width: int) -> Block:
        if not self._floats:
            return self._row(width)
        whole = self._row(2 * width)
        return self._float_norm(whole, width)

    def _float_norm(self, whole: Block, width: int) -> Block:
        """whole: in float32, held until the end."""
        self._free(self._row(2 * width))  # squares
        scaled = self._row(2 * width)
        weighed = self._row(2 * width)
        self._free(scaled)
        out = self._row(width)
        self._free(weighed, whole)
        return out

    def _add_float_norm(self, width: int) -> tuple[Block, Block]:
        """(normed, residual)."""
        ours, theirs = self._row(2 * width), self._row(2 * width)
        whole = self._row(2 * width)
        self._free(ours, theirs)
        residual = self._row(width)
        return self._float_norm(whole, width), residual

    def _multiply(self, *, stored: bool = False) -> None:
        """The first matrix product brings cuBLAS's workspace, for good. stored: by weights that are never quantized."""
        if self._cublas is None and (stored or not self._quantized):
            self._cublas = self._take(CUBLAS_BYTES)

    def _shared_width(self) -> int:
        own = _number(self._text, "moe_shared_expert_intermediate_size", "shared_expert_intermediate_size")
        return (_number(self._text, "n_shared_experts") or int(own > 0)) * (own or self._shape.expert_width)

    def _requests(self) -> int:
        return min(self._serving.max_num_seqs, self._tokens)

    def _pieces(self, size: int) -> int:
        """Of `size` tokens; a request's end ends one too."""
        return -(-self._tokens // size) + min(self._serving.max_num_seqs, self._tokens // size)

    def _gated(self) -> bool:
        return str(self._text.get("mlp_hidden_act") or "") != "relu2"

    def _row(self, width: int) -> Block:
        """The bytes of so many elements of every token in the model's precision."""
        return self._take(self._tokens * width * self._width)

    def _take(self, size: int) -> Block:
        return self.allocator.take(size)

    def _free(self, *blocks: Block) -> None:
        for block in blocks:
            self.allocator.give_back(block)


def _sampled(serving: Serving) -> int:
    """Rows of logits at once: one for each request and one for each token that was proposed to it."""
    return max(serving.max_num_seqs, min(serving.max_num_seqs, DRAFTED_REQUESTS) * (1 + serving.speculative_tokens))


def _latent(text: Mapping[str, Any]) -> tuple[int, int, int]:
    """Elements of a head's keys without and with a position, and of its values."""
    return _number(text, "qk_nope_head_dim"), _number(text, "qk_rope_head_dim"), _number(text, "v_head_dim")


def _number(text: Mapping[str, Any], *keys: str) -> int:
    """The first that is a count, 0 where none is."""
    values = (text.get(key) for key in keys)
    return next((value for value in values if type(value) is int and 0 < value < _MOST), 0)
