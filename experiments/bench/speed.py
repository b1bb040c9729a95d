"""What seconds of a step mean: tokens a second, and the part of a card's peak that the model needed."""

import dataclasses
from collections.abc import Sequence

from jaxdist.config import RunConfig
from jaxdist.models.gpt2 import GPT2Config
from jaxdist.plan.formulas import ModelShape, model_flops_per_token
from jaxdist.plan.hardware import Accelerator, find_hardware
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
CONVENTIONS = (
    "MFU: 6N + 12LHQT FLOPs a token (PaLM; N: matrices of the layers and the head's, at the real vocabulary; nothing "
    "added for what is computed again) at the card's dense 16-bit peak; causal counts half of attention's."
)


def card_of(device_kind: str) -> Accelerator | None:
    """What the hardware table says of a card, None where it does not know it."""
    return next((find_hardware(name) for part, name in CARDS if part in device_kind), None)


def flops_per_token(model: GPT2Config, attention: str) -> float:
    """Needed to train on one token, with "full" or "causal" attention; the padded vocabulary is no useful work."""
    shape = dataclasses.replace(ModelShape.of(model), vocab_size=model.vocab_size)
    return model_flops_per_token(shape, attention).value


def speed_rows(name: str, seconds: Sequence[float], config: RunConfig, devices: Devices, num_devices: int) -> list[Row]:
    """Tokens a second and, on a known card in 16 bits, MFU in both conventions. Nothing where devices are simulated."""
    if devices.simulated:
        return []
    model, kind = config.model, devices.devices[0].device_kind
    speeds = [config.batch_size * model.seq_len / s for s in seconds]
    rows = [Row.of(f"{name}: speed", speeds, "tokens/s")]
    card = card_of(kind)
    if card is not None and config.precision.dtype in ("bfloat16", "float16"):
        for attention in ("full", "causal"):
            needed = flops_per_token(model, attention) / card.peak(config.precision.dtype) / num_devices
            rows.append(Row.of(f"{name}: MFU, {attention} attention", [s * needed for s in speeds], "of peak"))
    return rows
