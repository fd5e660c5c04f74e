"""One step of training on whatever a cloud rented: ``make live CLOUD=...``."""

from __future__ import annotations

import torch

from gpu_flows import distributed as dist


def step() -> float:
    """Take one step, on every card, and return the loss."""
    device = dist.device()
    model = dist.wrap(torch.nn.Linear(64, 1).to(device))
    loss = model(torch.ones(8, 64, device=device)).square().mean()
    loss.backward()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    mean = dist.all_reduce_mean(loss.detach()).item()
    dist.print0(f"one step on {dist.world_size()} x {name}, loss {mean:.4f}")
    return mean


if __name__ == "__main__":
    dist.run(step)
