"""Seven training loops, each written as another person would, a few milliseconds a step on a CPU.

A loop has the attributes that `stabletrain.beside.preflight.loop.Loop` names, and shares no code with the others.
"""

import copy
import io
import itertools
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.reliability.preflight.held_out.program import clean, seed


def drawn(number):
    """Returns a generator, so that data depend on nothing else."""
    return torch.Generator().manual_seed(number)


# ---- a vision transformer: DataLoader, OneCycleLR, label smoothing, LayerScale, stochastic depth, EMA by hand


class Layer(nn.Module):
    """A pre-norm layer with LayerScale and stochastic depth."""

    def __init__(self, width, drop_path):
        super().__init__()
        self.norm1, self.qkv, self.proj = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.fc1, self.fc2 = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.gamma1, self.gamma2 = nn.Parameter(0.1 * torch.ones(width)), nn.Parameter(0.1 * torch.ones(width))
        self.drop_path, self.scale = drop_path, None

    def attend(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, 2, c // 2).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v, scale=self.scale).transpose(1, 2).reshape(b, n, c))

    def drop(self, x):
        if not self.training or not self.drop_path:
            return x
        keep = 1 - self.drop_path
        return x * torch.bernoulli(torch.full((len(x), 1, 1), keep)) / keep

    def forward(self, x):
        x = x + self.drop(self.gamma1 * self.attend(self.norm1(x)))
        return x + self.drop(self.gamma2 * self.fc2(F.gelu(self.fc1(self.norm2(x)))))


class PatchClassifier(nn.Module):
    """Images in patches of 4 x 4, and a class token."""

    layer = Layer

    def __init__(self, classes=5, width=16, depth=2, drop_path=0.1):
        super().__init__()
        self.patchify = nn.Conv2d(1, width, 4, stride=4)
        self.cls_token = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, 5, width))
        self.layers = nn.ModuleList(self.layer(width, drop_path) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def embed(self, images):
        patches = self.patchify(images).flatten(2).transpose(1, 2)
        return torch.cat([self.cls_token.expand(len(images), -1, -1), patches], 1) + self.pos_embed

    def forward(self, images):
        x = self.embed(images)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)[:, 0])


class Shadow:
    """An exponential moving average of the weights, with a decay that warms up."""

    def __init__(self, model, decay=0.9):
        self.decay, self.updates = decay, 0
        self.module = copy.deepcopy(model).requires_grad_(False).eval()

    @torch.no_grad()
    def update(self, model):
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        for ours, theirs in zip(self.module.state_dict().values(), model.state_dict().values(), strict=True):
            ours.lerp_(theirs, 1 - decay) if ours.is_floating_point() else ours.copy_(theirs)

    def state_dict(self):
        return {"updates": self.updates, "module": self.module.state_dict()}

    def load_state_dict(self, state):
        self.updates = state["updates"]
        self.module.load_state_dict(state["module"])


