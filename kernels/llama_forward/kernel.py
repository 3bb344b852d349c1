"""Calls into native/llama.cpp."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdec.kernels import native
from specdec.kernels.linear import PackedLinear, Quantization, pack_groups
from specdec.kernels.linear import kernel as linear
from specdec.kernels.llama_forward.weights import LayerWeights, LlamaShape, LlamaWeights

if TYPE_CHECKING:
    from specdec.kernels.llama_forward import LlamaStep

DTYPES = linear.DTYPES
NUMBERS_PER_LAYER = 15
STAGES = ("elementwise", "linears", "attention", "head")  # Stage in llama.cpp

Numbers = ctypes.Array[ctypes.c_int64]


@dataclass(frozen=True, slots=True, eq=False)
class PackedLlama:
    """A decoder's weights, each held once, in the order native code reads them."""

    shape: LlamaShape
    dtype: torch.dtype
    vocab_size: int
    width: int
    mlp_width: int
    layer_numbers: Numbers  # of every layer, in the order of Layer in llama.cpp; pointers into `owned`
    norm: Tensor  # [width] float32
    rotary: tuple[Tensor, Tensor]  # cos and sin [positions, R] float32
    embedding: Tensor | None  # [V, width]; None: tied, read out of the head
    head: Tensor  # panels
    head_code: int  # DType of the head's panels
    owned: tuple[Tensor, ...]
    held: tuple[tuple[str, int], ...]  # how weights are held, and bytes of it

    @property
    def num_layers(self) -> int:
        return len(self.layer_numbers) // NUMBERS_PER_LAYER


def pack(weights: LlamaWeights, dtype: torch.dtype, quantization: Quantization | None) -> PackedLlama:
    """Lay out weights in `dtype`, or as the codes they came from; norms, biases and rotary tables in float32."""
    owned: list[Tensor] = []
    held: list[tuple[str, int]] = []
    arena = linear.Arena()

    def keep(tensor: Tensor | None) -> int:
        if tensor is None:
            return 0
        owned.append(tensor)
        return tensor.data_ptr()

    flat: list[int] = []
    for layer in weights.layers:
        norms = (layer.input_norm, layer.q_norm, layer.k_norm, layer.post_norm)
        numbers = [keep(None if norm is None else _wide(norm)) for norm in norms]
        for weight in (layer.qkv, layer.out, interleave(layer), layer.down):
            panels, code = _panels(weight, dtype, quantization, arena)
            numbers += [keep(panels), code]
            held.append((linear.KINDS[code], panels.nbytes))
        numbers += [keep(None if bias is None else _wide(bias)) for bias in (layer.qkv_bias, layer.out_bias)]
        numbers.append(layer.window or 0)
        assert len(numbers) == NUMBERS_PER_LAYER
        flat += numbers
    is_tied = weights.head is None
    of_head = None if quantization is None else replace(quantization, num_bits=8)
    head, head_code = _panels(weights.embedding if weights.head is None else weights.head, dtype, of_head, arena)
    rotary = (_wide(weights.cos), _wide(weights.sin))
    embedding = None if is_tied else weights.embedding.detach().to(dtype).contiguous()
    held += [(linear.KINDS[head_code], head.nbytes), ("rotary tables", 2 * rotary[0].nbytes)]
    if embedding is not None:
        held.append((linear.KINDS[native.DTYPES[dtype]], embedding.nbytes))
    return PackedLlama(
        shape=weights.shape,
        dtype=dtype,
        vocab_size=weights.embedding.shape[0],
        width=weights.embedding.shape[1],
        mlp_width=weights.layers[0].gate.shape[0],
        layer_numbers=(ctypes.c_int64 * len(flat))(*flat),
        norm=_wide(weights.norm),
        rotary=rotary,
        embedding=embedding,
        head=head,
        head_code=head_code,
        owned=tuple(owned),
        held=tuple(held),
    )


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.float32, copy=True).contiguous()  # a view would keep a whole checkpoint alive


