"""Law 6: every option composes, builds and trains; every changed key changes the result or is rejected."""

import hashlib
import json
from functools import cache
from pathlib import Path

import pytest
import yaml
from PIL import Image

from stabletrain.config.checks import check
from stabletrain.config.make import leaves
from stabletrain.errors import ConfigError
from stabletrain.extension import NoPage
from stabletrain.tracking.metrics import read_jsonl
from stabletrain.trainer.build import build
from stabletrain.trainer.loop import train
from tests.reliability.ends import CLOCK
from tests.runs import CONF, composed

GROUPS = sorted(folder.name for folder in CONF.iterdir() if folder.is_dir())
OPTIONS = [(group, file.stem) for group in GROUPS for file in sorted((CONF / group).glob("*.yaml"))]

SMALL = ["steps=4", "batch_size=4", "eval_every=2", "eval_batches=2", "log_every=2", "checkpoint.every=2", "device=cpu"]
SMALL_GPT = [
    "data=text",
    "data.path=TEXT",
    "data.block_size=16",
    "model.n_layer=2",
    "model.n_head=2",
    "model.n_embd=16",
]
SMALL_RESNET = ["model=resnet20", "data=digits", "model.depth=8"]
LARGE_RESNET = ["data=digits", "batch_size=16", "steps=2", "eval_batches=1", "precision=fp32"]
LARGE_RESNET += ["guard=skip", "forensics=off", "checkpoint=off"]

WITH = {
    "model=gpt2": [
        "model.n_layer=2",
        "model.n_head=2",
        "model.n_embd=16",
        "data=text",
        "data.path=TEXT",
        "data.block_size=16",
    ],
    **{f"model=gpt2_{size}": SMALL_GPT for size in ("medium", "large", "xl")},
    "model=llama_160m": [*SMALL_GPT, "model.n_kv_head=1"],
    "model=resnet20": ["data=digits", "model.depth=8"],
    "model=nf_resnet20": ["data=digits", "model.depth=8"],
    "model=resnet18": LARGE_RESNET,
    "model=resnet50": LARGE_RESNET,
    "data=stdlib": ["data.block_size=16", "model.n_layer=2", "model.n_head=2", "model.n_embd=16"],
    "data=text": SMALL_GPT[1:],
    "data=tokens": ["data.path=SHARDS", "data.block_size=16", "model.n_layer=2", "model.n_head=2", "model.n_embd=16"],
    "data=digits": ["model=resnet20", "model.depth=8"],
    "data=cifar10": ["model=resnet20", "model.depth=8", "data.root=CIFAR"],
    "data=imagefolder": ["model=resnet20", "model.depth=8", "data.path=IMAGES", "data.image_size=8"],
    "experiment=gpt_stdlib": ["data.block_size=16", "model.n_layer=2", "model.n_head=2", "model.n_embd=16"],
    "experiment=gpt2_tokens": [
        "data.path=SHARDS",
        "data.block_size=16",
        "model.n_layer=2",
        "model.n_head=2",
        "model.n_embd=16",
        "grad_accum_steps=2",
    ],
    "experiment=lr_sensitivity": SMALL_GPT,
    "experiment=catalogue": [*SMALL_GPT, "checkpoint=default", "forecast=default", "wandb=offline"],
    "experiment=foretold": [*SMALL_GPT, "warmup.steps=2"],
    "experiment=healed": [*SMALL_GPT, "warmup.steps=2"],
    "experiment=resnet_digits": ["model.depth=8"],
    "experiment=nf_resnet_digits": ["model.depth=8"],
    "experiment=resnet20_cifar10": ["model.depth=8", "data.root=CIFAR"],
}
"""Overrides that make an option small or give it the data it needs; other options run on `SMALL_GPT`.

Large ResNets take two steps, and write no checkpoints and copy no state, which would take up to 300 MB each time. They
leave one pixel an image, and four are too few to normalise. They spike at this rate: nothing looks why.
"""

