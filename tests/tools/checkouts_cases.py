"""The cases on which `checkouts.py` compares two checkouts: each is a few commands in its own folder.

All case folders are siblings of `text.txt`, `pictures/` and `plugin/`, which `checkouts_inputs.py` writes.
"""

import shlex
from typing import NamedTuple


class Command(NamedTuple):
    """One command of a case.

    Attributes:
        program: `train` for train.py, `torchrun` for train.py on two ranks, `stabletrain` for that command, `python`
            for a user's script.
        arguments: as typed.
        code: the exit code that the old checkout must give, so that a broken case is noticed.
    """

    program: str
    arguments: list[str]
    code: int = 0


class Case(NamedTuple):
    """Commands that run one after the other in one folder.

    Attributes:
        commands: in order.
        shows: texts that the old checkout's events or output must contain, so that a case that no longer tests what it
            is for is noticed.
    """

    commands: list[Command]
    shows: tuple[str, ...] = ()


SMALL = "model.n_layer=2 model.n_head=2 model.n_embd=16 data.block_size=16 batch_size=4 steps=24 eval_every=12"
ALWAYS = (
    "device=cpu wandb=disabled eval_batches=2 log_every=1 checkpoint.every=8 checkpoint.asynchronous=false "
    "monitors.every=8 report=false precision=fp32 hydra.run.dir=run"
)
TEXT = "data=text data.path=../text.txt"
GPT = f"{TEXT} {SMALL} {ALWAYS}"
RESNET = f"model=resnet20 model.depth=8 data=digits batch_size=8 steps=12 eval_every=6 {ALWAYS} checkpoint.every=6"
OWN = f"--config-dir ../plugin/conf model=mine data=mine batch_size=8 steps=24 eval_every=12 {ALWAYS}"
QUICK = (
    "steps=40 checkpoint.every=6 guard=rollback guard.window=20 guard.patience=3 guard.snapshot_every=5 "
    "guard.healthy_after=4 guard.skip_batches=2 guard.lr_steps=6 schedule=constant warmup=none"
)
"""A rollback guard with windows short enough for 40 steps."""

PLAN = (
    "faults=plan 'faults.faults=[{kind:gradient,at:[6]},{kind:label,at:[9]},{kind:poison,at:[14],length:2},"
    "{kind:activation,at:[20],value:inf}]'"
)


def train(arguments: str, code: int = 0) -> Command:
    """Returns a `python train.py` command."""
    return Command("train", shlex.split(arguments), code)


def gpt(arguments: str = "", code: int = 0, without: str = "") -> Command:
    """Returns a run of a tiny GPT. The last value of a key wins; drops defaults whose keys begin with `without`."""
    return train(f"{less(GPT, without)} {arguments}", code)


def resnet(arguments: str = "", code: int = 0, without: str = "") -> Command:
    """Returns a run of a ResNet of depth 8 on digits; otherwise like `gpt`."""
    return train(f"{less(RESNET, without)} {arguments}", code)


def torchrun(arguments: str, code: int = 0) -> Command:
    """Returns a `torchrun --nproc_per_node=2 train.py` command."""
    return Command("torchrun", shlex.split(arguments), code)


def tool(arguments: str, code: int = 0) -> Command:
    """Returns a `stabletrain ...` command."""
    return Command("stabletrain", shlex.split(arguments), code)


def less(arguments: str, prefix: str) -> str:
    """Returns the arguments without those that begin with a prefix."""
    return " ".join(each for each in arguments.split() if not (prefix and each.startswith(prefix)))


def one(command: Command, *shows: str) -> Case:
    """Returns a case of one command."""
    return Case([command], shows)


