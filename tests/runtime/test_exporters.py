"""What a run tells Prometheus (a real server, where one is installed), TensorBoard and Weights & Biases."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from types import SimpleNamespace
from unittest import mock

import pytest
from support.launched import LAUNCHER_VARIABLES, ROOT, as_processes
from support.programs import run
from support.records import record

from experiments.launch import free_port
from experiments.train_flags import TrainFlags
from jaxdist.errors import ConfigError
from jaxdist.runtime import exporters, gpus
from jaxdist.runtime.telemetry import DeviceMemory

CARD = gpus.GPU(rank=1, busy=0.5, memory_used=2**30, power=300.0, temperature=60.0, ecc_errors=None)
MEMORY = [DeviceMemory(0, 1, 2, 3), DeviceMemory(1, 4, 5, 6)]


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


def test_a_project_that_weights_and_biases_refuses_is_refused_before_anything_is_made(monkeypatch):
    def refuses(project, **_):
        raise Refusal(f"Invalid project name {project!r}")

    Refusal = type("Refusal", (Exception,), {})
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(Error=Refusal, Settings=refuses))
    with pytest.raises(ConfigError, match=r"--wandb a/b: must be the name of a project \(Invalid project name 'a/b'"):
        TrainFlags(wandb="a/b", out="runs/a").check()


DASHBOARD = json.loads((ROOT / "cluster/dashboard.json").read_text())


QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (package prometheus)")
def test_names_follow_the_conventions(endpoint):
    endpoint.write(record(1, held_out_loss=4.5, loss_scale=8.0), MEMORY, [CARD])
    # The client adds when each counter was made, under names of OpenMetrics, which promtool does not know.
    text = re.sub(r"(?m)^.*_created\b.*\n", "", page(endpoint.address))
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stdout + done.stderr, done.stdout + done.stderr


def test_a_port_that_is_taken_is_refused_before_anything_is_made(endpoint, tmp_path, capfd):
    port = int(endpoint.address.rpartition(":")[2].partition("/")[0])
    with pytest.raises(ConfigError, match="cannot listen"):
        exporters.Prometheus(port, exporters.LOOPBACK, {}, None)
    (tmp_path / "text.txt").write_text("some words to learn from. " * 200)
    words = ["--metrics-port", port, "--steps", "1", "--data", tmp_path / "text.txt", "--out", tmp_path / "run"]
    code, out, err = run(capfd, "train", *words)
    assert code == 2 and "cannot listen" in err and "compil" not in out + err and not (tmp_path / "run").exists()


def test_a_card_that_the_driver_does_not_know_by_its_name_is_left_out(monkeypatch, tmp_path):
    """CUDA takes a part of a UUID, the driver a whole one."""
    (tmp_path / "no_driver.py").write_text(FAKE_DRIVER + "def nvmlDeviceGetHandleByUUID(name): raise NVMLError(name)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8932f937")
    card = SimpleNamespace(process_index=0, platform="gpu", local_hardware_id=0)
    assert gpus.Watch([card], "no_driver").read() == []


FAKE_DRIVER = """
class NVMLError(Exception): pass
class _Of:
    gpu, used = 50, 2**30
def nvmlInit(): pass
nvmlDeviceGetHandleByIndex = int
def nvmlDeviceGetUtilizationRates(h): return _Of
def nvmlDeviceGetMemoryInfo(h): return _Of
def nvmlDeviceGetPowerUsage(h): return 300_000
def nvmlDeviceGetTemperature(h, kind): return 60
def nvmlDeviceGetTotalEccErrors(h, a, b): raise NVMLError
"""


# Trains with devices that say they are GPUs to the driver's watch, and with their allocators' counters.
AS_IF_ON_GPUS = """
import experiments.train as train
from experiments import listeners
from experiments.entry import run_program
from jaxdist.runtime import gpus
from jaxdist.runtime.telemetry import DeviceMemory

def mine(devices):
    return {rank: each for rank, each in enumerate(devices) if each.process_index == train.jax.process_index()}

listeners.device_memory = lambda devices: [DeviceMemory(rank, 1, 2, 3) for rank in mine(devices)]
class Watch(gpus.Watch):
    def __init__(self, devices):
        self._handles = {}
        self._open(mine(devices), "fake_driver")
