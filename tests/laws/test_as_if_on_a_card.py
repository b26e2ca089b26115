"""Law 9: as if on a CUDA device, every acting option trains: no tensor elsewhere, and no step waits for the device.

`tests/tools/fake_card.py` makes the device of fake tensors, which have shapes, dtypes and devices but no values. It
lists the places that may read values, wait, or use host tensors. Fake tensors cannot show compiled code, several ranks,
writing a state to disk, and the values themselves.
"""

import math
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from stabletrain import buffers, step
from stabletrain.config.checks import check
from stabletrain.config.rules import CHOSEN_PARTS
from stabletrain.data.batches import ToDevice
from stabletrain.errors import ConfigError
from stabletrain.guard.policy import SkipGuard
from stabletrain.records import Batch, LossTerms
from stabletrain.stability.clipping import NormClip
from stabletrain.stability.objective import CrossEntropy
from stabletrain.stability.precision.loss_scale import LossScaled
from stabletrain.stability.sanitize import Sanitizer
from stabletrain.tracking.metrics import read_jsonl
from stabletrain.trainer.build import build
from stabletrain.trainer.loop import train
from stabletrain.trainer.rollback import Rollback
from tests.data.given import picture
from tests.runs import CONF, ROOT, TINY_GPT, TINY_RESNET, composed
from tests.tools.fake_card import HEALTHY, HOST, READERS, WAITERS, HostRead, as_if_on_a_card

PACKAGE = ROOT / "stabletrain"
CARDS = {"h100": (9, 0), "a100": (8, 0), "v100": (7, 0)}
SHORT = ["device=cuda", "compile=false", "checkpoint=off", "report=false", "monitors=none", "eval_batches=1", "steps=2"]
MODELS = {
    "gpt": [*TINY_GPT, "model.n_layer=1", *SHORT],
    "resnet": [*TINY_RESNET, "model.depth=8", *SHORT],
}

ACTING = ("optimizer", "precision", "clipping", "warmup", "schedule", "zloss", "qknorm", "softcap", "init")
ACTING += ("determinism", "qkclip", "softmax", "attention_gate", "norm_placement", "guard", "stability", "monitors")
ACTING += ("averaging", "activation_checkpointing", "faults")
NOT_HERE = {
    "activation_checkpointing=selective": "the fake engine computes a block again for each node; once is allowed",
    "faults=bitflip": "flips a bit of a real tensor",
    "faults=optimizer": "reads whether the step was withheld, and writes a number from the host",
    "faults=kill": "ends the process",
    "faults=disk_full": "acts on checkpoints only",
    "faults=wandb": "acts on W&B only",
    "faults=plan": "has no fault of its own",
    "faults=spiky": "has fixed steps far away; its kinds have options of their own",
}
"""Options that cannot run on fake tensors, or act on no tensor, and why."""

OPTIONS = [f"{group}={file.stem}" for group in ACTING for file in sorted((CONF / group).glob("*.yaml"))]
ALONE = ("precision=", "determinism=", "stability=")
"""Options that are tried alone: they choose others, or differ between cards. Others: `TOGETHER` and `FAULTS`."""

ACTING_OPTIONS = [option for option in OPTIONS if option not in NOT_HERE]


def is_tried(option: str, number: int, card: str, turn: int) -> bool:
    """Whether an option, with its place in the list, is tried alone on a card with the first or second model.

    An A100 differs from an H100 only in fp8, which it has not. Precisions are tried with both models, those on a V100
    that do not depend on the card with one, and so are the other options.
    """
    if card == "a100":
        return turn == 0 and option in ("precision=auto", "precision=fp8")
    if option.startswith("precision=") and (card == "h100" or option not in ("precision=fp32", "precision=fp16")):
        return True
    return option.startswith(ALONE) and ((card == "v100") + turn + number) % 2 == 0


CASES = [
    (card, model, option)
    for number, option in enumerate(ACTING_OPTIONS)
    for card in CARDS
    for turn, model in enumerate(MODELS)
    if is_tried(option, number, card, turn)
]
FAST = ("h100", "resnet", "precision=bf16")
PRODUCTS = {
    "precision=fp32": torch.float32,
    "precision=tf32": torch.float32,
    "precision=bf16": torch.bfloat16,
    "precision=fp16": torch.float16,
}
"""The dtype in which a precision runs products."""

