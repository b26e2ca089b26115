"""Four training loops of the second held-out set, and the checkpoint that they share."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Normal
from torch.optim import lr_scheduler

from tests.reliability.preflight.held_out.loops import drawn
from tests.reliability.preflight.held_out.program import clean, seed


class Script:
    """A loop made of `model`, `optimizers`, `schedulers`, and what else `stateful` adds."""

    precision, compiled, ranks, scaler, epoch = "fp32", False, 2, None, 4

    def __init__(self):
        seed(0)
        self.position, self.others = 0, {}
        self.data = self.read()
        self.model = self.net = self.create()
        self.optimizers = self.create_optimizers()
        self.schedulers = self.create_schedulers()

    def create_schedulers(self):
        return [lr_scheduler.LambdaLR(each, lambda n: min((n + 1) / 4, 2 / (n + 1) ** 0.5)) for each in self.optimizers]

    def rows(self, step, rank, size=8, count=64):
        """Returns the numbers of a batch's rows."""
        epoch, place = divmod(step, self.epoch)
        order = torch.randperm(count, generator=drawn(300 + epoch))[rank :: self.ranks]
        return order[place * size :][:size]

    def next_batch(self):
        self.position += 1
        return self.batch(self.position - 1)

    def stateful(self):
        """Returns all that has a `state_dict`, by name."""
        found = {"model": self.model}
        for name in ("optimizers", "schedulers"):
            found |= {f"{name}.{i}": each for i, each in enumerate(getattr(self, name))}
        return found | {"scaler": self.scaler} if self.scaler is not None else found

    def save(self):
        state = {name: each.state_dict() for name, each in self.stateful().items()}
        return copy.deepcopy({**state, "position": self.position, "random": torch.get_rng_state()})

    def load(self, state):
        state = copy.deepcopy(state)
        for name, each in self.stateful().items():
            each.load_state_dict(state[name])
        self.position = state["position"]
        torch.set_rng_state(state["random"])

    def finish(self, max_norm=1.0):
        """Clips, and steps optimizers and schedulers."""
        nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        for each in (*self.optimizers, *self.schedulers):
            each.step()


# ---- preferences: DPO against a frozen reference in fp16, with a term per pair and one per token


class Block(nn.Module):
    """A causal convolution."""

    def __init__(self, width, dropout):
        super().__init__()
        self.norm, self.conv = nn.LayerNorm(width), nn.Conv1d(width, 2 * width, 3)
        self.out, self.dropout = nn.Linear(2 * width, width), nn.Dropout(dropout)

    def forward(self, x):
        h = self.conv(F.pad(self.norm(x).transpose(1, 2), (2, 0)))
        return x + self.dropout(self.out(F.gelu(h).transpose(1, 2)))


class Policy(nn.Module):
    """A small language model."""

    block = Block

    def __init__(self, words=16, width=16, dropout=0.1):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(self.block(width, dropout) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@clean
class Preference(Script):
    """Pairs of answers; the reference is the policy as it was at first."""

    precision, micro, beta, init_scale = "fp16", 4, 0.5, 2.0**9

    def __init__(self):
        super().__init__()
        self.reference = copy.deepcopy(self.model).requires_grad_(False).eval()
        if self.precision == "fp16":
            self.scaler = torch.amp.GradScaler("cpu", init_scale=self.init_scale, growth_interval=2)

    def read(self):
        g = drawn(31)
        tokens = torch.randint(16, (64, 2, 12), generator=g)
        tokens[:, 0, 6:] = (tokens[:, :1, :6].sum(1) + torch.arange(6)) % 16  # the chosen answer has a rule
        starts = torch.randint(3, 10, (64,), generator=g)
        labels = tokens.masked_fill(torch.arange(12) < starts[:, None, None], -100)
        return {"chosen": tokens[:, 0], "rejected": tokens[:, 1], "labels": labels}

    def create(self):
        return Policy()

    def create_optimizers(self):
        return [torch.optim.AdamW(self.model.parameters(), lr=3e-3, weight_decay=0.01)]

    def batch(self, step, rank=0):
        rows = self.rows(step, rank)
        return {name: each[rows] for name, each in self.data.items()}

    def logps(self, model, batch):
        """Returns the log-probability of each answer, and of each token of the chosen ones."""
        tokens = torch.cat([batch["chosen"], batch["rejected"]])
        targets = batch["labels"].transpose(0, 1).flatten(0, 1)[:, 1:]
        with torch.autocast("cpu", torch.float16, enabled=self.precision == "fp16"):
            logits = model(tokens)[:, :-1]
        each = -F.cross_entropy(logits.float().transpose(1, 2), targets, reduction="none")
        return each.sum(1).view(2, -1), each[: len(batch["chosen"])]

    def terms(self, batch):
        """Returns the sums over pairs, and over tokens of chosen answers."""
        ours, tokens = self.logps(self.net, batch)
        with torch.no_grad():
            theirs, _ = self.logps(self.reference, batch)
        margin = (ours - theirs)[0] - (ours - theirs)[1]
        return -F.logsigmoid(self.beta * margin).sum(), -tokens.sum()

    def counts(self, batch):
        return len(batch["chosen"]), int((batch["labels"][:, 0, 1:] != -100).sum())

    def loss(self, batch):
        (pairs, tokens), (n, m) = self.terms(batch), self.counts(batch)
        return pairs / n + 0.2 * tokens / m

    def chunks(self, batch):
        starts = range(0, len(batch["chosen"]), self.micro)
        return [{name: each[i : i + self.micro] for name, each in batch.items()} for i in starts]

    def scaled(self, loss):
        return loss if self.scaler is None else self.scaler.scale(loss)

    def backward(self, batch):
        n, m = self.counts(batch)
        for chunk in self.chunks(batch):
            pairs, tokens = self.terms(chunk)
            self.scaled(pairs / n + 0.2 * tokens / m).backward()

    def step(self, batch):
        self.model.train()
        self.optimizers[0].zero_grad()
        self.backward(batch)
        if self.scaler is None:
            return self.finish()
        return self.scaled_finish()

    def scaled_finish(self):
        self.scaler.unscale_(self.optimizers[0])
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizers[0])
        self.scaler.update()
        self.schedulers[0].step()