REFUSED_WITH_RESNET = {
    "qknorm=layernorm": "no attention",
    "qknorm=rmsnorm": "no attention",
    "softcap=gemma2": "no attention",
    "qkclip=kimi": "no attention",
    "softmax=sink": "no attention",
    "attention_gate=sigmoid": "no attention",
    "norm_placement=sandwich": "no attention",
    "norm_placement=reordered": "no attention",
    "norm_placement=post": "no attention",
    "stability=qknorm": "no attention",
    "stability=zloss_qknorm": "no attention",
    "stability=full": "no attention",
    "stability=v100": "no attention",
    "init=gpt2": "init=gpt2 is for tokens",
    "init=small": "init=small is for tokens",
    "optimizer=muon": "no hidden matrix",
    "precision=fp8": "no linear layer",
}
"""Options that a ResNet rejects, and part of the message."""

REFUSED_HERE = {
    "precision=tf32": "precision=tf32 on cpu",
    "parallel=ddp": "parallel=ddp needs torchrun",
    "parallel=fsdp": "parallel=fsdp needs torchrun",
    "parallel=hsdp": "parallel=hsdp needs torchrun",
    "objective=mse": "objective=mse takes numbers",
    "objective=bce": "return a tensor of the targets' shape",
}
"""Options that one process on a CPU, or class ids as targets, reject, and part of the message.

tests/parallel/ covers `parallel`, tests/stability/objective/ and tests/test_examples_objectives.py `objective`.
"""

