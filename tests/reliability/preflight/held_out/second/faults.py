"""The faults of the second held-out set. Many follow public reports."""

import copy

import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

from tests.reliability.preflight.held_out.loops import drawn
from tests.reliability.preflight.held_out.program import planted
from tests.reliability.preflight.held_out.second import loops
from tests.reliability.preflight.held_out.second.clean import Experts, GeneratorDropout, HyperHead, LengthNormalized
from tests.reliability.preflight.held_out.second.loops import ActorCritic, Bytes, PlainPreference, Preference, Speech


def become(made, part, kind):
    """Gives a part of a model another class; returns the model."""
    made.get_submodule(part).__class__ = kind
    return made


@planted("fresh_dropout", "`checkpoint` does not restore the loop's own generator", "gru", "embed", "head")
class GeneratorInCheckpoint(GeneratorDropout):
    def run(self, batch, hidden):
        return checkpoint(super().run, batch, hidden, use_reentrant=False)  # here


class PerLetter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, sums, lengths):
        PerLetter.lengths = lengths  # here: not ctx
        return sums / lengths

    @staticmethod
    def backward(ctx, grad):
        return grad / PerLetter.lengths, None


@planted(
    "wrong_factor",
    "what backward needs is kept on the class, and the function is called twice",
    "PerLetter",
    "embed",
    "blocks",
)
class StateOnClass(LengthNormalized):
    def per_token(self, sums, lengths):
        return PerLetter.apply(sums, lengths)


class Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, tokens):
        ctx.save_for_backward(weight, tokens)
        return weight[tokens]

    @staticmethod
    def backward(ctx, grad):
        weight, tokens = ctx.saved_tensors
        out = torch.zeros_like(weight)
        out[tokens] += grad  # here: indices that repeat do not add up
        return out, None


class LookupModel(loops.ByteModel):
    def lookup(self, tokens):
        return Lookup.apply(self.embed.weight, tokens)


@planted("missing_term", "`out[index] += grad` in a backward pass of the user's own", "embed", "Lookup")
class RepeatsLost(Bytes):
    def create(self):
        return become(super().create(), "", LookupModel)


@planted("detached", "nn.Parameter(...) in the forward pass cuts the graph", "hyper", "code")
class WrappedInParameter(HyperHead):
    def weights(self):
        return nn.Parameter(super().weights())  # here


class IfInputNeeds(loops.Listener):
    def hear(self, features):
        with torch.set_grad_enabled(features.requires_grad):  # here
            return self.frontend(features)


@planted("no_grad", "the front end has gradients only if its input needs one, which data never do", "frontend")
class GradIfInputNeeds(Speech):
    def create(self):
        return become(super().create(), "", IfInputNeeds)


@planted("mean_of_means", "the term per pair is weighted by tokens too (trl, 2175)", "backward", "micro")
class PairsByTokens(PlainPreference):
    micro = 2

    def backward(self, batch):
        for chunk in self.chunks(batch):
            (self.loss(chunk) * self.counts(chunk)[1] / self.counts(batch)[1]).backward()  # here


@planted("not_divided", "what is there already is divided in place again", "backward", "micro")
class DividedInPlace(Speech):
    def accumulate(self, batch):
        parts = self.parts_of(batch)
        for part in parts:
            (self.total(part) / batch[3].sum() * len(parts)).backward()
            for p in self.model.parameters():
                p.grad /= len(parts)  # here


@planted(
    "last_partial", "the last batch is filled up with copies of its first row", "backward", "loss", "step", "micro"
)
class PaddedByCopies(Speech):
    def accumulate(self, batch):
        missing = 8 - len(batch[0])
        super().accumulate([torch.cat([each, each[:1].expand(missing, *each.shape[1:])]) for each in batch])  # here


@planted("clip_before_unscale", "the norm is measured before `unscale_`, and used after it", "clip", "scaler")
class NormBeforeUnscale(Preference):
    def scaled_finish(self):
        norm = torch.stack([p.grad.norm() for p in self.model.parameters()]).norm()  # here
        self.scaler.unscale_(self.optimizers[0])
        for p in self.model.parameters():
            p.grad.mul_((1.0 / norm).clamp(max=1.0))
        self.scaler.step(self.optimizers[0])
        self.scaler.update()
        self.schedulers[0].step()


@planted("scaler_twice", "of two terms one is scaled by itself and again with the sum", "scaler", "backward", "micro")
class OneTermScaledTwice(Preference):
    init_scale = 16.0

    def backward(self, batch):
        n, m = self.counts(batch)
        for chunk in self.chunks(batch):
            pairs, tokens = self.terms(chunk)
            self.scaled(pairs / n + self.scaled(0.2 * tokens / m)).backward()  # here