@clean
class ViT:
    """The loop of the vision transformer."""

    precision, compiled, ranks, classes, scaler, size = "fp32", False, 2, 5, None, 8

    def __init__(self):
        seed(0)
        self.dataset = TensorDataset(*self.tensors())
        self.model = self.build_model()
        self.net = self.model
        self.optimizer = self.build_optimizer()
        self.optimizers, self.schedulers = [self.optimizer], self.build_schedulers()
        self.ema = Shadow(self.model)
        self.others = {"ema": self.ema}
        self.current_epoch = self.batch_idx = 0
        self.epoch = len(self.loader(0, 0))

    def tensors(self):
        g = drawn(11)
        labels = torch.randint(self.classes, (64,), generator=g)
        patterns = torch.randn(self.classes, 1, 8, 8, generator=g)
        return patterns[labels] + 0.5 * torch.randn(64, 1, 8, 8, generator=g), labels

    def build_model(self):
        return PatchClassifier(self.classes)

    def build_optimizer(self):
        decay = [p for p in self.model.parameters() if p.requires_grad and p.ndim > 1]
        rest = [p for p in self.model.parameters() if p.requires_grad and p.ndim <= 1]
        return torch.optim.AdamW([{"params": decay}, {"params": rest, "weight_decay": 0.0}], lr=3e-3, weight_decay=0.05)

    def build_schedulers(self):
        return [lr_scheduler.OneCycleLR(self.optimizer, max_lr=1e-2, total_steps=60)]

    def loader(self, epoch, rank):
        sampler = DistributedSampler(self.dataset, num_replicas=self.ranks, rank=rank, seed=3)
        sampler.set_epoch(epoch)
        return DataLoader(self.dataset, self.size, sampler=sampler, generator=drawn(epoch))

    def batch(self, step, rank=0):
        epoch, index = divmod(step, self.epoch)
        images, labels = next(itertools.islice(self.loader(epoch, rank), index, None))
        return images, labels

    def next_batch(self):
        found = self.batch(self.current_epoch * self.epoch + self.batch_idx)
        self.batch_idx += 1
        if self.batch_idx == self.epoch:
            self.current_epoch, self.batch_idx = self.current_epoch + 1, 0
        return found

    def loss(self, batch):
        images, labels = batch
        return F.cross_entropy(self.net(images), labels, label_smoothing=0.1)

    def step(self, batch):
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        for scheduler in self.schedulers:
            scheduler.step()
        self.ema.update(self.model)
        return loss.item()

    def save(self):
        return copy.deepcopy(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "schedulers": [each.state_dict() for each in self.schedulers],
                "ema": self.ema.state_dict(),
                "epoch": self.current_epoch,
                "batch_idx": self.batch_idx,
                "rng": torch.get_rng_state(),
            }
        )

    def load(self, state):
        state = copy.deepcopy(state)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for scheduler, saved in zip(self.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(saved)
        self.ema.load_state_dict(state["ema"])
        self.current_epoch, self.batch_idx = state["epoch"], state["batch_idx"]
        torch.set_rng_state(state["rng"])


# ---- translation: dicts, packed sequences, attention, teacher forcing, tokens counted over micro-batches, Noam

BOS, WORDS = 13, 14


class Seq2Seq(nn.Module):
    """An LSTM that reads a packed sequence, and one that writes, with attention; the last layer is tied."""

    def __init__(self, width=16, dropout=0.1):
        super().__init__()
        self.source, self.target = nn.Embedding(WORDS, width, padding_idx=0), nn.Embedding(WORDS, width, padding_idx=0)
        self.encoder = nn.LSTM(width, width, batch_first=True)
        self.decoder = nn.LSTM(width, width, batch_first=True)
        self.dropout, self.combine = nn.Dropout(dropout), nn.Linear(2 * width, width)
        self.out = nn.Linear(width, WORDS)
        self.out.weight = self.target.weight

    def encode(self, source, lengths):
        packed = pack_padded_sequence(self.source(source), lengths, batch_first=True, enforce_sorted=False)
        memory, last = self.encoder(packed)
        return pad_packed_sequence(memory, batch_first=True, total_length=source.shape[1])[0], last

    def forward(self, source, lengths, inputs):
        memory, last = self.encode(source, lengths)
        hidden = self.decoder(self.dropout(self.target(inputs)), last)[0]
        scores = hidden @ memory.transpose(1, 2) / memory.shape[-1] ** 0.5
        weights = scores.masked_fill((source == 0)[:, None], -torch.inf).softmax(-1)
        return self.out(self.dropout(self.combine(torch.cat([hidden, weights @ memory], -1)).tanh()))


def noam(step, warmup=8):
    """Returns the factor of the learning rate of "Attention is all you need"."""
    return min((step + 1) ** -0.5, (step + 1) * warmup**-1.5)


@clean
class Translation:
    """Turns sequences round; four rows in a micro-batch, each weighted by its number of tokens."""

    ranks, epoch, accumulate, smoothing = 2, 4, 4, 0.1

    def __init__(self):
        seed(0)
        self.examples = self.corpus()
        self.model = self.build()
        self.optim = torch.optim.Adam(self.model.parameters(), lr=0.02, betas=(0.9, 0.98), eps=1e-9)
        self.optimizers = (self.optim,)
        self.schedule = lr_scheduler.LambdaLR(self.optim, noam)
        self.schedulers = (self.schedule,)
        self.updates = 0

    def build(self):
        return Seq2Seq()

    def corpus(self, rows=64, longest=9):
        g = drawn(12)
        lengths = torch.randint(2, longest + 1, (rows,), generator=g)
        words = torch.randint(1, BOS, (rows, longest), generator=g)
        places = torch.arange(longest)
        source = words.masked_fill(places >= lengths[:, None], 0)
        turned = source.gather(1, (lengths[:, None] - 1 - places).clamp(min=0)).masked_fill(source == 0, 0)
        inputs = torch.cat([torch.full((rows, 1), BOS), turned[:, :-1]], 1)
        return {
            "source": source,
            "lengths": lengths,
            "inputs": inputs,
            "targets": turned.masked_fill(turned == 0, -100),
        }

    def rows(self, step, rank):
        epoch, place = divmod(step, self.epoch)
        order = torch.randperm(64, generator=drawn(1000 + epoch)).view(self.epoch, self.ranks, -1)
        return order[place, rank]

    def batch(self, step, rank=0):
        rows = self.rows(step, rank)
        return {name: each[rows] for name, each in self.examples.items()}

    def next_batch(self):
        self.updates += 1
        return self.batch(self.updates - 1)

    def logits(self, batch):
        return self.model(batch["source"], batch["lengths"], batch["inputs"])

    def token_loss(self, logits, targets):
        return F.cross_entropy(logits.transpose(1, 2), targets, label_smoothing=self.smoothing)

    def loss(self, batch):
        return self.token_loss(self.logits(batch), batch["targets"])

    def tokens(self, batch):
        return (batch["targets"] != -100).sum()

    def chunks(self, batch):
        n = self.accumulate
        return [{name: each[i : i + n] for name, each in batch.items()} for i in range(0, len(batch["source"]), n)]

    def step(self, batch):
        self.model.train()
        self.optim.zero_grad()
        total = self.tokens(batch)
        for chunk in self.chunks(batch):
            (self.loss(chunk) * self.tokens(chunk) / total).backward()
        self.apply()

    def apply(self):
        nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
        self.optim.step()
        self.schedule.step()

    def save(self):
        return copy.deepcopy(
            {
                "net": self.model.state_dict(),
                "optim": self.optim.state_dict(),
                "schedule": self.schedule.state_dict(),
                "updates": self.updates,
                "rng": torch.get_rng_state(),
            }
        )

    def load(self, state):
        state = copy.deepcopy(state)
        self.model.load_state_dict(state["net"])
        self.optim.load_state_dict(state["optim"])
        self.schedule.load_state_dict(state["schedule"])
        self.updates = state["updates"]
        torch.set_rng_state(state["rng"])


# ---- a recommender: embeddings, two optimizers, steps that are not finite are skipped; `make` returns a dict


class Factors(nn.Module):
    """Embeddings of users and items, and a small network on both."""

    def __init__(self, users=30, items=20, width=6, sparse=False):
        super().__init__()
        self.user, self.item = nn.Embedding(users, width, sparse=sparse), nn.Embedding(items, width, sparse=sparse)
        self.mlp = nn.Sequential(nn.Linear(2 * width + 3, 16), nn.ReLU(), nn.Linear(16, 1))
        self.mean = nn.Parameter(torch.zeros(()))

    def forward(self, users, items, features):
        u, i = self.user(users), self.item(items)
        return (u * i).sum(1) + self.mlp(torch.cat([u, i, features], 1))[:, 0] + self.mean


@clean
class Recommender:
    """Ratings between 0 and 1 by users, items and a few features."""

    sparse = False

    def __init__(self):
        seed(0)
        self.table = self.ratings()
        self.model = Factors(sparse=self.sparse)
        self.optimizers = self.make_optimizers()
        self.schedulers = [lr_scheduler.ExponentialLR(each, 0.97) for each in self.optimizers]
        self.seen, self.epoch, self.ranks = 0, 5, 2

    def ratings(self, rows=160):
        g = drawn(13)
        users, items = torch.randint(30, (rows,), generator=g), torch.randint(20, (rows,), generator=g)
        features = torch.randn(rows, 3, generator=g)
        return users, items, features, (torch.sin(users * 1.0) * torch.cos(items * 2.0) + features[:, 0]).sigmoid()

    def make_optimizers(self):
        tables = [*self.model.user.parameters(), *self.model.item.parameters()]
        dense = [*self.model.mlp.parameters(), self.model.mean]
        return [torch.optim.Adagrad(tables, lr=0.05), torch.optim.Adam(dense, lr=5e-3)]

    def batch(self, step, rank=0):
        epoch, place = divmod(step, 5)
        order = torch.randperm(160, generator=drawn(epoch))[rank::2]
        return tuple(column[order[place * 16 : place * 16 + 16]] for column in self.table)

    def next_batch(self):
        self.seen += 1
        return self.batch(self.seen - 1)

    def loss(self, batch):
        users, items, features, ratings = batch
        return F.mse_loss(self.model(users, items, features), ratings)

    def step(self, batch):
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss = self.loss(batch)
        if not torch.isfinite(loss):
            return
        loss.backward()
        for optimizer, scheduler in zip(self.optimizers, self.schedulers, strict=True):
            optimizer.step()
            scheduler.step()

    def save(self):
        return copy.deepcopy(
            {
                "model": self.model.state_dict(),
                "optimizers": [each.state_dict() for each in self.optimizers],
                "schedulers": [each.state_dict() for each in self.schedulers],
                "seen": self.seen,
            }
        )

    def load(self, state):
        state = copy.deepcopy(state)
        self.model.load_state_dict(state["model"])
        for name in ("optimizers", "schedulers"):
            for each, saved in zip(getattr(self, name), state[name], strict=True):
                each.load_state_dict(saved)
        self.seen = state["seen"]

    def parts(self):
        """Returns what `make` returns."""
        names = ("model", "optimizers", "schedulers", "loss", "batch", "step", "next_batch", "save", "load")
        return {name: getattr(self, name) for name in (*names, "epoch", "ranks")}


# ---- diffusion: a small U-Net with GroupNorm, fp16 and GradScaler, warm restarts, AveragedModel, a generator


class Residual(nn.Module):
    """Two convolutions with GroupNorm and the time."""

    def __init__(self, inputs, width, dropout=0.1):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(2, inputs), nn.Conv2d(inputs, width, 3, padding=1)
        self.time = nn.Linear(16, width)
        self.norm2, self.conv2 = nn.GroupNorm(2, width), nn.Conv2d(width, width, 3, padding=1)
        self.skip = nn.Conv2d(inputs, width, 1) if inputs != width else nn.Identity()
        self.dropout = dropout

    def inner(self, x, time):
        h = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.conv2(F.dropout(F.silu(self.norm2(h)), self.dropout, self.training))

    def forward(self, x, time):
        return self.skip(x) + self.inner(x, time)


class UNet(nn.Module):
    """One level down and up again."""

    def __init__(self, width=8):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 16))
        self.first = nn.Conv2d(1, width, 3, padding=1)
        self.down, self.middle = Residual(width, width), Residual(width, 2 * width)
        self.up, self.last = Residual(3 * width, width), nn.Conv2d(width, 1, 3, padding=1)

    def embed_time(self, t):
        angles = t[:, None] * torch.tensor([1.0, 2.0, 4.0, 8.0])
        return self.time(torch.cat([angles.sin(), angles.cos()], 1))

    def forward(self, x, t):
        time = self.embed_time(t)
        fine = self.down(self.first(x), time)
        coarse = self.middle(F.avg_pool2d(fine, 2), time)
        return self.last(F.silu(self.up(torch.cat([fine, F.interpolate(coarse, scale_factor=2.0)], 1), time)))


