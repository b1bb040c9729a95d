"""What a command needs beside its layout: learning rate, warm-up, length and checkpoint interval, by published rules.

No JAX here. Each rule is a starting point that somebody published, none is tuned for this program.
"""

import math

from jaxdist.plan.cost import duration

# GPT-3, arXiv 2005.14165, table 2.1 and appendix B: Adam, linear warm-up over 375 million tokens, cosine to a tenth.
GPT3_RATES = (
    (125e6, 6.0e-4),
    (350e6, 3.0e-4),
    (760e6, 2.5e-4),
    (1.3e9, 2.0e-4),
    (2.7e9, 1.6e-4),
    (6.7e9, 1.2e-4),
    (13e9, 1.0e-4),
    (175e9, 0.6e-4),
)
WARMUP_TOKENS = 375e6
LONGEST_WARMUP = 0.1  # of a short run; ours, GPT-3 had no run that short
# QLoRA, arXiv 2305.14314, appendix B: adapters on all matrices, AdamW, models of up to 13 billion parameters and above.
ADAPTER_RATES, SMALL = (2e-4, 1e-4), 13.5e9
FINE_TUNING_STEPS = 1000  # assumed, of adapters too
# Llama 2, arXiv 2307.09288, section 3.1: supervised fine-tuning of all sizes, cosine, weight decay 0.1.
FINE_TUNING_RATE = 2e-5
TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022, arXiv 2203.15556
# Llama 3, arXiv 2407.21783, section 3.3.4: 419 unexpected interruptions in 54 days of 16,384 GPUs.
FAILURE_DEVICE_HOURS = 16_384 * 54 * 24 / 419
SAVE_BYTES_PER_S = 1e9  # of a node, to shared storage: assumed


def learning_rate(parameters: float) -> float:
    """Peak rate of AdamW: GPT-3's table, interpolated between its sizes in logarithms, two digits; its ends beyond."""
    sizes, rates = zip(*GPT3_RATES, strict=True)
    if parameters <= sizes[0]:
        return rates[0]
    for low, high, slow, fast in zip(sizes, sizes[1:], rates[1:], rates, strict=False):
        if parameters <= high:
            part = math.log(parameters / low) / math.log(high / low)
            return float(f"{fast * (slow / fast) ** part:.1e}")
    return rates[-1]


def adapter_learning_rate(parameters: float) -> float:
    """Peak rate of AdamW for low-rank adapters of a model with so many parameters."""
    return ADAPTER_RATES[parameters > SMALL]


def warmup_steps(batch_tokens: int, steps: int) -> int:
    """GPT-3's 375 million tokens, but no more than a tenth of the run."""
    return max(1, min(math.ceil(WARMUP_TOKENS / batch_tokens), int(LONGEST_WARMUP * steps)))


def chinchilla_steps(parameters: float, batch_tokens: int) -> int:
    return math.ceil(TOKENS_PER_PARAMETER * parameters / batch_tokens)


def checkpoint_every(
    state_bytes: float, num_nodes: int, num_devices: int, step_seconds: float, steps: int
) -> tuple[int, str]:
    """Steps between checkpoints that lose least time, sqrt(2 · time of one · time between failures), and why.

    Source: Young 1974, "A first order approximation to the optimum checkpoint interval".
    """
    save = state_bytes / (num_nodes * SAVE_BYTES_PER_S)
    between = FAILURE_DEVICE_HOURS / num_devices
    interval = math.sqrt(2 * save * between * 3600)
    every = max(1, round(interval / step_seconds))
    what = f"a checkpoint every {duration(every * step_seconds / 3600)}"
    if every >= steps:
        every, what = steps, "one checkpoint, at the end"
    size = f"{state_bytes / 1e9:,.0f}" if state_bytes >= 1e11 else f"{state_bytes / 1e9:.3g}"
    return every, (
        f"{what}, by Young's rule: a failure every {duration(between)} on {num_devices:,} devices (one in "
        f"{FAILURE_DEVICE_HOURS:,.0f} device-hours, Llama 3, arXiv 2407.21783) and {duration(save / 3600)} to write "
        f"{size} GB (assumed: {SAVE_BYTES_PER_S / 1e9:g} GB/s a node)"
    )
