"""Programs that look wrong and are right, each with a line on what looks wrong."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel

from tests.reliability.preflight.held_out.loops import drawn
from tests.reliability.preflight.held_out.program import clean
from tests.reliability.preflight.held_out.second import loops
from tests.reliability.preflight.held_out.second.loops import ActorCritic, Bytes, PlainPreference, Speech

clean(loops.BatchNormSpeech)


class Mixture(loops.Block):
    """A block with three experts, of which a router chooses one."""

    gated = True

    def __init__(self, width, dropout):
        super().__init__(width, dropout)
        self.router, self.experts = nn.Linear(width, 3), nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        x = super().forward(x)
        shares = self.router(x).softmax(-1)
        best, chosen = shares.max(-1)
        self.balance = 3 * (F.one_hot(chosen, 3).float().mean((0, 1)) * shares.mean((0, 1))).sum()
        y = sum((chosen == i)[..., None] * expert(x) for i, expert in enumerate(self.experts))
        return x + (best[..., None] * y if self.gated else y)


@clean
class Experts(PlainPreference):
    """A second loss, which keeps the experts in balance, is left by the forward pass as an attribute."""

    balance, micro, routed = 0.05, 8, type("Routed", (loops.Policy,), {"block": Mixture})

    def create(self):
        return self.routed()

    def terms(self, batch):
        pairs, tokens = super().terms(batch)
        balance = sum(each.balance for each in self.model.blocks)
        return pairs + self.balance * len(batch["chosen"]) * balance, tokens


@clean
class ExpertsByMicroBatch(Experts):
    """The balance is that of a micro-batch, so that the gradient is not quite the whole batch's, as is usual."""

    micro = 4


@clean
class LengthNormalized(PlainPreference):
    """No reference, and log-probabilities per token (SimPO); rejected answers count a third."""

    def per_token(self, sums, lengths):
        return sums / lengths

    def terms(self, batch):
        ours, tokens = self.logps(self.net, batch)
        one, two = (batch["labels"] != -100).sum(2).T
        margin = self.per_token(ours[0], one) - self.per_token(ours[1], 3 * two)
        return -F.logsigmoid(2 * margin).sum(), -tokens.sum()


@clean
class SameAsReference(PlainPreference):
    """No dropout, so that all margins are exactly 0 at first."""

    def create(self):
        return loops.Policy(dropout=0.0)


@clean
class DisabledScaler(PlainPreference):
    """A scaler that is off, with an empty state."""

    scaler = torch.amp.GradScaler("cpu", enabled=False)


@clean
class WarmupFromZero(PlainPreference):
    """The rate begins at 0: the first step moves nothing."""

    def create_schedulers(self):
        return [lr_scheduler.LambdaLR(self.optimizers[0], lambda n: min(n / 2, 1.0))]


@clean
class SeedPerStep(PlainPreference):
    """Each step sets the seed, so that what is random does not depend on the saved state."""

    def step(self, batch):
        torch.manual_seed(1000 + self.position)
        return super().step(batch)


@clean
class ObservesFirst(ActorCritic):
    """The statistics change before the loss is computed, which is another one than before the step."""

    def step(self, batch):
        if batch[0].isfinite().all():
            self.model.observe(batch[0])
        return super().step(batch)


@clean
class SeveralUpdates(ActorCritic):
    """A step updates four times, once for each pair of rows, and the scheduler once."""

    def step(self, batch):
        for part in zip(*(each.split(2) for each in batch), strict=True):
            self.model.zero_grad()
            self.loss(part).backward()
            for each in self.optimizers:
                each.step()
        for each in self.schedulers:
            each.step()
        self.model.observe(batch[0])


@clean
class TwoBackwards(ActorCritic):
    """Two backward passes of two losses add up in the trunk."""

    def step(self, batch):
        self.model.zero_grad()
        policy, value, ending, entropy = self.losses(batch)
        (policy - 0.01 * entropy).backward(retain_graph=True)
        (0.5 * value + 0.3 * ending).backward()
        self.finish()
        self.model.observe(batch[0])