@clean
class Diffusion:
    """Learns the noise that was added."""

    precision, ranks, max_norm = "fp16", 2, 0.5

    def __init__(self):
        seed(0)
        self.generator = drawn(14)
        self.images = self.load_images()
        self.model = self.unet()
        self.forward = self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3)
        self.optimizers = [self.optimizer]
        self.lr_scheduler = lr_scheduler.CosineAnnealingWarmRestarts(self.optimizer, T_0=4, T_mult=2)
        self.schedulers = [self.lr_scheduler]
        self.scaler = self.new_scaler()
        self.ema = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.95))
        self.others = {"ema": self.ema, "generator": self.generator}
        self.global_step, self.epoch = 0, 4
        self.compiled = False

    def new_scaler(self):
        enabled = self.precision == "fp16"
        return torch.amp.GradScaler("cpu", init_scale=2.0**9, growth_interval=2) if enabled else None

    def load_images(self):
        g = drawn(15)
        grid = torch.linspace(-2, 2, 8)
        x, y = torch.randn(2, 64, 1, 1, 1, generator=g)
        return torch.sin(grid * (1 + x)) * torch.cos(grid[:, None] * (1 + y)) + 0.1 * torch.randn(
            64, 1, 8, 8, generator=g
        )

    def unet(self):
        return UNet()

    def batch(self, step, rank=0):
        epoch, place = divmod(step, 4)
        order = torch.randperm(64, generator=drawn(50 + epoch))
        return self.images[order[rank::2][place * 8 : place * 8 + 8]]

    def next_batch(self):
        self.global_step += 1
        return self.batch(self.global_step - 1)

    def loss(self, images):
        t = torch.rand(len(images), generator=self.generator)
        noise = torch.randn(images.shape, generator=self.generator)
        keep = torch.cos(t * math.pi / 2)[:, None, None, None]
        with torch.autocast("cpu", torch.float16, enabled=self.precision == "fp16"):
            guess = self.forward(keep * images + (1 - keep**2).sqrt() * noise, t)
        return F.mse_loss(guess.float(), noise)

    def step(self, images):
        self.model.train()
        self.optimizer.zero_grad()
        loss = self.loss(images)
        if self.scaler is None:
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
            self.optimizer.step()
        else:
            self.scaled_step(loss)
        self.schedule()
        self.ema.update_parameters(self.model)
        return loss.detach()

    def schedule(self):
        self.lr_scheduler.step()

    def scaled_step(self, loss):
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def save(self):
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "lr_scheduler": self.lr_scheduler.state_dict(),
            "ema": self.ema.state_dict(),
            "scaler": {} if self.scaler is None else self.scaler.state_dict(),
            "global_step": self.global_step,
            "generator": self.generator.get_state(),
            "torch": torch.get_rng_state(),
        }
        return copy.deepcopy(state)

    def load(self, state):
        state = copy.deepcopy(state)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.lr_scheduler.load_state_dict(state["lr_scheduler"])
        self.ema.load_state_dict(state["ema"])
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])
        self.global_step = state["global_step"]
        self.generator.set_state(state["generator"])
        torch.set_rng_state(state["torch"])


