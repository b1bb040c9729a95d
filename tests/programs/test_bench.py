"""Benches: rows of one form, simulated time that is never called speed, and each bench at a tiny size."""

import dataclasses
import importlib
import json
import math
import sys
import warnings
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from conftest import in_sample
from rich.console import Console
from support import programs

from experiments.bench import collectives, experts, kernels, parity, peers, speed, standin
from experiments.bench.__main__ import BENCHES
from experiments.bench.flags import BenchFlags
from experiments.bench.profile import own_seconds, own_time
from experiments.bench.rows import Row, ratios
from experiments.bench.workers import Worker, WorkerEnded
from jaxdist.config import RunConfig
from jaxdist.models.base import declare
from jaxdist.models.gpt2 import GPT2Config
from jaxdist.models.presets import PRESETS
from jaxdist.params import named_params
from jaxdist.plan.hardware import find_hardware
from jaxdist.runtime.devices import Devices, acquire_devices

TINY = ["--num-layers", "2", "--width", "32", "--num-heads", "4", "--seq-len", "32", "--vocab-size", "100"]
TINY += ["--repeats", "2"]
KEYS = {field.name for field in dataclasses.fields(Row)}


def run(capsys, *args) -> tuple[int, str]:
    code, *said = programs.run(capsys, "bench", *args)
    return code, "".join(said)


def test_a_row_is_a_median_with_its_spread():
    row = Row.of("step", [3.0, 1.0, 2.0], "s", against="theirs", ratio=0.5)
    assert (row.value, row.spread, row.runs) == (2.0, (1.0, 3.0), 3)
    assert ratios([1.0, 4.0], [2.0, 2.0]) == [0.5, 2.0]


@pytest.mark.filterwarnings("error::DeprecationWarning")
def test_the_profiler_of_jaxlib_warns_nobody():
    class Event:
        start_ns, duration_ns = 0, 3e9

        @property
        def stats(self):
            warnings.warn("builtin type event_stats has no __module__ attribute", DeprecationWarning, stacklevel=1)
            return [("hlo_op", "dot")]

    plane = SimpleNamespace(lines=[SimpleNamespace(events=[Event()])])
    assert own_seconds(SimpleNamespace(planes=[plane])) == [("dot", 3, 1)]


@pytest.mark.parametrize("unit", ["tokens/s", "bytes/s", "steps/s"])
def test_simulated_devices_have_no_speed(unit):
    with pytest.raises(ValueError, match="no speed"):
        Row("dp=8", 1.0, unit, simulated=True)
    Row("one device", 1.0, unit)
    Row("dp=8", 1.0, "s", simulated=True)


SMALL = [
    ("step", ["--mesh", "dp=2", "--zero", "1", "--accumulate", "2", *TINY], "update", 9),
    ("step", ["--mesh", "pp=2", *TINY], "update", 9),
    ("step", ["--no-phases", *TINY], "tokens/s", 6),
    ("profile", ["--mesh", "dp=2", *TINY], "dot_general", None),
    ("executor", ["--num-layers", "2", "--width", "16", "--num-heads", "4", "--repeats", "2"], "jax.grad", 4),
    ("kernels", ["--only", "GELU", "--batch-size", "2", *TINY], "GELU: forward and backward", None),
    ("kernels", ["--only", "optimizer", *TINY], "optimizer update", None),
    ("collectives", ["--mesh", "dp=2", "--message-bytes", "65536", "--repeats", "2"], "all_to_all", 5),
    ("compile", ["--depths", "1", "2", *TINY], "layers", 2),
]


@pytest.mark.parametrize("bench, args, word, num_rows", in_sample(SMALL, [SMALL[2], SMALL[5], SMALL[7]]))
def test_a_bench_prints_a_table_and_writes_rows(capsys, tmp_path, bench, args, word, num_rows):
    path = tmp_path / "figures.json"
    code, printed = run(capsys, bench, *args, "--json", path)
    record = json.loads(path.read_text())
    assert code in (0, 1) and word in printed
    assert {"command", "date", "cpu", "python", "versions", "model"} <= set(record["header"])
    assert num_rows is None or len(record["rows"]) == num_rows
    assert record["rows"] and all(set(row) == KEYS for row in record["rows"])


def test_a_message_is_as_long_as_its_row_says(monkeypatch):
    sent = []
    monkeypatch.setattr(collectives, "time_rounds", lambda f, mesh, axis, local, n: sent.append(local) or [1.0])
    flags = BenchFlags(which="collectives", mesh="dp=2", message_bytes=(100,), device="cpu")
    rows, _ = collectives.bench_collectives(flags, flags.run_config(), None)
    inputs = dict(zip([row.name for row in rows], sent[::2], strict=True))  # each before a copy
    assert inputs["all_reduce 96 bytes on 2"] == 24 and inputs["all_gather 96 bytes on 2"] == 12