CHANGED: dict[str, object] = {
    "steps": 5,
    "batch_size": 6,
    "grad_accum_steps": 2,
    "seed": 1,
    "label_smoothing": 0.1,
    "loss_chunk": 7,
    "eval_every": 3,
    "eval_batches": 1,
    "log_every": 1,
    "device": "cuda:99",
    "compile": True,
    "report": False,
    "init_from": "nowhere",
    "init_strict": False,
    "resume": "auto",
    "data.block_size": 8,
    "data.length_warmup": 3,
    "data.length_start": 4,
    "data.val_fraction": 0.3,
    "data.path": "OTHER",
    "data.root": "nowhere",
    "data.download": True,
    "data.mean": [0.4],
    "data.std": [0.4],
    "data.augment": "none",
    "data.image_size": 12,
    "data.cache_mb": 0,
    "data.workers": 3,
    "optimizer.lr": 0.01,
    "optimizer.betas": [0.8, 0.9],
    "optimizer.eps": 0.01,
    "optimizer.weight_decay": 0.5,
    "optimizer.momentum": 0.5,
    "optimizer.nesterov": {False: True, True: False},
    "optimizer.fused": False,
    "optimizer.decay": "independent",
    "optimizer.cautious_decay": True,
    "optimizer.theta": 1.5,
    "optimizer.reset_interval": 3,
    "optimizer.warmup_steps": 1,
    "optimizer.ns_steps": 1,
    "optimizer.no_decay": [],
    "optimizer.scale": "original",
    "optimizer.per_head": True,
    "optimizer.momentum_low": 0.5,
    "optimizer.momentum_warmup": 3,
    "optimizer.momentum_cooldown": 2,
    "precision.fp32_modules": ["head"],
    "precision.bf16_modules": ["blocks.0.mlp.up"],
    "precision.recipe": "rowwise",
    "precision.init_scale": 2.0**17,
    "precision.growth_interval": 1,
    "precision.min_scale": 2.0**41,
    "clipping.max_norm": 0.01,
    "clipping.clip_value": 1e-6,
    "clipping.clipping": 1e-6,
    "clipping.eps": 1.0,
    "clipping.z_threshold": 0.01,
    "clipping.alpha": 0.5,
    "clipping.warmup_steps": 2,
    "clipping.growth": 1.5,
    "clipping.beta": 0.5,
    "warmup.steps": 3,
    "schedule.final_ratio": 0.9,
    "schedule.decay_share": 0.9,
    "schedule.shape": "linear",
    "schedule.milestones": [0.1],
    "schedule.gamma": 0.5,
    "schedule.weight_decay": "cosine",
    "schedule.weight_decay_final_ratio": 0.5,
    "zloss.coefficient": 0.1,
    "qknorm.eps": 0.1,
    "softcap.attention_cap": 0.1,
    "softcap.final_cap": 0.1,
    "softcap.attention": "flex",
    "qkclip.max_logit": 1e-6,
    "attention_gate.per": "element",
    "averaging.decay": 0.1,
    "averaging.warmup": 100.0,
    "averaging.every": 2,
    "averaging.start_share": 0.1,
    "init.std": 0.1,
    "guard.max_consecutive": 0,
    "guard.sigma": "inf",
    "guard.slow": "loud",
    "guard.slow_rate": 0,
    "guard.keep": "all_but_guilty",
    "guard.escalate": "sometimes",
    "guard.whatif_steps": 0,
    "guard.window": 19,
    "guard.checksum_every": -1,
    "guard.recheck_every": -1,
    "guard.recheck_across": "ranks",
    "guard.check_update": "sometimes",
    "guard.healthy_after": 5,
    "guard.patience": 3,
    "guard.snapshots": 0,
    "guard.snapshot_every": 3,
    "guard.skip_batches": 4,
    "guard.max_rollbacks": -1,
    "guard.lr_factor": 0.25,
    "guard.lr_steps": 1,
    "faults.at": [2],
    "faults.value": 7,
    "faults.seed": 5,
    "faults.rank": 1,
    "faults.module": "head",
    "faults.parameter": "head.weight",
    "faults.where": "moment",
    "faults.bit": 22,
    "faults.factor": 3.0,
    "faults.length": 2,
    "faults.faults": [{"kind": "label", "at": [1]}],
    "parallel.find_unused_parameters": True,
    "parallel.compare": False,
    "parallel.shard": 1,
    "parallel.replicate": 1,
    "parallel.reshard_after_forward": False,
    "parallel.start_timeout": 60,
    "parallel.timeout": 60,
    "monitors.every": 2,
    "monitors.margin_every": 0,
    "forecast.horizon": 50,
    "forecast.action": "checkpoint",
    "monitors.hessian_iterations": 0,
    "monitors.hessian_samples": 1,
    "checkpoint.every": 1,
    "checkpoint.keep": 1,
    "checkpoint.keep_best": False,
    "forensics.max_incidents": 1,
    "forensics.max_seconds": 1e-9,
    "forensics.keep_state": False,
    "checkpoint.asynchronous": False,
    "wandb.mode": "nonsense",
    "wandb.project": "other",
    "wandb.entity": "us",
    "wandb.group": "a-group",
    "wandb.name": "a-name",
    "wandb.tags": ["a-tag"],
    "model.modality": "neither",
    "data.modality": "neither",
    "init.modality": "neither",
    "model.vocab_size": 300,
    "model.block_size": 8,
    "model.n_layer": 1,
    "model.n_head": 4,
    "model.n_kv_head": {None: 1, 1: 2},
    "model.n_embd": 24,
    "model.position": {"rope": "learned", "learned": "rope"},
    "model.norm": "rmsnorm",
    "model.norm_eps": 0.1,
    "model.mlp": "swiglu",
    "model.swiglu_limit": 0.1,
    "model.bias": {False: True, True: False},
    "model.tied_head": {False: True, True: False},
    "model.dropout": 0.3,
    "model.embedding_gradient": 0.1,
    "model.alpha": 0.5,
    "model.skipinit": True,
    "model.depth": {8: 14, 18: 34},
    "model.num_classes": 12,
    "model.in_channels": 3,
    "model.stem": "small",
}
"""A changed value for every key; a dict maps the default to the changed value."""


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Writes small data of every format; returns the folders by the names used above."""
    root = tmp_path_factory.mktemp("data")
    (root / "text.txt").write_text("".join(f"line {i} of some text, {i * i}\n" for i in range(400)))
    (root / "other.txt").write_text("quite another text. " * 300)
    from stabletrain.cli.commands import main

    assert main(["prepare", str(root / "text.txt"), str(root / "shards"), "--val-fraction", "0.2"]) == 0
    assert main(["prepare", str(root / "other.txt"), str(root / "other_shards"), "--val-fraction", "0.2"]) == 0
    for folder, shade in (("images", 40), ("other_images", 90)):
        for split in ("train", "val"):
            for label in range(3):
                (root / folder / split / f"class{label}").mkdir(parents=True)
                for i in range(6):
                    picture = Image.effect_noise((12, 12), shade + 10 * label + i).convert("RGB")
                    picture.save(root / folder / split / f"class{label}" / f"{i}.png")
    (root / "cifar").mkdir()  # see pretend_cifar
    names = {"TEXT": "text.txt", "SHARDS": "shards", "IMAGES": "images", "FLAT": "images/train", "CIFAR": "cifar"}
    return {name: str(root / file) for name, file in names.items()} | {
        "OTHER:text": str(root / "other.txt"),
        "OTHER:tokens": str(root / "other_shards"),
        "OTHER:imagefolder": str(root / "other_images"),
    }


@pytest.fixture(autouse=True)
def pretend_cifar(monkeypatch):
    """Replaces torchvision's CIFAR10, which is 170 MB, by random images; a missing folder raises the same error."""
    import numpy as np
    import torchvision

    class CIFAR10:
        classes = [f"class{i}" for i in range(10)]  # noqa: RUF012

        def __init__(self, root, train=True, download=False, **_):
            if not Path(root).is_dir() and not download:
                raise RuntimeError("Dataset not found or corrupted. You can use download=True to download it")
            if download and not Path(root).is_dir():
                raise OSError("no network here")
            generator = np.random.default_rng(int(train))
            self.data = generator.integers(0, 256, (40, 32, 32, 3), dtype=np.uint8)
            self.targets = [i % 10 for i in range(40)]

    monkeypatch.setattr(torchvision.datasets, "CIFAR10", CIFAR10)