def _panels(
    weight: Tensor, dtype: torch.dtype, quantization: Quantization | None, arena: linear.Arena
) -> tuple[Tensor, int]:
    """Return packed panels and their DType."""
    grouped: PackedLinear | None = None
    if quantization is not None:
        grouped = pack_groups(weight, None, quantization, arena=arena)
    if grouped is not None:
        assert grouped.code is not None
        return grouped.data, grouped.code
    return linear.pack(weight.detach().to(dtype).contiguous(), arena)


def interleave(layer: LayerWeights) -> Tensor:
    """Return gate and up in turns of half a panel, so that a panel's sums hold both factors of its outputs."""
    half = native.function("specdec_panel", "", "i")() // 2
    missing = -layer.gate.shape[0] % half
    padded = [torch.nn.functional.pad(w.detach(), (0, 0, 0, missing)) for w in (layer.gate, layer.up)]
    return torch.stack([w.view(-1, half, w.shape[1]) for w in padded], 1).flatten(0, 2)


def llama_forward(
    model: PackedLlama,
    step: "LlamaStep",
    kv_caches: Sequence[tuple[Tensor, Tensor]],
    seconds: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As the twin; seconds [len(STAGES)] float64, to which the time of each stage is added."""
    num_tokens, num_logits = step.token_ids.shape[0], step.logits_indices.shape[0]
    logits = torch.empty(num_logits, model.vocab_size)
    features = torch.empty(num_tokens, len(step.feature_layers), model.width)
    tables = (step.block_tables, step.seq_lens, step.cu_query_lens)
    indices = (step.token_ids, step.positions, step.slot_mapping, step.logits_indices)
    assert all(x.dtype == torch.int32 for x in tables) and all(x.dtype == torch.int64 for x in indices)
    assert step.block_tables.stride(1) == 1 and all(x.is_contiguous() for x in (*tables[1:], *indices))
    inputs = None if step.inputs is None else step.inputs.to(torch.float32).contiguous()
    wanted = (ctypes.c_int64 * len(step.feature_layers))(*step.feature_layers)
    numbers = (ctypes.c_int64 * 17)(
        num_tokens,
        step.seq_lens.shape[0],
        num_logits,
        step.block_tables.stride(0),
        len(wanted),
        *(x.data_ptr() for x in indices),
        ctypes.addressof(wanted),
        *(x.data_ptr() for x in (*tables, logits, features)),
        0 if inputs is None else inputs.data_ptr(),
        0 if seconds is None else seconds.data_ptr(),
    )
    k_cache = kv_caches[0][0]
    caches = (ctypes.c_int64 * (2 * len(kv_caches)))(*(cache.data_ptr() for pair in kv_caches for cache in pair))
    shape = _shape(model, k_cache)
    failed = native.function("specdec_llama_forward", "pppppppppffi", "i")(
        shape,
        model.layer_numbers,
        model.norm.data_ptr(),
        *(table.data_ptr() for table in model.rotary),
        None if model.embedding is None else model.embedding.data_ptr(),
        model.head.data_ptr(),
        caches,
        numbers,
        model.shape.eps,
        model.shape.scale,
        torch.get_num_threads(),
    )
    if failed:
        raise IndexError(
            f"a token id is not below {model.vocab_size}, a position not below {model.rotary[0].shape[0]}, "
            f"or a logits index not below {num_tokens}"
        )
    return logits, features.transpose(0, 1)


def _shape(model: PackedLlama, k_cache: Tensor) -> Numbers:
    """Return the numbers of Shape in llama.cpp, in its order."""
    shape = model.shape
    assert k_cache.shape[2:] == (shape.num_kv_heads, shape.head_dim) and k_cache.is_contiguous()
    numbers = (
        model.num_layers,
        model.width,
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        model.mlp_width,
        model.vocab_size,
        *reversed(model.rotary[0].shape),
        k_cache.shape[1],
        native.DTYPES[model.dtype],
        model.head_code,
        native.DTYPES[k_cache.dtype],
        int(native.has_tiles()),
    )
    return (ctypes.c_int64 * len(numbers))(*numbers)