@planted("scheduler_first", "the scheduler steps in a hook before the optimizer's step", "schedulers.0")
class StepsInPreHook(Bytes):
    def create_schedulers(self):
        [scheduler] = super().create_schedulers()
        self.optimizers[0].register_step_pre_hook(lambda *_: scheduler.step())  # here
        return [scheduler]

    def finish(self, max_norm=1.0):
        nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        self.optimizers[0].step()


@planted("not_zeroed", "the loop's fp32 buffers of gradients are never zeroed", "zero_grad", "gradient", "optimizers.0")
class MainGrads(Speech):
    def finish(self, max_norm=1.0):
        for p in self.model.parameters():
            p.main_grad = getattr(p, "main_grad", 0) + p.grad  # here
            p.grad.copy_(p.main_grad)
        super().finish(max_norm)


@planted("nan_stays", "statistics take in a batch not known to be finite", "mean", "square", "skip")
class ObservesNaN(ActorCritic):
    def step(self, batch):
        self.model.observe(batch[0])  # here
        return super().step(batch)


@planted("stale_parameters", "the optimizer is made of a copy of the model", "embed", "blocks", "norm", "head")
class OptimizesReference(PlainPreference):
    def create_optimizers(self):
        reference = copy.deepcopy(self.model)
        return [torch.optim.AdamW(reference.parameters(), lr=3e-3)]  # here


class LazyAgent(loops.Agent):
    def forward(self, states):
        if not hasattr(self, "inner"):
            self.inner = nn.Linear(24, 24)  # here
        mean, std, values, ends = super().forward(states)
        return mean + self.actor(self.inner(self.trunk(states)).tanh()), std, values, ends


@planted("in_no_group", "a layer that `forward` makes is in no optimizer", "inner")
class MadeInForward(ActorCritic):
    def create(self):
        return become(super().create(), "", LazyAgent)

    def load(self, state):
        self.loss(self.batch(0))  # makes the layer, whose weights are saved
        super().load(state)


@planted("in_two", "an optimizer for each module that has parameters, children's included", "frontend")
class OptimizerPerModule(Speech):
    def create_optimizers(self):
        modules = [self.model.frontend, *self.model.frontend.children(), self.model.gru, self.model.head]  # here
        return [torch.optim.AdamW(each.parameters(), lr=5e-3) for each in modules]


@planted("without_gradient", "the router only chooses (argmax), and there is no auxiliary loss", "blocks.0.router")
class RouterUnused(Experts):
    balance = 0.0

    def create(self):
        model = super().create()
        for part in model.modules():
            if hasattr(part, "router"):
                part.gated = False  # here
        return model


@planted("eval_mode", "all modules that have a norm in them are put into eval mode", "blocks", "model")
class NormsByName(PlainPreference):
    def terms(self, batch):
        for each in self.model.modules():
            if hasattr(each, "norm") and each is not self.model:
                each.eval()  # here
        return super().terms(batch)


@planted("optimizer_not_restored", "`load` changes the order of parameters (Lightning, 17025)", "optimizers.0")
class OrderByName(Speech):
    def load(self, state):
        state, saved = copy.deepcopy(state), state["optimizers.0"]["state"]
        order = {id(p): i for i, p in enumerate(p for g in self.optimizers[0].param_groups for p in g["params"])}
        one, two = (order[id(each.weight)] for each in (self.model.frontend.conv2, self.model.frontend.conv3))
        state["optimizers.0"]["state"] |= {one: saved[two], two: saved[one]}  # here
        super().load(state)


@planted("scheduler_not_restored", "a scheduler made with `last_epoch=n` takes a step", "schedulers.0", "optimizers.0")
class LastEpochSteps(Bytes):
    def load(self, state):
        super().load(state)
        old, optimizer = self.schedulers[0], self.optimizers[0]
        self.schedulers = [lr_scheduler.LambdaLR(optimizer, old.lr_lambdas[0], last_epoch=old.last_epoch)]  # here


@planted("scaler_not_restored", "`load` keeps the larger of two scales", "scaler")
class LargerScale(Preference):
    def load(self, state):
        scale = max(state["scaler"]["scale"], 2.0**12)  # here
        super().load({**state, "scaler": {**state["scaler"], "scale": scale}})


@planted("position_not_restored", "the order of the epoch is not restored", "position", "data", "batch")
class OrderOfEpochKept(ActorCritic):
    epoch, order = 2, 0

    def next_batch(self):
        if self.position % self.epoch == 0:
            self.order = self.position // self.epoch  # here: not restored
        self.position += 1
        return self.batch(self.order * self.epoch + (self.position - 1) % self.epoch)