def filled(overrides, places):
    """Returns the overrides with the names of folders replaced by their paths."""
    return [f"{key}={places.get(value, value)}" for key, _, value in (o.partition("=") for o in overrides)]


def observe(folder, overrides):
    """Returns everything a run leaves behind, except times: what a live key must change."""
    with composed(*overrides) as cfg:
        check(cfg)
        job = build(cfg, folder)
        train(job)
        filed = cfg.wandb if "mode" in cfg.wandb else {}
        filed = {key: str(value) for key, value in filed.items()}
    weights = hashlib.sha256()
    for value in job.state.model.state_dict().values():
        weights.update(value.float().contiguous().numpy().tobytes())
    lines = [*read_jsonl(folder / "metrics.jsonl"), *read_jsonl(folder / "events.jsonl")]
    return {
        "weights": weights.hexdigest(),
        "lines": [{k: repr(v) for k, v in line.items() if k not in CLOCK} for line in lines],
        "kept": sorted(path.name for path in (folder / "checkpoints").glob("*")),
        "incidents": sorted(f"{path.parent.name}/{path.name}" for path in folder.glob("incidents/*/*")),
        "how": [job.state.optimizer.defaults.get("fused"), job.state.model._compiled_call_impl is not None],
        "background": getattr(job.saved.checkpoints, "asynchronous", None),
        "wandb": filed,
        "data": json.loads((folder / "run.json").read_text())["data"],
    }


def observe_or_refusal(folder, overrides):
    """Returns what a run leaves behind, or the message with which it was rejected."""
    try:
        return observe(folder, overrides)
    except ConfigError as refused:
        return str(refused)


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory):
    """Caches what an option's run leaves behind before any key is changed."""
    return cache(lambda *overrides: observe_or_refusal(tmp_path_factory.mktemp("unchanged"), overrides))


def overrides_for(group, option):
    """Returns a small run with this option."""
    choice = f"{group}={option}"
    others = WITH.get(choice, SMALL_GPT)
    off = "checkpoint=off" in (choice, *others)
    small = [o for o in SMALL if not (off and o.startswith("checkpoint."))]
    wandb = [] if "wandb" in (group, option) else ["wandb=disabled"]
    return [choice, *small, *wandb, *others]


def lies_beside(group, option):
    """Whether an option's class, or that of an option which it chooses, lies in `stabletrain/beside/`."""
    text = (CONF / group / f"{option}.yaml").read_text()
    return "_target_: stabletrain.beside" in text or "override /faults" in text