class PlainDiffusion(Diffusion):
    """The same in fp32."""

    precision = "fp32"


# ---- metric learning: batches of classes, BatchNorm, the hardest triplets, two schedulers


class Embedder(nn.Module):
    """Convolutions with BatchNorm and a normalized embedding."""

    def __init__(self, momentum=0.1):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8, momentum=momentum), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(8, 16, 3, 2, 1), nn.BatchNorm2d(16, momentum=momentum), nn.ReLU())
        self.fc = nn.Linear(16, 12)

    def normalize(self, x):
        return F.normalize(x, dim=1)

    def forward(self, x):
        return self.normalize(self.fc(self.body(self.stem(x)).mean((2, 3))))


@clean
class Metric:
    """Triplets of the hardest rows in batches of four classes with four images each."""

    margin, epoch, ranks, lr = 0.5, 5, 2, 0.05

    def __init__(self):
        seed(0)
        g = drawn(16)
        self.prototypes = torch.randn(8, 1, 8, 8, generator=g)
        self.model = self.make_model()
        self.optimizer = self.make_optimizer()
        self.optimizers = [self.optimizer]
        self.warmup = lr_scheduler.LinearLR(self.optimizer, 0.2, total_iters=5)
        self.decay = lr_scheduler.MultiStepLR(self.optimizer, [2, 12], gamma=0.5)
        self.schedulers = [self.warmup, self.decay]
        self.it = 0

    def make_model(self):
        return Embedder()

    def make_optimizer(self):
        return torch.optim.SGD(self.model.parameters(), lr=self.lr, momentum=0.9, nesterov=True, weight_decay=1e-4)

    def batch(self, step, rank=0):
        g = drawn(10_000 * rank + step % self.epoch)
        labels = torch.randperm(8, generator=g)[:4].repeat_interleave(4)
        return self.prototypes[labels] + 0.7 * torch.randn(16, 1, 8, 8, generator=g), labels

    def next_batch(self):
        self.it += 1
        return self.batch(self.it - 1)

    def loss(self, batch):
        images, labels = batch
        return self.triplets(self.model(images), labels)

    def triplets(self, z, labels):
        distance = (2 - 2 * z @ z.T).clamp(min=1e-6).sqrt()
        alike = labels[:, None] == labels
        furthest = distance.masked_fill(~alike, -torch.inf).amax(1)
        nearest = distance.masked_fill(alike, torch.inf).amin(1)
        return F.softplus(furthest - nearest + self.margin).mean()

    def step(self, batch):
        loss = self.loss(batch)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        for each in self.schedulers:
            each.step()
        return float(loss.detach())

    def save(self):
        return copy.deepcopy(
            [
                self.model.state_dict(),
                self.optimizer.state_dict(),
                [each.state_dict() for each in self.schedulers],
                {"it": self.it},
            ]
        )

    def load(self, state):
        model, optimizer, schedulers, rest = copy.deepcopy(state)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        for each, saved in zip(self.schedulers, schedulers, strict=True):
            each.load_state_dict(saved)
        self.it = rest["it"]


