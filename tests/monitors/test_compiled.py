"""An inspection of a model compiled in place recompiles nothing; the next steps reuse the compiled code."""

import pytest
import torch
from torch import nn

from stabletrain.monitors.monitors import FullMonitors
from stabletrain.records import Batch
from stabletrain.stability.objective import CrossEntropy
from tests.monitors.watched import PRECISIONS, adamw, backward


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.1)

    def forward(self, x):
        return x + self.dropout(torch.relu(self.norm(self.linear(x))))


class Plain(nn.Module):
    """A model without checked annotations, so that dynamo sees it as it sees users' models."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(8, 4)

    def forward(self, inputs):
        return self.head(self.blocks(inputs))


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    return Batch(torch.randn(8, 8, generator=generator), torch.randint(4, (8,), generator=generator))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_inspection_keeps_the_compiled_step(precision):
    torch.compiler.reset()
    compiled = 0

    def backend(graph, inputs):
        nonlocal compiled
        del inputs
        compiled += 1
        return graph.forward

    def trained(monitors):
        model, mode = Plain(), PRECISIONS[precision]()
        model.compile(backend=backend, fullgraph=True)
        optimizer = adamw(model)
        torch.manual_seed(1)
        for step in range(5):
            backward(model, batch(step), mode)
            if monitors is not None:
                monitors.before(model, optimizer, batch(step), mode, CrossEntropy())
            optimizer.step()
            if monitors is not None:
                metrics, alarms = monitors.after(model, optimizer, True)
                assert alarms == []
                assert "monitors/activation_rms/blocks.1" in metrics
                assert "monitors/hessian_top" in metrics
        with torch.compiler.set_stance("fail_on_recompile"):
            backward(model, batch(9), mode)
        return [p.detach().clone() for p in model.parameters()] + [b.clone() for b in model.buffers()]

    alone = trained(None)
    graphs = compiled
    assert graphs > 0
    torch.compiler.reset()
    watched = trained(FullMonitors(1, 2, 4))
    assert compiled == 2 * graphs, "an inspection must not make a graph of its own"
    assert all(torch.equal(a, b) for a, b in zip(watched, alone, strict=True))
    torch.compiler.reset()