ALONE = {
    "model": "needs sizes and data of its own",
    "data": "needs a folder, or a model that takes it",
    "experiment": "chooses all others",
    "stability": "chooses others",
    "qkclip": "is refused beside a norm of the queries",
    "wandb": "writes what another option may not",
    "checkpoint": "writes what is looked for",
}
"""Groups whose options are tried alone, and why. Each other option is tried in a row with one of each other group."""

IN_THE_FAST_TIER = ("precision=tf32", "optimizer=muon", "clipping=adagc", "guard=rollback", "stability=full")
"""One that is refused, and those that change most of a step: tried alone; the slow tier tries the others."""


def is_alone(group, option):
    """Whether an option is tried alone."""
    return group in ALONE or f"{group}={option}" in {*WITH, *REFUSED_HERE, *IN_THE_FAST_TIER}


def in_rows(options):
    """Returns options in rows, of each group at most one."""
    groups: dict[str, list[str]] = {}
    for group, option in options:
        groups.setdefault(group, []).append(option)
    longest = max(map(len, groups.values()))
    return [[(group, each[row]) for group, each in groups.items() if row < len(each)] for row in range(longest)]


def typed(row):
    """Returns a row as it is typed."""
    return " ".join(f"{group}={option}" for group, option in row)


def logged(row):
    """Returns the option of `wandb` with a row: a fault of it needs a folder of W&B's."""
    return ["wandb=offline" if ("faults", "wandb") in row else "wandb=disabled"]


def row_lies_beside(row):
    """Whether the class of one of a row's options lies in `stabletrain/beside/`."""
    return any(lies_beside(*each) for each in row)


def losses(seen):
    """Returns the training losses that a run has logged."""
    return [float(line["train/loss"]) for line in seen["lines"] if "train/loss" in line]


@pytest.mark.beside(when=lambda group, option: lies_beside(group, option))
@pytest.mark.slow(unless=lambda group, option: f"{group}={option}" in IN_THE_FAST_TIER)
@pytest.mark.parametrize(("group", "option"), [each for each in OPTIONS if is_alone(*each)], ids=lambda value: value)
def test_an_option_trains_or_says_why_not(tmp_path, monkeypatch, places, unchanged, group, option):
    monkeypatch.setenv("WANDB_MODE", "offline")
    chosen = filled(overrides_for(group, option), places)
    if refused := REFUSED_HERE.get(f"{group}={option}"):
        with pytest.raises(ConfigError, match=refused):
            observe(tmp_path, chosen)
        return
    seen = observe(tmp_path, chosen) if group == "wandb" else unchanged(*chosen)
    assert not isinstance(seen, str), seen
    assert losses(seen)
    saved = ["step-00000002", "step-00000004"]  # and before them the state for a rollback
    assert seen["kept"][-2:] == ([] if "checkpoint=off" in chosen else saved)


@pytest.mark.beside(when=row_lies_beside)
@pytest.mark.slow
@pytest.mark.parametrize("row", in_rows(each for each in OPTIONS if not is_alone(*each)), ids=typed)
def test_every_other_option_trains_beside_others(tmp_path, places, row):
    seen = observe(tmp_path, filled([*typed(row).split(), *SMALL, *logged(row), *SMALL_GPT], places))
    assert losses(seen)
    assert all(0 < loss < 20 for loss in losses(seen))
    assert seen["kept"][-2:] == ["step-00000002", "step-00000004"]


SAME_FOR_EVERY_MODEL = ("model", "data", "experiment", "warmup", "schedule", "wandb", "checkpoint", "determinism")
"""Groups that choose the model, or that never see it."""


def with_resnet():
    """Returns the options that a ResNet takes, in rows: one of each group, or one that is tried alone."""
    taken = [
        (group, option)
        for group, option in OPTIONS
        if group not in SAME_FOR_EVERY_MODEL and f"{group}={option}" not in {*REFUSED_WITH_RESNET, *REFUSED_HERE}
    ]
    return in_rows(each for each in taken if each[0] not in ALONE) + [[each] for each in taken if each[0] in ALONE]


