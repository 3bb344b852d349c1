"""LLM: the engine for offline use, prompts in and outputs out, in one process and thread.

It knows text, prompts and choices; the engine knows the rest.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from specdec.assembly import build, resolve_draft
from specdec.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, SpeculativeConfig
from specdec.engine import Engine, link_choices
from specdec.errors import InvalidRequestError, shown
from specdec.interrupts import between_steps
from specdec.models.loader import pick_device
from specdec.outputs import CompletionOutput, RequestOutput
from specdec.request import Request
from specdec.sampling_params import SamplingParams
from specdec.tokenizer import OutputText, Tokenizer

Prompt = str | Sequence[int]

BATCHED_TOKENS, CPU_BATCHED_TOKENS = 512, 256


def engine_config(
    target: str | os.PathLike[str] = "smollm2-135m",
    draft: str | os.PathLike[str] | None = "auto",
    speculative: SpeculativeConfig | Mapping[str, Any] | None = None,
    *,
    dtype: str = "auto",
    device: str = "auto",
    draft_dtype: str | None = None,
    draft_device: str | None = None,
    quantization: str | None = "none",
    max_model_len: int | None = None,
    max_num_seqs: int = 64,
    max_num_batched_tokens: int | None = None,
    block_size: int = 16,
    kv_cache_memory: int | None = None,
    num_kv_blocks: int | None = None,
    kv_cache_dtype: str = "auto",
    gpu_memory_utilization: float = 0.9,
    enable_prefix_caching: bool = True,
    seed: int = 0,
    num_threads: int | None = None,
    compile: str = "auto",
    speculative_trace: str | None = None,
) -> EngineConfig:
    """Compose an EngineConfig from flat options; the flags of the server are these names."""
    resolved = resolve_draft(_name(draft), _speculative_config(speculative), str(target))
    if speculative_trace is not None:
        resolved = replace(resolved, trace=speculative_trace)
    _check_draft_device(draft_device, device)
    model = ModelConfig(
        model=_name(target), dtype=dtype, device=device, max_model_len=max_model_len,
        quantization="none" if quantization is None else quantization,
    )  # fmt: skip
    return EngineConfig(
        target=model,
        draft=_draft_model(model, resolved.draft, draft_dtype),
        cache=CacheConfig(
            block_size=block_size,
            kv_cache_memory=kv_cache_memory,
            num_kv_blocks=num_kv_blocks,
            enable_prefix_caching=enable_prefix_caching,
            gpu_memory_utilization=gpu_memory_utilization,
            kv_cache_dtype=kv_cache_dtype,
        ),
        scheduler=_scheduler_config(max_num_batched_tokens, device, max_num_seqs),
        speculative=resolved,
        seed=seed,
        num_threads=num_threads,
        compile=compile,
    )


def _check_draft_device(draft_device: str | None, device: str) -> None:
    if draft_device is not None and draft_device != device:
        raise InvalidRequestError(
            f"draft_device is {draft_device!r}; the draft shares the target's blocks and must be on {device!r}",
            param="draft_device",
        )


def _draft_model(target: ModelConfig, draft: str | None, dtype: str | None) -> ModelConfig | None:
    """The draft's own configuration; None where it follows the target's in everything."""
    if draft is None or dtype is None:
        return None
    return replace(target, model=draft, dtype=dtype, max_model_len=None)


def _name(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _speculative_config(value: SpeculativeConfig | Mapping[str, Any] | None) -> SpeculativeConfig:
    if value is None:
        return SpeculativeConfig()
    if isinstance(value, SpeculativeConfig):
        return value
    if isinstance(value, Mapping):
        return SpeculativeConfig.from_dict(dict(value))
    raise InvalidRequestError(
        f"speculative is {shown(value)}; it must be a SpeculativeConfig or its fields as a dict", param="speculative"
    )


def _scheduler_config(tokens: int | None, device: str, max_num_seqs: int) -> SchedulerConfig:
    """Tokens of a step: on CPU a chunk of 256 keeps others waiting half as long as one of 512, at the same rate."""
    if tokens is None:
        least = CPU_BATCHED_TOKENS if pick_device(device).type == "cpu" else BATCHED_TOKENS
        tokens = max(least, max_num_seqs) if isinstance(max_num_seqs, int) else least
    return SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=tokens)


@dataclass(slots=True)
class _Sequence:
    """One choice of one prompt while it runs."""

    prompt_index: int
    request: Request
    text: OutputText | None


class LLM:
    """A target, its draft and a cache, ready to generate.

    The options are those of `engine_config`.
    """

    def __init__(
        self,
        target: str | os.PathLike[str] = "smollm2-135m",
        draft: str | os.PathLike[str] | None = "auto",
        **options: Any,
    ) -> None:
        self.engine: Engine = build(engine_config(target, draft, **options))
        inner = self.engine.target.model.tokenizer
        self.tokenizer = Tokenizer(inner) if inner is not None else None
        self._ids = itertools.count()
        self._turn = threading.Lock()  # an engine is stepped by one thread; other callers wait their turn

    @property
    def model_path(self) -> Path:
        """The checkpoint directory the target was loaded from."""
        return self.engine.target.model.path

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Continue every prompt; outputs come in the order of the prompts.

        prompts           a text, a list of texts, or a list of lists of token ids
        sampling_params   one for all or one for each; None: the defaults
        progress          a bar on stderr; None: where there is more than one prompt
        """
        given = _as_list(prompts)
        encoded = [self._encode(prompt) for prompt in given]
        texts = [prompt if isinstance(prompt, str) else None for prompt in given]
        return self._run(encoded, texts, _as_params(sampling_params, len(given)), progress)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or several (a list of lists).

        A message is {"role": ..., "content": ...}.
        """
        if not isinstance(messages, (list, tuple)) or not messages:
            raise InvalidRequestError(f"messages is {shown(messages)}; it must be a list of messages", param="messages")
        conversations = [messages] if messages and isinstance(messages[0], dict) else list(messages)
        if self.tokenizer is None:
            raise InvalidRequestError("the target has no tokenizer; generate() takes token ids", param="messages")
        encoded = [self.tokenizer.encode_chat(conversation) for conversation in conversations]
        return self._run(encoded, [None] * len(encoded), _as_params(sampling_params, len(encoded)), progress)

    def _encode(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return prompt if isinstance(prompt, list) else self.engine.checked_prompt(prompt)
        if self.tokenizer is None:
            raise InvalidRequestError("the target has no tokenizer; give token ids", param="prompt")
        return self.tokenizer.encode(prompt)

    def _run(
        self, prompts: list[list[int]], texts: list[str | None], params: list[SamplingParams], progress: bool | None
    ) -> list[RequestOutput]:
        sequences = [
            sequence
            for index, (prompt, own) in enumerate(zip(prompts, params, strict=True))
            for sequence in self._sequences(index, prompt, own)
        ]
        show = len(prompts) > 1 if progress is None else progress
        with self._turn:
            self._drive({s.request.request_id: s for s in sequences}, show)
        outputs = [RequestOutput(str(i), texts[i], prompts[i], []) for i in range(len(prompts))]
        for sequence in sequences:
            choices = outputs[sequence.prompt_index].outputs
            choices.append(_completion(len(choices), sequence))
            if sequence.request.params.prompt_logprobs is not None:
                outputs[sequence.prompt_index].prompt_logprobs = sequence.request.prompt_logprobs
        return outputs

    def _sequences(self, prompt_index: int, prompt: list[int], params: SamplingParams) -> list[_Sequence]:
        if params.stop_strings and self.tokenizer is None:
            raise InvalidRequestError("the target has no tokenizer; stop strings need one", param="stop")
        base_seed = self.engine.fresh_seed() if params.seed is None else None
        made = []
        for index in range(params.n):
            text = None
            if self.tokenizer is not None:
                text = OutputText(
                    self.tokenizer,
                    params.stop_strings,
                    skip_special_tokens=params.skip_special_tokens,
                    min_tokens=params.min_tokens or 0,
                )
            matcher = text if params.stop_strings else None
            request = self.engine.make_request(
                f"offline-{next(self._ids)}", prompt, params, index=index, base_seed=base_seed, stop_matcher=matcher
            )
            made.append(_Sequence(prompt_index, request, text))
        link_choices([sequence.request for sequence in made])
        return made

    def _drive(self, sequences: dict[str, _Sequence], show: bool) -> None:
        """Step until all are done; an interrupt aborts them and leaves the engine clean."""
        bar = tqdm(total=len(sequences), desc="generating", unit="seq", disable=not show)
        with bar, between_steps() as check_interrupt:
            num_tokens = 0
            try:
                for sequence in sequences.values():
                    self.engine.add(sequence.request)
                while self.engine.has_work:
                    check_interrupt()
                    for gain in self.engine.step():
                        num_tokens += len(gain.token_ids)
                        bar.update(gain.request.is_finished)
                    if show:
                        bar.set_postfix_str(f"{num_tokens / max(bar.format_dict['elapsed'], 1e-9):.0f} tok/s", False)
            finally:
                for request_id in sequences:
                    self.engine.abort(request_id)


def _completion(index: int, sequence: _Sequence) -> CompletionOutput:
    request, text = sequence.request, sequence.text
    if text is not None:
        if request.stop_matcher is None:
            for token_id in request.output_token_ids:
                text.push(token_id)
        text.finish()
    return CompletionOutput(
        index=index,
        text=text.text if text is not None else "",
        token_ids=request.output_token_ids,
        finish_reason=request.finish_reason.value if request.finish_reason else None,
        error=request.error,
        logprobs=None if request.params.logprobs is None else request.logprobs,
        stats=request.stats,
    )


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, (list, tuple)):
        raise InvalidRequestError(
            f"prompts is {type(prompts).__name__}; it must be a text, a list of texts or a list of lists of token ids",
            param="prompts",
        )
    if prompts and all(type(p) is int for p in prompts):
        raise InvalidRequestError("prompts is a flat list of ids; give a list of lists", param="prompts")
    return list(prompts)


def _as_params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, (list, tuple)) or not all(isinstance(own, SamplingParams) for own in params):
        raise InvalidRequestError(
            f"sampling_params is {shown(params)}; it must be SamplingParams or a list of them", param="sampling_params"
        )
    if len(params) != count:
        raise InvalidRequestError(
            f"sampling_params holds {len(params)} values for {count} prompts", param="sampling_params"
        )
    return list(params)


def generate(
    prompts: Prompt | Sequence[Prompt],
    *,
    target: str = "smollm2-135m",
    draft: str | None = "auto",
    sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    **engine_options: Any,
) -> list[RequestOutput]:
    """Load, generate, forget: the one-call face. For more than one call keep an LLM."""
    return LLM(target, draft, **engine_options).generate(prompts, sampling_params)
