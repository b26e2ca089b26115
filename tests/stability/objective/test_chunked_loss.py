"""The loss in chunks: equal to that of whole logits, in value and gradient, and with less memory."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stabletrain.errors import ConfigError
from stabletrain.models.gpt import GPT
from stabletrain.records import IGNORE_INDEX, LOGITS_AT_ONCE, Batch
from stabletrain.stability.objective import CrossEntropy, NoZLoss, ZLoss, chunked_loss
from stabletrain.stability.objective.chunked_loss import ChunkedLoss, tokens_at_once, with_loss_chunk
from stabletrain.stability.precision.autocast import Unscaled
from stabletrain.stability.qkclip import NoQKClip
from stabletrain.stability.qknorm import NoQKNorm
from stabletrain.stability.softcap import Gemma2Softcap, NoSoftcap
from tests.workloads import build_tools

VOCAB, TOKENS = 37, (3, 11)


def gpt(tied_head=False, softcap=None, seed=0, **changed):
    torch.manual_seed(seed)
    asked = {"vocab_size": VOCAB, "block_size": 16, "n_layer": 1, "n_head": 2, "n_embd": 8, "dropout": 0.0}
    kinds = {"position": "rope", "norm": "layernorm", "mlp": "gelu", "bias": False, "tied_head": tied_head}
    knobs = {"qknorm": NoQKNorm(), "qkclip": NoQKClip(), "softcap": softcap or NoSoftcap()}
    return GPT(**{**asked, **kinds, **knobs, **changed})


class Run:
    """Runs a model as a step does, at a loss scale."""

    def __init__(self, model, autocast=nullcontext, scale=1.0):
        precision = Unscaled("fp32", torch.device("cpu"), torch.float32)
        precision.autocast, precision.scale = autocast, lambda loss: loss * scale
        self.model, self.tools = model, build_tools(precision)

    def loss(self, objective, inputs, targets):
        model = objective.wrap(self.model, self.model, self.tools)
        with self.tools.precision.autocast():
            logits = model(inputs)
        return objective(logits, Batch(inputs, targets), (targets != IGNORE_INDEX).sum())


def chunk_example():
    drawn = torch.Generator().manual_seed(1)
    inputs, targets = (torch.randint(VOCAB, TOKENS, generator=drawn) for _ in range(2))
    targets[0, :9] = IGNORE_INDEX  # whole chunks without a target, and one with some
    return inputs, targets


def gradients(run, objective, times=1.0):
    """Returns the loss terms and gradients of a step."""
    inputs, targets = chunk_example()
    terms = run.loss(objective, inputs, targets)
    run.model.zero_grad()
    (run.tools.scale(terms.total) * times).backward()
    return terms.detach(), {name: p.grad for name, p in run.model.named_parameters()}


@pytest.mark.parametrize("tokens", [1, 4, 32])
@pytest.mark.parametrize("softcap", [None, Gemma2Softcap(5.0, 3.0)], ids=["plain", "softcap"])
@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
def test_values_and_gradients_equal_a_float64_reference_of_whole_logits(tied, softcap, tokens):
    plain = CrossEntropy(ZLoss(1e-2), 0.1)
    model = gpt(tied, softcap)
    wide = copy.deepcopy(model).double()
    terms, found = gradients(Run(model), ChunkedLoss(plain, tokens, VOCAB))
    model_64, targets = wide, chunk_example()[1]
    log_p = torch.log_softmax(model_64(chunk_example()[0]).flatten(0, 1), -1)
    keep = (targets != IGNORE_INDEX).flatten()
    hit = log_p.gather(1, targets.clamp(min=0).flatten()[:, None])[:, 0]
    ce = -(0.9 * hit + 0.1 * log_p.mean(-1))[keep].mean()
    z = 1e-2 * torch.logsumexp(model_64(chunk_example()[0]).flatten(0, 1), -1).square()[keep].mean()
    (ce + z).backward()
    torch.testing.assert_close(terms.parts["ce"].double(), ce.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(terms.parts["zloss"].double(), z.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(terms.total, terms.parts["ce"] + terms.parts["zloss"])
    for name, parameter in wide.named_parameters():
        torch.testing.assert_close(found[name].double(), parameter.grad, rtol=1e-5, atol=1e-7)


def test_a_batch_that_fits_into_one_chunk_is_bitwise_equal_to_the_plain_objective():
    plain = CrossEntropy(ZLoss(1e-4))
    size = TOKENS[0] * TOKENS[1]
    whole, wanted = gradients(Run(gpt()), plain)
    chunked, found = gradients(Run(gpt()), ChunkedLoss(plain, size, VOCAB))
    assert torch.equal(chunked.total, whole.total)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
def test_a_hook_on_the_heads_weights_sees_their_whole_gradient_once(tied):
    plain, found = CrossEntropy(ZLoss(1e-4)), []
    for objective in (plain, ChunkedLoss(plain, 4, VOCAB)):
        model, seen = gpt(tied_head=tied), []
        model.classifier().weight.register_hook(lambda given, seen=seen: (seen.append(given.clone()), given / 2)[1])
        _, of = gradients(Run(model), objective)
        found.append((seen, of))
    (whole, wanted), (chunked, halved) = found
    assert len(chunked) == len(whole) == 1
    assert torch.equal(chunked[0], whole[0])
    assert all(torch.equal(halved[name], wanted[name]) for name in wanted)


@pytest.mark.slow(unless=lambda dtype, times: dtype == torch.bfloat16 and times == 1)
@pytest.mark.parametrize("times", [1.0, 3.0])
@pytest.mark.parametrize(("dtype", "scale"), [(torch.bfloat16, 1.0), (torch.float16, 2.0**12)])
def test_in_half_precision_gradients_are_as_near_as_those_of_whole_logits(dtype, scale, times):
    def autocast():
        return torch.autocast("cpu", dtype)

    plain, seeds = CrossEntropy(ZLoss(1e-3)), range(16)  # of one model alone either may be nearer, by chance
    off = []
    for seed in seeds:
        _, exact = gradients(Run(gpt(seed=seed)), plain)
        _, whole = gradients(Run(gpt(seed=seed), autocast, scale), plain, times)
        _, found = gradients(Run(gpt(seed=seed), autocast, scale), ChunkedLoss(plain, 4, VOCAB), times)
        off += [
            [(each[name] / scale / times - right).norm() / right.norm() for each in (whole, found)]
            for name, right in exact.items()
        ]
    of_whole, of_chunks = torch.tensor(off).view(len(seeds), -1, 2).square().mean(dim=0).sqrt().T
    assert (of_chunks <= 1.5 * of_whole).all(), dict(zip(exact, (of_chunks / of_whole).tolist(), strict=True))


def test_a_loss_scale_too_large_for_fp16_shows_in_the_gradients():
    run = Run(gpt(), lambda: torch.autocast("cpu", torch.float16), 2.0**24)
    terms, found = gradients(run, ChunkedLoss(CrossEntropy(NoZLoss()), 4, VOCAB))
    assert torch.isfinite(terms.total)
    assert not torch.isfinite(found["head.weight"]).all()


def test_a_nan_in_one_chunk_reaches_loss_and_gradients():
    model = gpt()
    with torch.no_grad():
        model.head.weight[5, 2] = float("nan")
    terms, found = gradients(Run(model), ChunkedLoss(CrossEntropy(NoZLoss()), 4, VOCAB))
    assert torch.isnan(terms.total)
    assert not torch.isfinite(found["embedding.weight"]).all()


@pytest.mark.parametrize("part", ["head", "blocks"])
def test_frozen_parts_get_no_gradient_and_the_others_theirs(part):
    plain, model = CrossEntropy(NoZLoss()), gpt()
    getattr(model, part).requires_grad_(False)
    _, wanted = gradients(Run(copy.deepcopy(model)), plain)
    _, found = gradients(Run(model), ChunkedLoss(plain, 4, VOCAB))
    for name, gradient in wanted.items():
        assert (gradient is None) == (found[name] is None) == name.startswith(part)
        if gradient is not None:
            torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-7)


def test_with_all_but_the_head_frozen_the_head_learns():
    plain, model = CrossEntropy(NoZLoss()), gpt()
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    _, wanted = gradients(Run(copy.deepcopy(model)), plain)
    _, found = gradients(Run(model), ChunkedLoss(plain, 4, VOCAB))
    torch.testing.assert_close(found["head.weight"], wanted["head.weight"], rtol=1e-5, atol=1e-7)


class Largest(TorchDispatchMode):
    """Records the largest tensor, of those whose last dimension is the vocabulary, that any operation creates."""

    def __init__(self, dtype=None):
        super().__init__()
        self.rows, self.dtype = 0, dtype

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        wanted = isinstance(made, torch.Tensor) and self.dtype in (None, made.dtype)
        if wanted and made.ndim and made.shape[-1] == VOCAB:
            self.rows = max(self.rows, made.numel() // VOCAB)
        return made


def test_no_more_logits_than_a_chunk_exist_at_once():
    seen = {}
    for name, objective in (
        ("plain", CrossEntropy(ZLoss(1e-4))),
        ("chunks", ChunkedLoss(CrossEntropy(ZLoss(1e-4)), 4, VOCAB)),
    ):
        model = gpt(n_embd=2, n_head=1)  # so that no weight has more rows than a chunk
        with Largest() as largest:
            gradients(Run(model), objective)
        seen[name] = largest.rows
    assert seen == {"plain": 33, "chunks": 4}


def test_auto_uses_as_many_tokens_as_fit_and_leaves_models_without_a_head_unchanged():
    plain = CrossEntropy(NoZLoss())
    chosen = with_loss_chunk(plain, "auto", gpt(), able=True)
    assert isinstance(chosen, ChunkedLoss)
    assert (chosen.tokens, chosen.vocabulary) == (LOGITS_AT_ONCE // VOCAB // 128 * 128, VOCAB)
    assert with_loss_chunk(plain, "none", gpt(), able=True) is plain
    assert with_loss_chunk(plain, "auto", gpt(), able=False) is plain
    assert with_loss_chunk(plain, "auto", torch.nn.Linear(2, 2), able=True) is plain


def test_auto_takes_multiples_of_128_tokens_and_more_on_a_larger_card(monkeypatch):
    cpu = torch.device("cpu")
    assert tokens_at_once(50257, cpu) == 1280, "256 MiB of fp32 logits"
    assert tokens_at_once(10**6, cpu) == 128
    found = []
    for gib in (16, 80):
        monkeypatch.setattr(chunked_loss, "device_memory", lambda device, gib=gib: gib * 2**30)
        found.append(tokens_at_once(50257, cpu))
    assert found == [1280, 3328], "a 128th of the card's memory"


class Copies(TorchDispatchMode):
    """Counts the copies to another dtype, by number of elements."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func.__name__.startswith("_to_copy"):
            self.sizes.append(made.numel())
        return made


