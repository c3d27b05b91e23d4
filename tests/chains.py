"""Chains of kernels that are edited at random, and a model of them; for the simulator and for a device.

The hard problem: edits come by many ways (one field, everything from a node, a captured operation, a
whole graph, a move of memory) and each of them keeps books of what the executable does now; one that
forgets to tell the others gives a right answer until the next edit. So they are mixed, and every answer
is compared with a model that knows nothing of graphs.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Protocol

import numpy
import pytest

from breakable_cuda_graphs import CUDAGraphSequence, Graph, UpdateError
from breakable_cuda_graphs.sequence.rebinding.rebind import rebind

STEPS = 4


class Tools(Protocol):
    """Memory and the known kernel, out = source * factor, of the simulator or of a device."""

    block: int

    def array(self, value: float) -> Any: ...
    def address(self, array: Any) -> int: ...
    def scale(self, graph: Graph, out: Any, source: Any, factor: float, after: Any) -> Any: ...
    def launch(self, stream: Any, out: Any, source: Any, factor: float) -> None: ...
    def sync(self) -> None: ...


class Chain:
    """b[i + 1] = b[i] * f[i], a kernel a step, in a sequence or in an executable of its own."""

    def __init__(self, tools: Tools, seed: int, *, in_sequence: bool) -> None:
        self.tools, self.chosen = tools, random.Random(seed)
        self.buffers = [tools.array(n + 1.0) for n in range(STEPS + 1)]
        self.sources = list(range(STEPS))  # which buffer each step reads
        self.factors = [float(n + 2) for n in range(STEPS)]
        self.disabled: set[int] = set()
        self.graph = self.build()
        self.nodes = self.graph.nodes
        self.seq = CUDAGraphSequence() if in_sequence else None
        if self.seq is not None:
            self.exec = self.seq.append(self.graph).exec
        else:
            self.exec = self.graph.instantiate()

    def build(self) -> Graph:
        """A graph of the same topology that does what the chain is to do now."""
        graph, node = Graph(), None
        for step in range(STEPS):
            source = self.buffers[self.sources[step]]
            target, factor = self.buffers[step + 1], self.factors[step]
            node = self.tools.scale(graph, target, source, factor, node)
        return graph

    # ---- the model, and the comparison

    def check(self) -> None:
        for buffer in self.buffers:
            buffer[:] = self.chosen.randint(1, 9)
        expected = [float(buffer[0]) for buffer in self.buffers]
        for step in range(STEPS):
            if step not in self.disabled:
                expected[step + 1] = expected[self.sources[step]] * self.factors[step]
        if self.seq is not None:
            self.seq.replay()
        else:
            self.exec.launch()
        self.tools.sync()
        assert [float(buffer[0]) for buffer in self.buffers] == expected
        assert all(bool((buffer == buffer[0]).all()) for buffer in self.buffers)

    def check_what_is_shown(self) -> None:
        """The nodes of a segment's graph show what will run."""
        if self.seq is None:
            return
        for step, node in enumerate(self.graph.nodes):
            assert node.args[2].as_float32() == numpy.float32(self.factors[step])
            assert node.args[1].as_pointer() == self.tools.address(self.buffers[self.sources[step]])
            assert node.args[0].as_pointer() == self.tools.address(self.buffers[step + 1])
            assert node.enabled == (step not in self.disabled)

    # ---- the edits

    def step(self) -> int:
        return self.chosen.randrange(STEPS)

    def another_factor(self) -> None:
        step = self.step()
        self.factors[step] = float(self.chosen.randint(1, 5))
        self.exec.update(self.nodes[step], args={2: numpy.float32(self.factors[step])})

    def another_source(self) -> None:
        step = self.step()
        self.sources[step] = self.chosen.randrange(step + 1)
        self.exec.update(self.nodes[step], args={1: self.buffers[self.sources[step]]})

    def another_shape(self) -> None:
        self.exec.update(
            self.nodes[self.step()], grid=self.chosen.randint(1, 3), block=self.tools.block
        )

    def from_a_node(self) -> None:
        step = self.step()
        self.factors[step] = float(self.chosen.randint(1, 5))
        self.exec.update(self.nodes[step], from_node=self.build().nodes[step])

    def from_a_capture(self) -> None:
        step = self.step()
        self.factors[step] = float(self.chosen.randint(1, 5))
        source, target = self.buffers[self.sources[step]], self.buffers[step + 1]
        with self.exec.capture_update(self.nodes[step]) as stream:
            self.tools.launch(stream, target, source, self.factors[step])

    def from_a_graph(self) -> None:
        self.factors = [float(self.chosen.randint(1, 5)) for _ in range(STEPS)]
        self.exec.update_from(self.build())

    def switch(self) -> None:
        step = self.step()
        if step in self.disabled:
            self.exec.enable(self.nodes[step])
        else:
            self.exec.disable(self.nodes[step])
        self.disabled ^= {step}

    def move(self) -> None:
        if self.seq is None:
            return
        moves = []
        for place in self.chosen.sample(range(STEPS + 1), self.chosen.randint(1, 3)):
            new = self.tools.array(0)
            moves.append((self.buffers[place], new))
            self.buffers[place] = new
        rebind(self.seq, moves)

    def swap(self) -> None:
        if self.seq is None:
            return
        one, other = self.chosen.sample(range(STEPS + 1), 2)
        a, b = self.buffers[one], self.buffers[other]
        rebind(self.seq, [(a, b), (b, a)])
        self.buffers[one], self.buffers[other] = b, a

    def refused(self) -> None:
        with pytest.raises(UpdateError):
            self.exec.update(
                self.nodes[self.step()], args={2: numpy.float32(9), 3: numpy.float64(9)}
            )

    def edits(self) -> list[Callable[[], None]]:
        return [
            self.another_factor, self.another_source, self.another_shape, self.from_a_node,
            self.from_a_capture, self.from_a_graph, self.switch, self.move, self.swap, self.refused,
        ]  # fmt: skip

    def run(self, edits: int) -> None:
        """Edit at random, and compare after each."""
        self.check()
        for _ in range(edits):
            self.chosen.choice(self.edits())()
            self.check_what_is_shown()
            self.check()
        self.close()

    def close(self) -> None:
        if self.seq is not None:
            self.seq.reset()
        else:
            self.exec.close()