MODELS = {
    "gpt": one(gpt("report=true"), "nats/byte"),
    "gpt, other architecture": one(
        gpt(
            "model.position=learned model.norm=rmsnorm model.mlp=swiglu model.bias=true model.tied_head=true "
            "model.dropout=0.1 model.embedding_gradient=0.1 seed=3"
        )
    ),
    "gpt on stdlib": one(train(f"{SMALL} {ALWAYS} steps=6")),
    "gpt on tokens": Case(
        [tool("prepare ../text.txt shards --val-fraction 0.1"), gpt("data=tokens data.path=shards report=true")]
    ),
    "resnet": one(resnet("report=true"), "val accuracy"),
    "resnet18": one(
        resnet("model=resnet18 model.depth=18 model.stem=small steps=3 checkpoint=off", without="checkpoint.")
    ),
    "nf_resnet": one(resnet("model=nf_resnet20 model.skipinit=true")),
    "resnet on pictures": one(
        resnet("data=imagefolder data.path=../pictures data.image_size=16 data.val_fraction=0.3")
    ),
}

PRECISIONS = {
    f"{model} precision={precision}": one(run(f"precision={precision}"))
    for model, run in {"gpt": gpt, "resnet": resnet}.items()
    for precision in ("auto", "bf16", "bf16_params", "fp16")
} | {"gpt precision.fp32_modules": one(gpt("precision=bf16 'precision.fp32_modules=[head,blocks.*.attention]'"))}

CLIPPINGS = {
    f"{name} clipping={clipping}": one(run(f"clipping={clipping}"))
    for name, run in {"gpt": gpt, "resnet": resnet}.items()
    for clipping in (
        "none",
        "norm clipping.max_norm=0.3",
        "value clipping.clip_value=0.01",
        "per_module clipping.max_norm=0.1",
        "agc",
        "zclip clipping.warmup_steps=4 clipping.z_threshold=0.5",
        "adagc clipping.warmup_steps=4",
    )
}

OPTIMIZERS = {
    f"{name} optimizer={optimizer}": one(run(f"optimizer={optimizer}"))
    for name, run in {"gpt": gpt, "resnet": resnet}.items()
    for optimizer in (
        "adamw optimizer.fused=false",
        "sgd",
        "sgd optimizer.fused=false optimizer.nesterov=true",
        "stable_adamw",
        "spam optimizer.reset_interval=7 optimizer.warmup_steps=3 optimizer.theta=10.0",
    )
} | {
    "gpt optimizer=muon": one(gpt("optimizer=muon")),
    "resnet optimizer=muon": one(resnet("optimizer=muon", 2), "has no hidden matrix"),
    "gpt optimizer.decay=independent": one(gpt("optimizer.decay=independent optimizer.weight_decay=1e-3")),
}

SCHEDULES = {
    f"gpt {chosen}": one(gpt(chosen))
    for chosen in (
        "warmup=none schedule=constant",
        "warmup=cosine warmup.steps=6 schedule=wsd",
        "warmup=linear warmup.steps=6 schedule=wsd schedule.shape=linear",
        "schedule=step",
    )
}

STABILITY = {
    f"gpt {chosen}": one(gpt(chosen))
    for chosen in (
        "zloss=palm",
        "zloss=olmo",
        "qknorm=layernorm",
        "qknorm=rmsnorm",
        "softcap=gemma2",
        "averaging=ema",
        "averaging=snapshots",
        "qkclip=kimi qkclip.max_logit=0.01 optimizer=muon",
        "init=torch",
        "init=normal",
        "init=fan_in",
        "init=small",
        "init=zero_residual",
        "stability=zloss_qknorm",
        "stability=full",
        "stability=v100",
    )
} | {f"resnet init={init}": one(resnet(f"init={init}")) for init in ("fan_in", "normal", "zero_residual")}

