"""What a run tells Prometheus (a real server, where one is installed), TensorBoard and Weights & Biases."""

import urllib.parse
import urllib.request

import pytest

from experiments.launch import free_port
from jaxdist.runtime import exporters, gpus
from jaxdist.runtime.telemetry import PARTS, DeviceMemory

CARD = gpus.GPU(rank=1, busy=0.5, memory_used=2**30, power=300.0, temperature=60.0, ecc_errors=None)
MEMORY = [DeviceMemory(0, 1, 2, 3), DeviceMemory(1, 4, 5, 6)]


def record(step: int, **more) -> dict:
    seconds = dict.fromkeys(PARTS, 0.0) | {"step": 0.8, "host": 0.2}
    known = {"step": step, "loss": 5.0 - step, "grad_norm": 1.0, "lr": 1e-3, "tokens": 64, "tokens_per_second": 640.0}
    return {
        **known,
        "grad_norms": {"blocks.attention": 0.5, "tokens": 0.8},
        "seconds": {**seconds, "total": 1.0},
        **more,
    }


def page(address: str) -> str:
    with urllib.request.urlopen(address, timeout=10) as answer:
        return answer.read().decode()


@pytest.fixture
def endpoint():
    pytest.importorskip("prometheus_client", reason="pip install -e '.[metrics]'")
    found = exporters.Prometheus(free_port(), exporters.LOOPBACK, {"mesh": "dp=2", "run": 'a "b"\n'}, planned=2**20)
    yield found
    found.close()


def test_an_endpoint_has_every_number_of_a_step(endpoint):
    endpoint.write(record(1, held_out_loss=4.5, loss_scale=8.0), MEMORY, [CARD])
    endpoint.write(record(2, mfu=0.5, hfu=0.6), MEMORY, [CARD])
    text = page(endpoint.address)
    for line in (
        "jaxdist_steps_total 2.0",
        "jaxdist_tokens_total 128.0",
        'jaxdist_loss_nats{split="train"} 3.0',
        'jaxdist_loss_nats{split="held_out"} 4.5',
        'jaxdist_time_seconds_total{part="step"} 1.6',
        'jaxdist_time_seconds_total{part="checkpoint"} 0.0',
        'jaxdist_gradient_group_norm{group="blocks.attention"} 0.5',
        'jaxdist_device_memory_bytes{kind="peak",rank="1"} 5.0',
        "jaxdist_device_memory_planned_bytes 1.048576e+06",
        'jaxdist_gpu_busy_ratio{rank="1"} 0.5',
        "jaxdist_loss_scale_ratio 8.0",
        'jaxdist_flops_utilization_ratio{flops="model"} 0.5',
    ):
        assert line in text.splitlines(), line
    assert 'mesh="dp=2"' in text and 'run="a \\"b\\"\\n"' in text and "gpu_ecc_uncorrected_errors{" not in text


def test_an_offline_run_of_weights_and_biases(tmp_path):
    pytest.importorskip("wandb", reason="pip install -e '.[metrics]'")
    writer = exporters.WeightsAndBiases(tmp_path, "proof", {"steps": 2})
    writer.write(record(1), [], [])
    writer.close()
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
