"""A transformer layer split over the ranks of a process group, replayed from breakable CUDA graphs.

    torchrun --nproc-per-node=2 examples/tensor_parallel.py

Attention heads and hidden units of the MLP are divided between the ranks (as in Megatron-LM: the
first matrix by columns, the second by rows), so each half of the layer ends with an all-reduce. It
is replayed in two ways:

  break      the all-reduce is a break: it runs eagerly between two graphs
  captured   the all-reduce is a kernel of the graph (NCCL only)

and compared with the whole layer in one process, for other inputs at each of 100 replays. With a
GPU for each rank the ranks use NCCL; where they have to share one they use gloo on it; without a
GPU gloo and the simulated device. The first line of the output says which.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from breakable_cuda_graphs import CUDAGraphSequence, no_graph
from breakable_cuda_graphs.distributed import capture_together, compare
from breakable_cuda_graphs.simulator import simulated_device

TOKENS, WIDTH, HEADS, HIDDEN = 16, 128, 4, 256
TOLERANCE = 1e-4  # sums over ranks are added up in another order

Reduce = Callable[[torch.Tensor], Any]


class Layer:
    """One rank's part of a pre-norm transformer layer; all of it where the world is one rank."""

    def __init__(self, rank: int, world: int, device: str) -> None:
        random = torch.Generator().manual_seed(0)  # the same whole weights on every rank

        def whole(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=random) / shape[0] ** 0.5

        def columns(matrix: torch.Tensor) -> torch.Tensor:
            return matrix.chunk(world, dim=1)[rank].contiguous().to(device)

        def rows(matrix: torch.Tensor) -> torch.Tensor:
            return matrix.chunk(world, dim=0)[rank].contiguous().to(device)

        self.heads = HEADS // world
        self.query, self.key, self.value = (columns(whole(WIDTH, WIDTH)) for _ in range(3))
        self.output = rows(whole(WIDTH, WIDTH))
        self.up, self.down = columns(whole(WIDTH, HIDDEN)), rows(whole(HIDDEN, WIDTH))

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's heads, and what they add to the sum over the ranks."""
        x = functional.layer_norm(x, (WIDTH,))
        query, key, value = (
            (x @ weight).view(TOKENS, self.heads, -1).transpose(0, 1)
            for weight in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value)
        return mixed.transpose(0, 1).reshape(TOKENS, -1) @ self.output

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's hidden units, and what they add to the sum over the ranks."""
        return functional.gelu(functional.layer_norm(x, (WIDTH,)) @ self.up) @ self.down

    def __call__(self, x: torch.Tensor, reduce: Reduce) -> torch.Tensor:
        for part in (self.attention, self.mlp):
            partial = part(x)
            reduce(partial)
            x = x + partial
        return x


def all_reduce(partial: torch.Tensor) -> None:
    """Sum over the ranks, in place."""
    dist.all_reduce(partial)


all_reduce_as_a_break = no_graph(all_reduce)


def nothing(partial: torch.Tensor) -> None:
    """What the whole layer has to sum."""


@dataclass
class Place:
    """Where this rank runs."""

    rank: int
    world: int
    device: str
    backend: str
    words: str

    @property
    def can_capture(self) -> bool:
        """gloo has the host sum up: no graph can hold that."""
        return self.backend == "nccl"


def find_place() -> Place:
    """By what torchrun says and the machine has; alone, one rank."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local = int(os.environ.get("LOCAL_RANK", 0))
    beside = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if HEADS % world or HIDDEN % world:
        raise SystemExit(f"{HEADS} heads cannot be divided between {world} ranks")
    if not torch.cuda.is_available():
        words = "no GPU: gloo, and a simulated device in each"
        return Place(rank, world, "cpu", "gloo", words)
    if torch.cuda.device_count() >= beside and dist.is_nccl_available():
        torch.cuda.set_device(local)
        return Place(rank, world, "cuda", "nccl", "NCCL, a GPU for each")
    torch.cuda.set_device(0)
    return Place(rank, world, "cuda", "gloo", "gloo, on one GPU that they share")


def largest_difference(
    sequence: CUDAGraphSequence, x: torch.Tensor, out: torch.Tensor, whole: Layer, replays: int
) -> float:
    """Between replays and the whole layer in this process, relative to the layer's largest value."""
    largest = 0.0
    for number in range(replays):
        random = torch.Generator().manual_seed(number)
        x.copy_(torch.randn(TOKENS, WIDTH, generator=random))
        out.fill_(float("nan"))
        sequence.replay()
        expected = whole(x, nothing)
        difference = float((out - expected).abs().max() / expected.abs().max())
        largest = max(largest, difference if difference == difference else float("inf"))
    return largest


def run(place: Place, replays: int) -> bool:
    """Capture and replay in both ways; whether all replays were right on this rank."""
    layer, whole = Layer(place.rank, place.world, place.device), Layer(0, 1, place.device)
    x = torch.zeros(TOKENS, WIDTH, device=place.device)
    out = torch.zeros(TOKENS, WIDTH, device=place.device)
    layer(x, all_reduce)  # a group makes its communicator at its first collective: not in a capture
    ways: dict[str, Reduce] = {"break": all_reduce_as_a_break, "captured": all_reduce}
    right = True
    for name, reduce in ways.items():
        if name == "captured" and not place.can_capture:
            say(place, f"{name}: left out, gloo's collectives are done by the host")
            continue
        sequence = CUDAGraphSequence()
        with capture_together(sequence):
            out.copy_(layer(x, reduce))
        compare(sequence)
        difference = largest_difference(sequence, x, out, whole, replays)
        right = right and difference < TOLERANCE
        graphs = len(sequence.segments[::2])
        say(
            place,
            f"{name}: {graphs} graph segments, {len(sequence) - graphs} breaks; {replays} replays, "
            f"largest difference from one process {difference:.1e}",
        )
        sequence.reset()  # a communicator waits for the graphs that use it
    return right


def say(place: Place, text: str) -> None:
    """One rank speaks for all."""
    if place.rank == 0:
        print(text, flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--replays", type=int, default=100)
    given = parser.parse_args(arguments)
    place = find_place()
    if "RANK" in os.environ:
        dist.init_process_group(place.backend)
    else:
        store = dist.HashStore()
        dist.init_process_group(place.backend, store=store, rank=0, world_size=1)
    say(place, f"{place.world} rank{'s' * (place.world > 1)} over {place.words}")
    device: Any = simulated_device() if place.device == "cpu" else contextlib.nullcontext()
    with device:
        right = run(place, given.replays)
    verdicts: list[Any] = [None] * place.world
    dist.all_gather_object(verdicts, right)
    dist.destroy_process_group()
    say(place, "right on all ranks" if all(verdicts) else f"WRONG: {verdicts}")
    return 0 if all(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
