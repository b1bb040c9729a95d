"""The operations that a step is made of, each jitted alone at the step's shapes, beside PyTorch's same operation.

Dims: B batch, T sequence, R = B T, D model, N heads, H head dim, F feed-forward, V padded vocabulary.
"""

import dataclasses
import importlib.util
import math
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.markup import escape

from jaxdist.commands import install_text
from jaxdist.config import RunConfig
from jaxdist.mesh import MeshShape, make_mesh
from jaxdist.models.attention import attention_core
from jaxdist.models.context import Batch, Context
from jaxdist.models.fused import gelu_tanh
from jaxdist.models.gpt2 import GPT2Config, LayerNorm
from jaxdist.runtime.devices import Devices, acquire_devices
from jaxdist.train.gradients.base import all_finite
from jaxdist.train.program import attention_on, build_program
from jaxdist.train.update import gradient_norms, update

from .flags import BenchFlags
from .rows import Measured, Row
from .timing import repeated
from .workers import Worker, WorkerEnded

SECONDS = 0.05  # of one measurement: short operations are called that often in a row
MOST_CALLS = 200
UPDATE = "optimizer update"
BOTH = " and backward"


def array_shapes(config: GPT2Config, batch_size: int) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Operation -> shapes of the arrays that it is differentiated by."""
    length, width, ffn, vocab = config.seq_len, config.width, config.ffn_width, config.padded_vocab_size
    rows, heads = batch_size * length, config.num_heads
    return {
        "qkv product": ((rows, width), (width, 3 * width)),
        "output product": ((rows, width), (width, width)),
        "up product": ((rows, width), (width, ffn)),
        "down product": ((rows, ffn), (ffn, width)),
        "head product": ((rows, width), (vocab, width)),
        "attention": ((batch_size, length, heads, width // heads),) * 3,
        "LayerNorm": ((batch_size, length, width), (width,), (width,)),
        "GELU": ((rows, ffn),),
        "embedding": ((vocab, width), (length, width)),
        "norm, head, cross-entropy": ((batch_size, length, width), (vocab, width), (width,), (width,)),
    }


def product_flops(name: str, shapes: tuple[tuple[int, ...], ...]) -> int | None:
    """FLOPs of one forward; backward has two products of the same size."""
    return 2 * shapes[0][0] * math.prod(shapes[1]) if name.endswith("product") else None


def operations(config: RunConfig, attention: str) -> dict[str, Callable]:
    """Operation -> function(tokens_BT, *arrays): the model's own code, on one device."""
    shape = config.model
    norm = nnx.split(nnx.eval_shape(lambda: LayerNorm(shape.width)))[0]
    ctx = Context(attention=attention)

    def head(tokens_BT, x_BTD, table_VD, scale_D, bias_D):
        root = {"tokens": table_VD, "ln_final": {"scale": scale_D, "bias": bias_D}}
        return shape.loss(ctx, root | {"positions": None}, x_BTD, Batch(tokens_BT, tokens_BT, None))

    products = [name for name in array_shapes(shape, 1) if name.endswith("product")]
    return dict.fromkeys(products, lambda _, x, w: x @ w) | {
        "head product": lambda _, x, table: x @ table.T,
        "attention": lambda _, q, k, v: attention_core(attention, ctx)(q, k, v),
        "LayerNorm": lambda _, x, scale, bias: nnx.merge(norm, {"scale": scale, "bias": bias})(x),
        "GELU": lambda _, x: gelu_tanh(x),
        "embedding": lambda tokens_BT, tokens, positions: shape.embed(
            ctx,
            {"tokens": tokens, "positions": positions, "ln_final": {"scale": None, "bias": None}},
            Batch(tokens_BT, tokens_BT, None),
        ),
        "norm, head, cross-entropy": head,
    }


def with_backward(function: Callable) -> Callable:
    """(tokens, cotangent, *arrays) -> (output, gradients of the arrays)."""

    def both(tokens_BT, cotangent, *arrays):
        output, pull = jax.vjp(lambda *arrays: function(tokens_BT, *arrays), *arrays)
        return output, pull(cotangent)

    return both


def bench_kernels(flags: BenchFlags, config: RunConfig, console: Console) -> Measured:
    """Ours and PyTorch's in turn, pair by pair; both get as many calls in a row as ours need for a twentieth of a
    second."""
    devices = acquire_devices(1, flags.device)
    console.print(f"{config.precision.dtype}, {config.batch_size} sequences")
    peer = start_torch(config, devices, console)
    rows = []
    try:
        for name, theirs, flops, run in programs(config, devices, flags.only):
            with console.status(name):
                times = measure(run, theirs, peer, flags.repeats)
            if isinstance(times, str):
                console.print(f"PyTorch: {theirs}: not measured ({escape(times)})")
                times = measure(run, theirs, None, flags.repeats)
            rows += rows_of_pair(name, times, flops)
    finally:
        if peer is not None:
            peer.close()
    if devices.platform == "gpu":
        console.print("What takes less than some 20 us may be the time of dispatching it, on either side.")
    return rows, devices


def measure(run, name: str, peer: Worker | None, repeats: int) -> list[tuple[float, ...]] | str:
    """(ours, theirs) of every round; why there are none where PyTorch refuses the operation."""
    run(1)
    count = max(1, min(MOST_CALLS, math.ceil(SECONDS / max(run(1), 1e-6))))
    times = []
    for number in range(repeats + 1):
        pair = (run(count),)
        if peer is not None:
            answer = peer.ask(f"{count} {name}")
            if "error" in answer:
                return answer["error"]
            pair += (answer["seconds"],)
        if number:  # the first round warms up
            times.append(pair)
    return times


