"""Each fault does what it says, at its numbers and nowhere else; and a run without faults knows nothing of them."""

import contextlib
import math
import signal
from dataclasses import fields

import pytest
import torch
import yaml
from torch import nn

from stabletrain.checkpoint import writer
from stabletrain.checkpoint.reader import verify
from stabletrain.config.checks import check
from stabletrain.config.make import make
from stabletrain.errors import ConfigError
from stabletrain.faults import (
    Activation,
    BitFlip,
    DiskFull,
    Empty,
    Gradient,
    Ignored,
    Input,
    Label,
    LearningRate,
    LostWandb,
    NoFaults,
    Plan,
    Poison,
)
from stabletrain.faults.plan import KINDS
from stabletrain.records import IGNORE_INDEX, Batch, TrainState
from stabletrain.tracking.metrics import read_jsonl
from stabletrain.tracking.wandb import NoWandb, Wandb
from stabletrain.trainer.build import build
from stabletrain.trainer.loop import train
from tests.runs import CONF, TINY_GPT, TINY_RESNET, command, composed

MODEL, TRAINING, MANIFEST = "model.safetensors", "training.safetensors", "manifest.json"
NAN, INF = float("nan"), float("inf")
NEVER = 10**9
SMALL = {"gpt": TINY_GPT, "resnet": [*TINY_RESNET, "model.depth=8"]}
CADENCE = ["steps=12", "eval_every=6", "checkpoint.every=4", "checkpoint.keep=9", "warmup.steps=2", "log_every=1"]


# ---- by hand: a small model, and steps as `stabletrain/step.py` takes them


class Scaled:
    """A precision with a loss scale, as the faults see it."""

    def __init__(self, scale=1.0):
        self.scale = scale

    def loss_scale(self):
        return torch.tensor(self.scale)


def fresh(optimizer=None, dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 6), nn.Linear(6, 3)).to(dtype)
    make_optimizer = optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    return TrainState(model, make_optimizer(model.parameters()))


def samples(tick, size=2):
    return torch.randn(size, 4, generator=torch.Generator().manual_seed(tick))


def step(state, micro_batches=1, scale=1.0, applied=True):
    """One step: gradients, then the update where it is `applied`."""
    state.optimizer.zero_grad(set_to_none=True)
    for part in range(micro_batches):
        (state.model(samples(state.executed_steps + part)).float().square().sum() * scale).backward()
    for parameter in state.model.parameters():
        parameter.grad.div_(scale)
    if applied:
        state.optimizer.step()
    state.step += 1
    state.executed_steps += 1


def weights(state):
    return [parameter.detach().clone() for parameter in state.model.parameters()]


def gradients(state):
    return [parameter.grad.clone() for parameter in state.model.parameters()]


def bad_elements(tensors):
    return sum(int((~torch.isfinite(tensor)).sum()) for tensor in tensors)


def differing(one, other):
    """How many elements of two lists of tensors are not the same bits."""
    return sum(int((a.view(torch.int32) != b.view(torch.int32)).sum()) for a, b in zip(one, other, strict=True))


class Numbers:
    """A data set that says nothing but its batches; one memory is handed out again and again."""

    def __init__(self, inputs, targets):
        self.given = Batch(inputs, targets, torch.arange(len(inputs)), [f"line {i}" for i in range(len(inputs))])

    def batch(self, step, size, split):
        return self.given


class Images(Numbers):
    num_classes = 5

    def __init__(self):
        super().__init__(torch.ones(4, 1, 3, 3), torch.tensor([0, 1, 2, 4]))


class Tokens(Numbers):
    vocab_size = 7

    def __init__(self):
        super().__init__(
            torch.ones(2, 5, dtype=torch.int64), torch.tensor([[0, 1, 2, 3, 6], [5, IGNORE_INDEX, 5, 5, 5]])
        )

    def decode(self, tokens):
        return "text"


# ---- when


def option(kind, *overrides):
    """The object of an option, as a command line makes it."""
    with composed(f"faults={kind}", *overrides) as cfg:
        check(cfg)
        return make(cfg, "faults")