WITHOUT_ATTENTION = (*(f"{part}=" for part in CHOSEN_PARTS), "stability=", "optimizer=muon", "init=gpt2", "init=small")
FOR_RESNETS = (*(f"{part}={off}" for part, off in CHOSEN_PARTS.items()), "stability=none", "stability=zloss")


def is_refused(card: str, model: str, option: str) -> bool:
    """Whether the option is refused for this model or on this card."""
    if card == "v100" and option in ("precision=tf32", "precision=bf16", "precision=bf16_params", "precision=fp8"):
        return True
    if model == "resnet" and option == "precision=fp8":
        return True
    return model == "resnet" and option.startswith(WITHOUT_ATTENTION) and option not in FOR_RESNETS


def trained(folder: Path, card: str, *overrides: str, reading=None, number: float = 1.0):
    """Trains as if on a card; returns the recorder of all operations between building the run and its end.

    `monitors=full` takes two of its iterations, which are alike.
    """
    overrides += ("monitors.hessian_iterations=2",) if "monitors=full" in overrides else ()
    with as_if_on_a_card(CARDS[card], reading, number) as recorder, composed(*overrides) as cfg:
        check(cfg)
        run = build(cfg, folder)
        recorder.restart()
        train(run)
        assert run.state.step == cfg.steps
        assert {tensor.device.type for tensor in run.state.model.state_dict().values()} == {"cuda"}
    assert recorder.count > 100
    events = folder / "events.jsonl"
    assert not events.exists() or "could not measure" not in events.read_text()  # a monitor that raises is an alarm
    return recorder


@pytest.mark.slow(unless=lambda card, model, option: (card, model, option) == FAST)
@pytest.mark.parametrize(("card", "model", "option"), CASES)
def test_every_option_trains(tmp_path, card, model, option):
    chosen = [*MODELS[model], option]
    if is_refused(card, model, option):
        with pytest.raises(ConfigError):
            trained(tmp_path, card, *chosen)
        return
    recorder = trained(tmp_path, card, *chosen)
    assert recorder.foreign == []
    if model == "resnet" and option in PRODUCTS:  # no other dtype has a larger share than the head
        assert recorder.products[PRODUCTS[option]] > 0.9 * recorder.products.total()


FAULTS = [
    each.removeprefix("faults=") for each in ACTING_OPTIONS if each.startswith("faults=") and each != "faults=none"
]


@pytest.mark.beside
@pytest.mark.slow
@pytest.mark.parametrize(("card", "model"), [("h100", "resnet"), ("v100", "gpt")])
def test_every_fault_is_injected(tmp_path, card, model):
    plan = ", ".join(f"{{kind: {kind}, at: [{number}]}}" for number, kind in enumerate(FAULTS, start=1))
    # With a reading that shows no fault: only the operations are tested.
    chosen = ["faults=plan", f"faults.faults=[{plan}]", f"steps={len(FAULTS) + 2}"]
    assert trained(tmp_path, card, *MODELS[model], *chosen).foreign == []


TOGETHER = {
    "gpt": [
        "optimizer=muon clipping=agc warmup=linear schedule=constant zloss=mu qknorm=layernorm softcap=gemma2 "
        "init=fan_in softmax=sink attention_gate=sigmoid norm_placement=post guard=rollback monitors=default "
        "averaging=none",
        "optimizer=spam clipping=norm warmup=none schedule=step zloss=none qknorm=rmsnorm init=normal softmax=plain "
        "attention_gate=none norm_placement=sandwich guard=skip monitors=none averaging=ema",
        "clipping=update_norm optimizer=stable_adamw zloss=palm qknorm=none init=gpt2 qkclip=kimi softcap=none "
        "norm_placement=reordered guard=off monitors=full "
        "activation_checkpointing=blocks",
        "clipping=zclip init=torch qkclip=none norm_placement=pre activation_checkpointing=none",
        "init=small",
    ],
    "resnet": [
        "optimizer=adamw clipping=adagc warmup=cosine schedule=cosine zloss=mu_centering init=zero_residual guard=off "
        "monitors=full averaging=ema",
        "optimizer=sgd clipping=none warmup=none schedule=wsd zloss=olmo guard=skip averaging=snapshots",
        "optimizer=stable_adamw clipping=per_module",
        "clipping=value",
    ],
}
"""Each other option beside some more, in fp16; `KEYS` has it in bf16."""


@pytest.mark.slow
@pytest.mark.parametrize(("model", "typed"), [(model, typed) for model, each in TOGETHER.items() for typed in each])
def test_options_train_together(tmp_path, model, typed):
    assert trained(tmp_path, "v100", *MODELS[model], *typed.split()).foreign == []


