"""Configurations whose training halts or diverges, each with the fixes that are known to be right for its cause.

Settings are drawn from wide ranges by a generator seeded with the case's name, so that they do not depend on the order
or number of cases. The causes, and the fixes that count as right, were written down before any of these cases ran. The
ranges were chosen with other draws, so that most cases of a family fail; those draws are no cases.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

LOWER_RATE = ("lr_half", "lr_fifth", "rate")
"""`rate` stands for every arm that sets a lower `optimizer.lr`, such as the rate that the diagnosis names."""

COMMON = (
    "device=cpu",
    "wandb=disabled",
    "report=false",
    "eval_every=1000000",
    "eval_batches=16",
)
GPT = (
    "model.n_layer=2",
    "model.n_head=2",
    "model.n_embd=32",
    "data.block_size=32",
    "batch_size=8",
    "precision=fp32",
    "schedule=constant",
    "steps=700",
)
RESNET = ("model.depth=8", "batch_size=16", "precision=fp32", "schedule=constant", "steps=500")


@dataclass(frozen=True)
class Drawn:
    """Settings of a case.

    Attributes:
        overrides: the command line.
        right: names of the arms that are known to be right; see `LOWER_RATE`.
        grid: command lines from step 0 with one right fix each, besides half and a fifth of the learning rate.
    """

    overrides: tuple[str, ...]
    right: tuple[str, ...]
    grid: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Case:
    """One configuration.

    Attributes:
        name: `family/number`.
        drawn: its settings.
    """

    name: str
    drawn: Drawn

    @property
    def family(self) -> str:
        """The cause of its trouble."""
        return self.name.partition("/")[0]

    @property
    def overrides(self) -> tuple[str, ...]:
        """Its whole command line."""
        return (*self.drawn.overrides, *COMMON, f"seed={self.name.rpartition('/')[2]}")


def rate(draw: random.Random) -> Drawn:
    """A learning rate that is far too high from the start."""
    lr = log_uniform(draw, 0.5, 10.0)
    return Drawn((*GPT, f"optimizer.lr={lr}"), LOWER_RATE, (("optimizer.lr=0.01",), (f"optimizer.lr={lr / 30:.3g}",)))


def attention(draw: random.Random) -> Drawn:
    """Attention logits that grow at a high learning rate without QK-norm (arXiv 2309.14322)."""
    return growing_attention(draw, 0.3, 3.0)


def growing_attention(draw: random.Random, low: float, high: float) -> Drawn:
    """A learning rate between two bounds without QK-norm."""
    settings = (
        *GPT,
        f"optimizer.lr={log_uniform(draw, low, high)}",
        f"warmup.steps={draw.choice([100, 200, 300])}",
    )
    return Drawn(settings, ("qknorm", "qkclip", *LOWER_RATE), (("qknorm=layernorm",), ("qkclip=kimi",)))


def logits(draw: random.Random) -> Drawn:
    """Output logits that drift at a high learning rate without z-loss and weight decay (arXiv 2309.14322)."""
    lr = log_uniform(draw, 1.0, 10.0)
    settings = ("qknorm=layernorm", "optimizer.weight_decay=0", f"optimizer.lr={lr}", "warmup.steps=200")
    return Drawn((*GPT, *settings), ("zloss", "softcap", *LOWER_RATE), (("zloss=palm",), ("softcap=gemma2",)))


def stale(draw: random.Random) -> Drawn:
    """A very slow second moment, beta2 0.9995, that lags behind the gradients late in a warmup (arXiv 2304.13013)."""
    settings = (f"optimizer.lr={log_uniform(draw, 1.0, 10.0)}", "optimizer.betas=[0.9,0.9995]", "warmup.steps=300")
    right = ("beta2", "stable_adamw", "moments", *LOWER_RATE)
    return Drawn((*GPT, *settings), right, (("optimizer.betas=[0.9,0.95]",), ("optimizer=stable_adamw",)))


def overflow(draw: random.Random) -> Drawn:
    """fp16 whose range is exceeded at the lowest loss scale: the floor is high, as with a static scale."""
    scale = draw.choice([2**18, 2**20, 2**22])
    small = ("model.n_layer=1", "model.n_embd=16", "data.block_size=16", "batch_size=4", "steps=400")
    settings = (
        f"precision.init_scale={scale}",
        f"precision.min_scale={scale}",
        f"optimizer.lr={draw.choice([1e-2, 3e-2])}",
    )
    gpt = tuple(each for each in GPT if each != "precision=fp32")
    return Drawn((*gpt, *small, "precision=fp16", *settings), ("fp32", "bf16"), (("precision=bf16",),))


def bad_data(draw: random.Random) -> Drawn:
    """A long series of batches with wrong targets, longer than the guard's rollbacks skip."""
    start, length = draw.choice([120, 200, 300]), draw.choice([100, 150, 200])
    faults = ("faults=poison", f"faults.at=[{start}]", f"faults.length={length}")
    return Drawn((*GPT, *faults, f"optimizer.lr={log_uniform(draw, 3e-3, 3e-2)}"), ("skip",), (("faults=none",),))


