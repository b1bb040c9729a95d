"""Models by name, with the sizes of their published configurations."""

from jaxdist.models.base import Model
from jaxdist.models.decoder import SLIDING, DecoderConfig
from jaxdist.models.gpt2 import GPT2Config


def _gpt2(num_layers, width, num_heads, seq_len=1024, vocab_size=50257) -> GPT2Config:
    return GPT2Config(num_layers, width, num_heads, 4 * width, seq_len, vocab_size)


def _llama3(num_layers, width, num_heads, ffn_width, seq_len=8192, **more) -> DecoderConfig:
    sizes = {"num_kv_heads": 8, "head_dim": 128, "vocab_size": 128_256, "rope_theta": 500_000.0} | more
    return DecoderConfig(num_layers, width, num_heads, ffn_width=ffn_width, seq_len=seq_len, **sizes)


def _qwen3(num_layers, width, num_heads, ffn_width, num_kv_heads=8, **more) -> DecoderConfig:
    return DecoderConfig(
        num_layers,
        width,
        num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=128,
        ffn_width=ffn_width,
        seq_len=40_960,
        vocab_size=151_936,
        rope_theta=1_000_000.0,
        norm_eps=1e-6,
        qk_norm=True,
        **more,
    )


def _mistral_7b(**more) -> DecoderConfig:
    return DecoderConfig(32, 4096, 32, num_kv_heads=8, head_dim=128, ffn_width=14_336, seq_len=32_768, **more)


def _moe(num_layers, width, num_heads, ffn_width, seq_len, vocab_size) -> DecoderConfig:
    sizes = {"num_kv_heads": 2, "head_dim": width // num_heads, "ffn_width": ffn_width}
    experts = {"num_experts": 8, "top_k": 2, "balance_loss": 0.01, "z_loss": 0.001}
    return DecoderConfig(num_layers, width, num_heads, seq_len=seq_len, vocab_size=vocab_size, **sizes, **experts)


# Source: config.json of meta-llama/Meta-Llama-3-8B, -70B, Llama-3.1-405B and Llama-3.2-1B, Qwen/Qwen3-0.6B, -8B, -32B,
# -30B-A3B and -235B-A22B, mistralai/Mistral-7B-v0.1, -v0.3, Mixtral-8x7B-v0.1 and -8x22B-v0.1. Those without a source
# are ours, for proofs and laptops.
PRESETS: dict[str, Model] = {
    "proof": _gpt2(4, 64, 8, seq_len=32, vocab_size=250),
    "tiny": _gpt2(4, 128, 4, seq_len=128, vocab_size=256),
    "gpt-7m": _gpt2(6, 256, 8, seq_len=256, vocab_size=10000),
    "gpt-11m": _gpt2(6, 384, 6, seq_len=256, vocab_size=256),
    "12m": _gpt2(6, 320, 5, seq_len=512, vocab_size=16000),
    "gpt2-124m": _gpt2(12, 768, 12),
    "gpt2-350m": _gpt2(24, 1024, 16),
    "gpt2-774m": _gpt2(36, 1280, 20),
    "gpt2-1.5b": _gpt2(48, 1600, 25),
    "7b": _gpt2(32, 4096, 32, seq_len=2048),
    "70b": _gpt2(88, 8192, 64, seq_len=2048),
    "175b": _gpt2(96, 12288, 96, seq_len=2048),
    "llama-proof": DecoderConfig(4, 64, 8, num_kv_heads=2, head_dim=8, ffn_width=192, seq_len=32, vocab_size=250),
    "llama-10m": DecoderConfig(6, 384, 6, num_kv_heads=2, head_dim=64, ffn_width=1024, seq_len=256, vocab_size=256),
    "llama3-8b": _llama3(32, 4096, 32, 14_336),
    "llama3-70b": _llama3(80, 8192, 64, 28_672),
    "llama3-405b": _llama3(126, 16_384, 128, 53_248),
    "llama3.2-1b": _llama3(
        16, 2048, 32, 8192, seq_len=131_072, head_dim=64, tied=True, rope_scaling=("llama3", 32.0, 1.0, 4.0, 8192)
    ),
    "qwen3-0.6b": _qwen3(28, 1024, 16, 3072, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 32, 12_288),
    "qwen3-32b": _qwen3(64, 5120, 64, 25_600),
    "mistral-7b-v0.1": _mistral_7b(vocab_size=32_000, window=4096, kinds=(SLIDING,)),
    "mistral-7b-v0.3": _mistral_7b(vocab_size=32_768, rope_theta=1_000_000.0),
    "moe-proof": _moe(4, 64, 8, 64, seq_len=32, vocab_size=250),
    "moe-10m": _moe(4, 256, 4, 256, seq_len=256, vocab_size=256),
    "mixtral-8x7b": _mistral_7b(vocab_size=32_000, rope_theta=1_000_000.0, num_experts=8, top_k=2),
    "mixtral-8x22b": DecoderConfig(
        56,
        6144,
        48,
        num_kv_heads=8,
        head_dim=128,
        ffn_width=16_384,
        seq_len=65_536,
        vocab_size=32_000,
        rope_theta=1_000_000.0,
        num_experts=8,
        top_k=2,
    ),
    "qwen3-30b-a3b": _qwen3(48, 2048, 32, 6144, num_kv_heads=4, num_experts=128, top_k=8, expert_width=768),
    "qwen3-235b-a22b": _qwen3(94, 4096, 64, 12_288, num_kv_heads=4, num_experts=128, top_k=8, expert_width=1536),
}