SETTINGS = {
    "gpt grad_accum_steps": one(gpt("grad_accum_steps=2 model.dropout=0.1")),
    "gpt loss_chunk": one(gpt("loss_chunk=16 zloss=palm label_smoothing=0.1")),
    "gpt data.length_warmup": one(gpt("data.length_warmup=12")),
    "gpt determinism=strict": one(gpt("determinism=strict")),
    "gpt monitors=full": one(gpt("monitors=full report=true")),
    "gpt monitors=none": one(gpt("monitors=none", without="monitors.")),
    "gpt checkpoint=off": one(gpt("checkpoint=off", without="checkpoint.")),
    "gpt checkpoint.asynchronous": one(gpt("checkpoint.asynchronous=true checkpoint.keep=5")),
    "gpt wandb=offline": one(gpt("wandb=offline faults=label faults.at=[12]")),
    "gpt wandb lost": one(gpt("wandb=offline faults=wandb faults.at=[12]")),
    "gpt compile=true": one(gpt("compile=true steps=6 eval_every=6")),
    "resnet monitors=full": one(resnet("monitors=full")),
    "resnet grad_accum_steps": one(resnet("grad_accum_steps=2 data.augment=none label_smoothing=0.1")),
}

FAULTS = {
    f"{name} faults={fault}": one(run(f"faults={fault} guard=skip"), shows)
    for name, run in {"gpt": gpt, "resnet": resnet}.items()
    for fault, shows in {
        "input faults.at=[8]": '"skip"',
        "label faults.at=[8]": '"bad_label"',
        "ignored faults.at=[8]": '"skip"',
        "empty faults.at=[8]": '"skip"',
        "activation faults.at=[8]": '"incident"',
        "activation faults.at=[8] faults.value=inf precision=bf16": '"incident"',
        "gradient faults.at=[8]": '"incident"',
        "bitflip faults.at=[8]": "fault injected",
        "disk_full faults.at=[8] checkpoint.every=8": "fault injected",
    }.items()
} | {
    "gpt faults=gradient precision=fp16": one(gpt("faults=gradient faults.at=[12] precision=fp16"), '"skip"'),
    "gpt faults=gradient guard=off": one(gpt("faults=gradient faults.at=[12] guard=off"), "fault injected"),
    "gpt faults=plan": one(gpt(f"{PLAN} report=true"), '"skip"', "fault injected: poison"),
    "gpt forensics=off": one(gpt("faults=gradient faults.at=[12] forensics=off"), '"skip"'),
    "gpt faults=bitflip moment": one(gpt("faults=bitflip faults.at=[8] faults.where=moment"), "fault injected"),
}

RECOVERY = {
    "gpt rollback": one(
        gpt(f"{QUICK} faults=learning_rate faults.at=[23] faults.factor=1e5 report=true"), '"rollback"'
    ),
    "resnet rollback": one(resnet(f"{QUICK} faults=learning_rate faults.at=[23] faults.factor=1e5"), '"rollback"'),
    "gpt rollback of poisoned data": one(
        gpt(f"{QUICK} faults=poison faults.at=[24] faults.length=6 guard.sigma=2.0 optimizer.lr=0.03"), '"rollback"'
    ),
    "gpt halted": one(
        gpt(f"{QUICK} faults=learning_rate faults.at=[20] faults.length=60 faults.factor=1e5 guard.max_rollbacks=1", 3),
        '"halt"',
    ),
    "gpt halted by skips": one(
        gpt("guard=skip guard.max_consecutive=3 faults=input 'faults.at=[8,9,10,11]'", 3), '"halt"'
    ),
    "gpt spiky": Case(
        [
            train(
                f"experiment=spiky {GPT} steps=450 checkpoint.every=100 monitors.every=100 log_every=10 eval_every=450"
            ),
            tool("losses run losses.svg"),
        ],
        ('"rollback"',),
    ),
    "gpt killed and resumed": Case(
        [
            gpt("faults=kill faults.at=[16] model.dropout=0.1", -9),
            gpt("faults=kill faults.at=[16] model.dropout=0.1 resume=auto"),
        ],
        ('"resume"',),
    ),
    "gpt rollback, killed and resumed": Case(
        [
            gpt(
                f"{QUICK} faults=plan "
                "'faults.faults=[{kind:learning_rate,at:[23],factor:1e5},{kind:kill,at:[43]}]'",
                -9,
            ),
            train("resume=run"),
        ],
        ('"rollback"', '"resume"'),
    ),
    "resnet resumed": Case([resnet("steps=6 optimizer=sgd"), train("resume=run steps=12")], ('"resume"',)),
    "gpt resumed, everything stateful": Case(
        [
            gpt(
                "clipping=zclip clipping.warmup_steps=3 optimizer=muon qkclip=kimi precision=bf16_params steps=12 "
                "schedule=constant"
            ),
            train("resume=run steps=24"),
        ],
        ('"resume"',),
    ),
    "gpt resumed with fp16": Case(
        [gpt("precision=fp16 clipping=adagc clipping.warmup_steps=3 steps=12"), train("resume=run steps=24")]
    ),
    "gpt from a checkpoint, in a new folder": Case(
        [gpt(), train("resume=run/checkpoints/step-00000016 steps=30 hydra.run.dir=other")], ('"resume"',)
    ),
    "gpt finished already": Case([gpt(), gpt("resume=auto"), gpt("", 2)], ("is finished already", "already holds run")),
}

