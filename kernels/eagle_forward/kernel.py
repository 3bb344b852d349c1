"""Calls into native/eagle.cpp."""

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdec.kernels import native
from specdec.kernels.eagle_forward.weights import EagleWeights
from specdec.kernels.linear import groups
from specdec.kernels.linear import kernel as linear
from specdec.kernels.llama_forward.kernel import interleave

if TYPE_CHECKING:
    from specdec.kernels.eagle_forward import Pairs

DTYPES = linear.DTYPES
BLOCK_SIZE, CACHE_DTYPE = 11, 13  # places in Shape that the cache decides

Numbers = ctypes.Array[ctypes.c_int64]
Cache = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class PackedEagle:
    """A head's weights, each held once, in the order native code reads them."""

    shape: Numbers  # of Shape in eagle.cpp, but for block size and cache dtype
    weights: Numbers  # of Weights in eagle.cpp; pointers into `owned`
    width: int
    draft_vocab_size: int
    eps: float
    scale: float
    owned: tuple[Tensor, ...]


def pack(weights: EagleWeights, dtype: torch.dtype, num_bits: int | None) -> PackedEagle:
    """Lay out linear weights in `dtype` or in codes; norms, biases and rotary tables in float32."""
    owned: list[Tensor] = []
    arena = linear.Arena()

    def keep(tensor: Tensor | None) -> int:
        if tensor is None:
            return 0
        owned.append(tensor)
        return tensor.data_ptr()

    shape, layer = weights.shape, weights.layer
    q_width = shape.num_heads * shape.head_dim
    numbers: list[int] = []
    linears = (
        weights.fc, layer.qkv[:q_width], layer.qkv[q_width:], layer.out, interleave(layer), layer.down, weights.head,
    )  # fmt: skip
    for weight in linears:
        panels, code = _panels(weight, dtype, num_bits, arena)
        numbers += [keep(panels), code]
    bias = layer.qkv_bias
    biases = (None, None) if bias is None else (bias[:q_width], bias[q_width:])
    vectors = (
        weights.fc_bias, *biases, layer.out_bias, weights.feature_norm, layer.input_norm, weights.hidden_norm,
        layer.q_norm, layer.k_norm, layer.post_norm, weights.norm, weights.cos, weights.sin,
    )  # fmt: skip
    numbers += [keep(None if vector is None else _wide(vector)) for vector in vectors]
    embedding = weights.embedding.detach()
    embedding = (embedding if embedding.dtype in DTYPES else embedding.float()).contiguous()
    numbers += [keep(embedding), keep(weights.target_ids.to(torch.int64).contiguous())]
    return PackedEagle(
        shape=_shape(weights, native.DTYPES[embedding.dtype]),
        weights=(ctypes.c_int64 * len(numbers))(*numbers),
        width=weights.fc.shape[0],
        draft_vocab_size=weights.head.shape[0],
        eps=shape.eps,
        scale=shape.scale,
        owned=tuple(owned),
    )


def _shape(weights: EagleWeights, embedding_code: int) -> Numbers:
    """Return the numbers of Shape in eagle.cpp, in its order."""
    width, feature_width = weights.fc.shape
    shape = weights.shape
    numbers = (
        width, feature_width, weights.num_feature_norms, shape.num_heads, shape.num_kv_heads, shape.head_dim,
        weights.layer.gate.shape[0], weights.embedding.shape[0], weights.head.shape[0], *reversed(weights.cos.shape),
        0, embedding_code, 0, weights.layer.window or 0, weights.is_residual_normed, weights.is_feedback_normed,
        native.has_tiles(),
    )  # fmt: skip
    return (ctypes.c_int64 * len(numbers))(*map(int, numbers))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.float32).contiguous()