def deep(draw: random.Random) -> Drawn:
    """A deep model whose weights start too large, at a usual to high learning rate."""
    std, lr = draw.choice([0.3, 0.6, 1.0]), log_uniform(draw, 2.0, 20.0)
    settings = ("model.n_layer=6", "init=normal", f"init.std={std}", f"optimizer.lr={lr}", "warmup.steps=100")
    right = ("rewarmup", "clip", "qknorm", *LOWER_RATE)
    return Drawn((*GPT, *settings), right, (("init=gpt2",), ("qknorm=layernorm",)))


def creep(draw: random.Random) -> Drawn:
    """A learning rate that grows in every step, as a wrong schedule would have it."""
    growth = draw.choice([0.005, 0.007, 0.009])
    schedule = ("schedule._target_=tests.reliability.foresight.creep.Creep", f"+schedule.growth={growth}")
    settings = (f"optimizer.lr={log_uniform(draw, 0.03, 0.3)}", "warmup.steps=50")
    return Drawn((*GPT, *schedule, *settings), LOWER_RATE, (("+schedule.growth=0",),))


def muon(draw: random.Random) -> Drawn:
    """Muon without QK-clip at a high learning rate (Kimi K2, arXiv 2507.20534)."""
    settings = ("optimizer=muon", f"optimizer.lr={log_uniform(draw, 2.0, 20.0)}", "warmup.steps=100")
    return Drawn((*GPT, *settings), ("qkclip", "qknorm", *LOWER_RATE), (("qkclip=kimi",), ("qknorm=layernorm",)))


def attention_and_data(draw: random.Random) -> Drawn:
    """Two causes: growing attention logits, and batches with wrong targets."""
    first = growing_attention(draw, 1.0, 10.0)
    faults = ("faults=poison", f"faults.at=[{draw.choice([100, 150, 250])}]", "faults.length=30")
    grid = (("qknorm=layernorm",), ("qknorm=layernorm", "faults=none"), ("qkclip=kimi",))
    return Drawn((*first.overrides, *faults), first.right, grid)


def rate_and_stale(draw: random.Random) -> Drawn:
    """Two causes: a learning rate that is too high, and a slow second moment."""
    lr = log_uniform(draw, 1.0, 10.0)
    settings = (f"optimizer.lr={lr}", "optimizer.betas=[0.9,0.999]", "warmup.steps=20")
    return Drawn((*GPT, *settings), LOWER_RATE, ((f"optimizer.lr={lr / 30:.3g}",), ("optimizer.betas=[0.9,0.95]",)))