PLUGINS = {
    "plug-in": Case(
        [train(f"{OWN} clipping=mine optimizer.lr=0.03 report=true"), tool("sample run", 2)], ("val accuracy",)
    ),
    "plug-in, guarded": Case(
        [train(f"{OWN} data.poisoned_step=7"), tool("diagnose run"), tool("replay run/incidents/step-00000008 --json")],
        ('"bad_data"',),
    ),
    "plug-in, interrupted and resumed": Case(
        [train(f"{OWN} model.stops_at=12", 75), train("resume=run")], ('"preempt"', '"resume"')
    ),
    "plug-in, a broken contract": one(train(f"{OWN} data.broken=true", 2)),
    "plug-in, an error of its own": one(train(f"{OWN} model.raises_at=5", 1), "too sad"),
    "plug-in, a misspelt key": one(train(f"{OWN} model.wdith=3", 2), "did you mean"),
    "script of the user's": Case(
        [gpt("steps=6"), Command("python", ["../plugin/script.py", "run"])], ("columns", "clipped by hand")
    ),
}

SWEEPS = {
    "sweep": Case(
        [
            train(f"-m {GPT} clipping=none,norm seed=0,1 steps=12 hydra.sweep.dir=many report=true"),
            train("resume=many"),
            tool("compare many --csv runs.csv"),
            tool("compare many --each --wide --sort seed --html page.html"),
            tool("compare many/0 many/3 --rows 1"),
            tool("losses many losses.svg"),
        ],
        ("best ", "(before)"),
    ),
    "sweep with runs that fail": Case(
        [
            train(
                f"-m {GPT} steps=12 hydra.sweep.dir=many optimizer.lr=-1,1e-2,1e3 guard.max_rollbacks=1 "
                "guard.max_consecutive=3",
                2,
            ),
            tool("compare many"),
        ]
    ),
}

SHARDED = f"{less(GPT, 'monitors.')} monitors=none parallel=fsdp"
RANKS = {
    "two ranks, ddp": one(torchrun(f"{GPT} parallel=ddp model.dropout=0.1 clipping=zclip report=true")),
    "two ranks, ddp resnet bf16": one(torchrun(f"{RESNET} precision=bf16")),
    "two ranks, ddp, a fault on one": one(
        torchrun(f"{GPT} guard=skip faults=gradient faults.at=[12] faults.rank=1"), '"incident"'
    ),
    "two ranks, fsdp, then one": Case(
        [torchrun(f"{SHARDED} steps=12"), train("resume=run steps=24 parallel=auto")], ('"resume"',)
    ),
    "two ranks, fsdp, rollback": one(
        torchrun(f"{SHARDED} {QUICK} faults=learning_rate faults.at=[23] faults.factor=1e5"), '"rollback"'
    ),
    "two ranks, a bad batch size": one(torchrun(f"{GPT} batch_size=3", 1), "does not divide among 2 ranks"),
}