@pytest.mark.parametrize("kind", KINDS)
def test_an_options_keys_are_its_kinds(kind):
    tree = yaml.safe_load((CONF / "faults" / f"{kind}.yaml").read_text())
    assert set(tree) - {"_target_"} == {field.name for field in fields(KINDS[kind])}
    assert type(option(kind)) is KINDS[kind]


def test_every_other_option_is_none_or_a_plan():
    options = {file.stem for file in (CONF / "faults").glob("*.yaml")}
    assert options >= {*KINDS, "none", "plan"}
    made = {name: type(option(name)) for name in options - set(KINDS)}
    assert made == {name: NoFaults if name == "none" else Plan for name in made}


@pytest.mark.parametrize("at", [[], [-1], [3, -5], [True]])
def test_what_is_no_plan_is_refused(at):
    with pytest.raises(ConfigError, match="faults.at="):
        Gradient(at=at)


@pytest.mark.parametrize(
    ("value", "message"),
    [("1.5", "not a list of numbers"), ("[-1]", "-1 is not a whole number"), ("[]", "plans nothing")],
)
def test_a_number_on_the_command_line_that_is_no_step_is_refused(value, message):
    with pytest.raises(ConfigError, match=message):
        option("gradient", f"faults.at={value}")


@pytest.mark.parametrize(
    ("planned", "here", "hit"), [(None, None, True), (0, None, True), (1, None, False), (1, "1", True)]
)
def test_a_fault_of_one_rank_hits_that_rank(monkeypatch, planned, here, hit):
    monkeypatch.delenv("RANK", raising=False)
    if here is not None:
        monkeypatch.setenv("RANK", here)
    state = fresh()
    Gradient(at=[0], rank=planned).state(state, Scaled())
    step(state)
    assert bool(bad_elements(gradients(state))) == hit
    assert (len(Empty(at=[0], rank=planned).data(Images()).batch(0, 4, "train")) == 0) == hit


@pytest.mark.parametrize(
    "fault",
    [Gradient(at=[4]), Activation(at=[4]), BitFlip(at=[4])],
    ids=["gradient", "activation", "bitflip"],
)
def test_a_tick_comes_once_however_often_the_step_does(fault):
    state = fresh()
    untouched = state.model
    fault.state(state, Scaled())
    bad = []
    for _ in range(9):
        if state.executed_steps == 5:  # a rollback: weights and step of the start, the tick stays
            restored = fresh()
            untouched.load_state_dict(restored.model.state_dict())
            state.step = 0
        before = weights(state)
        step(state, applied=False)
        bad.append(bool(bad_elements(gradients(state))) or differing(before, weights(state)) > 0)
    assert bad == [False] * 4 + [True] + [False] * 4


# ---- data


def test_one_value_of_one_image_is_bad_and_the_data_stays_as_it_was():
    data = Images()
    for value in (NAN, INF, -INF, 7.0):
        spoilt = Input(at=[3], value=value).data(data)
        batch = spoilt.batch(3, 4, "train")
        changed = batch.inputs != data.given.inputs
        assert changed.sum() == 1
        assert str(float(batch.inputs[changed])) == str(value)
        assert torch.equal(batch.targets, data.given.targets)
    assert torch.equal(data.given.inputs, torch.ones(4, 1, 3, 3))


def test_one_token_is_far_out_of_range():
    for value, written in ((NAN, 2**31 - 1), (INF, 2**31 - 1), (5.0, 5)):
        inputs = Input(at=[3], value=value).data(Tokens()).batch(3, 2, "train").inputs
        assert inputs.dtype == torch.int64
        assert sorted(inputs.flatten().tolist()) == [1] * 9 + [written]


def test_one_label_is_out_of_range():
    for value in (10**6, -1):
        data = Tokens()
        targets = Label(at=[3], value=value).data(data).batch(3, 2, "train").targets
        changed = targets != data.given.targets
        assert changed.sum() == 1
        assert targets[changed].item() == value


def test_no_target_counts_and_no_sample_is_there():
    batch = Ignored(at=[3]).data(Tokens()).batch(3, 2, "train")
    assert (batch.targets == IGNORE_INDEX).all()
    assert batch.targets.shape == (2, 5)
    batch = Empty(at=[3]).data(Images()).batch(3, 4, "train")
    assert batch.inputs.shape == (0, 1, 3, 3)
    assert (len(batch.targets), len(batch.ids), len(batch.sources)) == (0, 0, 0)


