"""The order of a step's parts: what is said of one fault of each kind, and nothing of what only looks like one."""

import pytest
import torch
from torch import nn

from stabletrain.beside.preflight.loop import Maker
from stabletrain.beside.preflight.order import check
from tests.beside.preflight.plain import Plain, said, source


class Half(Plain):
    """In fp16, clipped after unscaling."""

    scale, max_norm = 1024.0, 0.1


class ClipsScaled(Half):
    """Clips before unscaling."""

    def clip(self):
        nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.scaler.unscale_(self.optimizers[0])


class ClipsInHooks(Half):
    """Clips in hooks of the backward pass."""

    def make_optimizers(self):
        for parameter in self.model.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        return super().make_optimizers()


class UnscalesInHooks(Half):
    """Hooks divide by the loss scale, and so does the scaler."""

    def make_optimizers(self):
        for parameter in self.model.parameters():
            parameter.register_hook(lambda gradient: gradient / self.scaler.get_scale())
        return super().make_optimizers()


class UnscalesInHooksAlone(UnscalesInHooks):
    """Hooks divide by the loss scale, and the optimizer steps without the scaler."""

    def clip(self):
        pass

    def update(self):
        self.optimizers[0].step()


class ScalesTwice(Half):
    """Scales the loss twice; clipping hides it from the optimizer."""

    def backward(self, batch):
        loss = self.loss(batch)
        self.scaler.scale(self.scaler.scale(loss)).backward()
        return loss


class ScalesPartTwice(Half):
    """Scales one of two terms by itself, and again with the sum."""

    def backward(self, batch):
        loss = self.loss(batch)
        self.scaler.scale(loss + self.scaler.scale(0.001 * loss)).backward()
        return loss


class UnscalesTwice(Half):
    """Unscales by hand too."""

    def clip(self):
        for parameter in self.model.parameters():
            parameter.grad /= self.scaler.get_scale()
        super().clip()


class UpdatesTwice(Half):
    """Updates the scaler after each of two optimizers."""

    def make_optimizers(self):
        return [torch.optim.SGD(self.model[index].parameters(), lr=0.1) for index in (0, 2)]

    def update(self):
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
            self.scaler.update()


class NeverUnscales(Half):
    """Steps the optimizer itself; clipping makes the gradients alike under each scale."""

    def clip(self):
        nn.utils.clip_grad_norm_(self.model.parameters(), 10.0)

    def update(self):
        self.optimizers[0].step()


class Overflows(Half):
    """The first steps overflow."""

    scale = 2.0**20


class NeverZeroes(Plain):
    """Adds up the gradients of all steps."""

    def zero_grad(self):
        pass


class ZeroesEverySecond(Plain):
    """Zeroes gradients every second step."""

    def zero_grad(self):
        if self.position % 2:
            super().zero_grad()


class ZeroesAtEnd(Plain):
    """Zeroes gradients at the end of the step."""

    def zero_grad(self):
        pass

    def schedule(self):
        super().schedule()
        super().zero_grad()


class ZeroesInPlace(Plain):
    """Gradients are 0 and not missing."""

    def zero_grad(self):
        self.optimizers[0].zero_grad(set_to_none=False)


class OverCalls(ZeroesAtEnd):
    """Adds up the gradients of two calls."""

    def update(self):
        if self.position % 2 == 0:
            super().update()

    def schedule(self):
        if self.position % 2 == 0:
            super().schedule()


class Assigns(NeverZeroes):
    """Assigns the gradients: what was there before does not count."""

    def backward(self, batch):
        loss, parameters = self.loss(batch), [*self.model.parameters()]
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            self.take(parameter, gradient)
        return loss

    def take(self, parameter, gradient):
        parameter.grad = gradient


class AddsByHand(Assigns):
    """Adds the gradients to what was there before."""

    def take(self, parameter, gradient):
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


class Masters(Plain):
    """The optimizer holds copies of the parameters, to which gradients and from which weights are copied."""

    def make_optimizers(self):
        self.masters = [each.detach().clone().requires_grad_() for each in self.model.parameters()]
        return [torch.optim.SGD(self.masters, lr=0.1)]

    def zero_grad(self):
        self.model.zero_grad()

    def update(self):
        for master, parameter in zip(self.masters, self.model.parameters(), strict=True):
            master.grad = parameter.grad.clone()
        super().update()
        with torch.no_grad():
            for master, parameter in zip(self.masters, self.model.parameters(), strict=True):
                parameter.copy_(master)