TOOLS = {
    "tools on a run": Case(
        [
            gpt("report=true"),
            tool("sample run"),
            tool("sample run --best --tokens 30"),
            tool("sample run --prompt ab --tokens 30 --temperature 0 --seed 4"),
            tool("sample run/checkpoints/step-00000016 --tokens 30 --top-k 3"),
            tool("compare run"),
            tool("compare run --csv runs.csv --html page.html"),
            tool("losses run losses.svg"),
            tool("diagnose run"),
            tool("diagnose run --json"),
        ],
        ("no incidents",),
    ),
    "tools on an incident": Case(
        [
            gpt("faults=gradient faults.at=[12] model.dropout=0.1 precision=bf16"),
            tool("diagnose run"),
            tool("diagnose run --json"),
            tool("replay run/incidents/step-00000013"),
            tool("replay --json run/incidents/step-00000013 precision=fp32"),
            tool("replay run/incidents/step-00000013 stability=qknorm grad_accum_steps=2"),
            tool("replay run/incidents/step-00000013 optimizer.lr=1", 2),
            tool("replay run/incidents/step-00000013 precison=bf16", 2),
            tool("replay run/incidents/step-00000014", 2),
        ],
        ("  folder ",),
    ),
    "tools on nothing": Case(
        [
            tool("diagnose nowhere", 2),
            tool("compare nowhere", 2),
            tool("sample nowhere", 2),
            tool("losses nowhere out.svg", 2),
            tool("prepare nowhere out", 2),
            tool("sync nowhere", 2),
            tool("nothing", 2),
            tool("", 2),
        ]
    ),
}

HELP = {"train.py --help": one(train("--help"), "Groups (group=option)"), "stabletrain --help": one(tool("--help"))}
HELP |= {
    f"stabletrain {name} --help": one(tool(f"{name} --help"))
    for name in ("prepare", "sample", "compare", "losses", "diagnose", "replay", "sync", "wandb-report")
}
HELP |= {
    f"--cfg job {chosen}": one(train(f"{chosen} --cfg job"))
    for chosen in (
        "model=gpt_mini",
        "model=gpt2 data=tokens",
        "model=resnet50 data=cifar10",
        *(
            f"experiment={name}"
            for name in (
                "resnet_digits",
                "nf_resnet_digits",
                "resnet20_cifar10",
                "gpt2_tokens",
                "lr_sensitivity",
                "precision_stability",
                "warmup_rate",
                "clipping_bad_batches",
                "init_depth",
                "cards",
            )
        ),
    )
}

REFUSED = {
    f"refused: {typed}": one(train(f"{typed} hydra.run.dir=run", 2))
    for typed in (
        "optimizer.lrr=1",
        "presision=bf16",
        "clipping=norn",
        "steps=abc",
        "steps=1e3",
        "steps=0",
        "steps=[",
        "steps",
        "+foo=1",
        "~guard",
        "init=null",
        "seed=-1",
        "optimizer.lr=1e-3,1e-1",
        "warmup.steps=2000",
        "grad_accum_steps=3",
        "data.length_warmup=2000",
        "model=resnet20",
        "model=resnet20 data=digits stability=full",
        "qkclip=kimi qknorm=rmsnorm",
        "data.path=x",
        "zloss.strength=1",
        "resume=nowhere",
        "resume=",
        "data=text",
        "data=text data.path=nowhere",
        "device=cuda:9",
        "device=tpu",
        "optimizer.lr=-1",
        "clipping.max_norm=0",
        "guard.window=0",
        "precision=tf32",
        "model.n_head=3",
        "loss_chunk=0",
        "faults=gradient faults.at=[]",
        "parallel=fsdp",
        "clipping=agc,,norm -m",
    )
}

CASES: dict[str, Case] = {
    name: case
    for part in (
        RANKS,  # the longest first, so that both cores finish at about the same time
        SETTINGS,
        RECOVERY,
        SWEEPS,
        PLUGINS,
        TOOLS,
        MODELS,
        PRECISIONS,
        CLIPPINGS,
        OPTIMIZERS,
        SCHEDULES,
        STABILITY,
        FAULTS,
        HELP,
        REFUSED,
    )
    for name, case in part.items()
}
