"""Head and loss of a chunk run as compiled code where the model does."""

import json
import shutil
import subprocess
import sys

import pytest

from tests.runs import ROOT

NO_COMPILER = not (shutil.which("g++") or shutil.which("clang++"))

SCRIPT = '''
import copy, json, torch
from torch import nn
from torch._dynamo.utils import counters
from stabletrain.machine.compiling import compile_
from stabletrain.stability.objective.chunked_loss import ChunkedLoss
from stabletrain.stability.objective import CrossEntropy, ZLoss
from tests.stability.objective.test_chunked_loss import TOKENS, VOCAB, Run, gradients

class Small(nn.Module):
    """As few operations as may be: a compiler takes most of a second for each."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB, bias=False)

    def forward(self, inputs, head=True):
        features = self.table(inputs).tanh()
        return self.logits(features) if head else features

    def logits(self, features):
        return self.head(features)

    def classifier(self):
        return self.head

def step(model):
    terms, found = gradients(Run(model, lambda: torch.autocast("cpu", torch.bfloat16)), chunked)
    return float(terms.total), found, counters["stats"]["unique_graphs"]

chunked = ChunkedLoss(CrossEntropy(ZLoss(1e-2)), 8, VOCAB)  # four whole chunks, and one of a single token
torch.manual_seed(0)
model = Small()
steps = [step(model)]
for _ in range(2):
    taken = copy.deepcopy(model)
    compile_(taken, TOKENS)
    steps.append(step(taken))
losses, gradients, graphs = zip(*steps)
eager, compiled, copied = gradients
off = max(float((compiled[name] - eager[name]).norm() / eager[name].norm()) for name in eager)
same = all(torch.equal(compiled[name], copied[name]) for name in eager)
print(json.dumps({"graphs": graphs, "losses": losses, "off": off, "same": same}))
'''


@pytest.mark.slow
@pytest.mark.skipif(NO_COMPILER, reason="needs a C++ compiler")
def test_where_the_model_is_compiled_the_chunks_are_too():
    """In a process of its own: the compiler cannot look into functions whose types the tests check."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["graphs"] == [0, 2, 2], "the model and the loss of a whole chunk, once; the last chunk is eager"
    assert found["losses"][1] == pytest.approx(found["losses"][0], rel=1e-3)
    assert found["off"] < 0.02
    assert found["same"] is True, "a replay's copy of the model gets the same bits"