class InTurn(Plain):
    """Two optimizers, each of which is stepped and then scheduled, before the next."""

    def __init__(self):
        super().__init__()
        self.schedulers = [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in self.optimizers]

    def make_optimizers(self):
        return [torch.optim.SGD(self.model[index].parameters(), lr=0.1) for index in (0, 2)]

    def update(self):
        for optimizer, scheduler in zip(self.optimizers, self.schedulers, strict=True):
            optimizer.step()
            scheduler.step()

    def schedule(self):
        pass


class OverwritesOneInTurn(InTurn):
    """The rate of the second optimizer is set by hand."""

    def clip(self):
        self.optimizers[1].param_groups[0]["lr"] = 0.01


class ZeroesTooLate(Plain):
    """Zeroes gradients between backward pass and step."""

    def clip(self):
        self.optimizers[0].zero_grad()


class StepsTwice(Half):
    """Steps the optimizer through the scaler, and again."""

    def update(self):
        super().update()
        self.optimizers[0].step()


class LBFGS(Plain):
    """An optimizer that calls the backward pass itself."""

    def make_optimizers(self):
        return [torch.optim.LBFGS(self.model.parameters(), lr=0.1, max_iter=2)]

    def step(self, batch):
        def closure():
            self.zero_grad()
            return self.backward(batch)

        loss = self.optimizers[0].step(closure)
        self.schedule()
        return loss


class SkipsNaN(Plain):
    """Skips a step whose loss is not finite."""

    def step(self, batch):
        self.zero_grad()
        loss = self.backward(batch)
        if loss.isfinite():
            self.update()
            self.schedule()
        return loss


class KeepsNaN(SkipsNaN):
    """Zeroes gradients only in steps that it does not skip."""

    def zero_grad(self):
        pass

    def update(self):
        super().update()
        super().zero_grad()


class KeepsNaNOfTokens(KeepsNaN):
    """The same with integers as inputs."""

    def make_model(self):
        return nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(4, 1))

    def batch(self, step, rank=0):
        return (torch.arange(4)[:, None] + step) % 9, torch.arange(4)[:, None]

    def loss(self, batch):
        return (self.model(batch[0]) - batch[1]).square().mean()


class KeepsNaNInNorm(SkipsNaN):
    """BatchNorm takes the batch of a step that is skipped."""

    def make_model(self):
        return nn.Sequential(nn.BatchNorm1d(6), *super().make_model())


class KeepsNaNInNormByScaler(Half):
    """The same where the loss scaler alone skips the step."""

    def make_model(self):
        return nn.Sequential(nn.BatchNorm1d(6), *super().make_model())


class RestoresNorm(KeepsNaNInNorm):
    """Puts the running statistics back after a step that is skipped."""

    def step(self, batch):
        before = {name: each.clone() for name, each in self.model.named_buffers()}
        loss = super().step(batch)
        if not loss.isfinite():
            for name, each in self.model.named_buffers():
                each.copy_(before[name])
        return loss


class Largest(nn.Module):
    """Keeps a number of the last batch in a buffer, which each batch writes anew."""

    def __init__(self):
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x):
        self.largest.copy_(x.max())
        return x


class KeepsNaNUntilNext(SkipsNaN):
    """The next step writes the buffer anew."""

    def make_model(self):
        return nn.Sequential(Largest(), *super().make_model())


class TrainsForTwo(SkipsNaN):
    """Trains for two batches only, with or without NaN."""

    def update(self):
        if self.position <= 2:
            super().update()


class KeepsNaNInAverage(Plain):
    """Skips steps by an average that a step that is skipped has entered."""

    average, waits = 1.0, 0

    def step(self, batch):
        self.zero_grad()
        loss = self.backward(batch)
        self.average = self.after(self.average, float(loss.detach()))
        if self.average < 100.0 and not self.waits:
            self.update()
            self.schedule()
        self.waits = max(self.waits - 1, 0)
        return loss

    def after(self, average, loss):
        return 0.9 * average + 0.1 * loss


class WaitsAfterNaN(KeepsNaNInAverage):
    """Skips three more steps on purpose."""

    def after(self, average, loss):
        if loss != loss:
            self.waits = 4
            return average
        return super().after(average, loss)


class StopsAtNaN(Plain):
    """Raises an error at NaN."""

    def backward(self, batch):
        loss = super().backward(batch)
        assert loss.isfinite()
        return loss


