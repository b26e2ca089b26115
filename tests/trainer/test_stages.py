"""The first stages of building a run: seeds of the ranks, data that can be used, batches that divide, the model."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from stabletrain.config.make import Choice
from stabletrain.data.batches import Dataset
from stabletrain.errors import ConfigError
from stabletrain.extension import NoFaults
from stabletrain.machine import hardware
from stabletrain.machine.determinism import mix
from stabletrain.parallel import distributed
from stabletrain.parallel.ranks import Ranks, current_ranks, join_process_group
from stabletrain.parallel.single import SingleProcess
from stabletrain.records import IGNORE_INDEX, Batch, TrainState, Transform
from stabletrain.stability.objective import CrossEntropy
from stabletrain.trainer.stages import (
    BatchLoader,
    Process,
    Source,
    build_model,
    load_data,
    make_optimizer,
    make_tools,
    opening_notes,
    rank_seed,
    start_process,
)
from tests.runs import TINY_GPT, composed
from tests.trainer.given import CPU, FP32, options_of

BYTES = Source(SimpleNamespace(vocab_size=256, block_size=16), "tok", "byte")


class Numbered:
    """Batches that hold their own number; the last one has fewer samples."""

    vocab_size = 9

    def __init__(self, rows=12):
        self.rows = rows
        self.device = None

    def batch(self, step, size, split):
        rows = min(size, self.rows)
        return Batch(torch.full((rows, 2), float(step)), torch.zeros(rows, dtype=torch.int64))


class Rows(Numbered):
    """Reads rows, and notes which; each input is the sample's number in the run."""

    def __init__(self, short=0):
        super().__init__()
        self.asked, self.short = [], short
        del self.rows

    def rows(self, step, size, split, rows):
        self.asked.append((step, size, split, rows))
        numbers = torch.arange(step * size, (step + 1) * size)[rows][: -self.short or None]
        return Batch(numbers, numbers, counted=size - 1)


class Movable(Numbered):
    """Makes its batches on the training device."""

    def to(self, device):
        self.device = device


class NoData:
    """Cannot be asked for a batch."""


def process(rank=0, world_size=1, parallel=None):
    ranks = Ranks(rank, world_size)
    return Process(ranks, parallel or SingleProcess(ranks), FP32, {}, CPU)


def empty_state(**options):
    model = nn.Linear(1, 1)
    return TrainState(model, torch.optim.SGD(model.parameters()), **options)


# ---- process