@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
def test_the_head_is_cast_once_a_micro_batch(tied):
    run = Run(gpt(tied, n_embd=12), lambda: torch.autocast("cpu", torch.bfloat16))  # only the head has 37 x 12 values
    with Copies() as seen:
        gradients(run, ChunkedLoss(CrossEntropy(NoZLoss()), 4, VOCAB))
    assert seen.sizes.count(VOCAB * 12) == 1, "not in every chunk, and no gradient of a chunk is cast either"


class Plugin(torch.nn.Module):
    """A user's model, whose `logits` takes features only."""

    def __init__(self):
        super().__init__()
        self.gpt = gpt()

    def forward(self, inputs, *, head=True):
        return self.gpt(inputs, head=head)

    def logits(self, features):
        return self.gpt.logits(features)

    def classifier(self):
        return self.gpt.classifier()


def test_a_model_that_casts_its_head_in_every_call_gets_the_same_gradients():
    plain, autocast = CrossEntropy(ZLoss(1e-2)), lambda: torch.autocast("cpu", torch.bfloat16)
    _, wanted = gradients(Run(gpt(), autocast), ChunkedLoss(plain, 4, VOCAB))
    _, found = gradients(Run(Plugin(), autocast), ChunkedLoss(plain, 4, VOCAB))
    assert all(torch.equal(found[f"gpt.{name}"], right) for name, right in wanted.items())


@pytest.mark.parametrize(
    ("wanted", "model", "able", "message"),
    [
        (64, gpt, False, "loss_chunk=64: with parallel.find_unused_parameters=true"),
        (64, lambda: torch.nn.Linear(2, 2), True, "loss_chunk=64: Linear has no head that can run outside"),
    ],
)
def test_a_chunk_that_the_model_cannot_use_is_refused(wanted, model, able, message):
    with pytest.raises(ConfigError, match=message):
        with_loss_chunk(CrossEntropy(NoZLoss()), wanted, model(), able)