class FailsAfterNaN(Half):
    """Leaves a step whose loss is not finite between unscaling and updating the scaler."""

    def step(self, batch):
        self.zero_grad()
        loss = self.backward(batch)
        self.clip()
        if loss.isfinite():
            self.update()
            self.schedule()
        return loss


class ScheduleFirst(Plain):
    """Schedules before the optimizer steps."""

    def clip(self):
        super().schedule()

    def schedule(self):
        pass


class ScheduleInPreHook(Plain):
    """Schedules in the optimizer's step, before the update."""

    def make_optimizers(self):
        [optimizer] = super().make_optimizers()
        self.register(optimizer, lambda *_: self.schedulers[0].step())
        return [optimizer]

    def register(self, optimizer, hook):
        optimizer.register_step_pre_hook(hook)

    def schedule(self):
        pass


class ScheduleInPostHook(ScheduleInPreHook):
    """Schedules in the optimizer's step, after the update."""

    def register(self, optimizer, hook):
        optimizer.register_step_post_hook(hook)


class ScheduleTwice(Plain):
    """Schedules twice a step."""

    def schedule(self):
        super().schedule()
        super().schedule()


class NoSchedule(Plain):
    """Never schedules."""

    def schedule(self):
        pass


class OncePerEpoch(Plain):
    """Schedules at the end of an epoch."""

    def schedule(self):
        if self.position % 3 == 0:
            super().schedule()


class OtherSchedule(Plain):
    """Makes the optimizer anew after the scheduler."""

    def __init__(self):
        super().__init__()
        self.optimizers = self.make_optimizers()


class Overwrites(Plain):
    """Sets the learning rate in each step."""

    def clip(self):
        self.optimizers[0].param_groups[0]["lr"] = 0.01


class WarmsUp(Plain):
    """Raises the learning rate by hand at first, on purpose."""

    def clip(self):
        self.optimizers[0].param_groups[0]["lr"] = 0.01 * self.position


class TwoSchedules(Plain):
    """Two schedulers of one optimizer, one after the other."""

    def __init__(self):
        super().__init__()
        self.schedulers.append(torch.optim.lr_scheduler.LinearLR(self.optimizers[0], 0.1, total_iters=5))


