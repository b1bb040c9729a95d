"""What seconds of a step mean: tokens a second, and the part of a card's peak that the model needed."""

import dataclasses
from collections.abc import Sequence

from jaxdist.config import RunConfig
from jaxdist.models.base import Model
from jaxdist.models.gpt2 import GPT2Config
from jaxdist.plan.formulas import ModelShape, model_flops_per_token
from jaxdist.plan.hardware import Accelerator, Cluster, find_hardware
from jaxdist.plan.parts import work_of
from jaxdist.plan.search import Candidates, score
from jaxdist.plan.time_model import StepTime
from jaxdist.runtime.devices import Devices

from .rows import Row

# A part of the device's name, and the card in `jaxdist/plan/hardware.toml`. A name that fits none has no known peak:
# an H100 PCIe is no H100 SXM.
CARDS = (
    ("A100-SXM4-40GB", "a100-40"),
    ("A100-SXM4-80GB", "a100-80"),
    ("H100 80GB HBM3", "h100"),
    ("H200", "h200"),
    ("B200", "b200"),
)
NARROW = ("bfloat16", "float16")  # in which products run at a card's peak
CONVENTIONS = (
    "MFU: for GPT-2 6N + 12LHQT FLOPs a token (PaLM; N: matrices of the layers and the head's, at the real vocabulary)"
    ", else of its products as traced; nothing added for what is computed again; at the card's dense 16-bit peak. "
    "Causal counts half of attention's."
)


def card_of(device_kind: str) -> Accelerator | None:
    """What the hardware table says of a card, None where it does not know it."""
    return next((find_hardware(name) for part, name in CARDS if part in device_kind), None)


def plan_step(config: RunConfig, hardware: Accelerator, attention: str) -> StepTime:
    """The plan's columns, of this one layout, on as few nodes as hold the mesh."""
    count = config.parallel.mesh.num_devices
    per_node = min(hardware.devices_per_node, count)
    cluster = Cluster(hardware, -(-count // per_node), per_node)
    return score(config, Candidates.of(config), cluster, attention).time


def flops_per_token(model: Model, attention: str) -> float:
    """Needed to train on one token, with "full" or "causal" attention; the padded vocabulary is no useful work.

    Of GPT-2 by PaLM's formula, of other models by the trace, which knows what is frozen.
    """
    if isinstance(model, GPT2Config):
        shape = dataclasses.replace(ModelShape.of(model), vocab_size=model.vocab_size)
        return model_flops_per_token(shape, attention).value
    work = work_of(model)
    core = work.num_layers * 3 * sum(product.flops for product in work.layer if product.batched)
    return work.flops_per_token - (core / 2 if attention == "causal" else 0)


def speed_rows(name: str, seconds: Sequence[float], config: RunConfig, devices: Devices, num_devices: int) -> list[Row]:
    """Tokens a second and, on a known card in 16 bits, MFU in both conventions. Nothing where devices are simulated."""
    if devices.simulated:
        return []
    model, kind = config.model, devices.devices[0].device_kind
    speeds = [config.batch_size * model.seq_len / s for s in seconds]
    rows = [Row.of(f"{name}: speed", speeds, "tokens/s")]
    card = card_of(kind)
    if card is not None and config.precision.dtype in NARROW:
        for attention in ("full", "causal"):
            needed = flops_per_token(model, attention) / card.peak(config.precision.dtype) / num_devices
            rows.append(Row.of(f"{name}: MFU, {attention} attention", [s * needed for s in speeds], "of peak"))
    return rows
