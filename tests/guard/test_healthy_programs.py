"""Programs that train well, and at which the tests of `train.py` raise alarms; the guard of an own loop is silent."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stabletrain import Guard
from stabletrain.guard.policy.slow import SlowSpikes


class Watched:
    """A guard that also keeps the readings of its steps."""

    def __init__(self, model, optimizer, folder, **options):
        self.guard = Guard(model, optimizer, folder=folder, max_incidents=0, **options)
        self.slow, self.readings = self.guard._loop.policy.slow_spikes, []
        add = self.slow.add
        self.slow.add = lambda reading: self.readings.append(reading) or add(reading)

    def kinds(self, slow=None):
        """The kinds of the guard's alarms, or of those that other tests raise on the same readings."""
        found = self.guard.alarms if slow is None else [each for given in self.readings for each in slow.add(given)]
        return {each.kind for each in found}


def mlp(inputs, hidden, outputs, activation=nn.ReLU):
    return nn.Sequential(nn.Linear(inputs, hidden), activation(), nn.Linear(hidden, outputs))


def graph_network(folder, seed=0, hurt=None, told=False):
    """A graph network that fits its labels; then Adam's L2 penalty is most of the gradient, and the weights shrink."""
    torch.manual_seed(seed)
    labels = torch.randint(4, (120,))
    near = torch.rand(120, 120) < torch.where(labels[:, None] == labels, 0.1, 0.01)
    edges = (near | near.T | torch.eye(120, dtype=torch.bool)).float()
    edges = edges / edges.sum(1, keepdim=True)
    nodes = torch.rand(120, 32)
    nodes[:, :4] += F.one_hot(labels, 4)
    model = nn.ModuleList([nn.Linear(32, 16), nn.Linear(16, 4)])
    loop = Watched(model, torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-2), folder)

    def loss():
        return F.cross_entropy((edges @ model[1](F.relu(edges @ model[0](nodes))))[:40], labels[:40])

    for step in range(1, 220):
        loop.guard.step(loss)
        if step == hurt:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.5)
            if told:
                loop.guard.state_replaced()
    return loop


def policy_gradient(folder, **options):
    """REINFORCE learns to balance: the longer the episode, the larger the sum over its steps."""
    torch.manual_seed(0)
    policy, lengths = mlp(2, 32, 2, nn.Tanh), []
    loop = Watched(policy, torch.optim.Adam(policy.parameters(), lr=5e-3), folder, **options)
    for _ in range(150):
        state, states, actions = 0.05 * torch.randn(2), [], []
        while len(states) < 60 and state[0].abs() <= 0.5:
            with torch.no_grad():
                actions.append(torch.distributions.Categorical(logits=policy(state)).sample())
            states.append(state)
            force = 0.3 * (2 * actions[-1].float() - 1) + 0.6 * state[0] + 0.05 * torch.randn(())
            state = torch.stack([state[0] + 0.1 * state[1], state[1] + force])
        lengths.append(len(states))
        rewards = 0.99 ** torch.arange(len(states))
        returns = rewards.cumsum(0).flip(0)

        def loss(states, actions, returns=returns):
            return -(torch.distributions.Categorical(logits=policy(states)).log_prob(actions) * returns).sum()

        loop.guard.step(loss, batch=(torch.stack(states), torch.stack(actions)))
    assert sum(lengths[-30:]) > 3 * sum(lengths[:30]), "it has learnt"
    return loop


def critic(folder):
    """A critic with clipped weights: its loss falls far below 0, and rises again as the generator learns."""
    torch.manual_seed(0)
    judge, generator = mlp(2, 64, 1), mlp(2, 64, 2)
    own = torch.optim.RMSprop(generator.parameters(), lr=1e-3)
    loop = Watched(judge, torch.optim.RMSprop(judge.parameters(), lr=1e-3), folder)
    for step in range(220):
        real = 0.3 * torch.randn(64, 2) + torch.tensor([2.0, 0.0])
        fake = generator(torch.randn(64, 2)).detach()
        loop.guard.step(lambda real, fake: judge(fake).mean() - judge(real).mean(), batch=(real, fake))
        with torch.no_grad():
            for parameter in judge.parameters():
                parameter.clamp_(-0.1, 0.1)
        if step > 100:
            own.zero_grad()
            (-judge(generator(torch.randn(64, 2))).mean()).backward()
            own.step()
    return loop