def test_poison_is_valid_and_wrong_everywhere():
    batch = Poison(at=[3], factor=10.0).data(Images()).batch(3, 4, "train")
    assert torch.equal(batch.inputs, torch.full((4, 1, 3, 3), 10.0))
    assert (batch.targets != torch.tensor([0, 1, 2, 4])).all()
    assert ((batch.targets >= 0) & (batch.targets < 5)).all()
    tokens = Tokens()
    batch = Poison(at=[3]).data(tokens).batch(3, 2, "train")
    assert torch.equal(batch.inputs, tokens.given.inputs)
    same = batch.targets == tokens.given.targets
    assert same.nonzero().tolist() == [[1, 1]]  # what is ignored stays so
    assert batch.targets.max() < 7


@pytest.mark.parametrize("kind", ["input", "label", "ignored", "empty", "poison"])
def test_bad_data_lies_at_its_positions_of_training_and_nowhere_else(kind):
    data = Tokens()
    spoilt = KINDS[kind](at=[3, 6]).data(data)
    bad = [position for position in range(10) if spoilt.batch(position, 2, "train") is not data.given]
    assert bad == [3, 6]
    assert all(spoilt.batch(position, 2, "val") is data.given for position in range(10))


def test_poison_goes_on_for_its_length():
    data = Tokens()
    spoilt = Poison(at=[3, 8], length=2).data(data)
    assert [p for p in range(12) if spoilt.batch(p, 2, "train") is not data.given] == [3, 4, 8, 9]


def test_a_position_gives_the_same_bad_batch_every_time_and_another_seed_another():
    def batch(kind, seed):
        found = KINDS[kind](at=[3], seed=seed).data(Tokens()).batch(3, 2, "train")
        return torch.stack([found.inputs, found.targets]).tolist()

    for kind in ("input", "label", "poison"):
        assert batch(kind, 0) == batch(kind, 0)
        assert len({str(batch(kind, seed)) for seed in range(6)}) > 1


def test_what_the_data_has_is_there_and_what_it_has_not_is_not():
    spoilt = Plan([{"kind": "input", "at": [1]}, {"kind": "label", "at": [1]}]).data(Tokens())
    assert spoilt.decode([1]) == "text"
    assert spoilt.vocab_size == 7
    for name in ("encode", "prompt", "batches", "fingerprint", "num_classes", "summary"):
        assert not hasattr(spoilt, name)
    assert not hasattr(NoFaults().data(Images()), "decode")


# ---- within the step


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_exactly_one_element_of_one_gradient_is_bad(value, micro_batches):
    state = fresh()
    Gradient(at=[2], value=value, parameter="1.weight").state(state, Scaled(1024.0))
    for tick in range(4):
        step(state, micro_batches, scale=1024.0, applied=False)
        found = gradients(state)
        assert bad_elements(found) == (tick == 2)
        assert bad_elements([state.model[1].weight.grad]) == (tick == 2)


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_a_finite_gradient_arrives_as_it_was_written(scale):
    state, clean = fresh(), fresh()
    Gradient(at=[0], value=1e4).state(state, Scaled(scale))
    step(state, scale=scale, applied=False)
    step(clean, scale=scale, applied=False)
    assert differing(gradients(state), gradients(clean)) == 1
    assert max(gradient.max().item() for gradient in gradients(state)) == 1e4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("value", [NAN, -INF, 512.0])
def test_exactly_one_element_of_one_output_is_bad_in_the_first_micro_batch(value, dtype):
    clean, state = fresh(), fresh()
    Activation(at=[2], value=value, module="0").state(state, Scaled())
    seen = []
    for each in (clean, state):
        given = []
        each.model[1].register_forward_pre_hook(lambda _, inputs, given=given: given.append(inputs[0].detach().clone()))
        autocast = torch.autocast("cpu", dtype) if dtype != torch.float32 else contextlib.nullcontext()
        for tick in range(4):
            each.optimizer.zero_grad()
            for part in range(2):
                with autocast:
                    out = each.model(samples(10 * tick + part))
                out.float().sum().backward()
            each.executed_steps += 1
        seen.append(given)
    assert {output.dtype for output in seen[1]} == {dtype}
    for number, (one, other) in enumerate(zip(*seen, strict=True)):
        changed = ~((one == other) | (one.isnan() & other.isnan()))
        assert changed.sum() == (number == 4)
        if number == 4:
            assert str(float(other[changed])) == str(value)


