"""One process of a PyTorch peer of `experiments.bench peers`, which starts it: steps on request, their time in return.

Each line of standard input is a number of steps; each line of standard output is JSON: once it is ready the first
loss, then the seconds of the steps asked for. It runs in a process of its own so that two frameworks' threads
never share one; while it waits for a line it uses no core.
"""

import json
import sys
import time

import torch

from experiments import torch_gpt2
from jaxdist.config import ModelConfig

MODELS = {"torch": torch_gpt2.GPT2, "transformers": torch_gpt2.HuggingFaceGPT2}


def main(asked: dict, batch: dict) -> None:
    rank, processes, wrap = asked["rank"], asked["num_processes"], asked["wrap"]
    if wrap != "none":
        torch_gpt2.join(rank, processes, asked["port"])
    rows = len(batch["inputs"]) // processes
    training = torch_gpt2.Training(
        ModelConfig(**asked["model"]),
        {name: values[rank * rows : (rank + 1) * rows] for name, values in batch.items()},
        asked["device"],
        asked["compiled"],
        dtype=None,
        model=MODELS[asked["code"]],
        wrap=wrap,
    )
    loss = float(training.step())
    print(json.dumps({"loss": loss, "threads": torch.get_num_threads()}), flush=True)
    for line in sys.stdin:
        training.synchronize()
        start = time.perf_counter()
        for _ in range(int(line)):
            training.step()
        training.synchronize()
        print(json.dumps({"seconds": time.perf_counter() - start}), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), json.loads(sys.stdin.readline()))
