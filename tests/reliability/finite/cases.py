"""Which runs the campaign consists of: faulty ones, their clean partners, and clean ones over all presets."""

import random
from dataclasses import dataclass
from typing import Any

from tests.reliability.finite.kinds import KINDS

STEPS = 240

COMMON = [
    f"steps={STEPS}",
    "eval_every=20",
    "eval_batches=8",
    f"log_every={STEPS}",
    "device=cpu",
    "wandb=disabled",
    "checkpoint=off",
    "forensics=off",
    "report=false",
    "guard.snapshot_every=20",
    "guard.lr_steps=20",
    "guard.checksum_every=1",
    "guard.recheck_every=10",
]
"""Short runs: states to go back to lie as close as the evaluations, and a lowered learning rate ends within the run.

Faults last 1 to 130 steps here, so a step in 10 is computed twice; in long runs it is one in 250.
"""

MODELS = {
    "gpt": ["model.n_layer=2", "model.n_head=2", "model.n_embd=48", "data.block_size=32", "batch_size=8"],
    "resnet": ["model=resnet20", "model.depth=8", "data=digits", "optimizer=sgd", "batch_size=32"],
}
PRECISIONS = ("fp32", "bf16", "bf16_params")
SEEDS = (3, 4, 5)
"""Others than those of the runs to which the thresholds of slow spikes were fitted (0, 1, 2)."""

MODES = ("alarm", "act")
"""`alarm`: every detector only says what it sees. `act`: the guard as a user has it."""


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        model, precision, seed: of the setting.
        kind: name of the fault; empty for a run without one.
        mode: one of `MODES`.
        extra: further overrides.
        part: `faulty`, `partner` or `clean`.
    """

    part: str
    model: str
    precision: str
    seed: int
    kind: str = ""
    mode: str = "alarm"
    extra: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Identifies the run in the recordings."""
        fields = (self.part, self.model, self.precision, str(self.seed), self.kind or "none", self.mode)
        return "/".join([*fields, *self.extra])

    @property
    def fields(self) -> dict[str, Any]:
        """What a recording says of the case."""
        own = {name: getattr(self, name) for name in ("name", "part", "model", "precision", "seed", "kind", "mode")}
        of_fault = {"at": self.at, "group": KINDS[self.kind].group} if self.kind else {}
        return {**own, "extra": list(self.extra), **of_fault}

    @property
    def partner(self) -> "Case":
        """The same run without the fault."""
        return Case("partner", self.model, self.precision, self.seed, extra=KINDS[self.kind].overrides)

    @property
    def at(self) -> int:
        """First tick of the fault: after the guard's window is warm, and different in each run."""
        last = 97 if KINDS[self.kind].steps > 100 else 119
        return random.Random(f"{self.kind}/{self.model}/{self.precision}/{self.seed}").randint(80, last)

    @property
    def overrides(self) -> list[str]:
        """The overrides of the command line."""
        given = [*MODELS[self.model], *COMMON, f"precision={self.precision}", f"seed={self.seed}"]
        if self.kind:
            target = "tests.reliability.finite.inject.Finite"
            fault = [f"+faults.kind={self.kind}", f"+faults.at={self.at}", f"+faults.seed={self.seed}"]
            given += [f"faults._target_={target}", *fault, *KINDS[self.kind].overrides]
        given.append("guard.slow=rollback" if self.kind and self.mode == "act" else "guard.slow=alarm")
        return [*given, *self.extra]


def faulty(mode: str = "alarm") -> list[Case]:
    """Returns the faulty runs: every kind, model, precision and seed; the first of them are useful alone."""
    return [
        Case("faulty", model, precision, seed, name, mode)
        for precision in PRECISIONS
        for seed in SEEDS
        for group in ("training", "arithmetic", "memory")
        for model in MODELS
        for name, kind in KINDS.items()
        if model in kind.models and kind.group == group
    ]


def partners() -> list[Case]:
    """Returns the runs without faults that the faulty ones are compared with."""
    return list(dict.fromkeys(case.partner for case in faulty()))


ANY = {
    "optimizer": ["stable_adamw", "spam"],
    "clipping": ["none", "value", "per_module", "agc", "zclip", "adagc"],
    "schedule": ["constant", "wsd", "step"],
    "warmup": ["none", "cosine"],
    "init": ["normal", "fan_in", "torch", "zero_residual"],
    "zloss": ["palm", "olmo"],
    "averaging": ["ema", "snapshots"],
    "label_smoothing": ["0.1"],
    "grad_accum_steps": ["2"],
    "optimizer.fused": ["false"],
}
"""Options of groups that clean runs try, one at a time, and then two at once."""

GPT_ONLY = {
    "optimizer": ["sgd", "muon"],
    "init": ["small"],
    "stability": ["zloss", "qknorm", "zloss_qknorm", "full"],
    "qknorm": ["rmsnorm"],
    "softcap": ["gemma2"],
    "qkclip": ["kimi"],
    "data.length_warmup": ["60"],
    "model.dropout": ["0.1"],
    "batch_size": ["4", "16"],
    "optimizer.lr": ["1e-3", "1e-2"],
}
RESNET_ONLY = {
    "objective": ["mse", "bce"],
    "model": ["nf_resnet20"],
    "optimizer": ["adamw"],
    "batch_size": ["16", "64"],
    "optimizer.lr": ["0.03", "0.3"],
    "data.augment": ["none"],
}
CLEAN = 200


def options(model: str) -> list[str]:
    """Returns the overrides that a clean run of this model can have beside the defaults."""
    own = GPT_ONLY if model == "gpt" else RESNET_ONLY
    return [f"{key}={value}" for table in (ANY, own) for key, values in table.items() for value in values]


def clean() -> list[Case]:
    """Returns `CLEAN` runs without faults, each with its own seed: defaults, single options, then random pairs.

    They run with the guard as a user has it, on seeds that no detector was tuned on. fp16 is slow on a CPU, so few of
    them use it.
    """
    draw, found = random.Random(2), list[Case]()
    singles = [(model, option) for model in MODELS for option in options(model)]
    draw.shuffle(singles)
    chosen = [(model, ()) for model in MODELS for _ in range(15)] + [(model, (option,)) for model, option in singles]
    while len(chosen) < CLEAN:
        model = draw.choice(list(MODELS))
        one, two = draw.sample(options(model), 2)
        if compatible(one, two):
            chosen.append((model, (one, two)))
    for number, (model, extra) in enumerate(chosen[:CLEAN]):
        precision = "fp16" if number % 20 == 19 else PRECISIONS[number % 3]
        found.append(Case("clean", model, precision, 2000 + number, mode="act", extra=fitting(model, extra)))
    return found


APART = (
    {"stability", "zloss"},
    {"stability", "qknorm"},
    {"stability", "optimizer"},
    {"stability", "clipping"},
    {"optimizer", "optimizer.fused"},
    {"optimizer", "optimizer.lr"},
    {"stability", "optimizer.fused"},
    {"qkclip", "qknorm"},
    {"qkclip", "stability"},
    {"softcap", "qkclip"},
    {"objective", "label_smoothing"},
    {"objective", "zloss"},
    {"model", "init"},
)
"""Keys of which one overrides or refuses the other."""


def compatible(one: str, two: str) -> bool:
    """Whether two options can be chosen together."""
    keys = {one.partition("=")[0], two.partition("=")[0]}
    return len(keys) == 2 and keys not in APART


def fitting(model: str, extra: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the options with what they need beside them."""
    floats = "data._target_=tests.reliability.finite.onehot.OneHotDigits"
    return (*extra, floats) if any(option.startswith("objective=") for option in extra) else extra