def rows_of_pair(name: str, times: list[tuple[float, ...]], flops: int | None) -> list[Row]:
    ours, *theirs = zip(*times, strict=True)
    rows, rates = [Row.of(name, ours, "s")], {f"{name}: rate": ours}
    if theirs:
        rows = [Row.beside(name, ours, theirs[0], f"{name}: PyTorch"), Row.of(f"{name}: PyTorch", theirs[0], "s")]
        rates[f"{name}: PyTorch's rate"] = theirs[0]
    return rows + [Row.of(key, [flops / s for s in seconds], "FLOP/s") for key, seconds in rates.items() if flops]


def programs(config: RunConfig, devices: Devices, only: str) -> Iterator[tuple[str, str, int | None, Callable]]:
    """(name, PyTorch's name, FLOPs, n -> seconds of one of n calls); arrays live as long as their turn."""
    on_device = jax.default_device(devices.devices[0])
    at_once = devices.platform != "cpu"
    mesh = make_mesh(MeshShape(), devices.devices)
    attentions = dict.fromkeys(("xla", attention_on(mesh, config, training=True)))
    shapes = array_shapes(config.model, config.batch_size)
    for kernel, sizes in shapes.items():
        for attention in attentions if kernel == "attention" else ("xla",):
            title = f"attention, {attention}" if kernel == "attention" else kernel
            if not any(only in name for name in (f"{title}: forward", f"{title}: forward{BOTH}")):
                continue
            function = operations(config, attention)[kernel]
            with on_device:
                tokens_BT, arrays = make_inputs(config, sizes)
            forward, both = (on_one_device(each, devices) for each in (function, with_backward(function)))
            output = jax.eval_shape(forward, tokens_BT, *arrays)
            with on_device:
                cotangent = normal(99, output.shape, output.dtype) if output.shape else jnp.ones((), output.dtype)
            calls = {
                "": (1, lambda f=forward, t=tokens_BT, a=arrays: f(t, *a)),
                BOTH: (3, lambda f=both, t=tokens_BT, g=cotangent, a=arrays: f(t, g, *a)),
            }
            flops = product_flops(kernel, sizes)
            for more, (products, call) in calls.items():
                name = f"{title}: forward{more}"
                if only in name:
                    yield name, f"{kernel}: forward{more}", flops and flops * products, repeated(call, at_once)
    if only in UPDATE:
        yield UPDATE, UPDATE, None, repeated(update_program(config, devices), at_once)


def on_one_device(function: Callable, devices: Devices, donated: tuple[int, ...] = ()) -> Callable:
    """Jitted on a mesh of one: the model's code asks for axes, all of size 1."""
    mesh = make_mesh(MeshShape(), devices.devices)
    on_mesh = jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=True)
    return jax.jit(on_mesh, donate_argnums=donated)


def make_inputs(config: RunConfig, shapes) -> tuple[jax.Array, list[jax.Array]]:
    tokens = np.random.default_rng(0).integers(
        0, config.model.vocab_size, (config.batch_size, config.model.seq_len), dtype=np.int32
    )
    return jnp.asarray(tokens), [normal(i, shape, config.precision.dtype) for i, shape in enumerate(shapes)]


def normal(seed: int, shape: tuple[int, ...], dtype) -> jax.Array:
    return jax.jit(jax.random.normal, static_argnums=(1, 2))(jax.random.key(seed), shape, jnp.dtype(dtype))


def update_program(config: RunConfig, devices: Devices) -> Callable:
    """Clipping, the check for finite gradients and the update, of every parameter; the state is donated."""
    program = build_program(config, make_mesh(MeshShape(), devices.devices))
    layout, state = program.layout, program.init(config.seed)
    owned = state.params if state.master is None else state.master

    def step(owned, moments, grads):
        finite_leaves, norm = all_finite(grads), gradient_norms(grads, layout)[0]
        finite, step = jnp.isfinite(norm), jnp.zeros((), norm.dtype)
        owned, moments = update(program.optimizer, layout, finite, grads, moments, owned, step=step, norm=norm)
        params = None if state.master is None else jax.tree.map(lambda p: p.astype(config.precision.dtype), owned)
        return owned, moments, params, finite_leaves

    run = on_one_device(step, devices, donated=(0, 1))
    grads = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1e-3, tree))(owned)
    held = {"owned": owned, "moments": state.moments}

    def call():
        held["owned"], held["moments"], *more = run(held["owned"], held["moments"], grads)
        return held["owned"], more

    return call


def start_torch(config: RunConfig, devices: Devices, console: Console) -> Worker | None:
    """PyTorch's process, ready; None, and the reason on the console, where there is none."""
    if importlib.util.find_spec("torch") is None:
        console.print(f"PyTorch: not run, torch is not installed ({install_text('bench')})", markup=False)
        return None
    asked = {
        "model": dataclasses.asdict(config.model),
        "batch_size": config.batch_size,
        "dtype": config.precision.dtype,
        "device": "cuda" if devices.platform == "gpu" else "cpu",
    }
    worker = Worker(f"{__package__}.torch_kernels", asked)
    try:
        ready = worker.answer()
    except WorkerEnded as ended:
        console.print(f"PyTorch: not run ({escape(str(ended))})")
        return None
    console.print(f"PyTorch {ready['torch']} in a process of its own, eager, {ready['threads']} threads")
    return worker