def test_one_expert_gets_all_rows(monkeypatch):
    taken = []
    monkeypatch.setattr(experts, "timed", lambda product, sizes, counts, *_: taken.append(counts.tolist()) or [1.0])
    model = dataclasses.replace(PRESETS["moe-proof"], num_experts=1, top_k=1)
    flags = BenchFlags(which="experts", device="cpu", only="grouped")
    experts.bench_experts(flags, RunConfig(model, batch_size=2), Console(quiet=True))
    assert taken == [[2 * model.seq_len]] * 3


def test_time_inside_another_operation_is_not_its_own():
    spans = [("while", 0, 100), ("dot", 10, 40), ("in dot", 20, 25), ("add", 50, 60), ("copy", 100, 105)]
    assert own_time(reversed(spans)) == [("while", 60), ("dot", 25), ("in dot", 5), ("add", 10), ("copy", 5)]


def test_no_option_is_tried_after_its_time(capsys):
    code, printed = run(capsys, "flags", "--only", "onednn", "--start-within", "0", *TINY)
    assert code == 0 and printed.count("not tried") == 2


@pytest.mark.parametrize("bench", BENCHES)
def test_every_bench_can_be_imported(bench):
    module, function, _ = BENCHES[bench]
    assert callable(getattr(importlib.import_module(f"experiments.bench.{module}"), function))


BAD = [
    (["step", "--repeats", "0"], "--repeats 0"),
    (["peers", "--dtype", "bfloat16"], "Add --only 'one device'"),
    (["peers", "--dtype", "float16"], "float32 or bfloat16"),
    (["kernels", "--optimizer", "lion"], "has no use for it"),
    (["parity", "--dtype", "bfloat16"], "has no use for it"),
    (["standin"], "Use --mesh dp=8"),
    (["standin", "--mesh", "pp=2"], "first stage"),
    (["peers", "--mesh", "dp=2"], "has no use for it"),
    (["collectives", "--mesh", "dp=2,tp=2"], "one axis"),
    (["collectives", "--zero", "3"], "has no use for it"),
    (["collectives", "--mesh", "dp=3", "--message-bytes", "35"], "must be at least 36"),
    (["compile", "--json", "/nowhere/x.json"], "--json"),
]


@pytest.mark.parametrize("args, message", BAD)
def test_what_a_bench_cannot_do_is_refused(capsys, args, message):
    code, printed = run(capsys, *args)
    assert code == 2 and message in printed


# ---- one device in 16 bits ----


@pytest.fixture(scope="module")
def cpu() -> Devices:
    return Devices(jax.devices("cpu")[:1], False, "1 CPU device")