def test_an_activation_of_a_compiled_model_is_heard_and_compiled_code_comes_back():
    state = fresh()
    Activation(at=[1]).state(state, Scaled())
    state.model.compile(backend="eager")
    compiled = state.model._compiled_call_impl
    bad = []
    for _ in range(3):
        step(state, applied=False)
        bad.append(bad_elements(gradients(state)) > 0)
    assert bad == [False, True, False]
    assert state.model._compiled_call_impl is compiled


def test_an_evaluation_never_meets_an_activation_that_its_step_did_not_come_to():
    state = fresh()
    Activation(at=[0]).state(state, Scaled())
    state.optimizer.zero_grad()  # the step has an empty batch, so nothing is run
    with torch.no_grad():
        assert torch.isfinite(state.model(samples(0))).all()


def test_a_step_begins_with_gradients_gone_or_at_zero_as_it_asks():
    state = fresh()
    Gradient(at=[NEVER]).state(state, Scaled())
    step(state)
    state.optimizer.zero_grad(set_to_none=False)
    assert all(not parameter.grad.any() for parameter in state.model.parameters())
    state.optimizer.zero_grad(set_to_none=True)
    assert all(parameter.grad is None for parameter in state.model.parameters())


def adamw(fused):
    return lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=fused)


@pytest.mark.parametrize("bit", [0, 22, 23, 30, 31])
def test_one_bit_of_one_weight_flips(bit):
    state = fresh()
    BitFlip(at=[1], bit=bit).state(state, Scaled())
    step(state)
    before = weights(state)
    state.optimizer.zero_grad()
    changed = [a.view(torch.int32) ^ b.view(torch.int32) for a, b in zip(before, weights(state), strict=True)]
    flipped = torch.cat([bits.flatten() for bits in changed])
    assert flipped.count_nonzero() == 1
    assert flipped.sum().item() & 0xFFFFFFFF == 1 << bit


def test_one_bit_of_a_bf16_weight_flips_and_there_are_sixteen():
    state = fresh(dtype=torch.bfloat16)
    BitFlip(at=[0], bit=15, parameter="2.weight").state(state, Scaled())
    before = state.model[2].weight.detach().clone()
    state.optimizer.zero_grad()
    changed = before != state.model[2].weight
    assert changed.sum() == 1
    assert (before[changed] == -state.model[2].weight[changed]).all()
    with pytest.raises(ConfigError, match="faults.bit=16 is above 15"):
        BitFlip(at=[0], bit=16).state(fresh(dtype=torch.bfloat16), Scaled())


@pytest.mark.parametrize(
    ("optimizer", "where", "key"),
    [
        (adamw(True), "moment", "exp_avg"),
        (adamw(False), "exp_avg_sq", "exp_avg_sq"),
        (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), "moment", "momentum_buffer"),
    ],
    ids=["fused adamw", "adamw", "sgd"],
)
def test_one_bit_of_one_moment_flips(optimizer, where, key):
    state = fresh(optimizer)
    BitFlip(at=[0, 2], where=where, bit=30).state(state, Scaled())
    step(state)  # at 0 there is no moment yet, or only zeros
    step(state)
    before = weights(state), [state.optimizer.state[p][key].clone() for p in state.model.parameters()]
    state.optimizer.zero_grad()
    after = weights(state), [state.optimizer.state[p][key] for p in state.model.parameters()]
    assert differing(before[0], after[0]) == 0
    assert differing(before[1], after[1]) == 1


@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
def test_a_burst_of_the_learning_rate_lasts_its_length_and_leaves_nothing(fused):
    state = fresh(lambda parameters: torch.optim.SGD(parameters, lr=0.01, fused=fused))
    LearningRate(at=[2], factor=50.0, length=2).state(state, Scaled())
    rates = []
    for _ in range(6):
        before = weights(state)
        step(state)
        moved = before[0] - state.model[0].weight.detach()
        rates.append((moved.sum() / gradients(state)[0].sum()).item())
        assert state.optimizer.param_groups[0]["lr"] == 0.01
    assert rates == pytest.approx([0.01, 0.01, 0.5, 0.5, 0.01, 0.01], rel=1e-2)