KEYS = {
    "gpt": [
        "grad_accum_steps=2 loss_chunk=8 zloss=palm guard.checksum_every=1",
        "loss_chunk=8 precision=fp16 model.mlp=swiglu model.swiglu_limit=7 model.norm=rmsnorm model.bias=true zloss=mu "
        "model.n_kv_head=1",
        "loss_chunk=8 precision=bf16_params model.vocab_size=300",
        "loss_chunk=none model.vocab_size=300 label_smoothing=0.1 model.tied_head=false model.position=learned "
        "model.dropout=0.1 qknorm=layernorm softcap=gemma2 init=fan_in clipping=agc warmup=linear schedule=constant "
        "averaging=none",
        "precision.fp32_modules=[head] optimizer.decay=independent data.length_warmup=2 data.length_start=8 steps=4 "
        "softmax=sink attention_gate=sigmoid norm_placement=post init=small clipping=zclip schedule=step averaging=ema "
        "warmup=none",
        "activation_checkpointing=blocks steps=1",  # the fake engine computes a block again for each node
        "precision=fp16 optimizer=spam monitors=full",
        "precision=fp8 precision.recipe=rowwise grad_accum_steps=2 model.bias=true",
        "precision=fp8 precision.recipe=rowwise_with_gw_hp loss_chunk=8 monitors=full",
        "precision=bf16_params optimizer=stable_adamw clipping=adagc",
        "optimizer.cautious_decay=true clipping=update_norm clipping.warmup_steps=2 guard.recheck_every=2 steps=5 "
        "norm_placement=reordered init=gpt2 qkclip=kimi",
        "optimizer=sgd optimizer.nesterov=true optimizer.momentum=0.9 monitors=default monitors.every=1 eval_every=1 "
        "steps=3 norm_placement=sandwich qknorm=rmsnorm init=normal clipping=norm "
        "schedule=wsd averaging=snapshots zloss=olmo",
        "guard.recheck_every=1 precision=fp16 optimizer=stable_adamw grad_accum_steps=2",
        "guard=rollback guard.recheck_every=1 guard.snapshot_every=2 steps=7 init=torch",
        "guard=skip guard.recheck_every=3 steps=3 optimizer=muon clipping=none zloss=none qknorm=none softcap=none "
        "softmax=plain attention_gate=none qkclip=none norm_placement=pre activation_checkpointing=none monitors=none",
        "guard.recheck_every=3 steps=3 optimizer=muon optimizer.per_head=true optimizer.cautious_decay=true "
        "optimizer.momentum_warmup=2 optimizer.decay=corrected schedule.weight_decay=cosine",
    ],
    "resnet": [
        "grad_accum_steps=2 precision=fp16 guard.checksum_every=1",
        "model=nf_resnet20 clipping=agc",
        "model=resnet18 model.depth=18 forensics=off guard=off clipping=value optimizer=sgd",
        "model=resnet50 model.depth=50 forensics=off guard=off steps=1",
        "data.augment=none label_smoothing=0.1 guard.recheck_every=1 clipping=per_module optimizer=stable_adamw "
        "init=zero_residual",
        "monitors=full monitors.every=1 eval_every=1 steps=3 optimizer=adamw clipping=adagc warmup=cosine "
        "schedule=cosine zloss=mu_centering guard=off averaging=ema",
    ],
}
"""Overrides beyond single options that change which operations a step runs."""


@pytest.mark.parametrize(("card", "rows"), [("h100", KEYS), ("v100", TOGETHER)], ids=["h100", "v100"])
def test_every_option_is_tried(card, rows):
    tried = {option for each in rows.values() for typed in each for option in typed.split()}
    tried |= {option for on, _, option in CASES if on == card} | {f"faults={kind}" for kind in [*FAULTS, "none"]}
    assert {*ACTING_OPTIONS} <= tried


@pytest.mark.slow(unless=lambda model, typed: model == "gpt" and typed.startswith("grad_accum_steps=2"))
@pytest.mark.parametrize(("model", "typed"), [(model, typed) for model, each in KEYS.items() for typed in each])
def test_other_keys_train(tmp_path, model, typed):
    assert trained(tmp_path, "h100", *MODELS[model], *typed.split()).foreign == []