FAULTS = {
    ClipsScaled: (
        "the gradients are clipped, or otherwise changed, while they are still scaled by the scaler: the gradients "
        "that optimizers.0 gets are not those of the loss alone; their norm is 6.1e-06 under a loss scale of 16384 and "
        "9.77e-05 under one of 1024",
        ("scaler", "optimizers.0"),
        "self.scaler.unscale_(self.optimizers[0])",
        "call scaler.unscale_(optimizer) before clipping",
    ),
    ClipsInHooks: (
        "the gradients are clipped while they are scaled by the scaler, in a hook of the backward pass: ",
        ("scaler",),
        "(loss if self.scaler is None else self.scaler.scale(loss)).backward()",
        "clip after scaler.unscale_(optimizer), not in hooks",
    ),
    UnscalesInHooks: (
        "the gradients are divided by the loss scale twice, by hooks of the backward pass and by the scaler: ",
        ("scaler",),
        "self.scaler.unscale_(optimizer)",
        "do not divide by the scale in hooks",
    ),
    ScalesTwice: (
        "the loss is scaled twice by the scaler: the gradients of the backward pass, divided by the scale, are not",
        ("scaler",),
        "self.scaler.scale(self.scaler.scale(loss)).backward()",
        "call scaler.scale(loss) once",
    ),
    ScalesPartTwice: (
        "the loss, or a part of it, is scaled twice by the scaler: the gradients of the backward pass, divided by the",
        ("scaler",),
        "self.scaler.scale(loss + self.scaler.scale(0.001 * loss)).backward()",
        "call scaler.scale(loss) once",
    ),
    UnscalesTwice: (
        "the gradients are unscaled twice, by hand and by the scaler: the gradients that optimizers.0 gets are not",
        ("scaler", "optimizers.0"),
        "self.scaler.unscale_(optimizer)",
        "call scaler.unscale_(optimizer) alone",
    ),
    UpdatesTwice: (
        "scaler.update() is called before the last optimizer has stepped, and forgets that its gradients are unscaled: "
        "they are unscaled twice: the gradients that optimizers.1 gets are not",
        ("scaler", "optimizers.1"),
        "self.scaler.update()",
        "call scaler.update() once, at the end",
    ),
    NeverUnscales: (
        "the scaler's scale is never taken out of the gradients: the gradients that optimizers.0 gets are not",
        ("scaler", "optimizers.0"),
        "self.optimizers[0].step()",
        "call scaler.step(optimizer) in place of optimizer.step()",
    ),
    NeverZeroes: (
        "in steps 2, 3 the optimizer gets the gradients of the step before once more, added to the new ones: "
        "4 parameters, 0.weight, 0.bias, 2.weight, 2.bias",
        ("0.weight", "0.bias", "2.weight", "2.bias"),
        "(loss if self.scaler is None else self.scaler.scale(loss)).backward()",
        "call optimizer.zero_grad() in each step, before the first backward pass",
    ),
    ZeroesEverySecond: (
        "in step 2 the optimizer gets the gradients of the step before once more",
        ("0.weight", "0.bias", "2.weight", "2.bias"),
        "(loss if self.scaler is None else self.scaler.scale(loss)).backward()",
        "call optimizer.zero_grad() in each step",
    ),
    AddsByHand: (
        "in steps 2, 3 the optimizer gets the gradients of the step before once more, added to the new ones: 4 param",
        ("0.weight", "0.bias", "2.weight", "2.bias"),
        "",
        "call optimizer.zero_grad() in each step",
    ),
    ZeroesTooLate: (
        "the gradients of optimizers.0 are zeroed after the backward pass and before its step: it trains nothing",
        ("optimizers.0", "zero_grad"),
        "self.optimizers[0].zero_grad()",
        "call optimizer.zero_grad() before the backward pass",
    ),
    StepsTwice: (
        "optimizers.0 steps twice with the same gradients",
        ("optimizers.0",),
        "self.optimizers[0].step()",
        "call one of optimizer.step() and scaler.step(optimizer)",
    ),
    KeepsNaN: (
        "after a step that the loop skips for its NaN, the gradients of 4 parameters stay NaN, as they are not zeroed: "
        "the 8 next steps are NaN too (0.weight, 0.bias, 2.weight, 2.bias)",
        ("0.weight", "0.bias", "2.weight", "2.bias", "zero_grad"),
        "(loss if self.scaler is None else self.scaler.scale(loss)).backward()",
        "call optimizer.zero_grad() before each backward pass",
    ),
    KeepsNaNOfTokens: (
        "after a step that the loop skips for its NaN, the gradients of 3 parameters stay NaN",
        ("0.weight", "2.weight", "2.bias", "zero_grad"),
        "(loss if self.scaler is None else self.scaler.scale(loss)).backward()",
        "call optimizer.zero_grad() before each backward pass",
    ),
    KeepsNaNInNorm: (
        "a step that the loop skips for its NaN leaves NaN in 0.running_mean, 0.running_var, and the next step does "
        "not take it away: the loss is NaN in eval mode",
        ("0.running_mean", "0.running_var"),
        "",
        "restore the buffers of the model after a step that is skipped",
    ),
    KeepsNaNInAverage: (
        "after a step that the loop skips for its NaN, it skips each of the 8 next ones too, which are not NaN: no "
        "step moves the weights any more; NaN is kept in average",
        ("optimizers.0", "average"),
        "",
        "decide on a step by values that a skipped step has not entered",
    ),
    FailsAfterNaN: (
        "after a step that the loop skips for its NaN, the next one fails with RuntimeError: unscale_() has already",
        ("zero_grad",),
        "",
        "skip a step only after scaler.update()",
    ),
    OverwritesOneInTurn: (
        "the learning rate of optimizers.1 is not the one that schedulers.1 sets: it is 0.01 in each of 3 steps",
        ("schedulers.1", "optimizers.1.param_groups[0].lr"),
        "",
        "do not set group['lr'] beside a scheduler",
    ),
    ScheduleFirst: (
        "schedulers.0 steps before optimizers.0: its first learning rate is never used",
        ("schedulers.0",),
        "scheduler.step()",
        "call scheduler.step() after optimizer.step()",
    ),
    ScheduleInPreHook: (
        "schedulers.0 steps before optimizers.0: its first learning rate is never used",
        ("schedulers.0",),
        "self.register(optimizer, lambda *_: self.schedulers[0].step())",
        "call scheduler.step() after optimizer.step()",
    ),
    ScheduleTwice: (
        "schedulers.0 steps more than once for each step of optimizers.0 (2 times a step): the learning rate changes",
        ("schedulers.0",),
        "scheduler.step()",
        "call scheduler.step() in one place",
    ),
    NoSchedule: (
        "schedulers.0 has not stepped in 4 steps, more than an epoch: the learning rate stays where it is",
        ("schedulers.0",),
        "",
        "call scheduler.step() after optimizer.step()",
    ),
    OtherSchedule: (
        "schedulers.0 steps an optimizer that is not the loop's: the learning rate stays where it is",
        ("schedulers.0",),
        "",
        "make the scheduler after the optimizer",
    ),
    Overwrites: (
        "the learning rate of optimizers.0 is not the one that schedulers.0 sets: it is 0.01 in each of 3 steps, and "
        "the scheduler's goes from 0.1 to 0.005; it is overwritten",
        ("schedulers.0", "optimizers.0.param_groups[0].lr"),
        "",
        "do not set group['lr'] beside a scheduler",
    ),
}