def test_a_burst_whose_update_is_withheld_does_not_wait_for_the_next():
    state = fresh()
    LearningRate(at=[1], factor=50.0).state(state, Scaled())
    for tick in range(3):
        before = weights(state)
        step(state, applied=tick != 1)
        moved = (before[0] - state.model[0].weight.detach()).sum() / gradients(state)[0].sum()
        assert moved.item() == pytest.approx(0.0 if tick == 1 else 0.1, rel=1e-2)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Gradient(at=[0], parameter="1.wieght"), "faults.parameter=1.wieght is no parameter"),
        (BitFlip(at=[0], parameter="3.weight"), "faults.parameter=3.weight is no parameter"),
        (Activation(at=[0], module="7"), "faults.module=7 names no module"),
    ],
    ids=["gradient", "bitflip", "activation"],
)
def test_a_place_that_is_not_there_is_refused_before_the_first_step(fault, message):
    with pytest.raises(ConfigError, match=message):
        fault.state(fresh(), Scaled())


# ---- in a run


@contextlib.contextmanager
def built(folder, *overrides):
    with composed(*overrides) as cfg:
        check(cfg)
        job = build(cfg, folder)
    try:
        yield job
    finally:
        job.data.batches.close()


def ran(folder, *overrides):
    """The job of a run that is over, and its events."""
    with built(folder, *overrides) as job:
        train(job)
    file = folder / "events.jsonl"
    return job, read_jsonl(file) if file.exists() else []


def everything(state):
    moments = {
        f"{number}/{key}": value
        for number, kept in enumerate(state.optimizer.state.values())
        for key, value in kept.items()
    }
    return {**state.model.state_dict(), **moments}


def plan(*entries):
    return ["faults=plan", f"faults.faults=[{','.join(entries)}]"]


@pytest.mark.slow(unless=lambda model, precision: (model, precision) in (("gpt", "bf16"), ("resnet", "fp32")))
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("model", SMALL)
def test_a_run_whose_faults_are_still_to_come_is_the_run_without_any(tmp_path, model, precision):
    kinds = [f"{{kind:{kind},at:[{NEVER}]}}" for kind in KINDS if kind != "wandb"]
    given = [*SMALL[model], *CADENCE, f"precision={precision}", "grad_accum_steps=2"]
    clean, _ = ran(tmp_path / "clean", *given)
    other, _ = ran(tmp_path / "faults", *given, *plan(*kinds))
    one, two = everything(clean.state), everything(other.state)
    assert list(one) == list(two)
    assert all(torch.equal(one[key], two[key]) for key in one if isinstance(one[key], torch.Tensor))
    counted = [(len(list(j.state.model.parameters())), len(list(j.state.model.buffers()))) for j in (clean, other)]
    assert counted[0] == counted[1]
    assert not any(module._forward_hooks for module in other.state.model.modules())
    lines = [read_jsonl(tmp_path / name / "metrics.jsonl") for name in ("clean", "faults")]
    assert [line.get("train/loss") for line in lines[0]] == [line.get("train/loss") for line in lines[1]]