def test_every_rank_has_randomness_of_its_own_in_every_step():
    seeds = [rank_seed(seed, Ranks(rank, 64)) for seed in range(5) for rank in range(64)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    drawn = {mix(rank_seed(0, Ranks(rank, 8)), step) for rank in range(8) for step in range(500)}
    assert len(drawn) == 8 * 500


def test_the_main_process_draws_the_same_numbers_as_a_single_process():
    assert [rank_seed(seed, Ranks(0, 8)) for seed in (0, 1, 7)] == [0, 1, 7]


def test_a_process_has_the_objects_of_its_groups():
    with composed(*TINY_GPT, "precision=bf16") as cfg:
        started = start_process(options_of(cfg), Path("nowhere"))
    assert (started.ranks, started.device) == (Ranks(), CPU)
    assert started.precision.name == "bf16"
    assert started.switches["use_deterministic_algorithms"] is False
    assert isinstance(started.parallel, SingleProcess)


@pytest.fixture
def four_cards(monkeypatch):
    """A machine with four cards as rank 3 of four sees it; returns the device that becomes the current one, if any."""
    current = []
    for name, value in {"RANK": 3, "WORLD_SIZE": 4, "LOCAL_RANK": 3, "LOCAL_WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: 4,
        "is_initialized": lambda: bool(current),
        "set_device": current.append,
        "get_device_capability": lambda device: (8, 0),
        "get_arch_list": lambda: ["sm_80"],
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(distributed, "set_timeout", lambda seconds: None)
    return current


@pytest.mark.parametrize("device", ["auto", "cuda"])
@pytest.mark.parametrize("determinism", ["seeded", "strict", "off"])
def test_a_rank_sets_up_determinism_before_it_starts_cuda_on_its_own_card(four_cards, device, determinism):
    join_process_group(current_ranks())  # `train.py` joins before it knows the configuration
    with composed(*TINY_GPT, "precision=fp32", f"device={device}", f"determinism={determinism}") as cfg:
        started = start_process(options_of(cfg), Path("nowhere"))
    assert started.device == torch.device("cuda", 3)
    assert four_cards == [started.device]
    assert started.switches["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert started.switches["use_deterministic_algorithms"] is (determinism == "strict")


def test_strict_refuses_a_workspace_of_the_users_that_is_not_deterministic(four_cards, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    join_process_group(current_ranks())
    overrides = [*TINY_GPT, "precision=fp32", "device=cuda", "determinism=strict"]
    with composed(*overrides) as cfg, pytest.raises(ConfigError, match="CUBLAS_WORKSPACE_CONFIG=:0:0"):
        start_process(options_of(cfg), Path("nowhere"))
    assert not four_cards, "CUDA has not started"


# ---- data


def data_of(target, **keys):
    node = {"_target_": f"{__name__}.{target}", "modality": "images", **keys}
    return load_data(Choice("data", node, role=Dataset), NoFaults(), process(), 2)


def test_data_is_loaded_with_its_units_and_told_of_the_device():
    source = data_of("Movable", rows=3)
    assert (source.unit, source.per) == ("img", "image")
    assert source.data.rows == 3
    assert source.data.device == CPU
    assert data_of("Numbered").data.device is None


def test_data_without_a_batch_method_is_refused():
    with pytest.raises(ConfigError, match="NoData gives a NoData, which has no batch\\(\\)"):
        data_of("NoData")


# ---- batches


def loaded(step, *, data=None, world_size=1, parallel=None, skipped=(), batch_size=12, grad_accum_steps=1):
    here, state = process(0, world_size, parallel), empty_state(skipped=[*skipped])
    load = BatchLoader(here, data or Numbered(), state, CrossEntropy(), batch_size, grad_accum_steps)
    return load(step)


def test_a_step_reads_the_batch_of_its_position_in_the_data():
    assert loaded(5).inputs.unique().tolist() == [5.0]
    assert loaded(5, skipped=[(4, 7)]).inputs.unique().tolist() == [8.0]


@pytest.mark.parametrize(
    ("rows", "grad_accum_steps", "world_size", "refused"),
    [
        (12, 3, 1, None),
        (12, 3, 4, None),
        (12, 5, 1, "has 12 samples, not a multiple of grad_accum_steps=5: return batch_size=12 samples"),
        (12, 3, 8, "has 12 samples, not a multiple of grad_accum_steps=3 x 8 ranks"),
        (10, 3, 1, "batch 2 has 10 samples, not a multiple of grad_accum_steps=3:"),
    ],
)
def test_a_batch_that_does_not_divide_is_refused(rows, grad_accum_steps, world_size, refused):
    options = {"data": Numbered(rows), "grad_accum_steps": grad_accum_steps, "world_size": world_size}
    if refused is None:
        assert len(loaded(2, **options)) == rows
        return
    with pytest.raises(ConfigError, match=refused):
        loaded(2, **options)


def test_a_rank_gets_its_own_part():
    class Half(SingleProcess):
        def shard_batch(self, batch, size):
            assert size == 12
            return batch.rows(slice(0, len(batch) // 2))

    assert len(loaded(0, parallel=Half(), world_size=2)) == 6


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_data_that_reads_rows_is_asked_for_those_of_the_rank_only(rank):
    data, ranks = Rows(), Ranks(rank, 3, rank, launched=True)
    batch = loaded(5, data=data, world_size=3, parallel=distributed.Distributed(ranks), skipped=[(4, 7)])
    assert data.asked == [(8, 12, "train", slice(4 * rank, 4 * rank + 4))]
    assert batch.inputs.tolist() == [*range(96 + 4 * rank, 100 + 4 * rank)]
    assert batch.counted == 11


@pytest.mark.parametrize("parallel", [None, distributed.Distributed(Ranks(1, 2, 1, launched=True))])
def test_rows_that_are_missing_are_refused_and_an_empty_batch_is_one_without_valid_targets(parallel):
    world_size = 2 if parallel else 1
    with pytest.raises(ConfigError, match=r"data: rows\(2, 12, .train., slice.* has \d+ samples: return"):
        loaded(2, data=Rows(short=1), world_size=world_size, parallel=parallel)
    batch = loaded(2, data=Rows(short=12 // world_size), world_size=world_size, parallel=parallel)
    assert len(batch) == (6 if parallel else 0)
    assert (batch.targets == IGNORE_INDEX).all()
    assert batch.counted == (0 if parallel else 11)


def test_rows_without_the_count_of_the_whole_batch_are_refused_on_several_ranks():
    data = Rows()
    data.rows = lambda *asked: replace(Rows.rows(data, *asked), counted=None)
    assert len(loaded(0, data=data)) == 12
    with pytest.raises(ConfigError, match="rows\\(\\) gives no `counted`.*set it to the number of targets .* not -100"):
        loaded(0, data=data, world_size=3, parallel=distributed.Distributed(Ranks(1, 3, 1, launched=True)))


def test_zeros_in_the_place_of_an_empty_batch_have_the_form_that_the_model_reads():
    empty = torch.zeros(0, 2, dtype=torch.uint8)
    raw = Batch(empty, torch.zeros(0, dtype=torch.int64), transform=Transform(lambda x, each: x[:, :1].float(), empty))
    alone = distributed.Distributed(Ranks(1, 2, 1, launched=True)).shard_batch(raw, 4)
    assert (alone.inputs.dtype, alone.inputs.shape, alone.transform) == (torch.float32, (2, 1), None)


def test_a_batch_of_another_type_is_refused_when_it_is_read():
    data = Numbered()
    data.batch = lambda step, size, split: [1, 2]
    with pytest.raises(ConfigError, match="returned a list"):
        loaded(0, data=data)


# ---- model and tools


def test_the_model_follows_from_the_seed_and_its_parts_are_in_place():
    made = []
    with composed(*TINY_GPT, "model.n_layer=1", "precision=bf16", "precision.fp32_modules=[head]") as cfg:
        options = options_of(cfg)
        here = start_process(options, Path("nowhere"))
        for seed in (3, 3, 4):
            options = replace(options, seed=seed)
            torch.rand(5)  # what was drawn before makes no difference
            made.append(build_model(options, here, BYTES))
        tools = make_tools(options, here, BYTES, made[0].state.model)
    first, again, other = [list(each.state.model.parameters()) for each in made]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    trained = made[0]
    assert trained.parameters == sum(p.numel() for p in first)
    assert trained.fp32_modules == ["head"]
    assert trained.state.step == 0
    held = {id(p) for group in trained.state.optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in first}
    assert tools.sanitizer.vocab_size == 256
    assert tools.seed == 4
    assert tools.precision is here.precision


# ---- the optimizer


def optimizer_of(*overrides):
    """The optimizer of a linear layer with a frozen bias, and its note."""
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    with composed(*overrides) as cfg:
        optimizer, note = make_optimizer(options_of(cfg).optimizer, model, {})
    assert [p for group in optimizer.param_groups for p in group["params"]] == [model.weight]
    return optimizer, note


ADAM = "optimizer._target_=torch.optim.Adam"


@pytest.mark.parametrize("more", [[], ["+optimizer._partial_=true"]], ids=["plain", "partial"])
def test_a_typed_optimizer_class_gets_the_arguments_that_it_knows(more):
    optimizer, note = optimizer_of(ADAM, "optimizer.lr=0.5", "~optimizer.fused", "+optimizer.amsgrad=true", *more)
    assert type(optimizer) is torch.optim.Adam
    assert (optimizer.defaults["lr"], optimizer.defaults["amsgrad"], optimizer.defaults["fused"]) == (0.5, True, None)
    assert note == (
        "optimizer torch.optim.Adam(lr=0.5, betas=[0.9, 0.95], eps=1e-08, weight_decay=0.1, amsgrad=True) over all "
        "parameters; unused: optimizer.decay, optimizer.no_decay, optimizer.cautious_decay"
    )


@pytest.mark.parametrize("partial", ["", "_partial_: true\n"], ids=["plain", "partial"])
def test_an_optimizer_class_in_the_users_own_yaml_is_built(tmp_path, partial):
    (tmp_path / "optimizer").mkdir()
    (tmp_path / "optimizer" / "mine.yaml").write_text(f"_target_: torch.optim.Adam\n{partial}lr: 0.25\n")
    optimizer, note = optimizer_of(f"hydra.searchpath=[file://{tmp_path}]", "optimizer=mine")
    assert type(optimizer) is torch.optim.Adam
    assert (optimizer.defaults["lr"], note) == (0.25, "")


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ([ADAM, "optimizer.decay=independent"], "optimizer.decay=independent: torch.optim.Adam has no such argument"),
        ([ADAM, "optimizer.lr=-1.0"], "optimizer: torch.optim.Adam cannot be built: Invalid learning rate: -1.0"),
        (["optimizer._target_=torch.optim.LBFGS"], "optimizer: torch.optim.LBFGS calls the loss several times in a"),
        (["optimizer._target_=types.SimpleNamespace"], "optimizer=adamw: types.SimpleNamespace gives a "),
        (
            [f"optimizer._target_={__name__}.NoOptimizer"],
            f"optimizer: {__name__}.NoOptimizer gives a dict, not a",
        ),
    ],
)
def test_what_is_no_optimizer_is_refused(typed, message):
    with pytest.raises(ConfigError) as refusal:
        optimizer_of(*typed)
    assert str(refusal.value).startswith(message)


class NoOptimizer:
    """Takes anything, and gives no optimizer."""

    def __init__(self, **keys):
        self.keys = keys

    def __call__(self, model):
        return self.keys


def test_pytorchs_sgd_starts_from_a_momentum_of_zeros():
    typed = ["optimizer=sgd", "optimizer._target_=torch.optim.SGD"]
    optimizer, _ = optimizer_of(*typed)
    [state] = optimizer.state.values()
    assert not state["momentum_buffer"].any()
    assert not optimizer_of(*typed, "optimizer.momentum=0", "optimizer.nesterov=false")[0].state


# ---- the first lines


def test_a_busy_cpu_is_noted_with_the_length_of_an_evaluation(monkeypatch):
    monkeypatch.setattr(hardware, "load_and_cores", lambda: (9.0, 2))
    data = SimpleNamespace(split="the last tenth", batches=lambda size, split: 800 // size)
    source = Source(data, "tok", "byte")
    split, text, busy = opening_notes(source, process(), 8, None)
    assert text == ""
    assert split == "split: the last tenth"
    assert "eval_batches=20 instead of 100" in busy
    assert opening_notes(source, process(), 8, 30) == [split, "", ""]


class Contrastive:
    """A loss of the user's own in which each sample depends on the others."""

    couples_samples = True

    def __call__(self, outputs, batch, n_valid):
        return outputs.var()


@pytest.mark.parametrize(
    ("world_size", "typed", "fix"),
    [
        (1, ["grad_accum_steps=2"], "grad_accum_steps=2 would split the batch: use grad_accum_steps=1"),
        (2, [], "2 ranks would split the batch: use one process"),
        (1, [], None),
    ],
)
def test_an_objective_that_couples_samples_is_refused_where_the_batch_is_split(world_size, typed, fix):
    with composed(*TINY_GPT, f"objective._target_={__name__}.Contrastive", *typed) as cfg:

        def make():
            options = options_of(cfg)
            options = replace(options, choices=options.choices | {"objective": "mine"})
            return make_tools(options, process(0, world_size), BYTES, nn.Linear(1, 1))

        if fix is None:
            assert make().objective.couples_samples
            return
        with pytest.raises(ConfigError) as refusal:
            make()
    assert str(refusal.value) == f"objective=mine couples the samples of a batch, and {fix}"
