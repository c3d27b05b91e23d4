"""torch: two captured segments with a host-side decision between them."""

import torch

from breakable_cuda_graphs import CUDAGraphSequence, breakable_graph, no_graph


@no_graph
def scale_by_the_largest(t: torch.Tensor) -> None:
    """A break: `.item()` reads the device, and no capture survives that."""
    t.div_(max(t.max().item(), 1.0))


def step(x: torch.Tensor) -> torch.Tensor:
    y = torch.relu(x * 2 - 1)
    scale_by_the_largest(y)
    return y.cumsum(0)


x = torch.zeros(1024, device="cuda")
sequence = CUDAGraphSequence()
with breakable_graph(sequence):
    out = step(x)

for k in range(5):
    x.copy_(torch.arange(1024.0, device="cuda") * k)
    sequence.replay()
    torch.testing.assert_close(out, step(x), rtol=0, atol=0)
print("torch: the same as eager")