@pytest.mark.slow(unless=lambda precision, fused: (precision, fused) == ("fp32", "true"))
@pytest.mark.parametrize("fused", ["true", "false"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("model", SMALL)
def test_faults_are_withheld_at_their_steps_and_at_no_other(tmp_path, model, precision, fused):
    faults = plan("{kind:gradient,at:[3]}", "{kind:activation,at:[5]}", "{kind:label,at:[7]}", "{kind:empty,at:[9]}")
    given = [*SMALL[model], *CADENCE, f"precision={precision}", f"optimizer.fused={fused}", "grad_accum_steps=2"]
    if precision == "fp16":
        given += ["precision.init_scale=64.0", "model.n_layer=1" if model == "gpt" else "batch_size=4"]
    job, events = ran(tmp_path, *given, *faults)
    skips = [(event["step"], event["kind"]) for event in events if event["event"] == "skip"]
    first = "overflow" if precision == "fp16" else "nonfinite"
    assert skips == [(4, first), (6, "nonfinite"), (8, "bad_data"), (10, "bad_data")]
    assert job.state.executed_steps == 12
    assert not bad_elements(value for value in everything(job.state).values() if isinstance(value, torch.Tensor))


def test_nothing_of_a_learning_rates_burst_is_saved_or_logged(tmp_path):
    given = [*TINY_GPT, *CADENCE, "schedule=constant", "guard=off"]
    burst, _ = ran(tmp_path / "burst", *given, "faults=learning_rate", "faults.at=[4]", "faults.factor=10")
    clean, _ = ran(tmp_path / "clean", *given)
    assert not torch.equal(*(next(iter(job.state.model.parameters())) for job in (burst, clean)))
    rates = {line["lr"] for line in read_jsonl(tmp_path / "burst" / "metrics.jsonl") if "lr" in line}
    assert rates == {line["lr"] for line in read_jsonl(tmp_path / "clean" / "metrics.jsonl") if "lr" in line}
    assert burst.state.optimizer.param_groups[0]["lr"] == clean.state.optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_a_full_disk_costs_that_checkpoint_and_no_other(tmp_path, asynchronous):
    write = writer.write_file
    given = [*TINY_GPT, *CADENCE, f"checkpoint.asynchronous={asynchronous}"]
    _, events = ran(tmp_path, *given, "faults=disk_full", "faults.at=[8]")
    saved = [(e["event"], e["step"]) for e in events if e["event"].startswith("checkpoint")]
    assert ("checkpoint_failed", 8) in saved
    assert "No space left on device" in next(e["reason"] for e in events if e["event"] == "checkpoint_failed")
    paths = sorted((tmp_path / "checkpoints").glob("step-*"))
    assert [path.name for path in paths] == [f"step-{step:08d}" for step in (0, 4, 6, 12)]  # 0 is the guard's
    assert all(verify(path).healthy for path in paths)
    assert not list((tmp_path / "checkpoints").glob(".*"))
    assert writer.write_file is write


def test_a_full_disk_comes_while_the_second_file_is_half_written(tmp_path, monkeypatch):
    seen = {}

    def look(path, **_):
        seen.update({file.name: file.stat().st_size for file in path.iterdir()} if ".tmp-" in path.name else {})

    given = [*TINY_GPT, *CADENCE, "checkpoint.asynchronous=false"]
    with built(tmp_path, *given, "faults=disk_full", "faults.at=[8]") as job:
        happen = DiskFull.happen
        monkeypatch.setattr(DiskFull, "happen", lambda self, path, step: (look(path.parent), happen(self, path, step)))
        train(job)
    whole = {file.name: file.stat().st_size for file in (tmp_path / "checkpoints" / "step-00000012").iterdir()}
    assert set(seen) == {MODEL, TRAINING}
    assert seen[MODEL] == whole[MODEL]
    assert 0.4 < seen[TRAINING] / whole[TRAINING] <= 0.5  # what is still buffered is not on the disk


@pytest.mark.slow
def test_a_killed_run_leaves_hidden_files_only_and_ends_as_one_that_was_not_killed(tmp_path):
    given = [*TINY_GPT, *CADENCE, "checkpoint.keep=1"]
    killed = command(*given, "faults=kill", "faults.at=[8]", "hydra.run.dir=run", cwd=tmp_path)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    left = {path.name: path for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert {name for name in left if not name.startswith(".")} == {"step-00000000", "step-00000006"}
    hidden = [path for name, path in left.items() if name.startswith(".step-00000008.tmp-")]
    assert len(hidden) == 1
    assert TRAINING in {file.name for file in hidden[0].iterdir()}
    assert MANIFEST not in {file.name for file in hidden[0].iterdir()}
    resumed = command("resume=run", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    whole, _ = ran(tmp_path / "whole", *given)
    end = verify(tmp_path / "run" / "checkpoints" / "step-00000012").load()
    clean = whole.state.model.state_dict()
    assert all(torch.equal(value, end["model"][name]) for name, value in clean.items())


@pytest.mark.parametrize("kind", ["disk_full", "kill"])
def test_a_fault_of_checkpoints_is_refused_where_there_are_none(tmp_path, kind):
    with (
        pytest.raises(ConfigError, match="checkpoint=off"),
        built(tmp_path, *TINY_GPT, "checkpoint=off", f"faults={kind}"),
    ):
        pass


# ---- W&B


class Library:
    """A run of the library."""

    id = "abc"

    def __init__(self):
        self.logged, self.ended = [], []

    def log(self, metrics):
        self.logged.append(metrics["step"])

    def alert(self, title, text):
        self.logged.append(title)

    def finish(self, exit_code):
        self.ended.append(exit_code)


def test_wandb_is_lost_from_a_tick_on_and_training_never_hears_of_it(capsys):
    library, wandb = Library(), Wandb("offline", "project")
    wandb._run = library
    lost = LostWandb(at=[5]).wandb(wandb)
    assert isinstance(lost, NoWandb)
    for tick in (3, 4, 5, 6):
        lost.log(tick - 2, {"tick": tick})  # after a rollback
    lost.alert("too", "late")
    lost.summary({})
    lost.finish(0)
    assert library.logged == [1, 2]
    assert library.ended == [0]
    assert capsys.readouterr().err.count("some of this run may be missing there") == 1


def test_wandb_that_is_lost_from_the_start_is_not_started(tmp_path, capsys):
    wandb = LostWandb(at=[0]).wandb(Wandb("offline", "project"))
    assert wandb.start(tmp_path, "id", {}) == "id"
    wandb.log(1, {"tick": 1})
    wandb.finish(0)
    assert "wandb is unreachable (init)" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_wandb_that_is_not_used_cannot_be_lost(tmp_path):
    with pytest.raises(ConfigError, match="wandb=disabled"), built(tmp_path, *TINY_GPT, "faults=wandb"):
        pass


# ---- none, and the plan


def test_none_gives_everything_back_and_leaves_the_state_alone():
    state, off = fresh(), NoFaults()
    before = dict(vars(state.optimizer)), [dict(vars(module)) for module in state.model.modules()]
    off.state(state, Scaled())
    assert (dict(vars(state.optimizer)), [dict(vars(module)) for module in state.model.modules()]) == before
    for given in (object(), Images()):
        assert off.data(given) is off.checkpoints(given) is off.wandb(given) is given


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            {"kind": "gradeint", "at": [1]},
            r"faults.faults\[0\]: kind=gradeint is no kind of fault; did you mean gradient\?",
        ),
        ({"kind": "gradient", "at": [1], "valeu": 1}, r"gradient has no key valeu; did you mean value\?"),
        ({"kind": "kill"}, r"kill has no at: write \{kind: kill, at: \[30\]\}"),
        ({"at": [1]}, "has no kind"),
        ("gradient", "has no kind"),
        ({"kind": "poison", "at": [-1]}, r"faults.faults\[0\], poison: faults.at=\[-1\]"),
        ({"kind": "bitflip", "at": [1], "where": "wieght"}, "faults.where=wieght is none of weight"),
        ({"kind": "label", "at": [1], "value": IGNORE_INDEX}, "use faults=ignored"),
        ({"kind": "learning_rate", "at": [1], "factor": 0.0}, "faults.factor=0.0 is not above 0"),
    ],
    ids=["kind", "key", "no at", "no kind", "a word", "at", "where", "ignored", "factor"],
)
def test_a_plan_that_cannot_be_is_refused(entry, message):
    with pytest.raises(ConfigError, match=message):
        Plan([entry])


def test_a_plan_reads_numbers_that_yaml_takes_for_words():
    assert math.isnan(Plan([{"kind": "gradient", "at": [1], "value": "nan"}]).faults[0].value)
    assert Plan([{"kind": "input", "at": [1], "value": "-inf"}]).faults[0].value == -INF


def test_kinds_of_a_plan_meet_in_one_run():
    chosen = Plan(
        [{"kind": "gradient", "at": [1]}, {"kind": "bitflip", "at": [1], "bit": 0}, {"kind": "label", "at": [2]}]
    )
    state = fresh()
    chosen.state(state, Scaled())
    step(state)
    before = weights(state)
    step(state, applied=False)
    assert bad_elements(gradients(state)) == 1
    assert differing(before, weights(state)) == 1
    assert chosen.data(Tokens()).batch(2, 2, "train").targets.max() == 10**6
