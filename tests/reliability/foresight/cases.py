"""Runs of the campaign: families of trouble that grows, their partners with the fix, hot, clean and hopeless runs.

| group | families | use |
|---|---|---|
| fitted | attention, shift, logits, creep | the forecast is fitted on them and on their partners |
| held out | muon, nf_resnet, batchnorm, fp16, depth | scored once |
| hot | high learning rates, noisy data, spikes that heal | false alarms, where no event occurs |
| tame | ordinary runs | fitted on, and the threshold of the alarm is chosen on them |
| clean | ordinary runs | false alarms; nothing is fitted on them |
| sudden | poison, labels, bit flips | nothing foretells these: silence is right |

Settings are drawn from wide ranges by a generator seeded with the case's name, so that they do not depend on the order
or number of cases. Every run of a family has a partner `.../fixed`: the same run with the fix from the start. These and
the hot runs have another partner `.../slower`, at a third of the learning rate, of which only the losses are recorded.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

FITTED = ("attention", "shift", "logits", "creep")
HELD_OUT = ("muon", "nf_resnet", "batchnorm", "fp16", "depth")


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        name: `family/number`, with `/fixed` for the partner.
        family: of `FITTED` or `HELD_OUT`, or `hot`, `clean`, `sudden`.
        steps: its length.
        overrides: its command line.
        rate: the peak learning rate.
    """

    name: str
    family: str
    steps: int
    overrides: tuple[str, ...]
    rate: float

    @property
    def fixed(self) -> bool:
        """Whether this is a partner with the fix from the start."""
        return self.name.endswith("/fixed")

    @property
    def slower(self) -> bool:
        """Whether this is a partner at a third of the learning rate."""
        return self.name.endswith("/slower")


COMMON = (
    "guard=skip",
    "guard.checksum_every=0",
    "guard.recheck_every=0",
    "forensics=off",
    "checkpoint=off",
    "report=false",
    "wandb=disabled",
    "device=cpu",
    "eval_every=1000000",
    "eval_batches=8",
    "log_every=1",
    "monitors.every=25",
    "monitors.margin_every=1",
)
GPT = (
    "model.n_layer=4",
    "model.n_head=2",
    "model.n_embd=32",
    "data.block_size=64",
    "batch_size=8",
    "precision=fp32",
    "schedule=constant",
)
RESNET = ("batch_size=16", "precision=fp32", "schedule=constant")

Drawn = tuple[list[str], str, float]
"""Overrides of a run, the fix, and the peak learning rate."""


def attention(draw: random.Random, number: int) -> Drawn:
    """Attention logits that grow at a high learning rate without QK-norm (arXiv 2309.14322)."""
    del number
    rate, warmup = log_uniform(draw, 1e-2, 4e-1), draw.choice([300, 500, 700, 900])
    return [*GPT, f"optimizer.lr={rate}", f"warmup.steps={warmup}"], "qknorm=layernorm", rate


def shift(draw: random.Random, number: int) -> Drawn:
    """A slow second moment, beta2 0.999, and data that change slowly to bytes never seen before."""
    rate = log_uniform(draw, 3e-3, 1e-1)
    start, length = draw.choice([400, 600]), draw.choice([1, 200, 400])
    data = [
        "data._target_=tests.reliability.foresight.shift.ShiftedText",
        f"+data.start={start}",
        f"+data.length={length}",
    ]
    norm = ["qknorm=layernorm"] if number % 2 else []
    rates = [f"optimizer.lr={rate}", "optimizer.betas=[0.9,0.999]", "warmup.steps=200"]
    return [*GPT, *data, *norm, *rates], "optimizer.betas=[0.9,0.95]", rate


def logits(draw: random.Random, number: int) -> Drawn:
    """Output logits that drift without z-loss and weight decay (arXiv 2309.14322, section 3.2)."""
    del number
    rate, warmup = log_uniform(draw, 2e-2, 5e-1), draw.choice([300, 600])
    settings = ["qknorm=layernorm", "optimizer.weight_decay=0", f"optimizer.lr={rate}", f"warmup.steps={warmup}"]
    return [*GPT, *settings], "zloss=palm", rate