@clean
class DelayedActor(ActorCritic):
    """The actor is updated in every second step only, as in TD3: nothing of it moves in the first."""

    def finish(self, max_norm=1.0):
        self.optimizers[1].step()
        self.schedulers[1].step()
        if self.position % 2 == 0:
            self.optimizers[0].step()
            self.schedulers[0].step()


@clean
class FrozenAtFirst(ActorCritic):
    """The trunk is in the optimizer and frozen for two steps."""

    def step(self, batch):
        self.model.trunk.requires_grad_(self.position > 2)
        return super().step(batch)


@clean
class LearnedTemperature(ActorCritic):
    """The weight of the entropy has an optimizer and a loss of its own; each detaches what the other trains (SAC)."""

    def create_optimizers(self):
        self.model.log_alpha = nn.Parameter(torch.tensor(-3.0))
        return [*super().create_optimizers(), torch.optim.Adam([self.model.log_alpha], lr=0.01)]

    def loss(self, batch):
        policy, value, ending, entropy = self.losses(batch)
        alpha = self.model.log_alpha.exp()
        return policy + 0.5 * value + 0.3 * ending - alpha.detach() * entropy + alpha * (entropy.detach() - 1)


@clean
class GradientNoise(ActorCritic):
    """Noise is added to the gradients (Neelakantan et al.): they are not those of the loss."""

    def finish(self, max_norm=1.0):
        for p in self.model.parameters():
            p.grad.add_(torch.randn_like(p), alpha=1e-3)
        super().finish(max_norm)


@clean
class EmptyTranscripts(Speech):
    """Some transcripts are empty, on purpose: silence."""

    def batch(self, step, rank=0):
        features, frames, letters, lengths = super().batch(step, rank)
        heard = (torch.arange(len(lengths)) % 4 > 0).long()
        return features * heard[:, None, None], frames, letters * heard[:, None], lengths * heard


@clean
class CyclicMomentum(Speech):
    """The scheduler changes the momentum too."""

    def create_optimizers(self):
        return [torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)]

    def create_schedulers(self):
        return [lr_scheduler.CyclicLR(self.optimizers[0], 1e-3, 1e-2, step_size_up=3, mode="triangular2")]


@clean
class Averaging(Speech):
    """ASGD, whose state has tensors that are not of the parameters' size."""

    def create_optimizers(self):
        return [torch.optim.ASGD(self.model.parameters(), lr=0.05, t0=2)]


@clean
class LateAverage(Speech):
    """An average of the weights that begins after the second step, with a scheduler of its own from then on."""

    def __init__(self):
        super().__init__()
        self.others["average"] = AveragedModel(self.model)
        self.schedulers.append(SWALR(self.optimizers[0], swa_lr=1e-3, anneal_epochs=2))

    def stateful(self):
        return super().stateful() | self.others

    def finish(self, max_norm=1.0):
        nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        self.optimizers[0].step()
        self.schedulers[self.position > 2].step()
        if self.position > 2:
            self.others["average"].update_parameters(self.model)


@clean
class GeneratorDropout(Bytes):
    """One mask for a whole window, by a generator of the loop's own."""

    def __init__(self):
        super().__init__()
        self.others["noise"] = drawn(35)

    def run(self, batch, hidden):
        mask = torch.bernoulli(torch.full((4, 1, self.width), 0.7), generator=self.others["noise"]) / 0.7
        h, hidden = self.model.gru(mask * self.model.embed(batch[0]), hidden)
        return F.cross_entropy(self.model.head(h).transpose(1, 2), batch[1]), hidden.detach()

    def save(self):
        return {**super().save(), "noise": self.others["noise"].get_state()}

    def load(self, state):
        super().load(state)
        self.others["noise"].set_state(state["noise"])