@pytest.mark.parametrize("loop", FAULTS, ids=lambda loop: loop.__name__)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_fault_is_told_with_its_places_its_line_and_what_to_do(loop):
    text, places, line, fix = FAULTS[loop]
    found = said(check, loop)
    assert found.verdict == "fault"
    assert found.text.startswith(text)
    assert set(found.places) == set(places)
    assert (source(found) if found.line else "") == line
    assert fix in found.fix


CLEAN = [
    Plain,
    Assigns,
    Masters,
    InTurn,
    Half,
    UnscalesInHooksAlone,
    Overflows,
    ZeroesAtEnd,
    ZeroesInPlace,
    OverCalls,
    LBFGS,
    SkipsNaN,
    RestoresNorm,
    KeepsNaNUntilNext,
    WaitsAfterNaN,
    TrainsForTwo,
    StopsAtNaN,
    OncePerEpoch,
    ScheduleInPostHook,
    TwoSchedules,
]


@pytest.mark.parametrize("loop", CLEAN, ids=lambda loop: loop.__name__)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_nothing_is_said_of_a_clean_loop(loop):
    assert said(check, loop).verdict == "passed"


def test_what_may_be_meant_is_a_note():
    class LongEpoch(NoSchedule):
        epoch = 1000

    class Plateau(NoSchedule):
        def __init__(self):
            super().__init__()
            self.schedulers = [torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizers[0])]

    texts = {
        LongEpoch: "schedulers.0 has not stepped in 3 steps; it may do so after an epoch or an evaluation",
        Plateau: "schedulers.0 has not stepped in 4 steps; it may do so after an epoch or an evaluation",
        WarmsUp: "the learning rate of optimizers.0 is not the one that schedulers.0 sets: it is 0.01 where the "
        "scheduler's is 0.1",
        KeepsNaNInNormByScaler: "a step that the loop skips for its NaN leaves NaN in 0.running_mean, 0.running_var, "
        "and the next step does not take it away: the loss is NaN in eval mode",
    }
    assert {loop: (found.verdict, found.text) for loop in texts for found in [said(check, loop)]} == {
        loop: ("note", text) for loop, text in texts.items()
    }


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_scheduler_that_steps_first_and_several_times_is_told_both():
    class OnceAMicroBatch(ScheduleFirst):
        def clip(self):
            super().clip()
            super().clip()

    first, twice = check(Maker(OnceAMicroBatch))
    assert first.text == "schedulers.0 steps before optimizers.0: its first learning rate is never used"
    assert twice.text.startswith("schedulers.0 steps more than once for each step of optimizers.0 (2 times a step)")


def test_two_optimizers_that_step_in_turn_share_no_old_gradients():
    class Adversarial(Plain):
        """The second network's backward pass leaves gradients in the first, which zeroes them before its own."""

        def make_optimizers(self):
            return [torch.optim.SGD(self.model[index].parameters(), lr=0.1) for index in (0, 2)]

        def step(self, batch):
            for optimizer in self.optimizers:
                optimizer.zero_grad()
                loss = self.backward(batch)
                optimizer.step()
            self.schedule()
            return loss

    assert said(check, Adversarial).verdict == "passed"


def test_a_loop_without_a_step_is_not_checked():
    class NoStep(Plain):
        step = None

    found = said(check, NoStep)
    assert (found.verdict, found.text) == (
        "not checked",
        "make() returned no 'step', which is the order that is checked",
    )


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_scale_that_always_overflows_is_not_checked():
    class Huge(Half):
        scale = 2.0**80

    findings = {found.verdict: found.text for found in check(Maker(Huge))}
    assert [*findings] == ["not checked"]
    assert "no step between the loss scales 1.93428e+25 and 7.20576e+16 reaches an optimizer" in findings["not checked"]
