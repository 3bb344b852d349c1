"""Configuration: frozen values composed into one EngineConfig, checked when they are built.

It knows limits and defaults that need no model. What depends on the model, the device or the
memory ("auto", None) is resolved where that is known, before a value is used.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from specdec.errors import InvalidRequestError, shown

Method = Literal["auto", "none", "ngram", "suffix", "draft_model", "eagle", "hybrid"]
METHODS: tuple[str, ...] = ("auto", "none", "ngram", "suffix", "draft_model", "eagle", "hybrid")
DTYPES: tuple[str, ...] = ("auto", "float64", "float32", "bfloat16", "float16")
KV_CACHE_DTYPES: tuple[str, ...] = ("auto", "fp8")
QUANTIZATIONS: tuple[str, ...] = ("none", "int4", "int8", "int4-a8", "int8-a8")
COMPILES: tuple[str, ...] = ("off", "auto", "max")
MAX_SPECULATIVE_TOKENS = 64


def _check_range(name: str, value: Any, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidRequestError(f"{name} is {shown(value)}; it must be an integer from {low} to {high}", param=name)


def _check_choice(name: str, value: Any, choices: tuple[object, ...]) -> None:
    if type(value) is not type(choices[0]) or value not in choices:
        raise InvalidRequestError(
            f"{name} is {shown(value)}; it must be one of {', '.join(map(str, choices))}", param=name
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model, in which precision, on which device.

    model           alias, hub id, directory or .gguf file
    dtype           "auto" picks what the device does well
    max_model_len   most tokens of a request, prompt and output together; None: the model's own
    quantization    weights of linear layers in 4 or 8 bits (CPU); "-a8": their inputs in 8 bits too, which is faster
    """

    model: str
    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    quantization: str = "none"

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise InvalidRequestError(f"model is {shown(self.model)}; it must name a model", param="model")
        _check_choice("dtype", self.dtype, DTYPES)
        _check_choice("quantization", self.quantization, QUANTIZATIONS)
        if not isinstance(self.device, str):
            raise InvalidRequestError(
                f"device is {shown(self.device)}; it must be a name such as 'cpu'", param="device"
            )
        if self.max_model_len is not None:
            _check_range("max_model_len", self.max_model_len, 2, 2**24)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """How the key/value memory is cut.

    kv_cache_memory   bytes for target and draft together; None: a share of what is free
    num_kv_blocks     exact number of blocks; overrides kv_cache_memory
    kv_cache_dtype    of the target's keys and values; "auto": its own dtype; "fp8": e4m3 with a scale a layer and KV
                      head. A draft keeps its dtype
    """

    block_size: int = 16
    kv_cache_memory: int | None = None
    num_kv_blocks: int | None = None
    enable_prefix_caching: bool = True
    gpu_memory_utilization: float = 0.9
    kv_cache_dtype: str = "auto"

    def __post_init__(self) -> None:
        _check_choice("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        _check_range("block_size", self.block_size, 1, 4096)
        if self.kv_cache_memory is not None:
            _check_range("kv_cache_memory", self.kv_cache_memory, 1, 2**50)
        if self.num_kv_blocks is not None:
            _check_range("num_kv_blocks", self.num_kv_blocks, 1, 2**31 - 1)
        _check_choice("enable_prefix_caching", self.enable_prefix_caching, (True, False))
        if type(self.gpu_memory_utilization) not in (int, float) or not 0 < self.gpu_memory_utilization <= 1:
            raise InvalidRequestError(
                f"gpu_memory_utilization is {shown(self.gpu_memory_utilization)}; it must be above 0 and at most 1",
                param="gpu_memory_utilization",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """How much one step may hold.

    max_num_batched_tokens   tokens of one target forward: base tokens, prompt chunks and drafts
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512

    def __post_init__(self) -> None:
        _check_range("max_num_seqs", self.max_num_seqs, 1, 65536)
        _check_range("max_num_batched_tokens", self.max_num_batched_tokens, 1, 2**22)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InvalidRequestError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens} and max_num_seqs {self.max_num_seqs}; "
                "every running request needs one token a step, so the first must not be below the second",
                param="max_num_batched_tokens",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """How guesses are made and judged.

    method                  "auto" follows `draft`; "none" turns speculation off
    num_speculative_tokens  most drafts a row and step; None: 16 of a lookup while `adaptive`, else 5; 5 of a head, 4 of
                            a second model
    draft                   model id or path of a second model (methods "draft_model" and "hybrid") or of a feature
                            draft ("eagle" and "hybrid")
    adaptive                a controller chooses every row's length each step; False: always the most
    acceptance              "coupled": the target's own seeded sample decides (shared noise); "rejection": drafts
                            are drawn by a noise of their own and judged by the ratio of the laws, which accepts a
                            few more, but the tokens of a seed then depend on the draft and its lengths
    forced_tokens           tokens that a request's grammar leaves no choice about ride as drafts
    prompt_lookup_max/min   longest and shortest n-gram looked up; the shortest match of "suffix" too
    suffix_store_tokens     past outputs that suffix lookup may use, in tokens, kept apart by API key and
                            cache_salt; 0: a request sees its own text only. Below a few thousand it holds little
    trace                   file to which the controller's decisions are appended, a JSON line a step
    profile_seconds         longest measurement of the models at start, which seeds the controller; 0: none
    """

    method: Method = "auto"
    num_speculative_tokens: int | None = None
    draft: str | None = None
    adaptive: bool = True
    acceptance: Literal["coupled", "rejection"] = "coupled"
    forced_tokens: bool = True
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 2
    suffix_store_tokens: int = 0
    trace: str | None = None
    profile_seconds: float = 5.0

    def __post_init__(self) -> None:
        _check_choice("method", self.method, METHODS)
        _check_choice("acceptance", self.acceptance, ("coupled", "rejection"))
        if self.acceptance == "rejection" and self.method == "hybrid" and self.draft is not None:
            raise InvalidRequestError(
                "acceptance 'rejection' is given with method 'hybrid', which picks an offer after it is drawn; "
                "name method 'draft_model', or keep acceptance 'coupled'",
                param="acceptance",
            )
        if self.draft is not None and (not isinstance(self.draft, str) or not self.draft):
            raise InvalidRequestError(
                f"draft is {shown(self.draft)}; it must name a model or a directory", param="draft"
            )
        if self.trace is not None and not self.adaptive:
            raise InvalidRequestError("trace is given; it writes what the adaptive controller decides", param="trace")
        _check_choice("forced_tokens", self.forced_tokens, (True, False))
        _check_choice("adaptive", self.adaptive, (True, False))
        if self.trace is not None and (not isinstance(self.trace, str) or not self.trace):
            raise InvalidRequestError(f"trace is {shown(self.trace)}; it must be a path", param="trace")
        if type(self.profile_seconds) not in (int, float) or not 0 <= self.profile_seconds <= 60:
            raise InvalidRequestError(
                f"profile_seconds is {shown(self.profile_seconds)}; it must be from 0 (no profile) to 60",
                param="profile_seconds",
            )
        if self.num_speculative_tokens is not None:
            _check_range("num_speculative_tokens", self.num_speculative_tokens, 0, MAX_SPECULATIVE_TOKENS)
        _check_range("prompt_lookup_max", self.prompt_lookup_max, 1, 64)
        _check_range("prompt_lookup_min", self.prompt_lookup_min, 1, self.prompt_lookup_max)
        _check_range("suffix_store_tokens", self.suffix_store_tokens, 0, 2**26)
        if self.method in ("draft_model", "eagle") and self.draft is None:
            raise InvalidRequestError(
                f"method {self.method!r} needs draft=<model id or directory>; method 'ngram' needs no second model",
                param="draft",
            )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SpeculativeConfig:
        """Build from JSON; an unknown key is an error that lists the known ones."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(map(str, set(values) - known))
        if unknown:
            raise InvalidRequestError(
                f"speculative config has unknown keys {', '.join(unknown)}; known are {', '.join(sorted(known))}",
                param=unknown[0],
            )
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything an engine is built from.

    num_threads   threads of the CPU kernels, of the whole process; None: see `specdec.threads`
    compile       "off": nothing is ever compiled, every operation is PyTorch's own; "auto": kernels of ours where this
                  machine can build them, else as "off"; "max": on a CPU also torch.compile of the decoder layers
                  that our kernels do not run whole, which makes the start longer
    """

    target: ModelConfig
    draft: ModelConfig | None = None
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    seed: int = 0
    num_threads: int | None = None
    compile: str = "auto"

    def __post_init__(self) -> None:
        _check_choice("compile", self.compile, COMPILES)
        _check_range("seed", self.seed, -(2**63), 2**63 - 1)
        if self.num_threads is not None:
            _check_range("num_threads", self.num_threads, 1, 1024)