@clean
class HyperHead(Bytes):
    """The weights of a layer are no parameter: another network makes them."""

    def create(self):
        model = super().create()
        model.code, model.hyper = nn.Parameter(torch.randn(4)), nn.Linear(4, self.width**2)
        return model

    def weights(self):
        return self.model.hyper(self.model.code).view(self.width, self.width)

    def run(self, batch, hidden):
        h, hidden = self.model.gru(self.model.embed(batch[0]), hidden)
        logits = self.model.head((h @ self.weights()).tanh() + h)
        return F.cross_entropy(logits.transpose(1, 2), batch[1]), hidden.detach()


@clean
class TwoWindows(Bytes):
    """A step adds up the gradients of two halves of a window; the state between them is detached."""

    def step(self, batch):
        self.optimizers[0].zero_grad()
        for part in zip(*(each.split(6, 1) for each in batch), strict=True):
            loss, self.others["hidden"] = self.run(part, self.others["hidden"])
            (loss / 2).backward()
        self.finish(0.5)


@clean
class RandomResets(Bytes):
    """The carried state of a stream is forgotten at random."""

    def step(self, batch):
        self.others["hidden"] = self.others["hidden"] * (torch.rand(1, 4, 1) > 0.3)
        return super().step(batch)


@clean
class GrowingWindow(Bytes):
    """Windows are longer in later steps: no two batches have one shape."""

    def batch(self, step, rank=0):
        return tuple(each[:, : 4 + step % self.epoch] for each in super().batch(step, rank))


class GraphNet(nn.Module):
    """Two layers; a node takes the mean of its neighbours, if it has any."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 16), nn.Linear(32, 3)

    def forward(self, x, edges):
        h = F.relu(self.first(x))
        degree = torch.zeros(len(x), 1).index_add(0, edges[1], torch.ones(edges.shape[1], 1))
        near = torch.zeros_like(h).index_add(0, edges[1], h[edges[0]]) / degree.clamp(min=1)
        return self.second(torch.cat([h, near], 1))


@clean
class Graph(loops.Script):
    """One graph: every batch is the same, and four targets in five are ignored."""

    epoch, ranks = 1, 1

    def read(self):
        g = drawn(36)
        x, edges = torch.randn(60, 6, generator=g), torch.randint(60, (2, 150), generator=g)
        labels = x[:, 0].sign().long() + 1 - (x[:, 1] > 0.5).long() * (x[:, 0] > 0)
        return x, edges, labels.masked_fill(torch.rand(60, generator=g) < 0.8, -100)

    def create(self):
        return GraphNet()

    def create_optimizers(self):
        return [torch.optim.Adam(self.model.parameters(), lr=0.01, weight_decay=5e-4)]

    def batch(self, step, rank=0):
        return self.data

    def loss(self, batch):
        return F.cross_entropy(self.net(*batch[:2]), batch[2])

    def step(self, batch):
        self.model.zero_grad()
        loss = self.loss(batch)
        loss.backward()
        self.finish()
        return loss


@clean
class SignsOnly(Graph):
    """Rprop: only the signs of the gradients count, and there is a rate for each weight."""

    def create_optimizers(self):
        return [torch.optim.Rprop(self.model.parameters(), lr=1e-3)]


@clean
class InnerStep(Graph):
    """The loss is that after a gradient step within the loss (MAML), by a gradient of a gradient."""

    def loss(self, batch):
        weights = dict(self.model.named_parameters())
        inner = F.cross_entropy(self.model(*batch[:2])[:30], batch[2][:30])
        grads = torch.autograd.grad(inner, [*weights.values()], create_graph=True)
        moved = {name: p - 0.3 * g for (name, p), g in zip(weights.items(), grads, strict=True)}
        return F.cross_entropy(functional_call(self.model, moved, tuple(batch[:2]))[30:], batch[2][30:])