@clean
class PlainPreference(Preference):
    """The same in fp32."""

    precision = "fp32"


# ---- an actor and a critic: PPO, two optimizers, observations normalized by running statistics


class Agent(nn.Module):
    """A trunk, a Gaussian policy, a value, and whether the episode ends."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 24), nn.LayerNorm(24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh())
        self.actor, self.critic, self.ends = nn.Linear(24, 2), nn.Linear(24, 1), nn.Linear(24, 1)
        self.log_std = nn.Parameter(torch.zeros(2))
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("square", torch.ones(6))

    @torch.no_grad()
    def observe(self, states):
        self.mean.lerp_(states.mean(0), 0.1)
        self.square.lerp_(states.square().mean(0), 0.1)

    def forward(self, states):
        std = (self.square - self.mean.square()).clamp(min=1e-4).sqrt()
        h = self.trunk(((states - self.mean) / std).clamp(-10, 10))
        return self.actor(h), self.log_std.exp(), self.critic(h)[:, 0], self.ends(h)[:, 0]


@clean
class ActorCritic(Script):
    """Rollouts of a random policy; steps that are not finite are skipped."""

    def read(self):
        g = drawn(32)
        states, actions = torch.randn(64, 6, generator=g), torch.randn(64, 2, generator=g)
        reward = states[:, 0] * actions[:, 0] - actions[:, 1].square() + 1
        old = Normal(0.0, 1.0).log_prob(actions).sum(1)
        return states, actions, old, reward, reward + states[:, 1], (states[:, 2] > 0.5).float()

    def create(self):
        return Agent()

    def create_optimizers(self):
        heads = [*self.model.critic.parameters(), *self.model.ends.parameters()]
        actor = [*self.model.trunk.parameters(), *self.model.actor.parameters(), self.model.log_std]
        return [torch.optim.Adam(actor, lr=3e-3, eps=1e-5), torch.optim.RMSprop(heads, lr=2e-3, momentum=0.5)]

    def batch(self, step, rank=0):
        return tuple(each[self.rows(step, rank)] for each in self.data)

    def losses(self, batch):
        """Returns the losses of policy, value and end, and the entropy."""
        states, actions, old, advantages, returns, ends = batch
        mean, std, values, logits = self.net(states)
        policy = Normal(mean, std, validate_args=False)
        ratio = (policy.log_prob(actions).sum(1) - old).exp()
        surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        ending = F.binary_cross_entropy_with_logits(logits, ends)
        return -surrogate, (values - returns).square().mean(), ending, policy.entropy().sum(1).mean()

    def loss(self, batch):
        policy, value, ending, entropy = self.losses(batch)
        return policy + 0.5 * value + 0.3 * ending - 0.01 * entropy

    def step(self, batch):
        for each in self.optimizers:
            each.zero_grad(set_to_none=False)
        loss = self.loss(batch)
        if not loss.isfinite():
            return None
        loss.backward()
        self.finish()
        self.model.observe(batch[0])
        return loss.detach()


# ---- speech: CTC over padded features, micro-batches weighted by their letters, a smaller last batch


class Frontend(nn.Module):
    """Convolutions over time."""

    def __init__(self, width, norm):
        super().__init__()
        self.conv1, self.norm = nn.Conv1d(8, width, 3, padding=1), norm(width)
        self.conv2 = nn.Conv1d(width, width, 3, padding=1)
        self.conv3 = nn.Conv1d(width, width, 3, padding=1)

    def forward(self, x):
        h = F.relu(self.norm(self.conv1(x.transpose(1, 2))))
        return F.relu(self.conv3(F.relu(self.conv2(h)))).transpose(1, 2)


class Listener(nn.Module):
    """A convolutional front end, a bidirectional GRU and letters; letter 0 is the blank."""

    def __init__(self, width=12, norm=lambda width: nn.GroupNorm(2, width)):
        super().__init__()
        self.frontend = Frontend(width, norm)
        self.gru = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.dropout, self.head = nn.Dropout(0.1), nn.Linear(2 * width, 7)

    def hear(self, features):
        return self.frontend(features)

    def forward(self, features):
        return self.head(self.dropout(self.gru(self.hear(features))[0])).log_softmax(-1)


@clean
class Speech(Script):
    """Utterances of two to four letters, 22 a rank and epoch, in batches of eight."""

    epoch, micro = 3, 4

    def read(self):
        g = drawn(33)
        lengths = torch.randint(2, 5, (44,), generator=g)
        letters = torch.randint(1, 7, (44, 4), generator=g).masked_fill(torch.arange(4) >= lengths[:, None], 0)
        sounds = torch.randn(7, 8, generator=g)
        features = sounds[letters.repeat_interleave(4, 1)] + 0.3 * torch.randn(44, 16, 8, generator=g)
        return features, 4 * lengths, letters, lengths

    def create(self):
        return Listener()

    def create_optimizers(self):
        some = [each for each in self.model.parameters() if each.ndim > 1]
        rest = [each for each in self.model.parameters() if each.ndim <= 1]
        groups = [{"params": some, "weight_decay": 0.1}, {"params": rest, "lr": 1e-2}]
        return [torch.optim.AdamW(groups, lr=5e-3, weight_decay=0.0, betas=(0.9, 0.98))]

    def batch(self, step, rank=0):
        rows = self.rows(step, rank, count=44)
        return tuple(each[rows] for each in self.data)

    def total(self, batch):
        features, frames, letters, lengths = batch
        logs = self.net(features).transpose(0, 1)
        return F.ctc_loss(logs, letters, frames, lengths, reduction="sum", zero_infinity=True)

    def loss(self, batch):
        return self.total(batch) / batch[3].sum()

    def parts_of(self, batch):
        return [*zip(*(each.split(self.micro) for each in batch), strict=True)]

    def accumulate(self, batch):
        for part in self.parts_of(batch):
            (self.total(part) / batch[3].sum()).backward()

    def step(self, batch):
        self.model.train()
        self.model.zero_grad()
        self.accumulate(batch)
        self.finish(5.0)


class BatchNormSpeech(Speech):
    """The same with BatchNorm, and no micro-batches."""

    micro = 8

    def create(self):
        return Listener(norm=nn.BatchNorm1d)


# ---- bytes: a GRU that carries its state from window to window


class ByteModel(nn.Module):
    """A GRU whose last layer is its embedding."""

    def __init__(self, width=24, dropout=0.1):
        super().__init__()
        self.embed, self.gru = nn.Embedding(128, width), nn.GRU(width, width, batch_first=True)
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(width, 128)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.2)

    def lookup(self, tokens):
        return self.embed(tokens)

    def forward(self, tokens, hidden):
        h, hidden = self.gru(self.dropout(self.lookup(tokens)), hidden)
        return self.head(self.dropout(h)), hidden


@clean
class Bytes(Script):
    """Four streams of bytes in windows of 12; the state begins anew with each epoch."""

    epoch, width, window = 6, 24, 12

    def __init__(self):
        super().__init__()
        self.others = {"hidden": torch.zeros(1, 4, self.width)}

    def read(self):
        words = [b"gradient ", b"loss, ", b"step; ", b"weights and ", b"batch ", b"rate. "]
        text = b"".join(words[i] for i in torch.randint(6, (200,), generator=drawn(34)))
        return torch.tensor([*text[: 8 * 73]]).view(2, 4, 73)

    def create(self):
        return ByteModel()

    def create_optimizers(self):
        return [torch.optim.Adam(self.model.parameters(), lr=5e-3)]

    def batch(self, step, rank=0):
        begin = step % self.epoch * self.window
        window = self.data[rank, :, begin : begin + self.window + 1]
        return window[:, :-1], window[:, 1:]

    def next_batch(self):
        if self.position % self.epoch == 0:
            self.others["hidden"] = torch.zeros_like(self.others["hidden"])
        return super().next_batch()

    def run(self, batch, hidden):
        logits, hidden = self.net(batch[0], hidden)
        return F.cross_entropy(logits.transpose(1, 2), batch[1]), hidden.detach()

    def loss(self, batch):
        return self.run(batch, self.others["hidden"])[0]

    def step(self, batch):
        self.optimizers[0].zero_grad()
        loss, self.others["hidden"] = self.run(batch, self.others["hidden"])
        loss.backward()
        self.finish(0.5)
        return loss.item()

    def save(self):
        return {**super().save(), "hidden": self.others["hidden"].clone()}

    def load(self, state):
        super().load(state)
        self.others["hidden"] = state["hidden"].clone()