# ---- two tasks: a shared trunk in bf16, missing labels, learned weights of the losses, micro-batches


class Trunk(nn.Module):
    """A residual MLP with dropout."""

    def __init__(self, inputs=10, width=24, dropout=0.1):
        super().__init__()
        self.inlet = nn.Sequential(nn.Linear(inputs, width), nn.LayerNorm(width), nn.GELU())
        self.block = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(dropout), nn.Linear(width, width))

    def forward(self, x):
        x = self.inlet(x)
        return x + self.block(x)


class TwoHeads(nn.Module):
    """A class and two numbers, and how uncertain each task is."""

    def __init__(self, dropout=0.1):
        super().__init__()
        self.trunk = Trunk(dropout=dropout)
        self.classify, self.regress = nn.Linear(24, 4), nn.Linear(24, 2)
        self.log_var = nn.Parameter(torch.zeros(2))

    def uncertainty(self):
        return self.log_var

    def forward(self, x):
        h = self.trunk(x)
        return self.classify(h), self.regress(h)


@clean
class MultiTask:
    """Losses weighted as by Kendall et al.; a third of the labels are missing."""

    precision, ranks, micro, epoch = "bf16", 2, 4, 4

    def __init__(self):
        seed(0)
        self.data = self.read()
        self.model = self.create()
        self.optimizers = self.create_optimizers()
        self.schedulers = [
            lr_scheduler.SequentialLR(
                each, [lr_scheduler.ConstantLR(each, 0.1, 2), lr_scheduler.CosineAnnealingLR(each, 30)], [2]
            )
            for each in self.optimizers
        ]
        self.position = 0

    def read(self):
        g = drawn(17)
        x = torch.randn(58, 10, generator=g)
        labels = (x[:, 0] > 0).long() + 2 * (x[:, 1] * x[:, 2] > 0).long()
        labels[torch.rand(58, generator=g) < 0.3] = -100
        return x, labels, torch.stack([x[:, 3] * x[:, 4], x[:, 5].tanh()], 1)

    def create(self):
        return TwoHeads()

    def create_optimizers(self):
        return [torch.optim.NAdam(self.model.parameters(), lr=4e-3)]

    def batch(self, step, rank=0):
        """Returns eight rows, and five in the last batch of an epoch."""
        epoch, place = divmod(step, self.epoch)
        rows = torch.randperm(58, generator=drawn(epoch))[rank::2][place * 8 : place * 8 + 8]
        return [each[rows] for each in self.data]

    def next_batch(self):
        self.position += 1
        return self.batch(self.position - 1)

    def sums(self, batch):
        """Returns the sum of each task's losses."""
        x, labels, numbers = batch
        with torch.autocast("cpu", torch.bfloat16, enabled=self.precision == "bf16"):
            logits, guess = self.model(x)
        return (
            F.cross_entropy(logits.float(), labels, reduction="sum"),
            F.smooth_l1_loss(guess.float(), numbers, reduction="sum"),
        )

    def counts(self, batch):
        """Returns the number of each task's targets."""
        return (batch[1] != -100).sum().clamp(min=1), batch[2].numel()

    def total(self, losses, counts, regular=1.0):
        log_var = self.model.uncertainty()
        means = torch.stack([each / count for each, count in zip(losses, counts, strict=True)])
        return ((-log_var).exp() * means).sum() + regular * log_var.sum() / 2

    def loss(self, batch):
        return self.total(self.sums(batch), self.counts(batch))

    def parts_of(self, batch):
        return [*zip(*(each.split(self.micro) for each in batch), strict=True)]

    def step(self, batch):
        for each in self.optimizers:
            each.zero_grad()
        logged = self.accumulate(batch)
        for each in self.optimizers:
            each.step()
        for each in self.schedulers:
            each.step()
        return logged

    def accumulate(self, batch):
        counts, logged = self.counts(batch), 0.0
        for part in self.parts_of(batch):
            loss = self.total(self.sums(part), counts, regular=len(part[0]) / len(batch[0]))
            loss.backward()
            logged += loss.item()
        return logged

    def save(self):
        return copy.deepcopy(
            {
                "weights": self.model.state_dict(),
                "optimizers": {str(i): each.state_dict() for i, each in enumerate(self.optimizers)},
                "schedulers": {str(i): each.state_dict() for i, each in enumerate(self.schedulers)},
                "position": self.position,
                "cpu_rng": torch.random.get_rng_state(),
            }
        )

    def load(self, state):
        state = copy.deepcopy(state)
        self.model.load_state_dict(state["weights"])
        for name in ("optimizers", "schedulers"):
            for i, each in enumerate(getattr(self, name)):
                each.load_state_dict(state[name][str(i)])
        self.position = state["position"]
        torch.random.set_rng_state(state["cpu_rng"])