@pytest.mark.parametrize("choice", sorted({*REFUSED_WITH_RESNET, *REFUSED_HERE}))
def test_an_option_that_does_not_fit_a_resnet_says_why(tmp_path, choice):
    chosen = [o for o in overrides_for(*choice.split("=")) if o not in SMALL_GPT]
    with pytest.raises(ConfigError, match=REFUSED_WITH_RESNET.get(choice) or REFUSED_HERE.get(choice)):
        observe(tmp_path, [*chosen, *SMALL_RESNET])


@pytest.mark.beside(when=row_lies_beside)
@pytest.mark.slow
@pytest.mark.parametrize("row", with_resnet(), ids=typed)
def test_every_other_option_trains_a_resnet_too(tmp_path, row):
    seen = observe(tmp_path, [*typed(row).split(), *SMALL, *logged(row), *SMALL_RESNET])
    assert losses(seen)
    assert all(0 < loss < 20 for loss in losses(seen))


@cache
def tree_of(group, option):
    """Returns what this option's YAML holds beside its defaults."""
    tree = yaml.safe_load((CONF / group / f"{option}.yaml").read_text()) or {}
    return {key: value for key, value in tree.items() if key != "defaults"}


def keys_of(group, option):
    """Returns the keys of this option's YAML."""
    return [
        key
        for key, value in leaves(tree_of(group, option))
        if key and key != "_target_" and not str(value).startswith("${")
    ]


def needs_faults(group, option, key):
    """Whether a key shows its effect only with an injected fault, or with a forecast (`needed_for`)."""
    return group in ("faults", "forecast", "forensics", "guard") or (group, key) == ("checkpoint", "keep_best")


def class_of(group, option):
    """Returns what an option instantiates."""
    return tree_of(group, option).get("_target_")


KEYS = [
    (group, option, key)
    for group, option in OPTIONS
    if group not in ("experiment", "stability")
    for key in keys_of(group, option)
]
OF_ONE_CLASS = {(group, class_of(group, option), key): (group, option, key) for group, option, key in reversed(KEYS)}
"""One option for each key of a class: what a class does with a key does not depend on the option's values."""
TOP = [key for key in yaml.safe_load((CONF / "config.yaml").read_text()) if key not in ("defaults", "hydra")]


def changed(key, chosen):
    """Returns the key's changed value as an override."""
    value = CHANGED[key]
    if isinstance(value, dict):
        with composed(*chosen) as cfg:
            group, name = key.split(".")
            value = value[cfg[group][name]]
    return json.dumps(value).replace('"', "") if not isinstance(value, str) else value


@pytest.mark.beside(when=lambda group, option, key: needs_faults(group, option, key))
@pytest.mark.slow
@pytest.mark.parametrize(("group", "option", "key"), sorted(OF_ONE_CLASS.values()), ids=lambda value: value)
def test_every_key_of_every_option_is_alive(tmp_path, monkeypatch, places, unchanged, group, option, key):
    name = f"{group}.{key}"
    assert name in CHANGED, f"{name} is new: give CHANGED a value that must change a run"
    chosen = filled(overrides_for(group, option), places)
    if (group, option, key) in OF_IMAGES:
        chosen = [*(o for o in chosen if not o.startswith(("data", "model"))), *SMALL_RESNET]
    if f"{group}={option}" in REFUSED_HERE:
        pytest.skip(f"refused as a whole here; {SEEN_ELSEWHERE.get(name, 'seen on another machine')}")
    if group == "forecast":  # its keys act on an alarm only
        from tests.beside.forecast.given import LOUD

        monkeypatch.setattr("stabletrain.beside.forecast.forecast.fitted", lambda: LOUD)
    extra = needed_for(group, option, key, places)
    if group not in WATCHING and option not in OF_FOLDERS:
        chosen = [*(o for o in chosen if not o.startswith("checkpoint") and o not in QUIET), *QUIET]
    if extra is None:
        pytest.skip(SEEN_ELSEWHERE.get(name, "alive only on another machine: tests/stability/precision/test_modes.py"))
    base = unchanged(*chosen, *extra)
    assert (option, name) in REFUSED_WITHOUT or not isinstance(base, str), base
    value = NOT_HERE.get((group, option, key)) or changed(name, chosen)
    if value == "OTHER":
        value = places[f"OTHER:{option}"]
    other = observe_or_refusal(tmp_path / "other", [*chosen, *extra, f"{name}={value}"])
    if isinstance(other, str):
        assert key in other or group in other
    assert other != base, f"{name}={value} changed nothing"


