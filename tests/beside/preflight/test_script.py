"""`stabletrain run --check`: a script computes what it computes without, its faults are named, and it is ended."""

import copy
import json
import os

import pytest
import torch
from torch import nn

from stabletrain.beside.preflight.script import bare_loop, copied
from tests import forkserver
from tests.parallel.launches import finish, start

CLEAN = """
import torch, torch.nn.functional as F
from torch import nn
torch.manual_seed(0)
x, y = torch.randn(64, 6), torch.randint(0, 3, (64,))
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8)
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
"""

SCALED = (
    CLEAN.replace("scheduler = ", "scaler = torch.amp.GradScaler('cpu', init_scale=1024.0)\nscheduler = ")
    .replace(
        "loss.backward()", "scaler.scale(loss).backward()\n        nn.utils.clip_grad_norm_(model.parameters(), 0.1)"
    )
    .replace("optimizer.step()", "scaler.step(optimizer)\n        scaler.update()")
)

ZERO = """
class Own(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self):
        for each in self.param_groups[0]["params"]:
            each -= 0.01 * each.grad / each.grad.norm()
"""

SQUARE = """
class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x
    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0]
"""

BITS = """
import hashlib, random, torch, torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn = nn.Embedding(20, 16), nn.GRU(16, 16, batch_first=True)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.conv, self.norm = nn.Conv1d(16, 16, 3), nn.BatchNorm1d(16)
    def forward(self, ids):
        hidden = checkpoint(self.block, self.embed(ids), use_reentrant=False)
        hidden = hidden + self.rnn(hidden)[0]
        return self.norm(self.conv(hidden.mT)).mean(-1) @ self.embed.weight.T

torch.manual_seed(0)
random.seed(0)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedules = [torch.optim.lr_scheduler.LinearLR(optimizer, 0.5), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]
scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, schedules, [3])
for number in range(16):
    ids = torch.randint(20, (4, 8))
    with torch.autocast("cpu", torch.bfloat16, enabled=number > 4):
        loss = F.cross_entropy(model(ids), ids[:, 0])
    (loss / 2).backward()
    if number % 2:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    bits = [*model.state_dict().values(), torch.get_rng_state()]
    bits += [value for state in optimizer.state.values() for value in state.values()]
    hashed = hashlib.sha256(b"".join(each.numpy().tobytes() for each in bits)).hexdigest()
    print(number, loss.item(), hashed, scheduler.get_last_lr(), random.random())
"""


CHECK = """
import sys, warnings
from stabletrain.beside.script import command
warnings.simplefilter("ignore")
sys.exit(command.run(["--check", *sys.argv[1:], "train.py"]))
"""

PLAIN = """
import runpy, warnings
warnings.simplefilter("ignore")
runpy.run_path("train.py")
"""


@pytest.fixture
def run(tmp_path):
    """Runs a script in a fork; returns the exit code, the output and the errors."""

    def run(source, *words, check=True):
        (tmp_path / "train.py").write_text(source)
        ended = forkserver.run(["-c", CHECK if check else PLAIN, *words], tmp_path, os.environ, 300)
        return ended.returncode, ended.stdout, ended.stderr

    return run


def faults(out):
    """Returns of each fault the check, the text, and its line."""
    lines = out.splitlines()
    found = [at for at, line in enumerate(lines) if line.startswith("FAULT")]
    return [(*lines[at].split(maxsplit=2)[1:], lines[at + 1].split()[-1]) for at in found]


def test_of_a_clean_script_there_is_no_fault_and_it_is_said_what_was_not_checked(run):
    code, out, err = run(CLEAN)
    assert (code, err) == (0, "")
    verdicts = [line.split()[:2] for line in out.splitlines()[:-1]]
    assert verdicts == [
        ["ok", "structure"], ["ok", "order"], ["ok", "data"], ["ok", "optimizer"], ["-", "gradient"],
        ["ok", "headroom"], ["-", "resume"], ["-", "accumulation"],
    ]  # fmt: skip
    assert "6 updates" in out
    assert "use stabletrain.Guard.check(make)" in out