# ---- Q-learning: a target network, Huber loss, the checkpoint as bytes


class Dueling(nn.Module):
    """Values of three actions."""

    def __init__(self, width=24):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.value, self.advantage = nn.Linear(width, 1), nn.Linear(width, 3)

    def forward(self, state):
        h = self.body(state)
        advantage = self.advantage(h)
        return self.value(h) + advantage - advantage.mean(1, keepdim=True)


@clean
class QLearning:
    """Double Q-learning from a fixed replay memory, drawn with replacement; the data have no epochs."""

    ranks, epoch, gamma = 2, 0, 0.9

    def __init__(self):
        seed(0)
        g = drawn(18)
        n = 200
        state, action = torch.randn(n, 6, generator=g), torch.randint(3, (n,), generator=g)
        reward = state[:, 0] * (action - 1) + 0.1 * torch.randn(n, generator=g)
        self.memory = [state, action, reward, state.roll(1, 1) + action[:, None], torch.rand(n, generator=g) < 0.2]
        self.model = self.online = Dueling()
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.optimizer = self.build_optimizer([*self.online.parameters()])
        self.optimizers = [self.optimizer]
        self.others = {"target": self.target}
        self.t = 0

    def build_optimizer(self, parameters):
        return torch.optim.Adam(parameters, lr=2e-3, amsgrad=True)

    def batch(self, step, rank=0):
        rows = torch.randint(200, (16,), generator=drawn(100_000 * rank + step))
        return tuple(each[rows] for each in self.memory)

    def next_batch(self):
        self.t += 1
        return self.batch(self.t - 1)

    def loss(self, batch):
        state, action, reward, following, done = batch
        with torch.no_grad():
            best = self.online(following).argmax(1, keepdim=True)
            value = self.target(following).gather(1, best)[:, 0]
            goal = reward + self.gamma * value * ~done
        return F.smooth_l1_loss(self.online(state).gather(1, action[:, None])[:, 0], goal)

    def step(self, batch):
        loss = self.loss(batch)
        for parameter in self.online.parameters():
            parameter.grad = None
        loss.backward()
        self.optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(self.target.parameters(), self.online.parameters(), strict=True):
                slow.lerp_(fast, 0.05)
        return loss

    def save(self):
        file = io.BytesIO()
        parts = (self.online, self.target, self.optimizer)
        torch.save({"parts": [each.state_dict() for each in parts], "t": self.t}, file)
        return file.getvalue()

    def load(self, state):
        saved = torch.load(io.BytesIO(state))
        for each, values in zip((self.online, self.target, self.optimizer), saved["parts"], strict=True):
            each.load_state_dict(values)
        self.t = saved["t"]
