"""Train a small network on handwritten digits with DistributedDataParallel.

The data are the 1,797 images of 8 x 8 pixels that ship with scikit-learn. It runs as it stands:

    python train_digits.py
    torchrun --standalone --nproc-per-node 2 train_digits.py --epochs 30
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from gpu_flows import distributed as dist

HELD_OUT = 360


def load_digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return all images as floats (N, 1, 8, 8) in 0...1, and their labels.

    scikit-learn keeps them in one file; reading it spares every rank the seconds that importing scikit-learn takes.
    """
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise SystemExit("this demo needs scikit-learn for its data: pip install scikit-learn")
    file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    table = torch.from_numpy(np.loadtxt(file, delimiter=",", dtype=np.float32))
    return table[:, :64].reshape(-1, 1, 8, 8) / 16, table[:, 64].long()


def network() -> nn.Module:
    """Return two convolutions and two layers: 50,000 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def train(epochs: int, batch_size: int, learning_rate: float, out: Path) -> dict[str, float]:
    """Train on every rank; rank 0 speaks, and saves the model and its metrics.

    Args:
        epochs: Passes over the training images.
        batch_size: Images in a step, over all ranks.
        learning_rate: At the start; it falls linearly.
        out: Folder for ``model.pt`` and ``metrics.json``.

    Returns:
        The metrics.
    """
    began = time.monotonic()
    torch.manual_seed(7)  # the same split and the same order on every rank
    images, labels = (tensor.to(dist.device()) for tensor in load_digits())
    order = torch.randperm(len(images))
    held_out, training = order[:HELD_OUT], order[HELD_OUT:]

    ranks = f"{dist.world_size()} rank{'s'[: dist.world_size() - 1]} on {dist.device().type}"
    dist.print0(f"{ranks}: {len(training)} images to learn, {HELD_OUT} held out")

    model = dist.wrap(network().to(dist.device()))
    steps = len(training) // batch_size
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, total_iters=epochs)

    accuracy = 0.0
    for epoch in range(1, epochs + 1):
        shuffled = training[torch.randperm(len(training))]
        total = torch.zeros((), device=dist.device())
        for batch in shuffled[: steps * batch_size].split(batch_size):
            mine = dist.shard(batch, even=True)
            loss = functional.cross_entropy(model(images[mine]), labels[mine])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        schedule.step()
        mean_loss = dist.all_reduce_mean(total / steps).item()
        accuracy = evaluate(model, images, labels, held_out)
        dist.print0(f"epoch {epoch:3d}/{epochs}   loss {mean_loss:.4f}   held-out accuracy {accuracy:.4f}")

    metrics = {"accuracy": accuracy, "loss": mean_loss, "epochs": epochs, "world_size": dist.world_size()}
    if dist.is_main():
        out.mkdir(parents=True, exist_ok=True)
        unwrapped = getattr(model, "module", model)
        torch.save(unwrapped.state_dict(), out / "model.pt")
        (out / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")
    dist.print0(f"accuracy {accuracy:.4f} after {time.monotonic() - began:.1f} s; saved {out / 'model.pt'}")
    return metrics


def evaluate(model: nn.Module, images: torch.Tensor, labels: torch.Tensor, which: torch.Tensor) -> float:
    """Return the share of these images that are recognised; every rank looks at its part of them."""
    mine = dist.shard(which)
    model.eval()
    with torch.no_grad():
        right = (model(images[mine]).argmax(1) == labels[mine]).sum()
    model.train()
    return float(dist.all_reduce_mean(right)) * dist.world_size() / len(which)


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=0.1)
    parser.add_argument("--out", type=Path, default=Path("outputs"))
    options = parser.parse_args()
    dist.run(train, options.epochs, options.batch_size, options.learning_rate, options.out)


if __name__ == "__main__":
    main()
