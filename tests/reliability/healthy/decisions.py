"""Reinforcement learning: losses of any sign whose target moves, and gradients that depend on luck."""

import copy
import random
from collections import deque

import torch
import torch.nn.functional as F
from torch import nn

LENGTH = 8
"""Number of places in the corridor; the reward is at the end."""


def corridor(place, action):
    """Moves left (0) or right (1); returns the new place, the reward and whether the episode has ended."""
    place = max(place + (1 if action else -1), 0)
    return place, float(place == LENGTH - 1) - 0.01, place == LENGTH - 1


def seen(place):
    """Returns what the agent sees: its place, one-hot."""
    return F.one_hot(torch.as_tensor(place), LENGTH).float()


def episode(policy):
    """Plays one episode; returns places, actions and rewards."""
    place, steps = 0, []
    for _ in range(40):
        with torch.no_grad():
            action = torch.distributions.Categorical(logits=policy(seen(place))).sample().item()
        new, reward, ended = corridor(place, action)
        steps.append((place, action, reward))
        place = new
        if ended:
            break
    return zip(*steps, strict=True)


def returns(rewards, discount=0.98):
    """Returns the discounted sum of the rewards from each step on."""
    total, found = 0.0, []
    for reward in reversed(rewards):
        total = reward + discount * total
        found.append(total)
    return torch.tensor(found[::-1])


def reinforce(steps, guard):
    """REINFORCE (Williams 1992): the loss is the advantage times a log-probability, a gradient with much noise."""
    policy = nn.Sequential(nn.Linear(LENGTH, 32), nn.Tanh(), nn.Linear(32, 2))
    guarded = guard(policy, torch.optim.Adam(policy.parameters(), lr=1e-2))
    for _ in range(steps):
        places, actions, rewards = episode(policy)
        gained = returns(rewards)
        advantage = (gained - gained.mean()) / (gained.std(correction=0) + 1e-8)
        chosen = torch.tensor(actions)[:, None]
        guarded.step(
            lambda x, a, g: -(policy(x).log_softmax(1).gather(1, a)[:, 0] * g).sum(),
            batch=(seen(places), chosen, advantage),
        )


def actor_critic(steps, guard):
    """Advantage actor-critic with an optimizer and a guard for each network."""
    actor = nn.Sequential(nn.Linear(LENGTH, 32), nn.Tanh(), nn.Linear(32, 2))
    critic = nn.Sequential(nn.Linear(LENGTH, 32), nn.Tanh(), nn.Linear(32, 1))
    guard_a = guard(actor, torch.optim.Adam(actor.parameters(), lr=3e-3))
    guard_c = guard(critic, torch.optim.Adam(critic.parameters(), lr=1e-2))
    for _ in range(steps // 2):
        places, actions, rewards = episode(actor)
        x, gained = seen(places), returns(rewards)
        advantage = gained - critic(x)[:, 0].detach()
        guard_c.step(lambda x, g: F.mse_loss(critic(x)[:, 0], g), batch=(x, gained))
        chosen = torch.tensor(actions)[:, None]
        guard_a.step(
            lambda x, a, g: -(actor(x).log_softmax(1).gather(1, a)[:, 0] * g).mean(), batch=(x, chosen, advantage)
        )


def dqn(steps, guard):
    """DQN with replay and a target network (Mnih et al. 2015): the loss jumps when the target is copied."""
    values = nn.Sequential(nn.Linear(LENGTH, 64), nn.ReLU(), nn.Linear(64, 2))
    target, replay, place, age = copy.deepcopy(values), deque(maxlen=1000), 0, 0
    guarded = guard(values, torch.optim.Adam(values.parameters(), lr=1e-3))

    def loss(x, action, reward, x_next, ended):
        with torch.no_grad():
            wanted = reward + 0.98 * (1 - ended) * target(x_next).amax(1)
        return F.smooth_l1_loss(values(x).gather(1, action[:, None])[:, 0], wanted)

    for step in range(steps):
        for _ in range(4):
            explores = random.random() < max(0.05, 1 - step / 200)
            action = random.randrange(2) if explores else values(seen(place)).argmax().item()
            new, reward, ended = corridor(place, action)
            age = age + 1
            replay.append((place, action, reward, new, float(ended)))
            place, age = (0, 0) if ended or age > 40 else (new, age)
        x, action, reward, x_next, ended = map(torch.tensor, zip(*random.choices(replay, k=32), strict=True))
        guarded.step(loss, batch=(seen(x), action, reward, seen(x_next), ended))
        if step % 50 == 49:
            target.load_state_dict(values.state_dict())