QUIET = ["checkpoint=off", "forensics=off", "monitors=none", "report=false"]
"""For keys that must change the training itself: half of a short run's time goes into what is written beside it."""

WATCHING = ("checkpoint", "forensics", "monitors", "guard", "forecast", "wandb")
"""Groups whose keys may change what is written instead."""

OF_FOLDERS = ("kill", "disk_full", "wandb")
"""Faults of what is written."""

SEEN_ELSEWHERE = {
    "data.cache_mb": "tests/data/test_imagefolder.py",
    "data.workers": "tests/data/test_imagefolder.py",
    "parallel.find_unused_parameters": "tests/parallel/test_distributed.py",
    "parallel.compare": "tests/parallel/test_ddp.py",
    "parallel.reshard_after_forward": "tests/parallel/test_distributed.py",
    "parallel.start_timeout": "tests/parallel/test_ranks.py",
    "parallel.timeout": "tests/parallel/test_ranks.py",
}
"""Keys that affect only the cost of a run, or only several processes, and the test that shows their effect."""

REFUSED_WITHOUT = {("cifar10", "data.download"), ("imagefolder", "data.val_fraction")}
"""Options, and keys without which their run here is refused."""

OF_IMAGES = {("faults", "poison", "factor")}
"""Keys that matter for images only."""


def needed_for(group, option, key, places):
    """Returns overrides under which a key takes effect; None if it cannot take effect in a run here."""
    name = f"{group}.{key}"
    if group == "precision" and option == "auto":
        return None  # the three numbers only matter on GPUs where auto selects fp16
    if (group, key) == ("checkpoint", "keep_best"):
        return [
            "checkpoint.keep=1",
            "checkpoint.every=1",
            "checkpoint.asynchronous=false",  # otherwise its events come in random order
            "eval_every=1",
            "faults=learning_rate",  # the loss must rise too, so that the last is not the best
            "faults.at=[4]",
            "faults.factor=10000",
            "faults.length=2",
            "guard=off",
            "steps=6",
        ]
    if (group, option) == ("model", "resnet18"):
        return ["steps=1"]
    if name in SEEN_ELSEWHERE:
        return None
    if name == "data.download":
        return ["data.root=nowhere"]
    if name == "schedule.weight_decay_final_ratio":
        return ["schedule.weight_decay=cosine"]
    if name == "optimizer.momentum_low":
        return ["optimizer.momentum_warmup=3"]
    if name == "data.val_fraction" and option == "imagefolder":
        return [f"data.path={places['FLAT']}"]
    if name == "warmup.steps":
        return ["schedule=cosine"]
    if group == "schedule":
        return ["warmup=linear", "steps=8"]
    if (group, option) == ("optimizer", "spam"):
        return ["optimizer.reset_interval=4", "optimizer.warmup_steps=2", "steps=8"]
    if option == "adagc":
        return ["clipping.warmup_steps=1", "steps=8"]
    if option == "update_norm":
        loose = ["clipping.z_threshold=0.5", "clipping.warmup_steps=4", "steps=12"]
        return [
            *loose,
            "optimizer=adamw",
            "optimizer.betas=[0,0.99]",
        ]  # with momentum the first updates are the longest
    if option == "zclip" and key != "max_norm":
        loose = ["clipping.max_norm=100", "clipping.z_threshold=0.5", "clipping.warmup_steps=4"]
        return [*loose, "steps=12", "warmup=none", "batch_size=1", "optimizer.lr=1e-5"]  # the norms must rise and fall
    if group == "guard":  # a far too large update: endless spikes, or a rollback
        lost = ["faults=learning_rate", "faults.at=[4]", "faults.factor=3e3", "steps=16", "warmup=none"]
        quick = ["patience=2", "snapshot_every=2", "healthy_after=1", "skip_batches=1", "lr_steps=3"]
        return lost + [f"guard.{value}" for value in quick if option == "rollback"]
    if group == "forensics":  # two bad steps with a good one between
        return ["faults=label", "faults.at=[0,2]"]
    if group == "faults" and option not in ("plan", "spiky"):
        placed = key in ("seed", "module", "parameter") and option in SOFT
        # An update that is not finite is undone, and its step taken again: nothing of it is left.
        soft = ["faults.value=50"] if placed or (option == "optimizer" and key != "value") else []
        return ["faults.at=[1]", *soft]
    if name == "model.swiglu_limit":
        return ["model.mlp=swiglu"]
    if name == "data.length_start":
        return ["data.length_warmup=3"]
    return []


