"""A line of metrics.jsonl."""

from jaxdist.runtime.telemetry import PARTS


def record(step: int, **more) -> dict:
    seconds = dict.fromkeys(PARTS, 0.0) | {"step": 0.8, "host": 0.2}
    known = {"step": step, "loss": 5.0 - step, "grad_norm": 1.0, "lr": 1e-3, "tokens": 64, "tokens_per_second": 640.0}
    return {
        **known,
        "grad_norms": {"blocks.attention": 0.5, "tokens": 0.8},
        "seconds": {**seconds, "total": 1.0},
        **more,
    }