class Numbers:
    """Float inputs and targets `[size, 10]` in [0, 1], made beforehand: reading them runs no operation on the host."""

    def __init__(self, **unused: object) -> None:
        self.made = Batch(torch.rand(32, 10), torch.rand(32, 10))

    def batch(self, step, size, split):
        return self.made


def mean_and_term(outputs, batch, n_valid):
    """A loss of the user's own, with a term that is logged."""
    error = (outputs - batch.targets).abs().sum() / n_valid
    return LossTerms(error, {"absolute": error})


NUMBERS = [f"hydra.searchpath=[{ROOT / 'examples' / 'conf'}]", "experiment=regression"]
NUMBERS += [f"data._target_={__name__}.Numbers", "model._target_=torch.nn.Linear", "~model.width", "~model.dropout"]
NUMBERS += ["+model.in_features=10", "+model.out_features=10"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "typed",
    [
        "objective=mse grad_accum_steps=2",
        "objective=mse precision=fp16 monitors=full",
        "objective=bce",
        f"objective._target_={__name__}.mean_and_term grad_accum_steps=2 monitors=full",
    ],
)
def test_every_objective_trains(tmp_path, typed):
    assert trained(tmp_path, "h100", *NUMBERS, *SHORT, "wandb=disabled", *typed.split()).foreign == []


@pytest.mark.slow
@pytest.mark.parametrize("augment", ["crop_flip", "resized_crop"])
def test_images_from_files_go_to_the_card_as_bytes_and_are_completed_there(tmp_path, monkeypatch, augment):
    for number in range(12):
        picture(tmp_path / "set" / f"class{number % 2}" / f"{number}.png", number)
    moved, real = [], ToDevice.__call__

    def noting(to_device, batch):
        moved.append((batch, real(to_device, batch)))
        return moved[-1][1]

    monkeypatch.setattr(ToDevice, "__call__", noting)
    images = ["data=imagefolder", f"data.path={tmp_path / 'set'}", "data.image_size=8", "data.val_fraction=0.4"]
    chosen = [*SHORT, "model=resnet20", "model.depth=8", *images, f"data.augment={augment}", "batch_size=4"]
    assert trained(tmp_path / "run", "h100", *chosen).foreign == []
    to_the_card = [(before, after) for before, after in moved if after.inputs.device.type == "cuda"]
    assert len(to_the_card) >= 3, "two steps and an evaluation"
    for before, after in to_the_card:
        assert (before.inputs.dtype, before.inputs.device.type) == (torch.uint8, "cpu")
        assert (after.inputs.dtype, after.transform) == (torch.float32, None)
        assert after.inputs.is_contiguous(memory_format=torch.channels_last)


def bad_at(*steps: int):
    """Returns what steps measure: NaN the first time that each of `steps` runs, and nothing unusual otherwise."""
    bad, left = HEALTHY._replace(loss=math.nan, grad_norm=math.nan, applied=False), {*steps}

    def reading(step: int):
        if step not in left:
            return HEALTHY
        left.discard(step)
        return bad

    return reading


ROLLING_BACK = ["steps=4", "forensics=off", "guard.patience=1", "guard.snapshot_every=1", "guard.healthy_after=1"]
"""With these, a skipped step 3 restores the snapshot of step 1, which holds what the parts have kept so far."""

RESTORED = [
    ("resnet", "optimizer=sgd"),
    ("gpt", "optimizer=muon"),
    ("gpt", "optimizer=spam"),
    ("gpt", "optimizer=adamw precision=bf16_params clipping=zclip"),
    ("gpt", "optimizer=stable_adamw precision=fp16 clipping=adagc"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "typed", "resumed"),
    [(*pair, True) for pair in RESTORED] + [("resnet", "optimizer=sgd", False), ("gpt", "precision=fp16", False)],
)
def test_a_restored_state_is_on_the_device(tmp_path, monkeypatch, model, typed, resumed):
    if resumed:  # a process that resumes has an optimizer without state, so that its tensors are made anew
        roll_back = Rollback.roll_back

        def forgetting(rollback, *arguments):
            rollback.saved.state.optimizer.state.clear()
            roll_back(rollback, *arguments)

        monkeypatch.setattr(Rollback, "roll_back", forgetting)
    chosen = [*MODELS[model], *typed.split(), *ROLLING_BACK]
    assert trained(tmp_path, "h100", *chosen, reading=bad_at(3)).foreign == []
    kinds = [event["event"] for event in read_jsonl(tmp_path / "events.jsonl")]
    assert "rollback" in kinds


