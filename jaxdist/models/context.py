"""What a model's functions are given beside their parameters: the batch, and the run as the model sees it."""

import sys
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax, random

from jaxdist.errors import ConfigError
from jaxdist.parallel import collectives as comm
from jaxdist.parallel import tensor, vocabulary
from jaxdist.parallel.chunked_loss import cross_entropy_in_chunks
from jaxdist.parallel.dropout import dropout
from jaxdist.parallel.remat import SavePolicy, mark_saveable
from jaxdist.parallel.rings import Ring
from jaxdist.parallel.sequence import Split


class Batch(NamedTuple):
    """inputs, targets: tokens[B, T] (a negative target does not count). rows[B]: index in the global batch.

    starts[B, T]: where, in its row, the document of each token begins; None where documents are not told apart.
    """

    inputs: Any
    targets: Any
    rows: Any
    starts: Any = None


@dataclass(frozen=True)
class Context:
    """What a model's functions are told beside arrays: how the run is split, its dropout.

    sp, ring: sequence parallelism, and how matmuls and their collectives over tp overlap (`jaxdist.parallel.rings`).
    split: of the sequence over cp; starts_BT is of the whole sequence all the same. expert_axes: that experts are split
    over.
    attention: "xla", "blocked" or "cudnn". selective: backward runs again what is wrapped in `recomputed`. loss_chunks:
    parts in which the logits are made. on_gpu: whether a GPU's compiler gets the program. key: of the step's dropout,
    None for none. rows_B, starts_BT: as in `Batch`. weight: the factor of auxiliary losses and of counts, one over the
    number of tokens of the global batch (times fp16's loss scale); None outside of training. cache: of keys and values,
    where text is generated (`jaxdist.models.cache`). What is traced are these five. probe: where the model is, in a run
    that is watched (`jaxdist.probes.Probe`); None in every other.
    draws_choices: whether experts are drawn, not chosen by scores (`jaxdist.models.experts.choose`): in 16-bit proofs.
    """

    sp: bool = False
    ring: Ring | None = None
    split: Split = Split()
    expert_axes: tuple[str, ...] = ("ep",)
    attention: str = "xla"
    selective: bool = False
    loss_chunks: int = 1
    on_gpu: bool = False
    key: jax.Array | None = None
    rows_B: jax.Array | None = None
    starts_BT: jax.Array | None = None
    weight: jax.Array | None = None
    cache: Any = None
    probe: Any = None
    draws_choices: bool = False

    def at(self, site: int | jax.Array) -> "Context":
        """The same at another place of the model, where dropout draws other masks."""
        return self if self.key is None else replace(self, key=random.fold_in(self.key, site))

    def watching(self, part: str, layer: int | jax.Array = 0) -> "Context":
        """The same in another part of the model ("embed", "layer" or "loss"), whose probes are counted from the first.

        No function may be watched at two places at once."""
        return self if self.probe is None else replace(self, probe=self.probe.at(part, layer))

    def observe(self, name: str, x: jax.Array) -> jax.Array:
        """`x`, whose value and gradient a watched run compares with another run's (docs/diverge.md).

        Layout: x[B, ...] of the micro-batch's rows, with at most one dim split over tp; or a scalar, summed over rows.
        """
        return x if self.probe is None else self.probe(name, x, self.rows_B)

    def _observe(self, name: str, x: jax.Array) -> jax.Array:
        """`observe` under the name of the model's function that called the method: "Attention.row_parallel.out"."""
        if self.probe is None:
            return x
        frame = sys._getframe(1)
        while frame.f_code.co_filename == __file__:
            frame = frame.f_back
        caller = frame.f_code.co_qualname.split(".<locals>")[0].removesuffix(".__call__")
        return self.observe(f"{caller}.{name}", x)

    def recomputed(self, function):
        """`function`; under selective recomputation only its result is saved, and it runs again in backward (arXiv
        2205.05198, section 5)."""
        if not self.selective:
            return function
        again = jax.checkpoint(function, prevent_cse=False)
        return lambda *args: mark_saveable(again(*args))

    def checkpointed(self, function):
        """`function`; products and sums are saved for backward, elementwise steps are repeated.

        Layers, and the loss in one piece, are under this policy already; see `final_norm`.
        """
        return jax.checkpoint(function, policy=SavePolicy(), prevent_cse=False)

    def final_norm(self, norm):
        """`norm`, the step before the logits, as it is best kept for backward."""
        return self.checkpointed(norm) if self.loss_chunks > 1 else norm

    @property
    def trains(self) -> bool:
        """Whether a gradient is taken: without, auxiliary losses and counts are of no use."""
        return self.weight is not None

    def add_loss(self, x: jax.Array, value: jax.Array) -> jax.Array:
        """`x`; an auxiliary loss, in any part of a model: what is minimised is the mean loss of a target plus the mean
        of `value` over all tokens of the global batch, targets or not.

        value: a scalar, summed over this rank's tokens. One that differs between ranks (its type says so) counts on
        each. The loss that is reported, and that of an evaluation, stay those of `Model.loss`. Source: the scaler of
        Megatron-LM's load-balancing loss.
        """
        return _add_gradient(x, value, self.weight) if self.trains else x

    def count(self, x: jax.Array, counter: jax.Array, values: jax.Array) -> jax.Array:
        """`x`; a step adds `values` to a parameter that counts (`Param.update`), summed over micro-batches and ranks
        as a gradient is, and divided by the number of tokens. Values that differ between ranks count on each."""
        return _count(x, counter, values, self.weight) if self.trains else x

    # `jaxdist.parallel.tensor` and `dropout` as this run applies them.

    def enter(self, x_BTD: jax.Array) -> jax.Array:
        """Before what needs the whole sequence and is no matmul; before matmuls: `column_parallel`."""
        return tensor.enter(self._observe("enter.in", x_BTD), self.sp)

    def column_parallel(self, x_BTD: jax.Array, *weights: jax.Array) -> Any:
        """x[B, T, D] or x[B, T_tp, D] -> x @ w, w's last dims split over tp: the first half of Megatron's layer. Of
        several weights the products, in a list."""
        x_BTD = self._observe("column_parallel.in", x_BTD)
        products = tensor.column_parallel(x_BTD, weights, self.sp, self.ring)
        products = [self._observe("column_parallel.out", product) for product in products]
        return products if len(products) > 1 else products[0]

    def row_parallel(self, y_BTF: jax.Array, w_FD: jax.Array) -> jax.Array:
        """y[B, T, F_tp] -> y @ w summed over tp, in the layout between layers: its second half."""
        y_BTF = self._observe("row_parallel.in", y_BTF)
        return self._observe("row_parallel.out", tensor.row_parallel(y_BTF, w_FD, self.sp, self.ring))

    def embedding(self, tokens_BT: jax.Array, table_VD: jax.Array) -> jax.Array:
        """tokens[B, T] -> rows of a table that is split over tp, in the layout between layers."""
        return self._observe("embedding.out", vocabulary.vocab_parallel_embedding(tokens_BT, table_VD, self.sp))

    def positions(self, num_local: int) -> jax.Array:
        """Positions of the local tokens, each in its document: i32[T], of this rank's part with sp; i32[B, T] where
        rows differ."""
        if self.cache is not None:
            return self.cache.positions(num_local)
        return self._in_documents(self.places(num_local))

    def whole_positions(self, length: int) -> jax.Array:
        """The same of all that this rank of cp has: after `enter` or `column_parallel`."""
        if self.cache is not None:
            return self.cache.positions(length)
        return self._in_documents(self.split.positions(jnp.arange(length), length))

    @property
    def sequence_axes(self) -> tuple[str, ...]:
        """The axes that split a sequence between the tensor-parallel regions."""
        return ("cp", *((tensor.AXIS,) if self.sp else ()))

    def places(self, num_local: int) -> jax.Array:
        """Places in the whole sequence of the local tokens between the tensor-parallel regions: i32[T]."""
        length = num_local * (comm.size(tensor.AXIS) if self.sp else 1)
        return self.split.positions(tensor.positions(num_local, self.sp), length)

    def _heads(self, num_local: int) -> jax.Array:
        """Global indices of the heads that this rank computes with: a part of its own, while it has exchanged heads for
        positions."""
        all_N = tensor.global_indices(num_local * self.split.exchanging)
        if self.split.exchanging == 1:
            return all_N
        return lax.dynamic_slice_in_dim(all_N, self.split.member * num_local, num_local)

    def _in_documents(self, places_T: jax.Array) -> jax.Array:
        if self.starts_BT is None:
            return places_T
        return places_T - jnp.take(self.starts_BT, places_T, axis=1)

    def position_rows(self, table_TD: jax.Array, num_local: int) -> jax.Array:
        """The rows of a table of learned positions for the local tokens: [T, D], or [B, T, D].

        Raises: ConfigError for a sequence longer than the table."""
        length = num_local * comm.size(self.sequence_axes)
        if self.cache is None and length > len(table_TD):
            required = f"must have at most {len(table_TD)}: the model has learned no more positions"
            raise ConfigError(f"a sequence of {length} tokens", required, "Cut it, or use a larger seq_len")
        positions = self.positions(num_local)
        if positions.ndim > 1 or self.split.ranks > 1:
            return vocabulary.look_up(len(table_TD), table_TD, positions)
        return lax.dynamic_slice_in_dim(table_TD, positions[0], num_local)

    def loss(self, x_BTD: jax.Array, table_VD: jax.Array, targets_BT: jax.Array, vocab_size: int) -> jax.Array:
        """The summed cross-entropy of targets that are not negative, in nats, equal along tp."""
        x_BTD = self._observe("cross_entropy.in", x_BTD)
        head = (x_BTD, table_VD, targets_BT, vocab_size, self.sp)
        if self.loss_chunks > 1:
            return cross_entropy_in_chunks(*head, self.loss_chunks, self.on_gpu)
        losses_BT = vocabulary.vocab_parallel_cross_entropy(*head, self.on_gpu)
        losses_BT = self._observe("cross_entropy.out", losses_BT)
        return jnp.where(targets_BT >= 0, losses_BT, 0).sum()

    def dropout(self, x_BTD: jax.Array, rate: float) -> jax.Array:
        """Dropout on activations between the tensor-parallel regions."""
        if self.key is None or rate == 0:
            return x_BTD
        return dropout(x_BTD, rate, self.key, self.rows_B, self.places(x_BTD.shape[1]))

    def dropout_heads(self, x: jax.Array, rate: float) -> jax.Array:
        """Dropout on an array whose dims after the batch's begin with heads that are split over tp."""
        if self.key is None or rate == 0:
            return x
        return dropout(x, rate, self.key, self.rows_B, self._heads(x.shape[1]))


@jax.custom_vjp
def _add_gradient(x, value, weight):
    return x


_add_gradient.defvjp(
    # Of the value only its type is kept: what it costs to know it, sums over ranks among that, is not spent.
    lambda x, value, weight: (x, comm.varying_like(weight.astype(value.dtype), value)),
    lambda kept, dx: (dx, kept, None),
)


@jax.custom_vjp
def _count(x, counter, values, weight):
    return x


_count.defvjp(
    lambda x, counter, values, weight: (x, (counter, values * weight)),
    lambda kept, dx: (dx, comm.varying_like(kept[1].astype(kept[0].dtype), kept[0]), None, None),
)
