"""Captured torch.compile graphs, counted and executed eagerly."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partialmethod
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from train.data.draws import philox


@dataclass
class Graphs:
    """The captured graphs, and the number of times that they have been called."""

    captured: list[torch.fx.GraphModule] = field(default_factory=list)
    calls: int = 0

    def capture(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        """Serve as torch.compile's backend."""
        self.captured.append(graph)

        def run(*arguments: Any) -> Any:
            self.calls += 1
            return graph.forward(*arguments)

        return run

    @property
    def breaks(self) -> int:
        """Number of graph breaks."""
        return sum(counters["graph_break"].values())


@contextmanager
def capture_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Graphs]:
    """Capture the graphs that modules compile while the context is open."""
    graphs = Graphs()
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend=graphs.capture))
    monkeypatch.setattr("train.data.draws.fused_philox", lambda: philox)
    counters.clear()
    yield graphs
    torch.compiler.reset()