SOFT = ("activation", "gradient", "optimizer")
"""Faults that must be finite for their place to matter: otherwise every place has the same result."""

NOT_HERE = {
    ("faults", "kill", "at"): "[]",
    ("faults", "disk_full", "rank"): "-1",
    ("faults", "kill", "rank"): "-1",
    ("faults", "wandb", "at"): "[]",
}
"""Values that must be rejected, for keys whose effect would end this process, or that have nothing to act on here.

tests/beside/faults/test_in_io.py and test_planned.py show their effect.
"""


@pytest.mark.slow(unless=lambda key: key in ("compile", "label_smoothing"))
@pytest.mark.parametrize("key", TOP)
def test_every_top_level_key_is_alive(tmp_path, places, unchanged, key, monkeypatch):
    assert key in CHANGED, f"{key} is new: give CHANGED a value that must change a run"
    chosen = filled(["wandb=disabled", *SMALL, *SMALL_GPT], places)
    if key == "compile":  # jaxtyping's checks cannot be traced; tests/trainer/test_compile_warmup.py trains compiled
        tried = []
        monkeypatch.setattr(
            "stabletrain.trainer.parts.warm_up_compiled", lambda *_, **how: tried.append(how["must"]) or ({}, "tried")
        )
        for number, choice in enumerate(("auto", "false", "true")):
            with composed(*chosen, f"compile={choice}") as cfg:
                build(cfg, tmp_path / str(number))
        assert tried == [True], "on a CPU only true compiles, and then it must"
        return
    if key == "report":  # tests/beside/comparison/pages/test_at_end.py checks the page itself
        with composed(*chosen, "report=false") as cfg:
            assert type(build(cfg, tmp_path).output.page) is NoPage
        return
    if key == "resume":  # a finished run is not trained again, but logs the resume
        observe(tmp_path, chosen)
        again = observe(tmp_path, [*chosen, "resume=auto"])
        assert [line["event"] for line in again["lines"] if "event" in line][-1] == repr("resume")
        return
    base = unchanged(*chosen)
    other = observe_or_refusal(tmp_path / "other", [*chosen, f"{key}={changed(key, chosen)}"])
    if isinstance(other, str):
        assert key in other
    assert other != base, f"{key} changed nothing"


def test_every_key_has_a_changed_value():
    keys = {f"{group}.{key}" for group, _, key in KEYS}
    assert keys <= set(CHANGED), "give CHANGED a value for each that must change a run"


def test_no_changed_value_is_left_over():
    known = {f"{group}.{key}" for group, _, key in KEYS} | set(TOP)
    assert set(CHANGED) <= known, f"no option has {set(CHANGED) - known}"


def test_every_option_file_opens_with_a_line_that_says_what_and_when():
    for group, option in OPTIONS:
        lines = (CONF / group / f"{option}.yaml").read_text().splitlines()
        first = next(line for line in lines if not line.startswith("# @package"))
        assert first.startswith(f"# {option}: "), f"conf/{group}/{option}.yaml"
        assert len(first) > len(option) + 20


def test_every_group_can_be_switched_off_by_a_real_object():
    off = {"none", "off", "disabled", "constant", "torch", "fp32", "pre", "plain"}
    for group in set(GROUPS) - {
        "model",
        "data",
        "optimizer",
        "experiment",
        "parallel",
        "objective",
    }:  # `parallel` and `objective` need none: one process is the default, and a run has a loss
        options = {option for each, option in OPTIONS if each == group}
        assert options & off, f"{group} has no option that does nothing"