def test_until_it_is_ended_a_script_computes_the_same_bits(run):
    code, out, err = run(BITS)
    plain = run(BITS, check=False)[1].splitlines()
    assert (code, err, len(plain)) == (0, "", 16)
    assert out.splitlines()[:12] == plain[:12]
    assert "6 updates" in out.splitlines()[13]


PLANTED = {
    "no zero_grad": (
        CLEAN.replace("optimizer.zero_grad()", "pass"),
        ("order", "in steps 2, 3, 4, 5 and 1 more the optimizer gets the gradients of the step before once more", 14),
    ),
    "a head that was replaced": (
        CLEAN.replace("scheduler = ", "model[2] = nn.Linear(8, 3)\nscheduler = "),
        ("structure", "2 of the model's 4 are in no group (2.weight, 2.bias): they were replaced after", 8),
    ),
    "a parameter that was forgotten": (
        CLEAN.replace("(model.parameters(), lr", "([*model.parameters()][:3], lr"),
        ("structure", "in no group of an optimizer, so never updated: 2.bias (1 of 4 trainable parameters)", 8),
    ),
    "a layer in a list": (
        CLEAN.replace("optimizer = ", "model[1].layers = [nn.Linear(8, 8)]\n"
            "model[1].forward = lambda x: torch.relu(model[1].layers[0](x))\noptimizer = "),
        ("structure", "the loss depends on 1.layers[0].weight, 1.layers[0].bias, and PyTorch does not see them", 10),
    ),
    "clipped while scaled": (SCALED, ("order", "clipped to a norm of 0.1 while they are still scaled by 1024", 17)),
    "never unscaled": (
        SCALED.replace("scaler.step(optimizer)", "optimizer.step()").replace("nn.utils.clip_grad_norm_", "print"),
        ("order", "the scaler's scale is never taken out of the gradients of optimizers.0: their norm is", 17),
    ),
    "scheduler first": (
        CLEAN.replace("    scheduler.step()", "").replace("        opt", "        scheduler.step()\n        opt", 1),
        ("order", "schedulers.0 steps before optimizers.0: its first learning rate is never used", 12),
    ),
    "scheduler twice": (
        CLEAN.replace("        scheduler.step()", "        scheduler.step(); scheduler.step()"),
        ("order", "schedulers.0 steps more than once for each step of optimizers.0 (2 times a step)", 16),
    ),
    "a new iterator for each step": (
        CLEAN.replace("in loader:", "in [0] * 8:").replace("for x, y in", "for _ in").replace(
            "optimizer.zero_grad()", "x, y = next(iter(loader)); optimizer.zero_grad()"
        ),
        ("data", "5 of 6 steps have the inputs of an earlier one (step 6 those of step 1): each makes a new", 12),
    ),
    "targets of one class": (
        CLEAN.replace("64,", "2048,").replace("randint(0, 3,", "randint(1, 2,").replace("=8", "=256"),
        ("data", "all of the 1536 targets in cross_entropy that count are 1: there is nothing to learn", 13),
    ),
    "inputs in bytes": (
        CLEAN.replace("torch.randn(64, 6)", "torch.randint(0, 256, (64, 6)).float()"),
        ("data", "inputs (inputs[0]) have mean", 13),
    ),
    "a division by a zero norm": (
        CLEAN.replace("optimizer = torch.optim.AdamW", f"{ZERO}\noptimizer = Own").replace("lr=1e-2", "dict(lr=1)"),
        ("optimizer", "the first step of Own (optimizers.0), with zero gradients, is not finite: 0 / 0", 13),
    ),
    "a wrong backward pass": (
        CLEAN.replace("model = ", SQUARE + "model = ").replace("model(x)", "Square.apply(model(x))"),
        ("gradient", "Square.backward is not the gradient of its forward pass (Square): the gradient of input 0", 13),
    ),
}  # fmt: skip


@pytest.mark.slow(unless=lambda name: name in [*PLANTED][::3])
@pytest.mark.parametrize("name", PLANTED)
def test_a_fault_is_named_with_its_line(run, name):
    source, (check, text, line) = PLANTED[name]
    code, out, _ = run(source)
    assert code == 1
    [(found, said, at)] = faults(out)
    assert (found, at) == (check, f"train.py:{line}")
    assert text in said


