"""Runs one healthy program, and counts what its guards withheld and which alarms they raised."""

import random
from collections import Counter
from dataclasses import dataclass

import torch

from stabletrain.errors import TrainingHalted
from stabletrain.guard.guard import Guard
from stabletrain.guard.micro_batch import MicroBatch, loss_of
from tests.reliability.healthy import adversarial, decisions, densities, networks, sequences

PROGRAMS = {
    program.__name__: program
    for program in (
        *(adversarial.gan, adversarial.wgan, adversarial.wgan_gp, adversarial.infogan, adversarial.cyclegan),
        *(decisions.reinforce, decisions.actor_critic, decisions.dqn),
        *(densities.vae, densities.flow, densities.mixture_density, densities.diffusion, densities.autoencoder),
        *(sequences.rnn, sequences.transformer, sequences.seq2seq),
        *(networks.resnet, networks.graph, networks.contrastive, networks.physics),
    )
}


@dataclass(frozen=True)
class Found:
    """What the guards of a program did.

    Attributes:
        steps: number of steps of all guards.
        withheld: number of steps that were withheld.
        alarms: number of alarms by kind.
        halted: why the program was halted; empty if it was not.
    """

    steps: int
    withheld: int
    alarms: Counter[str]
    halted: str


class Attached:
    """Trains as a guard does, in a loop that calls backward and the optimizer itself, with a guard attached."""

    def __init__(self, model, optimizer, max_norm=None, **options):
        self.model, self.optimizer, self.max_norm = model, optimizer, max_norm
        self.guard = Guard.attach(model, optimizer, **options)

    def __getattr__(self, name):
        return getattr(self.guard, name)

    def step(self, closure, batch=None):
        """One step, as in `Guard.step`."""
        self.optimizer.zero_grad()
        loss = loss_of(MicroBatch(closure, batch)())
        loss.backward()
        if self.max_norm:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optimizer.step()
        return loss.detach()


def run(name: str, steps: int, seed: int = 0, attached: bool = False) -> Found:
    """Runs a program for so many steps, of all its networks together; with guards that are attached to a plain loop."""
    torch.manual_seed(seed)
    random.seed(seed)
    guards: list[Guard | Attached] = []

    def guard(model, optimizer, **options):
        guards.append((Attached if attached else Guard)(model, optimizer, max_incidents=0, **options))
        return guards[-1]

    halted = ""
    try:
        PROGRAMS[name](steps, guard)
    except TrainingHalted as error:
        halted = str(error)
    alarms = Counter(alarm.kind for each in guards for alarm in each.alarms)
    return Found(
        sum(each.last.step for each in guards if each.last), sum(each.skipped for each in guards), alarms, halted
    )