def adversary(folder):
    """The generator of a GAN: its loss rises while the discriminator learns faster."""
    torch.manual_seed(0)
    judge, generator = mlp(2, 64, 1), mlp(2, 64, 2)
    other = torch.optim.Adam(judge.parameters(), lr=2e-3, betas=(0.5, 0.999))
    own = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    loop = Watched(generator, own, folder, loss="adversarial")
    for _ in range(160):
        real, drawn = 0.3 * torch.randn(64, 2) + torch.tensor([2.0, 0.0]), torch.randn(64, 2)
        other.zero_grad()
        (F.softplus(-judge(real)) + F.softplus(judge(generator(drawn).detach()))).mean().backward()
        other.step()
        loop.guard.step(lambda drawn: F.softplus(-judge(generator(drawn))).mean(), batch=drawn)
    return loop


def q_learning(folder):
    """Deep Q-learning: the loss jumps whenever the target network is synchronised, and falls again."""
    torch.manual_seed(0)
    network = mlp(4, 64, 2)
    target = copy.deepcopy(network)
    loop = Watched(network, torch.optim.Adam(network.parameters(), lr=1e-3), folder)
    states, actions = torch.randn(2000, 4), torch.randint(2, (2000, 1))
    following, rewards = 0.9 * states + 0.3 * torch.randn(2000, 4), (states[:, :1] * (2 * actions - 1) > 0).float()

    def loss(drawn):
        with torch.no_grad():
            wanted = rewards[drawn] + 0.97 * target(following[drawn]).amax(1, keepdim=True)
        return F.smooth_l1_loss(network(states[drawn]).gather(1, actions[drawn]), wanted)

    for step in range(440):
        if step % 125 == 0:
            target.load_state_dict(network.state_dict())
        loop.guard.step(loss, batch=torch.randint(2000, (64,)))
    return loop


def heavy_tails(folder):
    """Log-normal features in batches of 4, near convergence: most losses are near 0, and a few are far above."""
    torch.manual_seed(0)
    true, model = torch.randn(20), mlp(20, 32, 1)
    loop = Watched(model, torch.optim.Adam(model.parameters(), lr=1e-2), folder)
    for _ in range(530):
        inputs = torch.exp(torch.randn(4, 20)) - 1.6
        targets = (inputs @ true > 0).float()[:, None]
        loop.guard.step(lambda x, y: F.binary_cross_entropy_with_logits(model(x), y), batch=(inputs, targets))
    return loop


@pytest.mark.slow(unless=lambda program: program is critic)
@pytest.mark.parametrize(
    ("program", "kind"),
    [
        (graph_network, "weight_growth"),
        (lambda folder: policy_gradient(folder, loss="policy"), "slow_loss"),
        (critic, "slow_loss"),
        (adversary, "slow_loss"),
        (q_learning, "slow_loss"),
        (heavy_tails, "slow_loss"),
    ],
    ids=["graph_network", "policy_gradient", "critic", "adversary", "q_learning", "heavy_tails"],
)
def test_a_healthy_program_raises_nothing_where_the_tests_of_the_trainer_do(tmp_path, program, kind):
    loop = program(tmp_path)
    assert kind in loop.kinds(SlowSpikes(0.1)), "the program is no example any more"
    assert loop.kinds() == set()


def test_weights_that_are_halved_outside_of_the_step_are_found_with_any_optimizer(tmp_path):
    (alarm,) = graph_network(tmp_path, hurt=150).guard.alarms
    assert (alarm.kind, alarm.since) == ("weight_growth", 151)
    assert "something else changed them" in alarm.text
    assert graph_network(tmp_path, hurt=150, told=True).guard.alarms == []


@pytest.mark.parametrize("guarded", ["step", "attached"])
def test_sparse_gradients_stay_as_the_backward_pass_left_them(guarded, tmp_path):
    """SGD adds the values of a repeated row one by one; summed up first, they give other bits."""

    def train(guarded):
        torch.manual_seed(0)
        model = nn.Embedding(5, 16, sparse=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {"folder": tmp_path, "max_incidents": 0}
        guard = {"step": Guard, "attached": Guard.attach}[guarded](model, optimizer, **options) if guarded else None
        for _ in range(20):
            x, y = torch.randint(0, 5, (64,)), torch.randn(64, 16)
            if guarded == "step":
                guard.step(lambda x, y: F.mse_loss(model(x), y), batch=(x, y))
                continue
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        return model.weight

    assert torch.equal(train(guarded), train(None))
