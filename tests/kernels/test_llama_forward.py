"""The one-call decoder computes what transformers computes, and a token does not notice its neighbours."""

from typing import Any

import pytest
import torch
from kernel_oracles import BFLOAT16_WAYS, WAYS, needs_native, needs_tiles
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from specdec.kernels.linear import Quantization
from specdec.kernels.llama_forward import (
    LayerWeights,
    LlamaShape,
    LlamaStep,
    LlamaWeights,
    llama_forward,
    pack_llama,
    reference,
)

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "attn_implementation": "eager",
}
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama, tied": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
    "llama, biases": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": False, "attention_bias": True}),
    "mistral, window": (MistralForCausalLM, MistralConfig, {"sliding_window": 20}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
}
BLOCK_SIZE = 8


def tiny_model(family: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    model_class, config_class, options = FAMILIES[family]
    model = model_class(config_class(**{**SIZES, **options, **changes})).eval()
    for parameter in model.parameters():  # norms and biases that do something
        torch.nn.init.normal_(parameter, std=0.2) if parameter.ndim > 1 else parameter.data.uniform_(0.5, 1.5)
    return model


def weights_of(model: Any) -> LlamaWeights:
    config, decoder = model.config, model.model
    cos, sin = decoder.rotary_emb(torch.empty(1), torch.arange(512)[None])
    layers = []
    for layer in decoder.layers:
        attention, mlp = layer.self_attn, layer.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        has_norms = hasattr(attention, "q_norm")
        layers.append(
            LayerWeights(
                input_norm=layer.input_layernorm.weight,
                qkv=torch.cat([p.weight for p in projections]),
                qkv_bias=None if projections[0].bias is None else torch.cat([p.bias for p in projections]),
                q_norm=attention.q_norm.weight if has_norms else None,
                k_norm=attention.k_norm.weight if has_norms else None,
                out=attention.o_proj.weight,
                out_bias=attention.o_proj.bias,
                post_norm=layer.post_attention_layernorm.weight,
                gate=mlp.gate_proj.weight,
                up=mlp.up_proj.weight,
                down=mlp.down_proj.weight,
                window=getattr(config, "sliding_window", None) if "Mistral" in type(model).__name__ else None,
            )
        )
    shape = LlamaShape(6, 2, config.head_dim, config.rms_norm_eps, config.head_dim**-0.5)
    head = None if config.tie_word_embeddings else model.lm_head.weight
    return LlamaWeights(shape, decoder.embed_tokens.weight, tuple(layers), decoder.norm.weight, head, cos[0], sin[0])


class Rows:
    """Rows of tokens that advance through a paged cache, each with every third block of it."""

    def __init__(
        self,
        prompts: list[list[int]],
        num_layers: int = 3,
        dtype: torch.dtype = torch.float32,
        head_dim: int = 16,
    ) -> None:
        self.tokens = prompts
        shape = (16 * len(prompts), BLOCK_SIZE, 2, head_dim)
        self.caches = [tuple(torch.full(shape, float("nan"), dtype=dtype) for _ in range(2)) for _ in range(num_layers)]

    def step(self, spans: list[tuple[int, int, int]], **options: Any) -> LlamaStep:
        """Return the step that computes tokens [begin, end) of the given rows; spans are (row, begin, end)."""
        tables = torch.arange(16 * len(self.tokens)).view(16, -1).T.flip(1).contiguous().int()
        token_ids, positions, slots = [], [], []
        for row, begin, end in spans:
            for position in range(begin, end):
                token_ids.append(self.tokens[row][position])
                positions.append(position)
                slots.append(int(tables[row, position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE)
        lens = torch.tensor([0] + [end - begin for _, begin, end in spans])
        return LlamaStep(
            token_ids=torch.tensor(token_ids),
            positions=torch.tensor(positions),
            slot_mapping=torch.tensor(slots),
            block_tables=tables[[row for row, _, _ in spans]],
            seq_lens=torch.tensor([end for _, _, end in spans], dtype=torch.int32),
            cu_query_lens=lens.cumsum(0).int(),
            logits_indices=torch.arange(len(token_ids)),
            **options,
        )


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(97, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.parametrize("is_native", [pytest.param(True, marks=needs_native), False])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_features_equal_transformers(family: str, is_native: bool) -> None:
    model = tiny_model(family)
    weights = weights_of(model)
    packed = pack_llama(weights) if is_native else weights
    rows = Rows(prompts(40, 9, 1))
    llama_forward(packed, rows.step([(0, 0, 30), (1, 0, 5)]), rows.caches)  # a prompt's chunk, a prompt
    llama_forward(packed, rows.step([(0, 30, 31)]), rows.caches)  # a decode
    step = rows.step([(0, 31, 40), (1, 5, 9), (2, 0, 1)], feature_layers=(2, 0, 3))  # verifications beside a prompt
    logits, features = llama_forward(packed, step, rows.caches)
    at = 0
    for tokens, begin in zip(rows.tokens, (31, 5, 0), strict=True):
        captured: list[torch.Tensor] = []
        hook = model.model.norm.register_forward_pre_hook(lambda _, args, to=captured: to.append(args[0]))
        with torch.no_grad():
            expected = model(torch.tensor([tokens]), output_hidden_states=True)
        hook.remove()
        here = slice(at, at + len(tokens) - begin)
        assert torch.allclose(logits[here], expected.logits[0, begin:], atol=1e-4), family
        for feature, hidden in zip(features, (expected.hidden_states[2], expected.hidden_states[0], captured[0])):
            assert torch.allclose(feature[here], hidden[0, begin:], atol=1e-4)
        at = here.stop


@needs_native
@pytest.mark.parametrize(("dtype", "amx"), WAYS)
def test_a_token_has_the_same_bits_in_any_step(dtype: torch.dtype, amx: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a prompt, decode token by token and verification of many drafts all give one answer, bit by bit."""
    monkeypatch.setenv("SPECDEC_AMX", amx)
    # Wide enough for the larger steps to be worth a second thread, and for single tokens not.
    head_dim = 64 if amx == "1" else 16  # what attention in tiles asks for
    model = tiny_model("llama, tied", num_hidden_layers=2, hidden_size=288, intermediate_size=320, head_dim=head_dim)
    packed = pack_llama(weights_of(model), dtype)
    plain, ragged = (Rows(prompts(60, 33, 47), 2, dtype, head_dim) for _ in range(2))
    one_by_one = {}
    for row, tokens in enumerate(plain.tokens):
        for i in range(len(tokens)):
            one_by_one[row, i] = llama_forward(packed, plain.step([(row, i, i + 1)]), plain.caches)[0][0]
    schedule = [
        [(0, 0, 20), (1, 0, 33)],
        [(2, 0, 1), (0, 20, 29)],
        [(2, 1, 40), (0, 29, 30)],
        [(0, 30, 60), (2, 40, 47)],
    ]
    for spans in schedule:
        logits, _ = llama_forward(packed, ragged.step(spans), ragged.caches)
        expected = [one_by_one[row, i] for row, begin, end in spans for i in range(begin, end)]
        assert torch.equal(logits, torch.stack(expected))


@needs_native
@pytest.mark.parametrize("amx", BFLOAT16_WAYS)
def test_bfloat16_is_as_close_to_the_oracle_as_its_rounded_weights_allow(
    amx: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECDEC_AMX", amx)
    weights = weights_of(tiny_model("llama, tied"))
    rows, wide = Rows(prompts(50), dtype=torch.bfloat16), Rows(prompts(50))
    logits, _ = llama_forward(pack_llama(weights, torch.bfloat16), rows.step([(0, 0, 50)]), rows.caches)
    oracle, _ = llama_forward(weights, wide.step([(0, 0, 50)]), wide.caches)
    assert (logits - oracle).abs().mean() < 0.02 * oracle.abs().mean()
    assert (logits - oracle).abs().mean() > 1e-5 * oracle.abs().mean(), "the check can tell the dtypes apart"


@needs_tiles
@pytest.mark.parametrize("family", ["llama, biases", "qwen3"])
def test_tiles_equal_the_twin_that_rounds_inputs(family: str) -> None:
    """What is left are inputs at the middle between two bfloat16 numbers, which a last bit of float32 decides."""
    weights = weights_of(tiny_model(family).to(torch.bfloat16))
    packed = pack_llama(weights)
    assert not isinstance(packed, LlamaWeights) and packed.head_code == 7
    given = prompts(50)
    step = Rows(given).step([(0, 0, 50)])
    found, _ = llama_forward(packed, step, Rows(given).caches)
    twin, _ = reference.llama_forward(weights, step, Rows(given).caches, rounds_inputs=True)
    whole, _ = reference.llama_forward(weights, step, Rows(given).caches)
    assert (found - twin).abs().mean() < 0.1 * (found - whole).abs().mean()


@needs_native
def test_weights_decoded_from_codes_give_the_same_bits_as_codes() -> None:
    model = tiny_model("llama, tied", hidden_size=96, intermediate_size=96)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:  # 8-bit codes in groups of 32
                grouped = parameter.view(len(parameter), -1, 32)
                d = (grouped.abs().amax(-1, keepdim=True) / 127).half().float()
                grouped.copy_((grouped / d).round().clamp(-127, 127) * d)
    weights = weights_of(model)
    logits = []
    for quantization in (Quantization(8), None):
        packed = pack_llama(weights, torch.float32, quantization)
        rows = Rows(prompts(30))
        logits.append(llama_forward(packed, rows.step([(0, 0, 30)]), rows.caches)[0])
    assert packed.head.dtype == torch.float32 and torch.equal(*logits)


@needs_native
def test_an_id_out_of_range_is_refused_before_anything_is_written() -> None:
    packed = pack_llama(weights_of(tiny_model("llama, tied")))
    rows = Rows([[96, 97]])
    with pytest.raises(IndexError, match="97"):
        llama_forward(packed, rows.step([(0, 0, 2)]), rows.caches)
    assert all(cache.isnan().all() for pair in rows.caches for cache in pair)


@needs_native
def test_embeddings_given_in_place_of_ids_are_used() -> None:
    weights = weights_of(tiny_model("qwen2"))
    packed = pack_llama(weights)
    rows = Rows(prompts(5))
    logits, _ = llama_forward(packed, rows.step([(0, 0, 5)]), rows.caches)
    inputs = weights.embedding[rows.tokens[0]]
    again, _ = llama_forward(packed, rows.step([(0, 0, 5)], inputs=inputs), rows.caches)
    assert torch.equal(logits, again)