def test_tied_weights_that_a_copy_has_split_are_seen_before_training_moves_them_apart(run):
    source = CLEAN.replace("nn.Linear(6, 8)", "nn.Embedding(8, 8)").replace(
        "torch.randn(64, 6)", "torch.arange(64) % 8"
    )
    copies = "model[2] = nn.Linear(8, 8)\nmodel[2].weight.data.copy_(model[0].weight)\n"
    code, out, _ = run(source.replace("optimizer = ", f"{copies}optimizer = "))
    [(check, text, _)] = faults(out)
    assert (code, check) == (1, "structure")
    assert text.startswith("2.weight equals 0.weight in all 64 values and is another parameter: a copy has split tied")


NOT_WRONG = {
    "clipped after unscaling": SCALED.replace("nn.utils", "scaler.unscale_(optimizer); nn.utils"),
    "divided while scaled": SCALED.replace("clip_grad_norm_(model.parameters(), 0.1)", "get_total_norm([])").replace(
        "        scaler.step", "        [each.grad.div_(1 + epoch) for each in model.parameters()]\n        scaler.step"
    ),
    "one batch for all": CLEAN.replace("model(x), y", "model(loader.dataset[:8][0]), loader.dataset[:8][1]"),
    "accumulated": CLEAN.replace(
        "        loss = ", "        (F.cross_entropy(model(x), y) / 2).backward()\n        loss = 0.5 * "
    ),
    "gradients written by hand": CLEAN.replace("        optimizer.zero_grad()\n", "").replace(
        "        loss.backward()", "        given = torch.autograd.grad(loss, [*model.parameters()])\n"
        "        [setattr(each, 'grad', value) for each, value in zip(model.parameters(), given)]"
    ),
    "a closure": CLEAN.replace("AdamW(model.parameters(), lr=1e-2)", "LBFGS(model.parameters(), max_iter=2)").replace(
        "        loss = F.cross_entropy(model(x), y)\n        loss.backward()\n        optimizer.step()",
        "        def closure():\n            optimizer.zero_grad()\n            loss = F.cross_entropy(model(x), y)\n"
        "            loss.backward()\n            return loss\n        optimizer.step(closure)",
    ),
}  # fmt: skip


@pytest.mark.slow(unless=lambda name: name in [*NOT_WRONG][::3])
@pytest.mark.parametrize("name", NOT_WRONG)
def test_what_only_looks_like_a_fault_is_none(run, name):
    code, out, err = run(NOT_WRONG[name])
    assert (code, err, faults(out)) == (0, "", [])
    assert "failed" not in out


def test_of_networks_that_train_against_each_other_constant_targets_are_a_note(run):
    source = """
import torch
from torch import nn
makes, judges = nn.Linear(4, 6), nn.Linear(6, 1)
first, second = (torch.optim.Adam(each.parameters()) for each in (makes, judges))
loss, real, made = nn.BCEWithLogitsLoss(), torch.ones(512, 1), torch.zeros(512, 1)
while True:
    second.zero_grad()
    images = makes(torch.randn(512, 4))
    loss(judges(torch.randn(512, 6)), real).backward()
    loss(judges(images.detach()), made).backward()
    second.step()
    first.zero_grad()
    loss(judges(images), real).backward()
    first.step()
"""
    code, out, _ = run(source)
    assert (code, faults(out)) == (0, [])
    assert "note   data" in out
    assert "Adam (optimizers.1) stays finite" in out


def test_a_script_that_fails_gets_its_own_traceback_after_what_could_be_said(run):
    code, out, err = run(CLEAN.replace("(64,))", "(64,)) + 1"))
    assert code == 1
    [(check, text, line)] = faults(out)
    assert (check, line) == ("data", "train.py:13")
    assert "out of range" in text
    assert err.splitlines()[-1] == "IndexError: Target 3 is out of bounds."
    assert "stabletrain/" not in err


