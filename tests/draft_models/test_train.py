"""Training end to end on a toy, from prompts without answers to a checkpoint; its parts beside it."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

from draft_models import corpus, optim, precision, prompts, start
from draft_models.checkpoint import load_state
from draft_models.features import FeatureTap, compute
from draft_models.recipes import Eagle3
from draft_models.supply import Supply
from draft_models.target import load_target
from draft_models.train import main
from specdec import LLM, SamplingParams
from tests.toys import byte_tokenizer, make_toy


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_toy(tmp_path_factory.mktemp("target"), tie_word_embeddings=True)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"{i} plus {i + 1}?", "source": "toy"}) for i in range(24)))
    return path


def _flags(target: str, data: Path, out: Path, *more: str) -> list[str]:
    return [
        "--target", target, "--data", str(data), "--out", str(out), "--draft-vocab-size", "128", "--answer-length",
        "32", "--heldout-percent", "20", "--batch-rows", "128", "--every", "0", "--fit-shards", "1",
        "--muon-rate", "0.02", *more,
    ]  # fmt: skip


def _log(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def test_a_head_is_trained_resumed_and_recorded(target: str, data: Path, tmp_path: Path) -> None:
    out, features = tmp_path / "out", tmp_path / "features"
    main(_flags(target, data, out, "--epochs", "3", "--features", str(features)))
    first = _log(out)
    assert first[-1]["loss"] < first[0]["loss"]
    main(_flags(target, data, out, "--epochs", "4", "--features", str(features)))
    assert _log(out)[len(first)]["rows"] > first[-1]["rows"]
    weights = load_state(out / "state.pt")["recipe"]
    still = ("--muon-rate", "0", "--adam-rate", "0")
    main(_flags(target, data, out, "--epochs", "5", "--features", str(features), *still))
    resumed = load_state(out / "state.pt")["recipe"]
    assert all(torch.equal(resumed[name], weights[name]) for name in weights), "rates are those of the last command"
    made_from = json.loads((out / "provenance.json").read_text())
    assert made_from["data_sha256"] == corpus.file_hash(data) and made_from["arguments"]["data"] == "prompts.jsonl"
    assert str(tmp_path) not in (out / "provenance.json").read_text()
    assert (out / "model.safetensors").is_file() and json.loads((out / "config.json").read_text())["specdec"]


def test_a_run_starts_from_a_trained_head_and_says_so(target: str, data: Path, tmp_path: Path) -> None:
    """At rates of zero what comes out is what went in, whatever a fresh head would have been."""
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    main(_flags(target, data, first, "--epochs", "1", "--precision", "fp32", "--feature-layers", "0,1,3"))
    still = ("--epochs", "1", "--muon-rate", "0", "--adam-rate", "0")
    main(_flags(target, data, second, *still, "--precision", "bf16", "--from", str(first), "--seed", "5"))
    main(_flags(target, data, third, *still, "--from", str(second)))
    made, went_in = load_file(second / "model.safetensors"), load_file(first / "model.safetensors")
    assert made.keys() == went_in.keys() and all(torch.equal(made[name], went_in[name]) for name in made)
    one, two, three = (json.loads((out / "provenance.json").read_text()) for out in (first, second, third))
    assert one["started_from"] is None and one["products_in"] == "float32" and two["products_in"] == "bfloat16"
    assert two["started_from"]["rows"] == one["rows"] and three["started_from"]["rows"] == one["rows"] + two["rows"]
    assert two["started_from"]["sha256"] == corpus.file_hash(first / "model.safetensors")


def test_a_head_that_cannot_be_a_start_is_refused(target: str, data: Path, tmp_path: Path) -> None:
    trained, out = tmp_path / "trained", tmp_path / "out"
    main(_flags(target, data, trained, "--epochs", "1"))
    with pytest.raises(ValueError, match=r"\(0, 2, 3\), but the head in .* reads \(1, 3\)"):
        main(_flags(target, data, out, "--from", str(trained), "--feature-layers", "0,2,3"))
    with pytest.raises(ValueError, match="--from starts heads"):
        main(_flags(target, data, out, "--from", str(trained), "--method", "llama"))
    config = json.loads((trained / "config.json").read_text())
    (trained / "config.json").write_text(json.dumps(config | {"rope_theta": 77.0}))
    with pytest.raises(ValueError, match=r"rope_theta is 77\.0; a head of"):
        main(_flags(target, data, out, "--from", str(trained)))


def test_features_of_another_precision_are_not_mixed_in(target: str, data: Path, tmp_path: Path) -> None:
    flags = _flags(target, data, tmp_path / "out", "--epochs", "1", "--features", str(tmp_path / "features"))
    main([*flags, "--precision", "fp32"])
    with pytest.raises(ValueError, match="give another folder"):
        main([*flags, "--precision", "bf16"])


def test_auto_precision_is_bf16_where_the_hardware_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    for found, chosen in (({"amx_bf16": True}, torch.bfloat16), ({"avx2": True}, torch.float32)):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda found=found: found)
        assert precision.choose("auto", cpu) == chosen
        assert precision.choose("fp32", cpu) == torch.float32 and precision.choose("bf16", cpu) == torch.bfloat16
    with pytest.raises(ValueError, match="expected one of auto, fp32, bf16"):
        precision.choose("fp16", cpu)


def test_unseen_text_comes_before_repeats(tmp_path: Path) -> None:
    examples = [corpus.Example((1, 2, 3), 1, "toy", 0.0)] * 6
    supply = Supply(examples, cast(FeatureTap, None), epochs=2, folder=tmp_path, shard_size=2)
    (tmp_path / "shard-00001.safetensors").touch()
    order = []
    while (shard := supply.next_shard()) is not None:
        order.append(shard)
        supply.visited(shard)
    assert order == [1, 0, 2, 1, 0, 2]


def test_a_tiny_llama_is_trained_and_the_engine_drafts_with_it(target: str, data: Path, tmp_path: Path) -> None:
    import specdec

    main(_flags(target, data, tmp_path, "--method", "llama", "--num-layers", "1", "--epochs", "2"))
    fixed = specdec.SpeculativeConfig(adaptive=False)
    llm = specdec.LLM(target, str(tmp_path), speculative=fixed, dtype="float32", num_kv_blocks=16)
    [out] = llm.generate([[1, 2, 3]], specdec.SamplingParams(max_tokens=8, ignore_eos=True))
    [plain] = specdec.LLM(target, None, dtype="float32", num_kv_blocks=16).generate(
        [[1, 2, 3]], specdec.SamplingParams(max_tokens=8, ignore_eos=True)
    )
    assert out.outputs[0].token_ids == plain.outputs[0].token_ids and out.stats.num_draft_tokens > 0


@torch.no_grad()
def test_a_fresh_head_is_the_best_linear_guess(target: str) -> None:
    """What a row adds by looking at itself alone is most of the token's part, as regression solved it.

    Values hold half the width of this toy. How sharply rows look at themselves is not claimed here: it takes the
    many rotary pairs of a real head.
    """
    loaded = load_target(target)
    layers = (1, 2, 3)
    text = [tuple((7 * i + j * j) % 256 for j in range(40)) for i in range(30)]
    samples = list(compute(FeatureTap(loaded.model, layers), [corpus.Example(t, 4, "toy", 0.0) for t in text]))
    recipe = Eagle3.fresh(loaded, torch.arange(128), layers, layers)
    start.fit(recipe.head, loaded, samples, recipe.picks)
    rows, embedded, wanted = start._rows(samples, loaded.embedding, recipe.picks, 64)
    guess = start._solve(rows, embedded, wanted)
    without_token = rows @ guess.by_feature - wanted
    whole, part = (x.square().mean() for x in (without_token + embedded @ guess.by_token, without_token))
    attention, config = recipe.head.midlayer.self_attn, recipe.head.config
    values = embedded @ attention.v_proj.weight[:, : embedded.shape[1]].T
    own = sum(
        values[:, group * config.head_dim : (group + 1) * config.head_dim] @ attention.o_proj.weight[:, columns].T
        for group, columns in enumerate(start._first_heads(recipe.head))
    )
    reached = (without_token + own).square().mean()
    assert whole < part and reached < whole + 0.5 * (part - whole)


def test_a_feature_layer_that_is_none_is_refused(target: str) -> None:
    with pytest.raises(ValueError, match=r"0\.\.3"):
        FeatureTap(load_target(target).model, (1, 9))


def test_answers_to_one_prompt_stay_on_one_side() -> None:
    records = [{"prompt": str(i // 4)} for i in range(400)]
    training, heldout = corpus.split(records, 30)
    assert heldout and not {r["prompt"] for r in training} & {r["prompt"] for r in heldout}


def test_an_answer_that_ended_gets_its_end_and_a_long_prompt_loses_its_beginning() -> None:
    tokenizer = byte_tokenizer()
    whole = corpus.encode({"prompt": "ab", "response": "xyz"}, tokenizer, 257, 64, 32)
    assert whole.ids[-4:] == (*b"xyz", 257) and whole.ids[whole.answer_start] == ord("x")
    cut = corpus.encode({"prompt": "a" * 99, "response": "x" * 32}, tokenizer, 257, 50, 32)
    assert len(cut.ids) == 50 and cut.ids[-32:] == tuple(b"x" * 32) and cut.answer_start == 18


def test_the_draft_vocabulary_is_the_most_frequent_ids_ascending() -> None:
    example = corpus.Example((9, 9, 5, 5, 7, 3), 2, "toy", 0.0)
    assert corpus.frequent_ids([example], 4, [257]).tolist() == [3, 5, 7, 257]


def test_a_file_without_prompts_is_refused_by_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    with pytest.raises(ValueError, match="line 2"):
        corpus.read_records(path)


def test_muon_updates_are_orthogonal_and_the_rate_comes_down() -> None:
    torch.manual_seed(0)
    for shape in ((20, 50), (50, 20)):
        singular = torch.linalg.svdvals(optim.orthogonal(torch.randn(shape)))
        assert singular.min() > 0.6 and singular.max() < 1.3
    rates = [optim.rate_factor(step, step / 100) for step in range(101)]
    assert rates[0] < rates[30] == 1.0 > rates[90] > rates[100] == 0.05


def test_progress_is_told_with_what_is_left(
    target: str, data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "draft_models"):
        main(_flags(target, data, tmp_path, "--epochs", "1"))
    assert "held-out mean acceptance length at k = 5" in caplog.text and "min left" in caplog.text


def test_a_target_asks_itself_and_a_file_is_continued(target: str, tmp_path: Path) -> None:
    """Numbers never repeat over an interrupt, answers are those of the stated temperature, and training takes them."""
    llm = LLM(target)
    tokenizer = llm.engine.target.model.tokenizer
    path, longest = tmp_path / "asked.jsonl", (24, 16)

    def go(num: int) -> list[dict[str, Any]]:
        prompts.run(llm, tokenizer, path, num=num, seed=3, longest=longest, until=float("inf"))
        return corpus.read_records(path)

    first = go(2 * prompts.GROUP)
    both = go(4 * prompts.GROUP)
    assert both[: len(first)] == first and len(both) > len(first) > 0
    assert len({r["number"] for r in both}) == len({r["prompt"] for r in both}) == len(both)
    for record in both:
        assert record["prompt"].startswith(prompts.opening(record["number"])[1].strip()) and record["response_ids"]
    greedy = next(r for r in both if r["temperature"] == 0)
    again = llm.generate([corpus.prompt_ids(tokenizer, greedy["prompt"])], SamplingParams(temperature=0, max_tokens=16))
    assert list(again[0].outputs[0].token_ids) == greedy["response_ids"]
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"prompt": "cut sh')
    assert go(4 * prompts.GROUP) == both and path.read_bytes() == whole
    path.write_bytes(b"{broken}\n" + whole)
    with pytest.raises(ValueError, match="line 1 of .* is no JSON record"):
        go(4 * prompts.GROUP)
    for flag, value in (("--num", "0"), ("--minutes", "nan"), ("--answer-length", "-1"), ("--seed", "-1")):
        with pytest.raises(SystemExit):
            prompts.main(["--out", str(path), flag, value])
    with pytest.raises(ValueError, match="chat template"):
        prompts.user_prefix(SimpleNamespace(apply_chat_template=lambda *_, **__: "fixed"))


def test_features_are_filled_ahead_and_a_run_beside_takes_them(target: str, data: Path, tmp_path: Path) -> None:
    """From the last shard down, what is there kept; without a folder there is nothing to fill."""
    features, out = tmp_path / "features", tmp_path / "out"
    flags = _flags(target, data, out, "--epochs", "1", "--features", str(features), "--features-only")
    main(flags)
    made = {path.name: path.stat().st_mtime_ns for path in features.glob("*.safetensors")}
    assert made and not (out / "log.jsonl").exists()
    main(flags)
    main(flags[:-1])
    assert {path.name: path.stat().st_mtime_ns for path in features.glob("*.safetensors")} == made and _log(out)
    for bad in (["--features-only"], ["--cooldown", "0"], ["--cooldown", "1.5"], ["--cooldown", "nan"]):
        with pytest.raises(SystemExit):
            main(_flags(target, data, out, *bad))
