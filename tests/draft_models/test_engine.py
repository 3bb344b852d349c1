"""What evaluation says of a head is what the engine then accepts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import specdec
from draft_models import corpus, start
from draft_models.acceptance import Tally, run_lengths, walk
from draft_models.features import FeatureTap, Sample, compute
from draft_models.measure import agreements
from draft_models.recipes import Eagle3
from draft_models.target import Target, load_target
from tests.toys import make_toy

LAYERS = (1, 2, 3)


@pytest.fixture(scope="module")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_toy(tmp_path_factory.mktemp("target"), tie_word_embeddings=True, initializer_range=0.05)


def _samples(target: Target, texts: list[tuple[int, ...]], answer_start: int) -> list[Sample]:
    examples = [corpus.Example(text, answer_start, "toy", 0.0) for text in texts]
    return list(compute(FeatureTap(target.model, LAYERS), examples))


@pytest.mark.parametrize("k", [1, 3])
def test_the_engine_accepts_what_the_table_says(target_path: str, tmp_path: Path, k: int) -> None:
    """Greedy, fp32; the answers are the engine's own, so the table is of the very text it decoded.

    Features pass through bf16 on their way into the table, so a rare near-tie may differ: two tokens are allowed.
    """
    prompts = [tuple((7 * i + 3 * j) % 256 for j in range(12)) for i in range(4)]
    params = specdec.SamplingParams(max_tokens=40, ignore_eos=True, temperature=0)
    options = {"dtype": "float32", "num_kv_blocks": 64}
    plain = specdec.LLM(target_path, None, **options).generate([list(p) for p in prompts], params, progress=False)
    texts = [p + tuple(o.outputs[0].token_ids) for p, o in zip(prompts, plain, strict=True)]

    target = load_target(target_path)
    samples = _samples(target, texts, len(prompts[0]))
    fresh = Eagle3.fresh(target, torch.arange(260), LAYERS, LAYERS)
    start.fit(fresh.head, target, samples, fresh.picks)
    fresh.save(tmp_path)

    tables = agreements(Eagle3.read(tmp_path, target, LAYERS), samples, k)
    told = Tally.total(walk(run_lengths(table).tolist(), k) for table in tables)
    speculative = specdec.SpeculativeConfig(num_speculative_tokens=k, adaptive=False)
    llm = specdec.LLM(target_path, str(tmp_path), speculative=speculative, **options)
    outs = llm.generate([list(p) for p in prompts], params, progress=False)
    assert [o.outputs[0].token_ids for o in outs] == [o.outputs[0].token_ids for o in plain]
    accepted = sum(o.stats.num_accepted_tokens for o in outs)
    assert sum(told.accepted) > 20, "a head that is never right would show nothing"
    assert abs(accepted - sum(told.accepted)) <= 2
