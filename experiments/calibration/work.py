"""What the papers' models compute, for `jaxdist.plan.time_model`. No JAX here."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxdist.plan.formulas import ModelShape, forward_flops_per_token
from jaxdist.plan.time_model import AttentionShape, Number


@dataclass(frozen=True)
class PaperWork:
    """What one layer and the head of a published model compute, by the papers' closed forms.

    matmul(n, k, m) in the methods: seconds of a product [positions, k] x [k, n]; m where another dim is the smallest.
    """

    shape: ModelShape
    layer_sums = 2  # over tp, of one layer's forward
    mixture_sums = 0  # of these, around experts
    ring_sums = 2  # and with products
    matrices_again = sums_again = sp_sums_again = 1.0  # PyTorch runs the whole layer again
    trained_layer = trained_table = 1.0
    layer_backward = head_backward = 2.0
    expert_parameters = 0

    def __getattr__(self, name: str):
        return getattr(self.shape, name)

    @property
    def table_parameters(self) -> int:
        return self.shape.vocab_size * self.shape.width

    @property
    def flops_per_token(self) -> float:
        return 3 * sum(forward_flops_per_token(self.shape).values())

    def matrices(self, matmul: Callable, tp: Number, ep: Number, experts_over_tp: Number) -> Number:
        """Products with a layer's weights."""
        shape, h = self.shape, self.shape.width
        up = (2 if shape.gated_mlp else 1) * shape.ffn_width
        return (
            matmul((h + 2 * shape.kv_width) / tp, h)
            + matmul(h, h / tp)
            + matmul(up / tp, h)
            + matmul(h, shape.ffn_width / tp)
        )

    def in_rings(self, matmul: Callable, tp: Number) -> Number:
        return self.matrices(matmul, tp, 1, False)

    @property
    def attention(self) -> tuple[AttentionShape, ...]:
        shape = self.shape
        return (AttentionShape(shape.num_heads, shape.num_kv_heads or shape.num_heads, shape.head_dim),)

    def core(self, matmul: Callable, tp: Number) -> Number:
        """Scores, masked ones too, and their sum over values, whose smallest dim is the head's."""
        shape = self.shape
        return 2 * matmul(shape.num_heads * shape.seq_len / tp, shape.head_dim, m=shape.head_dim)

    def head(self, matmul: Callable, tp: Number) -> Number:
        return matmul(self.shape.vocab_size / tp, self.shape.width)

    def elementwise_bytes(self, dropout: Number, flash: Number, itemsize: int) -> tuple:
        return elementwise_bytes(self.shape, dropout, flash, itemsize)


def elementwise_bytes(shape: ModelShape, dropout: Number, flash: Number, itemsize: int = 2) -> tuple:
    """HBM bytes of one position's forward through one layer: (whole on every tp rank unless sp, split over tp, scores).

    Counts what is read and written by kernels that fuse bias, dropout and residual, as in Megatron-LM: two norms; two
    residual sums; copies of q, k, v (rotary embedding another of q and k); the activation, one more product when gated.
    `scores` is softmax and its dropout, which flash attention does not write.
    """
    i, h, f, kv = itemsize, shape.width, shape.ffn_width, shape.kv_width
    masks = np.where(dropout, 1, 0)
    whole = h * (4 * i + 2 * (3 * i + masks))
    rotary = 0 if shape.learned_positions else 2 * i * (h + kv)
    split = 2 * i * (h + 2 * kv) + rotary + (5 if shape.gated_mlp else 2) * i * f
    scores = np.where(flash, 0, shape.num_heads * shape.seq_len * np.where(dropout, 4 * i + 1, 2 * i))
    return whole, split, scores