@pytest.mark.slow
@pytest.mark.parametrize(("model", "number"), [("gpt", 0.0), ("gpt", math.nan), ("resnet", 1.0), ("resnet", math.nan)])
def test_an_incident_is_traced_and_replayed_on_the_device(tmp_path, model, number):
    chosen = [*MODELS[model], "steps=4", "forensics.keep_state=false"]
    assert trained(tmp_path, "h100", *chosen, reading=bad_at(2), number=number).foreign == []
    report = (tmp_path / "incidents" / "step-00000002" / "report.md").read_text()
    assert "could not be checked" not in report
    if number != 1.0:  # else the batch looks bad, and nothing is replayed
        assert "| another batch, same weights |" in report
    if math.isnan(number):
        assert "aten." in report  # the operation at which the trace saw the first NaN


# ---- each of these mistakes breaks the law


def waits(result):
    """Reads a value of the result on the host."""
    bool(first(result).sum() > 0)
    return result


def selects(result):
    """Selects values of the result by a mask, so that the shape depends on values."""
    chosen = first(result).flatten()
    chosen[chosen == chosen].sum()
    return result


def from_host(result):
    """Moves the result to the host."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), result)


def with_constant(result):
    """Adds a constant made on the host, which PyTorch permits if it is one number."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor + torch.zeros((), dtype=tensor.dtype), result)


def with_vector(result):
    """Adds a vector made on the host, which PyTorch refuses."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor + torch.zeros(3), result)


def first(result):
    """Returns the first tensor of a result."""
    parts = result if isinstance(result, tuple) else (result,)
    fields = tree_leaves(
        [each if isinstance(each, torch.Tensor) else getattr(each, "__dict__", each) for each in parts]
    )
    return next(leaf for leaf in fields if isinstance(leaf, torch.Tensor))


BREAKS = {
    "clipping waits": (NormClip, "__call__", waits),
    "the gate waits": (SkipGuard, "gate", waits),
    "the check of the inputs waits": (Sanitizer, "inputs", waits),
    "the objective waits": (CrossEntropy, "__call__", waits),
    "the norms are selected by a mask": (step, "measure_all", selects),
    "the number of targets is on the host": (step, "count_targets", from_host),
    "the gate is on the host": (SkipGuard, "gate", from_host),
    "the buffers are saved on the host": (buffers, "as_bytes", from_host),
    "a number is made on the host": (LossScaled, "scale", with_constant),
    "a vector is made on the host": (LossScaled, "scale", with_vector),
    "the loss scale is kept on the host": (LossScaled, "loss_scale", from_host),
    "a snapshot is restored to the host": (LossScaled, "load_state_dict", None),
}


def left_on_the_host(scaler, state):
    """Restores a loss scale from a snapshot, but to the host."""
    scaler._scale = state["scale"].cpu()


@pytest.mark.slow(unless=lambda mistake: mistake in ("the gate waits", "the gate is on the host"))
@pytest.mark.parametrize("mistake", BREAKS)
def test_a_mistake_is_noticed(tmp_path, monkeypatch, mistake):
    owner, name, spoil = BREAKS[mistake]
    right = getattr(owner, name)
    wrong = left_on_the_host if spoil is None else lambda *args, **kwargs: spoil(right(*args, **kwargs))
    # Frames of this file are outside the package: as in the package, nothing in them may read or use the host.
    monkeypatch.setattr(owner, name, wrong)
    # a GPT writes no buffers, so that none is saved
    model = MODELS["resnet" if owner is buffers else "gpt"]
    chosen = [*model, "precision=fp16", *(ROLLING_BACK if spoil is None else [])]
    try:
        foreign = trained(tmp_path, "h100", *chosen, reading=bad_at(3)).foreign
    except (HostRead, RuntimeError) as error:
        foreign = [str(error)]
    assert foreign


@pytest.mark.slow
def test_an_optimizer_that_is_not_fused_waits_and_says_so(tmp_path):
    with pytest.raises(HostRead, match="step.py:\\d+ reads a value"):
        trained(tmp_path, "h100", *MODELS["gpt"], "optimizer.fused=false")


@pytest.mark.beside
def test_every_exception_is_a_place_in_the_package():
    for place in [*READERS, *WAITERS, *HOST]:
        file, _, function = place.partition(":")
        assert (PACKAGE / file).exists()
        assert not function or f"def {function}(" in (PACKAGE / file).read_text()