def nf_resnet(draw: random.Random) -> Drawn:
    """A ResNet without BatchNorm and without AGC (arXiv 2102.06171)."""
    settings = ("experiment=nf_resnet_digits", "clipping=none", f"optimizer.lr={log_uniform(draw, 0.3, 10.0)}")
    return Drawn((*settings, *RESNET, "warmup.steps=100"), ("clip", "zclip", *LOWER_RATE), (("clipping=agc",),))


def resnet_rate(draw: random.Random) -> Drawn:
    """A ResNet with a learning rate that is far too high."""
    lr = log_uniform(draw, 3.0, 100.0)
    settings = ("experiment=resnet_digits", "clipping=none", f"optimizer.lr={lr}")
    return Drawn((*settings, *RESNET), ("clip", "zclip", *LOWER_RATE), ((f"optimizer.lr={lr / 30:.3g}",),))


def resnet_data(draw: random.Random) -> Drawn:
    """A ResNet without BatchNorm, and a long series of bad batches: wrong targets, images 100 times too bright."""
    faults = ("faults=poison", f"faults.at=[{draw.choice([120, 200])}]", f"faults.length={draw.choice([100, 150])}")
    settings = ("experiment=nf_resnet_digits", f"optimizer.lr={log_uniform(draw, 0.03, 0.3)}")
    return Drawn((*settings, *RESNET, *faults), ("skip",), (("faults=none",),))


def nf_resnet_and_data(draw: random.Random) -> Drawn:
    """Two causes: a ResNet without BatchNorm and without AGC, and bad batches."""
    first = nf_resnet(draw)
    faults = ("faults=poison", f"faults.at=[{draw.choice([60, 120])}]", "faults.length=30")
    return Drawn((*first.overrides, *faults), first.right, (("clipping=agc",), ("clipping=agc", "faults=none")))


FAMILIES: dict[str, Callable[[random.Random], Drawn]] = {
    each.__name__: each
    for each in (
        rate,
        attention,
        logits,
        stale,
        overflow,
        bad_data,
        deep,
        creep,
        muon,
        attention_and_data,
        rate_and_stale,
        nf_resnet,
        resnet_rate,
        resnet_data,
        nf_resnet_and_data,
    )
}

NUMBER = 8
"""Cases drawn of each family; not all of them halt or diverge."""

CLEAN = 100
"""Ordinary runs."""


def all_cases() -> list[Case]:
    """Returns all cases, so that each beginning of the list has all families."""
    return [drawn(family, number) for number in range(NUMBER) for family in FAMILIES]


def drawn(family: str, number: int) -> Case:
    """Draws a case."""
    name = f"{family}/{number}"
    return Case(name, FAMILIES[family](random.Random(name)))


def clean_cases() -> list[Case]:
    """Returns ordinary runs: usual rates, any of the usual knobs, both models."""
    return [Case(f"clean/{number}", clean(random.Random(f"clean/{number}"), number)) for number in range(CLEAN)]


def clean(draw: random.Random, number: int) -> Drawn:
    """An ordinary run."""
    if number % 4 == 3:
        model = draw.choice(["experiment=resnet_digits", "experiment=nf_resnet_digits"])
        return Drawn((model, *RESNET, f"optimizer.lr={log_uniform(draw, 1e-2, 1e-1)}"), (), ())
    knobs = (draw.choice(["qknorm=none", "qknorm=layernorm"]), draw.choice(["zloss=none", "zloss=palm"]))
    schedule = draw.choice(["schedule=cosine", "schedule=constant", "schedule=wsd"])
    precision = draw.choice(["precision=fp32", "precision=bf16"])
    return Drawn((*GPT, *knobs, schedule, precision, f"optimizer.lr={log_uniform(draw, 1e-3, 1e-2)}"), (), ())


def log_uniform(draw: random.Random, low: float, high: float) -> float:
    """Draws between two bounds, evenly on a logarithmic scale; two digits."""
    return float(f"{low * (high / low) ** draw.random():.2g}")