def _panels(weight: Tensor, dtype: torch.dtype, num_bits: int | None, arena: linear.Arena) -> tuple[Tensor, int]:
    """Return packed panels and their DType: of the layers that share inputs, all in tiles or none."""
    is_tiled = dtype == torch.bfloat16 and num_bits == 8 and native.has_tiles()
    coded = None if num_bits is None else groups.to_groups(weight, num_bits, keeps_narrower=not is_tiled)
    if coded is None:
        return linear.pack(weight.detach().to(dtype).contiguous(), arena)
    code = linear.CODES_IN_TILES if is_tiled else linear.GROUP_CODES[coded.num_bits]
    return linear.pack_groups(coded, arena, code), code


def fuse(model: PackedEagle, streams: Tensor) -> Tensor:
    """As the twin."""
    streams = streams.to(torch.float32).contiguous()
    assert streams.shape[1] == model.shape[1]
    out = torch.empty(len(streams), model.width)
    call = native.function("specdec_eagle_fuse", "ppppifi")
    call(
        model.shape, model.weights, streams.data_ptr(), out.data_ptr(), len(streams), model.eps,
        torch.get_num_threads(),
    )  # fmt: skip
    return out


def keep(model: PackedEagle, pairs: "Pairs", slot_mapping: Tensor, cache: Cache) -> None:
    """As the twin."""
    assert slot_mapping.dtype == torch.int64 and slot_mapping.is_contiguous()
    _run("specdec_eagle_keep", model, pairs, cache, (0, 1), (slot_mapping.data_ptr(),), (0,) * 6)


def draft(
    model: PackedEagle,
    pairs: "Pairs",
    block_tables: Tensor,
    num_active: list[int],
    cache: Cache,
    wants_logits: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """As the twin."""
    assert block_tables.dtype == torch.int32 and block_tables.stride(1) == 1
    num_rows, depth = len(pairs.token_ids), len(num_active)
    token_ids = torch.empty(num_rows, depth, dtype=torch.int64)
    confidences = torch.zeros(num_rows, depth)
    features = torch.empty(num_rows, model.width)
    logits = torch.empty(num_rows, model.draft_vocab_size) if wants_logits else None
    active = (ctypes.c_int64 * depth)(*num_active)
    outputs = (
        block_tables.data_ptr(), ctypes.addressof(active), token_ids.data_ptr(), confidences.data_ptr(),
        0 if logits is None else logits.data_ptr(), features.data_ptr(),
    )  # fmt: skip
    _run("specdec_eagle_draft", model, pairs, cache, (block_tables.stride(0), depth), (0,), outputs)
    return token_ids, confidences, logits, features


def _run(
    name: str,
    model: PackedEagle,
    pairs: "Pairs",
    cache: Cache,
    sizes: tuple[int, int],
    slots: tuple[int],
    outputs: tuple[int, ...],
) -> None:
    """Call a function of eagle.cpp with the numbers of its Step."""
    k_cache, v_cache = cache
    assert k_cache.is_contiguous() and v_cache.is_contiguous() and k_cache.dtype == v_cache.dtype
    features = pairs.features.to(torch.float32).contiguous()
    indices = (pairs.token_ids, pairs.positions)
    assert all(x.dtype == torch.int64 and x.is_contiguous() for x in indices)
    shape = (ctypes.c_int64 * len(model.shape))(*model.shape)
    shape[BLOCK_SIZE], shape[CACHE_DTYPE] = k_cache.shape[1], native.DTYPES[k_cache.dtype]
    caches = (k_cache.data_ptr(), v_cache.data_ptr())
    pointers = (*(x.data_ptr() for x in indices), *slots, features.data_ptr(), *caches, *outputs)
    step = (ctypes.c_int64 * 15)(len(features), *sizes, *pointers)
    call = native.function(name, "pppffi", "i")
    if call(shape, model.weights, step, model.eps, model.scale, torch.get_num_threads()):
        raise IndexError(
            f"a token id is not below {model.shape[7]}, or a position not from 1 to {model.shape[10]} with its drafts"
        )
