"""A graph that captures nothing: it keeps the function, and calls it again on the same static tensors.

It stands in for `CudaGraph` where there is no card. As on a card, a capture leaves no trace in the model's buffers, a
launch writes its results into the memory of the first ones, and it neither seeds nor sets `.grad`.
"""

from dataclasses import fields, is_dataclass
from unittest import mock

import torch
from torch import Tensor

from stabletrain.buffers import buffers_of
from stabletrain.machine.determinism import Seeded
from stabletrain.records import TrainState


def tensors(found):
    """Returns the tensors of a result, in order."""
    if isinstance(found, Tensor):
        return [found]
    if isinstance(found, dict):
        return [tensor for each in found.values() for tensor in tensors(each)]
    if is_dataclass(found) and type(found).__module__ == "stabletrain.records":
        return [tensor for field in fields(found) for tensor in tensors(getattr(found, field.name))]
    return []


def results(computed):
    """Returns the tensors of a computed half step that `commit` reads."""
    return [*tensors(computed.terms), *tensors(computed.norms), *tensors(computed.checks)]


class EagerGraph:
    """See the module's docstring.

    Attributes:
        launches: number of launches of all graphs.
    """

    launches = 0

    def __init__(self, state: TrainState) -> None:
        self._state = state

    def capture(self, run):
        before = buffers_of(self._state.model).save()
        self._run, self._static = run, run()
        before.put_back()
        self._gradients = [parameter.grad for parameter in self._state.model.parameters()]
        for tensor in [*results(self._static), *filter(lambda each: each is not None, self._gradients)]:
            tensor.fill_(77)  # as on a card, nothing is in the results before a launch
        return self._static

    def launch(self):
        type(self).launches += 1
        parameters = [*self._state.model.parameters()]
        before = [parameter.grad for parameter in parameters]
        with mock.patch.object(Seeded, "seed_step"):  # a graph does not seed: it takes the generator's seed
            found = self._run()
        with torch.no_grad():
            for static, tensor in zip(results(self._static), results(found), strict=True):
                static.copy_(tensor)
            for parameter, static, own in zip(parameters, self._gradients, before, strict=True):
                if static is not None:
                    static.copy_(parameter.grad)
                parameter.grad = own  # a graph sets no attribute