def creep(draw: random.Random, number: int) -> Drawn:
    """A learning rate that grows by 0.3 % to 0.8 % in every step, with and without QK-norm; partner: it stays."""
    rate, growth = 1e-2, draw.choice([0.003, 0.004, 0.005, 0.006, 0.008])
    schedule = ["schedule._target_=tests.reliability.foresight.creep.Creep", f"+schedule.growth={growth}"]
    norm = ["qknorm=layernorm"] if number % 2 else []
    return [*GPT, *norm, *schedule, f"optimizer.lr={rate}", "warmup.steps=50"], "schedule.growth=0", rate


def muon(draw: random.Random, number: int) -> Drawn:
    """Muon without QK-clip (Kimi K2, arXiv 2507.20534)."""
    del number
    rate, warmup = log_uniform(draw, 1e-2, 1.0), draw.choice([300, 600])
    return [*GPT, "optimizer=muon", f"optimizer.lr={rate}", f"warmup.steps={warmup}"], "qkclip=kimi", rate


def nf_resnet(draw: random.Random, number: int) -> Drawn:
    """A ResNet without BatchNorm and without AGC (arXiv 2102.06171)."""
    del number
    rate, warmup = log_uniform(draw, 1e-1, 1e1), draw.choice([300, 600])
    settings = ["experiment=nf_resnet_digits", "clipping=none", f"optimizer.lr={rate}", f"warmup.steps={warmup}"]
    return [*settings, *RESNET], "clipping=agc", rate


def batchnorm(draw: random.Random, number: int) -> Drawn:
    """BatchNorm whose variance collapses, because weight decay shrinks the weights before it."""
    del number
    rate, decay = log_uniform(draw, 3e-2, 1.0), log_uniform(draw, 1e-2, 3e-1)
    settings = [f"optimizer.lr={rate}", f"optimizer.weight_decay={decay}", "warmup.steps=100"]
    return ["experiment=resnet_digits", *settings, *RESNET], "optimizer.weight_decay=5e-4", rate


def fp16(draw: random.Random, number: int) -> Drawn:
    """fp16 whose headroom shrinks, and whose loss scale falls, at a rate that creeps up; partner: bf16."""
    rate, growth = log_uniform(draw, 1e-2, 1e-1), draw.choice([0.003, 0.005])
    schedule = ["schedule._target_=tests.reliability.foresight.creep.Creep", f"+schedule.growth={growth}"]
    norm = ["qknorm=layernorm"] if number % 2 else []
    return (
        [*GPT, *norm, *schedule, "precision=fp16", f"optimizer.lr={rate}", "warmup.steps=100"],
        "precision=bf16",
        rate,
    )


def depth(draw: random.Random, number: int) -> Drawn:
    """Deep models whose residual branches are not scaled down, `init=fan_in`."""
    del number
    rate, layers = log_uniform(draw, 3e-3, 3e-1), draw.choice([10, 14])
    settings = [f"model.n_layer={layers}", "init=fan_in", f"optimizer.lr={rate}", "warmup.steps=300"]
    return [*GPT, *settings], "init=zero_residual", rate


FAMILIES: dict[str, tuple[Callable[[random.Random, int], Drawn], int, int]] = {
    "attention": (attention, 26, 1200),
    "shift": (shift, 16, 1200),
    "logits": (logits, 12, 1200),
    "creep": (creep, 18, 1200),
    "muon": (muon, 12, 1200),
    "nf_resnet": (nf_resnet, 12, 1200),
    "batchnorm": (batchnorm, 12, 1200),
    "fp16": (fp16, 12, 1200),
    "depth": (depth, 8, 1000),
}
"""What draws a run of each family, the number of runs, each with a partner, and their steps."""


def hot(draw: random.Random, number: int) -> tuple[list[str], float]:
    """A high learning rate, noisy labels, or a spike that heals."""
    rate, warmup = log_uniform(draw, 1e-2, 6e-2), draw.choice([100, 300, 600])
    kinds = [
        [],
        ["faults=poison", "faults.at=[300,400,500,600,700,800,900,1000]"],
        ["faults=poison", "faults.at=[400,800]", "faults.length=4", "guard.sigma=inf"],
        ["zloss=palm", "qknorm=rmsnorm"],
    ]
    return [*GPT, *kinds[number % 4], f"optimizer.lr={rate}", f"warmup.steps={warmup}"], rate


