"""Small models, one of each kind of attention and one with experts."""

from jaxdist.models.decoder import DecoderConfig
from jaxdist.models.gpt2 import GPT2Config

SIZES = {"num_layers": 4, "width": 32, "num_heads": 8, "num_kv_heads": 2, "head_dim": 8, "ffn_width": 48}
TEXT = {"seq_len": 40, "vocab_size": 250}
MODELS = {
    "gpt2": GPT2Config(num_layers=4, width=32, num_heads=8, ffn_width=64, **TEXT),
    "grouped": DecoderConfig(**SIZES, **TEXT),
    "windows": DecoderConfig(**SIZES, **TEXT, qk_norm=True, tied=True, window=6, kinds=("sliding", "full")),
    "experts": DecoderConfig(**SIZES, **TEXT, num_experts=4, top_k=2, shared_width=16),
}
