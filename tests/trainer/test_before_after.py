"""The loss before and after a change is measured without a trace."""

import torch
from torch import nn

from stabletrain.records import Batch
from stabletrain.stability import precision
from stabletrain.stability.objective import CrossEntropy
from stabletrain.stability.sanitize import Sanitizer
from stabletrain.trainer.before_after import TARGETS, Subject, fixed_batch, loss_on, near_identity

CPU = torch.device("cpu")


class Drawing(nn.Module):
    """BatchNorm, dropout, and a forward that draws random numbers even in evaluation mode."""

    def __init__(self):
        super().__init__()
        self.norm, self.drop, self.head = nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3)
        self.norm.eval()  # frozen

    def forward(self, x):
        return self.head(self.drop(self.norm(x))) + 0 * torch.rand(1)


def subject(model):
    return Subject(model, precision.fp32(CPU), CrossEntropy(), Sanitizer(None))


def batch(size=6):
    generator = torch.Generator().manual_seed(0)
    return Batch(torch.randn(size, 4, generator=generator), torch.randint(3, (size,), generator=generator))


def test_measuring_leaves_buffers_modes_gradients_and_generators_as_they_are():
    model = Drawing()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    drawn = torch.get_rng_state()
    first = loss_on(subject(model), batch())
    assert torch.equal(torch.get_rng_state(), drawn)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert loss_on(subject(model), batch()) == first, "no dropout"


def test_batchnorm_that_trains_keeps_its_statistics():
    model = Drawing().train()
    loss_on(subject(model), batch())
    assert torch.equal(model.norm.running_mean, torch.zeros(4))


def test_the_loss_is_the_mean_over_the_valid_targets():
    model, some = Drawing(), batch()
    some.targets[2] = -100
    model.eval()
    wanted = nn.functional.cross_entropy(model(some.inputs), some.targets)
    assert loss_on(subject(model), some) == wanted.item()


def test_the_fixed_batch_is_short_and_the_same_each_time():
    class Data:
        def batch(self, step, size, split):
            return Batch(torch.full((size, 2000), step), torch.full((size, 2000), step))

    found = fixed_batch(Data(), 64, 7, CPU)
    assert (len(found), found.inputs.unique().tolist()) == (TARGETS // 2000, [7])


def test_a_part_that_cannot_start_near_the_identity_starts_as_it_was_made():
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))
    found = near_identity(
        ["1.weight", "1.bias"], model, subject(nn.Sequential(nn.Linear(4, 3), nn.Identity())), batch()
    )
    assert {name: value.tolist() for name, value in found.items()} == {"1.weight": [1, 1, 1], "1.bias": [0, 0, 0]}