@planted("group_options_changed", "`load` takes the first group's decay for all", "optimizers.0.param_groups[1]")
class OptionsOfFirstGroup(Speech):
    def load(self, state):
        super().load(state)
        first, *rest = self.optimizers[0].param_groups
        for group in rest:
            group["weight_decay"] = first["weight_decay"]  # here


@planted("batchnorm_not_restored", "`load` computes the statistics anew, of one batch", "frontend.norm")
class Calibrates(loops.BatchNormSpeech):
    def load(self, state):
        super().load(state)
        self.model.frontend.norm.reset_running_stats()  # here
        with torch.no_grad():
            self.model(self.batch(0)[0])
        torch.set_rng_state(state["random"])


@planted("generator_not_restored", "`load` ends with a dry run, whose dropout draws", "random", "generator")
class DryRunAfterLoad(PlainPreference):
    def load(self, state):
        super().load(state)
        with torch.no_grad():
            self.loss(self.batch(0))  # here


@planted("ema_not_restored", "the state that is carried is not restored", "hidden", "others")
class StateForgotten(Bytes):
    def load(self, state):
        super().load({**state, "hidden": torch.zeros_like(state["hidden"])})  # here


@planted("repeated_batches", "a stride counted twice: half of the rows are never seen", "batch", "data", "rows")
class Strided(ActorCritic):
    def rows(self, step, rank, size=8, count=64):
        order = torch.randperm(count, generator=drawn(300 + step // self.epoch))[rank::2]
        return order[(torch.arange(size) + 2 * size * (step % self.epoch)) % (count // 2)]  # here


@planted("ranks_same", "all ranks take the same rows, with other noise", "rank", "batch", "data")
class SameWithNoise(Speech):
    def batch(self, step, rank=0):
        features, *rest = super().batch(step, 0)  # here
        noise = torch.randn(features.shape, generator=drawn(2 * step + rank))
        return (features + 0.1 * noise, *rest)


@planted("shard_without_labels", "the transcripts of rank 1's shard have length 0", "rank", "target", "label")
class EmptyShard(Speech):
    def batch(self, step, rank=0):
        features, frames, letters, lengths = super().batch(step, rank)
        return features, frames, letters * (1 - rank), lengths * (1 - rank)  # here

    def loss(self, batch):
        return self.total(batch) / batch[3].sum().clamp(min=1)


@planted("constant_targets", "each letter became the unknown one", "target", "label")
class AllUnknown(Speech):
    def batch(self, step, rank=0):
        features, frames, letters, lengths = super().batch(step, rank)
        return features, frames, torch.full_like(letters, 6), lengths  # here


@planted("label_range", "labels of -1 and 1 in a binary cross-entropy", "target", "label")
class MinusOneAndOne(ActorCritic):
    def batch(self, step, rank=0):
        *rest, ends = super().batch(step, rank)
        return (*rest, 2 * ends - 1)  # here


@planted("ignored_targets", "nearly all of the chosen answers is masked", "target", "label", "ignore")
class ChosenCutOff(PlainPreference):
    def batch(self, step, rank=0):
        batch = super().batch(step, rank)
        batch["labels"][:, 0, :-1] = -100  # here
        batch["labels"][1:, 0] = -100
        return batch


@planted("input_scale", "a mark of missing values is taken for a number", "input", "features", "batch", "states")
class MissingValues(ActorCritic):
    def batch(self, step, rank=0):
        states, *rest = super().batch(step, rank)
        return (states.where(states < 1.5, -9999.0), *rest)  # here


@planted("softmax_inputs", "the router's init is hundreds of times too large", "blocks", "softmax")
class RouterTooLarge(Experts):
    def create(self):
        model = super().create()
        for block in model.blocks:
            nn.init.normal_(block.router.weight, std=100.0)  # here
        return model


class Own(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, group["lr"], self.state[p])


class Standardized(Own):
    def update(self, p, lr, state):
        p.sub_(lr * (p.grad - p.grad.mean()) / p.grad.std(correction=0))  # here


@planted("zero_gradient", "`Standardized`", "Standardized", "optimizers.0")
class StandardizedGradients(PlainPreference):
    def create_optimizers(self):
        return [Standardized(self.model.parameters())]


class Hypergradient(Own):
    def update(self, p, lr, state):
        before = state.setdefault("before", torch.zeros_like(p))
        state["rate"] = state.get("rate", torch.ones(())) * (1e-3 * (before * p.grad).sum()).exp()  # here
        p.sub_(lr * state["rate"] * p.grad)
        before.copy_(p.grad)


@planted("huge_gradient", "a rate times exp(product with the gradient before)", "Hypergradient", "optimizers.0")
class RateByProduct(Bytes):
    def create_optimizers(self):
        return [Hypergradient(self.model.parameters(), lr=0.1)]