def test_a_script_that_ends_before_gets_what_could_be_said_and_its_own_exit_code(run):
    ends = CLEAN.replace("        scheduler.step()", "        raise SystemExit(7)").replace(
        "optimizer.zero_grad()", "pass"
    )
    code, out, _ = run(ends)
    assert code == 7
    assert "1 updates: each begins without old gradients" in out
    code, out, _ = run(CLEAN.replace("range(2)", "range(0)"))
    assert code == 0
    assert "structure     not checked: the script has ended before its first update" in out
    assert run("import torch")[:2] == (
        0,
        "-      structure     not checked: no optimizer of PyTorch was made in this process; of processes that a "
        "script starts nothing is seen\npreflight: 0 faults, 0 notes, 0 passed, 1 not checked; 0.0 s\n",
    )


def test_a_script_that_catches_errors_is_ended_all_the_same(run):
    catches = CLEAN.replace("        optimizer.zero_grad()", "      try:\n        optimizer.zero_grad()")
    code, out, _ = run(f"{catches}      except Exception: print('caught')\n")
    assert (code, "caught" in out) == (0, False)
    code, out, _ = run(f"{catches}      except: print('caught')\n".replace("range(2)", "iter(int, 1)"))
    assert (code, out.count("caught")) == (0, 10)
    assert out.count("preflight: 0 faults") == 1


def test_workers_of_a_loader_are_left_alone(run):
    source = CLEAN.replace("batch_size=8", "batch_size=22, num_workers=1, collate_fn=collate").replace(
        "range(2)", "range(9)"
    )
    collate = "embed = torch.nn.Linear(6, 6)\ndef collate(rows):\n    x, y = zip(*rows)\n"
    collate += "    return embed(torch.stack(x)).detach(), torch.stack(y)\n"
    code, out, err = run(source.replace("loader =", f"{collate}loader ="))
    assert (code, err, "6 updates" in out) == (0, "", True)


def test_a_compiled_model_is_not_watched(run):
    code, out, err = run(CLEAN.replace("optimizer = ", "model = torch.compile(model, backend='eager')\noptimizer = "))
    assert (code, err) == (0, "")
    assert "data          not checked: the script calls torch.compile" in out
    assert "ok     structure     4 trained parameters" in out


def test_the_findings_are_printed_as_json(run):
    code, out, _ = run(PLANTED["no zero_grad"][0], "--json")
    found = json.loads(out)
    assert (code, found["faults"]) == (1, 1)
    assert [each["check"] for each in found["findings"] if each["verdict"] == "fault"] == ["order"]


def test_a_copy_of_an_optimizer_steps_alone():
    torch.manual_seed(0)
    loop = bare_loop(nn.Linear(3, 2))
    loop.optimizers = [torch.optim.Adam(loop.model.parameters())]
    torch.optim.lr_scheduler.StepLR(loop.optimizers[0], 1)  # puts something in place of `step`
    loop.optimizers[0].register_step_post_hook(lambda *_: pytest.fail("a hook of the user's was called"))
    before = copy.deepcopy([loop.model.state_dict(), loop.optimizers[0].state_dict()])
    twin = copied(loop, 0)
    assert [*twin.parameters] == ["weight", "bias"]
    start = twin.parameters["weight"].clone()
    for each in twin.parameters.values():
        each.grad = torch.ones_like(each)
    twin.optimizers[0].step()
    assert not torch.equal(twin.parameters["weight"], start)
    assert repr([loop.model.state_dict(), loop.optimizers[0].state_dict()]) == repr(before)


@pytest.mark.slow
def test_of_several_ranks_the_first_one_reports_and_all_end(tmp_path):
    source = CLEAN.replace("model = ", "torch.distributed.init_process_group('gloo')\nmodel = ")
    source = source.replace("optimizer = ", "model = nn.parallel.DistributedDataParallel(model)\noptimizer = ")
    (tmp_path / "train.py").write_text(source.replace("range(2)", "range(10**6)"))
    done = finish(start(2, "-m", "stabletrain", "run", "--check", "train.py", cwd=tmp_path))
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("preflight: 0 faults") == 1
    assert "not looked at: several ranks train" in done.stdout
