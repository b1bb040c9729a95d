"""One process of a PyTorch peer of `experiments.bench peers`, which starts it: steps on request, their time in return.

The first line of its input is the batch, and its first answer the first loss; after that a line is a number of steps,
and the answer their seconds and, on a GPU, the most bytes of tensors so far. While others have their turn the card's
memory is theirs: what PyTorch keeps for itself is given back, and taken again by a step that is not timed.
"""

import json
import sys
import time

import torch

from jaxdist.models.registry import model_of

from .. import torch_gpt2

MODELS = {"torch": torch_gpt2.TorchGPT2, "transformers": torch_gpt2.HuggingFaceModel}


def main(asked: dict, batch: dict) -> None:
    rank, processes, wrap = asked["rank"], asked["num_processes"], asked["wrap"]
    if wrap != "none":
        torch_gpt2.join(rank, processes, asked["port"])
    rows = len(batch["inputs"]) // processes
    training = torch_gpt2.Training(
        model_of(asked["model"]),
        {name: values[rank * rows : (rank + 1) * rows] for name, values in batch.items()},
        asked["device"],
        asked["compiled"],
        dtype=None if asked["dtype"] == "float32" else getattr(torch, asked["dtype"]),
        model=MODELS[asked["code"]],
        wrap=wrap,
    )
    loss = float(training.step())
    training.release()
    print(json.dumps({"loss": loss, "threads": torch.get_num_threads()}), flush=True)
    for line in sys.stdin:
        if training.on_gpu:
            training.step()
        training.synchronize()
        start = time.perf_counter()
        for _ in range(int(line)):
            training.step()
        training.synchronize()
        seconds = time.perf_counter() - start
        peak = torch.cuda.max_memory_allocated() if training.on_gpu else None
        training.release()
        print(json.dumps({"seconds": seconds, "peak_bytes": peak}), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), json.loads(sys.stdin.readline()))