def clean(draw: random.Random, number: int) -> tuple[list[str], float]:
    """An ordinary run: a usual rate, any of the usual knobs."""
    seed = f"seed={number}"
    if number % 4 == 3:
        rate = log_uniform(draw, 1e-2, 1e-1)
        model = draw.choice(["experiment=resnet_digits", "experiment=nf_resnet_digits"])
        return [model, *RESNET[:2], f"optimizer.lr={rate}", seed], rate
    rate = log_uniform(draw, 1e-3, 1e-2)
    knobs = [draw.choice(["qknorm=none", "qknorm=layernorm"]), draw.choice(["zloss=none", "zloss=palm"])]
    schedule = draw.choice(["schedule=cosine", "schedule=constant", "schedule=wsd"])
    precision = draw.choice(["precision=fp32", "precision=bf16", "precision=fp16"])
    return [*GPT, *knobs, schedule, precision, f"optimizer.lr={rate}", seed], rate


def tame(draw: random.Random, number: int) -> tuple[list[str], float]:
    """As `clean`, with other seeds; every second run is a ResNet."""
    settings, rate = clean(draw, 3 if number % 2 else 0)
    return [*settings, f"seed={1000 + number}"], rate


def sudden(draw: random.Random, number: int) -> tuple[list[str], float]:
    """A fault without any sign before it."""
    rate, at = log_uniform(draw, 3e-3, 2e-2), draw.randrange(400, 900)
    kinds = [
        ["faults=poison", f"faults.at=[{at}]", "faults.length=4"],
        ["faults=poison", f"faults.at=[{at}]", "faults.length=60"],
        ["faults=bitflip", f"faults.at=[{at}]"],
    ]
    return [*GPT, *kinds[number % 3], "guard.sigma=inf", f"optimizer.lr={rate}"], rate


def log_uniform(draw: random.Random, low: float, high: float) -> float:
    """Returns a number between `low` and `high`, to two digits, whose logarithm is uniform."""
    return float(f"{low * (high / low) ** draw.random():.2g}")


def all_cases() -> list[Case]:
    """Returns every run, the families' round by round, so that a part of the list has all families."""
    found: list[tuple[int, Case]] = []
    for family, (draw_run, runs, steps) in FAMILIES.items():
        for number in range(runs):
            name = f"{family}/{number:02d}"
            settings, fix, rate = draw_run(random.Random(name), number)
            overrides = (*COMMON, *settings, f"seed={number}", f"steps={steps}")
            found.append((number, Case(name, family, steps, ordered(overrides), rate)))
            found.append((number, Case(f"{name}/fixed", family, steps, ordered((*overrides, fix)), rate)))
    for family, draw_plain, runs, steps in (
        ("hot", hot, 24, 1200),
        ("clean", clean, 68, 1500),
        ("tame", tame, 20, 1200),
        ("sudden", sudden, 9, 1000),
    ):
        for number in range(runs):
            name = f"{family}/{number:02d}"
            settings, rate = draw_plain(random.Random(name), number)
            overrides = (*COMMON, f"seed={number}", *settings, f"steps={steps}")
            found.append((number // 3, Case(name, family, steps, ordered(overrides), rate)))
    found += [(number, slower(case)) for number, case in found if case.rate >= LEAST_RATE and may_be_too_fast(case)]
    return [case for _, case in sorted(found, key=lambda pair: pair[0])]


LEAST_RATE = 1e-2
"""Lower learning rates are not too high for any of these models."""


def may_be_too_fast(case: Case) -> bool:
    """Whether a case gets a partner at a third of its learning rate."""
    return case.family in ("attention", "logits", *HELD_OUT, "hot")


def slower(case: Case) -> Case:
    """Returns the partner at a third of the learning rate."""
    overrides = tuple(each for each in case.overrides if not each.startswith("monitors."))
    rate = float(f"{case.rate / 3:.2g}")
    changed = (*overrides, f"optimizer.lr={rate}", "monitors=none", "forecast=off")
    return Case(f"{case.name}/slower", case.family, case.steps, ordered(changed), rate)


def ordered(overrides: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the overrides with one value a key, the last one."""
    return tuple({override.partition("=")[0]: override for override in overrides}.values())


def model_of(case: Case) -> str:
    """Returns `gpt` or `resnet`."""
    return "resnet" if any(override.startswith("experiment=") for override in case.overrides) else "gpt"
