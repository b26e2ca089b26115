"""Two optimizers in one guard: `python examples/guard_actor_critic.py`.

An actor and a critic learn from the same episodes, each with an optimizer of its own. `plain` is the loop as it was,
`guarded` the same loop with the guard: a step updates both networks or neither.
"""

import tempfile

import torch
from torch import Tensor, nn

from stabletrain import Guard


class ActorCritic(nn.Module):
    """A policy over 2 actions, and the value of a state."""

    def __init__(self):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
        self.critic = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))

    def losses(self, states: Tensor, actions: Tensor, returns: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the loss of the actor and that of the critic."""
        values = self.critic(states).squeeze(-1)
        chosen = torch.log_softmax(self.actor(states), -1)[range(len(actions)), actions]
        return -(chosen * (returns - values).detach()).mean(), (values - returns).square().mean()


def episodes(count: int, bad: int | None = None):
    """Yields states `[64, 4]`, actions `[64]` and returns `[64]`; one batch has a return of NaN."""
    for number in range(count):
        states, actions = torch.randn(64, 4), torch.randint(2, (64,))
        returns = torch.where(actions == (states[:, 0] > 0), 1.0, -1.0)
        yield states, actions, torch.where(torch.arange(64) == 7, torch.nan, returns) if number == bad else returns


def plain(model: ActorCritic, batches) -> list[torch.optim.Optimizer]:
    """The loop without the guard."""
    actor = torch.optim.Adam(model.actor.parameters(), lr=1e-2)
    critic = torch.optim.SGD(model.critic.parameters(), lr=1e-2, momentum=0.9)
    for batch in batches:
        policy_loss, value_loss = model.losses(*batch)
        actor.zero_grad()
        policy_loss.backward()
        critic.zero_grad()
        value_loss.backward()
        actor.step()
        critic.step()
    return [actor, critic]


def guarded(model: ActorCritic, batches, folder: str) -> tuple[Guard, list[torch.optim.Optimizer]]:
    """The loop with the guard."""
    actor = torch.optim.Adam(model.actor.parameters(), lr=1e-2)
    critic = torch.optim.SGD(model.critic.parameters(), lr=1e-2, momentum=0.9)
    guard = Guard(model, [actor, critic], loss="policy", folder=folder)
    for batch in batches:
        guard.step(lambda *batch: sum(model.losses(*batch)), batch)
    return guard, [actor, critic]


if __name__ == "__main__":
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        guard, _ = guarded(ActorCritic(), episodes(50, bad=20), folder)
    print(f"loss {guard.last.loss:.3f}  skipped {guard.skipped}")
