"""The plain-PyTorch twin of `write_kv`."""

from torch import Tensor


def write_kv(k: Tensor, v: Tensor, slot_mapping: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """k [T, G, D], v [T, G, Dv], slot_mapping [T] -> caches [num_blocks, block_size, G, D or Dv], in place."""
    is_kept = slot_mapping >= 0
    slots = slot_mapping[is_kept]
    k_cache.view(-1, *k_cache.shape[2:])[slots] = k[is_kept]
    v_cache.view(-1, *v_cache.shape[2:])[slots] = v[is_kept]
