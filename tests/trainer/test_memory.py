"""A run that cannot fit into memory is refused by a lower bound, with what it needs and what there is."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from stabletrain.config.make import Choice
from stabletrain.errors import ConfigError
from stabletrain.models.gpt import GPT
from stabletrain.parallel.ranks import Ranks
from stabletrain.parallel.single import SingleProcess
from stabletrain.records import Batch
from stabletrain.trainer import memory
from stabletrain.trainer.memory import Weights, check_memory, gigabytes, moments, weights_of
from tests.runs import TINY_GPT, TINY_RESNET, composed
from tests.trainer.given import options_of

SIZES = {"vocab_size": 256, "block_size": 16}
HERE = __name__


class Data:
    """Samples of 16 tokens and 16 targets: 256 bytes each."""

    def batch(self, step, size, split):
        del step, split
        return Batch(torch.zeros(size, 16, dtype=torch.long), torch.zeros(size, 16, dtype=torch.long))


class NotOnMeta(torch.nn.Linear):
    """Reads a value while it is built, which the meta device does not have."""

    def __init__(self):
        super().__init__(3, 3)
        float(self.weight.sum())


def said(*typed, limit=10**9, device="cpu", ranks=1, **choices):
    """Returns the message for a configuration on a machine with `limit` bytes; empty if there is none."""
    process = SimpleNamespace(
        ranks=Ranks(world_size=ranks, local_world_size=ranks),
        device=torch.device(device),
        parallel=SingleProcess(),
    )
    with composed(*TINY_GPT, *typed) as cfg, pytest.MonkeyPatch.context() as patch:
        options = options_of(cfg)
        options = replace(options, choices=options.choices | choices)
        patch.setattr(memory, "host_memory", lambda: limit)
        patch.setattr(memory, "device_memory", lambda device: limit)
        try:
            return check_memory(options, process, Data(), SIZES)
        except ConfigError as error:
            return str(error)


def test_deep_models_are_extrapolated_exactly():
    images = {"num_classes": 10, "in_channels": 1}
    for typed, base, sizes in (("model.n_layer=70", TINY_GPT, SIZES), ("model.depth=410", TINY_RESNET, images)):
        with composed(*base, typed) as cfg, pytest.MonkeyPatch.context() as patch:
            model = options_of(cfg).model
            guessed = weights_of(model, sizes)
            patch.setattr(memory, "DEEP", 10**6)
            assert guessed == weights_of(model, sizes)


def test_the_bytes_are_those_of_the_parameters():
    with composed(*TINY_GPT) as cfg:
        torch.manual_seed(1)
        drawn = torch.random.get_rng_state()
        found = weights_of(options_of(cfg).model, SIZES)
        assert torch.equal(torch.random.get_rng_state(), drawn), "counting draws no random numbers"
    real = sum(p.nbytes for p in GPT(**SIZES, n_layer=2, n_head=2, n_embd=16).parameters())
    assert found == Weights(real, real)


def test_the_bound_has_weights_gradients_moments_and_the_batch():
    with composed(*TINY_GPT) as cfg:
        weights = weights_of(options_of(cfg).model, SIZES)
    assert weights is not None
    need = int(4 * weights.all + 4 * 256)  # weights, gradients, two moments; 4 samples
    assert said(limit=need) == ""
    assert said(limit=need - 1)
    assert said("optimizer=sgd", limit=int(3 * weights.all + 4 * 256)) == ""
    assert said("averaging=ema", limit=need)
    assert said("averaging=ema", limit=int(5 * weights.all + 4 * 256)) == ""
    assert said(limit=need, ranks=2, precision="fp32"), "two processes on one machine need twice as much"
    assert said(limit=need // 2 + 1024, precision="bf16_params") == ""
    assert said(limit=need - 1, device="cuda"), "a card holds it all"


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        (["model.n_layer=5000"], "building model=gpt_nano with model.n_layer=5000: weights 0.0621 GB"),
        (["model.n_embd=16384"], "building model=gpt_nano with model.n_layer=2: weights 25.8 GB, in training 103 GB"),
        ([], ""),
    ],
)
def test_what_takes_long_to_build_is_said_before(typed, line):
    found = said(*typed, limit=10**12)
    assert found.startswith(line) if line else found == ""


def test_the_message_names_the_key_and_both_numbers():
    deep = said("model.n_layer=100000", "model.n_embd=128")
    assert deep == (
        "model=gpt_nano with model.n_layer=100000 cannot be trained: weights, gradients and moments need 315 GB or "
        "more and one batch less than 0.01 GB, but this process may use 1 GB of memory: choose a smaller model, or "
        "fewer layers"
    )
    assert said("batch_size=100000000").startswith("batch_size=100000000 cannot be trained: ")
    assert "need more than 9 billion GB or more" in said("model.n_embd=2147483648")
    assert "cuda has 1 GB" in said("model.n_layer=100000", "model.n_embd=128", device="cuda")


def test_a_model_that_cannot_be_built_on_the_meta_device_is_let_through():
    assert weights_of(Choice("model", {"_target_": f"{HERE}.NotOnMeta"}), {}) is None
    linear = {"_target_": "torch.nn.Linear", "in_features": 3, "out_features": 4}
    assert weights_of(Choice("model", linear), {}) == Weights(64, 64)
    assert weights_of(Choice("model", {"_target_": "no_such_code.Model"}), {}) is None


def test_moments_are_known_for_the_optimizers_of_this_package_only():
    for typed, count in (("adamw", 2), ("sgd", 1), ("sgd optimizer.momentum=0", 0), ("muon", 1), ("spam", 2)):
        with composed(*f"optimizer={typed}".split()) as cfg:
            assert moments(options_of(cfg).optimizer) == count
    with composed("optimizer._target_=torch.optim.Adam") as cfg:
        assert moments(options_of(cfg).optimizer) == 0


def test_sizes_are_words():
    assert [gigabytes(size) for size in (5.0, 1.234e10, 4.2e14, float("inf"))] == [
        *("less than 0.01 GB", "12.3 GB", "420,000 GB", "more than 9 billion GB"),
    ]