@pytest.fixture
def compile_fast():
    """XLA skips its costly passes: what is compared here holds without them."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.exhaustive
def test_bf16_is_close_to_fp32(capsys, tmp_path, compile_fast):
    path = tmp_path / "figures.json"
    code, printed = run(capsys, "parity", "--batch-size", "2", *TINY, "--json", path)
    assert code == 0 and "no collective in the compiled step" in printed, printed
    errors = {row["name"]: row["value"] for row in json.loads(path.read_text())["rows"]}
    pair = "bf16 xla against fp32 xla"
    assert errors.pop("collectives in the compiled step") == 0 and errors.pop(f"loss: {pair}") < 1e-3
    # bf16 was really used: nothing in fp32 errs by more than 1e-5.
    assert min(errors.values()) > 1e-3
    names = ("tokens", "positions", "blocks.attention.w_qkv")
    assert {f"{name}: {pair}" for name in names} <= set(errors)


@pytest.mark.parametrize(
    "loss, spoil, worst",
    [(1.0, lambda g: g * 1.04, 0.04), (1.0, lambda g: g * math.nan, math.nan), (1.01, lambda g: g, 0.0)],
    ids=["scaled", "nan", "loss"],
)
def test_an_error_is_seen(loss, spoil, worst):
    gradients = {"b": np.ones(3), "w": np.arange(4.0)}
    loss_error, errors = parity.compare((loss, {**gradients, "w": spoil(gradients["w"])}), (1.0, gradients))
    assert errors == pytest.approx({"b": 0.0, "w": worst}, nan_ok=True) and loss_error == pytest.approx(loss - 1)


@pytest.mark.parametrize("spoil", [1.04, math.nan])
def test_parity_can_fail(capsys, monkeypatch, spoil):
    def observe(config, devices, dtype, attention, precision=None):
        return 1.0, {"b": np.ones(3), "w": np.ones(3) * (1 if dtype == "float32" else spoil)}

    monkeypatch.setattr(parity, "observe", observe)
    monkeypatch.setattr(parity, "compiled_text", lambda program: "")
    code, printed = run(capsys, "parity", *TINY)
    assert code == 1 and "missed" in printed and "\nw " in printed


def test_a_collective_on_one_device_is_a_failure(capsys, monkeypatch):
    monkeypatch.setattr(parity, "observe", lambda *args: (1.0, {"b": np.ones(3)}))
    monkeypatch.setattr(parity, "compiled_text", lambda program: "all-reduce(a) all-reduce(b)")
    code, printed = run(capsys, "parity", *TINY)
    assert code == 1 and "2 all-reduce in the compiled step" in printed


def test_collectives_are_counted_by_opcode():
    hlo = """
      %all-reduce.1 = (f32[2], f32[]) all-reduce(f32[2] %a, f32[] %b), metadata={op_name="psum"}
      %start = f32[2] all-gather-start(f32[1] %all-reduce.1)
      %done = f32[2] all-gather-done(f32[2] %start)
      ROOT %c = f32[2] collective-permute(%done)
    """
    assert parity.count_collectives(hlo) == {"all-reduce": 1, "all-gather": 1, "collective-permute": 1}


# ---- operations ----

SIZES = GPT2Config(num_layers=1, width=32, num_heads=4, ffn_width=128, seq_len=16, vocab_size=128)  # nothing padded


def test_products_do_the_flops_they_are_given():
    shapes = kernels.array_shapes(SIZES, 2)
    flops = {name: kernels.product_flops(name, sizes) for name, sizes in shapes.items()}
    block = sum(flops[name] for name in ("qkv product", "output product", "up product", "down product"))
    assert block == 2 * 32 * 12 * 32**2 and flops["head product"] == 2 * 32 * 32 * 128
    assert flops["attention"] is flops["GELU"] is None


def test_every_operation_is_measured_forward_and_backward(cpu):
    found = {
        name: (theirs, flops) for name, theirs, flops, _ in kernels.programs(RunConfig(SIZES, batch_size=2), cpu, "")
    }
    assert list(found)[-1] == "optimizer update" and len(found) == 2 * 10 + 1
    assert found["attention, xla: forward"] == ("attention: forward", None)
    forward, both = (found[f"up product: forward{more}"][1] for more in ("", " and backward"))
    assert both == 3 * forward


@pytest.mark.parametrize("name", kernels.array_shapes(SIZES, 2))
def test_pytorch_computes_the_same_operation(cpu, name):
    torch = pytest.importorskip("torch", reason="pip install -e '.[oracle]'")
    from experiments.bench import torch_kernels

    config = RunConfig(SIZES, batch_size=2)
    tokens_BT, arrays = kernels.make_inputs(config, kernels.array_shapes(SIZES, 2)[name])
    ours = kernels.on_one_device(kernels.operations(config, "xla")[name], cpu)(tokens_BT, *arrays)
    copies = [torch.tensor(np.asarray(array), requires_grad=True) for array in arrays]
    tokens = torch.tensor(np.asarray(tokens_BT), dtype=torch.int64)
    theirs = torch_kernels.operations(SIZES)[name](tokens, *copies)
    cotangent = np.random.default_rng(1).normal(size=ours.shape).astype(np.float32)
    both = kernels.on_one_device(kernels.with_backward(kernels.operations(config, "xla")[name]), cpu)
    output, gradients = both(tokens_BT, cotangent, *arrays)
    theirs.backward(torch.tensor(cotangent))
    for a, b in zip((ours, output, *gradients), (theirs, theirs, *(copy.grad for copy in copies)), strict=True):
        b = b.detach().numpy()
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b)


@pytest.mark.parametrize(("name", "model"), [("TorchGPT2", None), ("HuggingFaceModel", "moe-proof")])
def test_a_model_of_peers_has_as_many_parameters(cpu, name, model):
    """Counters and biases of the choice are no parameters."""
    pytest.importorskip("transformers", reason="pip install -e '.[oracle]'")
    from experiments import torch_gpt2

    model = PRESETS[model] if model else SIZES
    ours = sum(math.prod(param.shape) for _, param in named_params(declare(model)) if param.update == "gradient")
    assert sum(weight.numel() for weight in getattr(torch_gpt2, name)(model).parameters()) == ours


def test_a_worker_answers_line_by_line_and_tells_its_last_words(tmp_path, monkeypatch):
    (tmp_path / "echoes.py").write_text(
        "import json, sys\n"
        "print('a library prints')\n"
        "for line in sys.stdin:\n"
        "    print(json.dumps({'got': line.strip(), 'asked': json.loads(sys.argv[1])}), flush=True)\n"
        "    if line.strip() == 'end': sys.exit('enough')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    worker = Worker("echoes", {"a": 1})
    assert worker.ask("one") == {"got": "one", "asked": {"a": 1}}
    assert worker.ask("end")["got"] == "end"
    with pytest.raises(WorkerEnded, match="enough"):
        worker.answer()


def test_pytorch_is_left_out_where_it_is_not_installed(capsys, monkeypatch):
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: None)
    code, printed = run(capsys, "kernels", "--only", "GELU", "--batch-size", "2", *TINY)
    assert code == 0 and "torch is not installed" in printed and "\nGELU " in printed


# ---- speed ----


def test_mfu_of_gpt2_124m_by_hand():
    # 12 blocks of 12 * 768^2, and the head of 50257 (not 50304) rows; attention in full, or half of it.
    multiplying = 12 * 12 * 768**2 + 50257 * 768
    attention = 12 * 12 * 768 * 1024
    assert speed.flops_per_token(PRESETS["gpt2-124m"], "full") == 6 * multiplying + attention
    assert speed.flops_per_token(PRESETS["gpt2-124m"], "causal") == 6 * multiplying + attention / 2


@pytest.mark.parametrize(
    "name, peak",
    [
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H200", 989e12),
        ("NVIDIA L4", None),
        ("cpu", None),
    ],
)
def test_peak_of_a_card(name, peak):
    card = speed.card_of(name)
    assert (card and card.peak("bfloat16")) == peak


def test_speed_of_a_card_and_of_none():
    card = dataclasses.make_dataclass("Card", ["device_kind"])("NVIDIA H200")
    config = RunConfig(
        PRESETS["gpt2-124m"], precision=dataclasses.replace(RunConfig(SIZES).precision, dtype="bfloat16")
    )
    rows = speed.speed_rows("step", [0.032768], config, Devices([card], False, ""), 1)
    assert [row.unit for row in rows] == ["tokens/s", "of peak", "of peak"]
    # 16 x 1024 tokens in 32.768 ms are 500,000 tokens/s.
    assert rows[0].value == pytest.approx(500_000)
    assert rows[1].value == pytest.approx(500_000 * speed.flops_per_token(config.model, "full") / 989e12)
    assert speed.speed_rows("step", [1.0], config, Devices([card], True, ""), 8) == []


# ---- one card standing for many ----


def test_a_stand_in_needs_a_gpu(no_accelerator):
    code, printed = no_accelerator("standin", "--mesh", "dp=8")
    assert code == 2 and "JAX sees none that can" in printed and "Traceback" not in printed


@pytest.fixture
def no_accelerator(monkeypatch):
    """Runs the program in a process of its own, which sees no GPU: it changes how JAX starts."""
    import subprocess

    def start(*args):
        monkeypatch.setenv("JAX_PLATFORMS", "cpu")
        command = [sys.executable, "-m", "experiments.bench", *args]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
        return ended.returncode, ended.stdout + ended.stderr

    return start


def test_a_stand_in_adds_what_the_plan_models():
    config = BenchFlags(which="standin", mesh="dp=2", zero=3).run_config()
    planned = standin.plan_step(config, find_hardware("h200"), "xla")
    work, sent, whole = standin.compare([0.25, 0.5, 0.75], planned)
    assert sent.value == planned.communication[0] > 0 and whole.value == pytest.approx(0.5 + sent.value)
    assert whole.ratio == pytest.approx(whole.value / planned.total[0])
    assert work.ratio == pytest.approx(0.5 / (planned.total[0] - planned.communication[0]))


@pytest.mark.parametrize(
    "code, processes, wrap", [("torch", 1, "none"), ("torch", 2, "ddp"), ("transformers", 1, "none")]
)
def test_pytorch_trains_beside_ours(code, processes, wrap):
    """Its processes start, their first loss is that of a model that knows nothing, and they take steps."""
    for package in ("torch", code):
        pytest.importorskip(package, reason="pip install -e '.[oracle]'")
    config = RunConfig(PRESETS["proof"], batch_size=4)
    workers = peers.start_workers(config, processes, code, False, wrap, acquire_devices(1, "cpu"))
    try:
        for worker in workers:
            assert worker.answer()["loss"] == pytest.approx(math.log(config.model.vocab_size), abs=0.2)
        assert peers.ask(workers, 1)["seconds"] > 0
    finally:
        for worker in workers:
            worker.close()