gpus.Watch = Watch
run_program(train.TrainFlags, train.main, "train")
"""


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed (package prometheus)")
def test_a_server_scrapes_two_processes_and_answers_every_query_of_the_dashboard(tmp_path):
    pytest.importorskip("prometheus_client", reason="pip install -e '.[metrics]'")
    port, web = free_port(), free_port()
    (tmp_path / "fake_driver.py").write_text(FAKE_DRIVER)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog; " * 400)
    targets = [f"127.0.0.1:{port}", f"127.0.0.1:{port + 1}"]
    settings = (ROOT / "cluster/prometheus.yml").read_text().replace("interval: 10s", "interval: 1s")
    settings = settings.replace('["127.0.0.1:9400", "127.0.0.1:9401"]', json.dumps(targets))
    (tmp_path / "prometheus.yml").write_text(settings)
    assert targets[1] in settings and "interval: 1s" in settings
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    environment |= {"PYTHONPATH": f"{ROOT}:{tmp_path}", "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    words = "--num-layers 1 --width 16 --num-heads 2 --seq-len 16 --batch-size 8 --steps 1000000 --eval-windows 8"
    words += f" --mesh dp=2 --eval-every 100 --data {tmp_path / 'text.txt'} --metrics-port {port}"
    server_words = ["--config.file", tmp_path / "prometheus.yml", "--storage.tsdb.path", tmp_path / "data"]
    server_words += ["--web.listen-address", f"127.0.0.1:{web}"]
    with (
        open(tmp_path / "server.log", "w") as log,
        subprocess.Popen(["prometheus", *map(str, server_words)], stdout=log, stderr=log) as server,
        subprocess.Popen(
            [*as_processes(2, 1), "-c", AS_IF_ON_GPUS, *words.split()],
            env=environment,
            cwd=tmp_path,
            stdout=log,
            stderr=log,
        ) as trained,
    ):
        try:
            unanswered, until = QUERIES, time.monotonic() + 150
            while unanswered and time.monotonic() < until:
                time.sleep(1)
                assert trained.poll() is None and server.poll() is None, (tmp_path / "server.log").read_text()
                unanswered = [query for query in unanswered if not answer(web, query)]
            assert not unanswered, (unanswered, (tmp_path / "server.log").read_text()[-2000:])
            found = answer(web, "jaxdist_run_info")
            assert {(each["metric"]["instance"], each["metric"]["process"]) for each in found} == {
                (targets[0], "0"),
                (targets[1], "1"),
            }
        finally:
            trained.terminate()
            server.terminate()


def answer(port: int, query: str) -> list:
    """What the server finds, with Grafana's variables filled in."""
    query = query.replace("$__rate_interval", "1m").replace("$job", ".*")
    address = f"http://127.0.0.1:{port}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    try:
        return json.loads(page(address))["data"]["result"]
    except OSError:  # it starts
        return []


def test_event_files_of_tensorboard(tmp_path):
    pytest.importorskip("tensorboardX", reason="pip install -e '.[metrics]'")
    writer = exporters.TensorBoard(tmp_path)
    writer.write(record(1, held_out_loss=4.5), MEMORY, [CARD])
    writer.close()
    [path] = tmp_path.glob("events.out.tfevents.*")
    text = path.read_bytes()
    for name in exporters.scalars(record(1, held_out_loss=4.5), MEMORY, [CARD]):
        assert name.encode() in text
    (tmp_path / "file").touch()
    with pytest.raises(OSError):  # on which a run goes on without
        exporters.TensorBoard(tmp_path / "file").write(record(1), MEMORY, [CARD])


def test_event_files_of_a_run_that_goes_back_replace_the_steps_that_come_again(tmp_path, monkeypatch):
    tensorboard = pytest.importorskip("tensorboardX", reason="pip install -e '.[metrics]'")
    made = []
    monkeypatch.setattr(tensorboard, "SummaryWriter", lambda folder, purge_step: made.append(purge_step) or mock.Mock())
    for first in (1, 4):
        writer = exporters.TensorBoard(tmp_path)
        for step in range(first, 7):
            writer.write(record(step), MEMORY, [CARD])
        writer.close()
    assert made == [1, 4]
