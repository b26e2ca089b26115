"""Copies of a model's buffers, to restore after a skipped step: the forward pass overwrites BatchNorm's statistics.

A ResNet has a hundred buffers of two dtypes. Copying each would launch a hundred kernels, so they are copied as bytes,
all in one vector.

A module may promise that nothing ever writes some of its buffers, such as tables of a position embedding: it names them
in `constant_buffers`. They are copied once, and compared with that copy when others are compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, UInt8
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from stabletrain.model_tensors import ModelTensors, tensors_of


class Buffers:
    """A model's buffers.

    Attributes:
        tensors: the buffers, in the order of `model.buffers()`.
        judged: those that must stay finite, as real tensors: all with floating-point or complex values, of at least 16
            bits, that can be written in place, but masks and constants.

    Args:
        places: modules with their buffers by name.
        masks: for each of `tensors`, whether it is a mask (`note_masks`); empty if none is.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        places: Sequence[tuple[nn.Module, dict[str, Tensor | None]]] = (),
        masks: Sequence[bool] = (),
    ) -> None:
        self.tensors, self._found, self._places = [*tensors], tensors, places
        self._memory = memory_of(tensors)
        tensors = [tensor for tensor in tensors if can_be_written(tensor)]
        masked = {id(tensor) for tensor, mask in zip(self.tensors, masks, strict=False) if mask}
        judged = [tensor for tensor in tensors if is_measured(tensor) and id(tensor) not in masked]
        promised = [each for module, _ in places for each in constants_of(module)]
        self._constant = {id(each): (each, each.detach().clone()) for each in promised if not each.is_meta}
        tensors = [tensor for tensor in tensors if id(tensor) not in self._constant]
        judged = [tensor for tensor in judged if id(tensor) not in self._constant]
        self.judged = [torch.view_as_real(each) if each.is_complex() else each for each in judged]
        plain = {id(tensor) for tensor in tensors if tensor.is_contiguous() and not hasattr(tensor, "to_local")}
        contiguous = [tensor for tensor in tensors if id(tensor) in plain]
        # Largest elements first: each part of the vector then begins at a multiple of its element size.
        self._contiguous = sorted(contiguous, key=lambda tensor: -tensor.element_size())
        self._others = [tensor for tensor in tensors if id(tensor) not in plain]
        self._bytes = [as_bytes(tensor) for tensor in self._contiguous]
        self._sizes = [view.numel() for view in self._bytes]

    def are(self, tensors: Sequence[Tensor]) -> bool:
        """Returns whether these are the same tensors, in the same memory."""
        if tensors is not self._found:
            if len(tensors) != len(self.tensors) or not all(map(is_, tensors, self.tensors)):
                return False
            self._found = tensors
        return memory_of(tensors) == self._memory

    def save(self) -> "SavedBuffers":
        """Copies the buffers' values."""
        memory = torch.cat(self._bytes) if self._bytes else None
        return SavedBuffers(self, memory, [tensor.clone() for tensor in self._others])

    def put_back(self) -> None:
        """Puts these tensors back into their modules, where the forward pass has replaced them by others."""
        for module, buffers in self._places:
            module._buffers.update(buffers)

    @torch.no_grad()
    def put_back_constants(self) -> None:
        """Restores the constants."""
        for tensor, kept in self._constant.values():
            tensor.copy_(kept)

    def changed_constants(self) -> list[Bool[Tensor, ""]]:
        """Returns for each constant whether its bits are no longer what they were; 0-d, on the device."""
        return [
            torch.ne(as_bytes(each.contiguous()), as_bytes(kept.contiguous())).any()
            for each, kept in self._constant.values()
        ]

    @torch.no_grad()
    def restore_(self, saved: "SavedBuffers", gate: Bool[Tensor, ""]) -> "SavedBuffers":
        """Restores the buffers' values if `gate` is closed; otherwise changes no bit. Returns their values now."""
        if saved.buffers is not self and not self._laid_out_as(saved.buffers):
            return self._restore_some_(saved, gate)
        memory = None
        if saved.memory is not None:
            memory = torch.where(gate, torch.cat(self._bytes), saved.memory)
            torch._foreach_copy_(self._bytes, memory.split(self._sizes))
        others = [torch.where(gate, tensor, before) for tensor, before in zip(self._others, saved.others, strict=True)]
        for tensor, kept in zip(self._others, others, strict=True):
            tensor.copy_(kept)
        return SavedBuffers(self, memory, others)

    def _restore_some_(self, saved: "SavedBuffers", gate: Bool[Tensor, ""]) -> "SavedBuffers":
        """Restores the buffers that the forward pass has neither added nor resized; modules do that with caches."""
        before = dict(zip(saved.buffers.forms(), saved.tensors(), strict=True))
        for form, tensor in zip(self.forms(), self.tensors, strict=True):
            if form in before and can_be_written(tensor):
                tensor.copy_(torch.where(gate, tensor, before[form]))
        return self.save()

    def _laid_out_as(self, other: "Buffers") -> bool:
        """Returns whether saved values of the other buffers have the places of these in memory."""
        contiguous = ([tensor.is_contiguous() for tensor in each.tensors] for each in (self, other))
        return self.forms() == other.forms() and len({tuple(each) for each in contiguous}) == 1

    def forms(self) -> list[tuple[int, str, torch.Size, torch.dtype]]:
        """Returns for each buffer its module, name, shape and dtype."""
        places = {
            id(tensor): (id(module), name)
            for module, buffers in reversed(self._places)
            for name, tensor in reversed(buffers.items())
        }
        return [(*places.get(id(tensor), (0, "")), tensor.shape, tensor.dtype) for tensor in self.tensors]

    def like(self, memory: UInt8[Tensor, " bytes"] | None, others: list[Tensor]) -> list[Tensor]:
        """Returns saved values with the shapes and dtypes of the buffers, in the order of `tensors`."""
        values = {key: kept for key, (_, kept) in self._constant.items()}
        values |= zip(map(id, self._others), others, strict=True)
        parts = () if memory is None else memory.split(self._sizes)
        for tensor, part in zip(self._contiguous, parts, strict=True):
            values[id(tensor)] = part.view(tensor.dtype).view(tensor.shape)
        return [values.get(id(tensor), tensor) for tensor in self.tensors]


@dataclass(frozen=True)
class SavedBuffers:
    """The values that a model's buffers had.

    Attributes:
        buffers: the buffers, which may have other values by now.
        memory: values of the contiguous buffers; None if there are none.
        others: copies of the other buffers.
    """

    buffers: Buffers
    memory: UInt8[Tensor, " bytes"] | None
    others: list[Tensor]

    def put_back(self, buffers: Buffers | None = None) -> None:
        """Restores these values, bit for bit, and puts the tensors back into their modules.

        Args:
            buffers: the buffers that get the values; by default those that were copied.
        """
        buffers = buffers or self.buffers
        buffers.put_back()  # also without tensors: the forward pass may have set a buffer that was None
        if buffers.tensors:
            buffers.put_back_constants()
            buffers.restore_(self, torch.zeros((), dtype=torch.bool, device=buffers.tensors[0].device))

    def tensors(self) -> list[Tensor]:
        """Returns the saved values with the buffers' shapes and dtypes, in the order of `model.buffers()`."""
        return self.buffers.like(self.memory, self.others)

    def live(self) -> list[Tensor]:
        """Returns the saved values, and of constants the present ones."""
        constant = self.buffers._constant
        pairs = zip(self.buffers.tensors, self.tensors(), strict=True)
        return [tensor if id(tensor) in constant else saved for tensor, saved in pairs]

    def equal(self, other: "SavedBuffers") -> Bool[Tensor, ""] | bool:
        """Returns whether all bits equal another copy's; False if it is a copy of buffers of other sizes.

        Constants must be what they were when they were first seen.
        """
        mine, theirs = self._flat(), other._flat()
        if len(mine) != len(theirs) or any(a.shape != b.shape for a, b in zip(mine, theirs, strict=True)):
            return False
        found = [torch.eq(a, b).all() for a, b in zip(mine, theirs, strict=True)]
        found += [~changed for changed in other.buffers.changed_constants()]
        return torch.stack(found).all() if len(found) > 1 else found[0] if found else True

    def changed(self, other: "SavedBuffers") -> list[int]:
        """Returns which tensors differ from another copy, as positions in `tensors()`; waits for the device."""
        pairs = zip(self.tensors(), other.live(), strict=False)
        return [at for at, (a, b) in enumerate(pairs) if a is not b and not same_bits(a, b)]

    def _flat(self) -> list[UInt8[Tensor, " bytes"]]:
        """Returns the values as bytes."""
        parts = [] if self.memory is None else [self.memory]
        return parts + [as_bytes(each.contiguous()) for each in self.others]


def constants_of(module: nn.Module) -> list[Tensor]:
    """Returns the buffers of a module that nothing ever writes, by its own promise."""
    named = (module._buffers.get(name) for name in getattr(module, "constant_buffers", ()))
    return [tensor for tensor in named if tensor is not None]


def names_of_constants(model: nn.Module) -> set[str]:
    """Returns the names of a model's buffers that nothing ever writes, by their modules' promise."""
    constant = {id(each) for module in model.modules() for each in constants_of(module)}
    return {name for name, each in model.named_buffers() if id(each) in constant}


MASK_THRESHOLD = 1e18
"""A buffer with a larger value before the first step is a mask: the square of its norm would overflow fp32."""

_BUFFERS: "WeakKeyDictionary[nn.Module, Buffers]" = WeakKeyDictionary()
_MASKS: "WeakKeyDictionary[nn.Module, dict[str, bool]]" = WeakKeyDictionary()
"""For each buffer that a model had when `note_masks` looked: whether it is a mask."""


def note_masks(model: nn.Module) -> None:
    """Notes which buffers are masks: not finite or above `MASK_THRESHOLD` when first seen; waits for the device.

    A mask holds -inf on purpose, as in attention, so it is not judged. It stays one if the model replaces it by another
    tensor. Call this before the first forward pass; buffers that the model adds later are looked at when they appear.
    """
    _BUFFERS.pop(model, None)
    _MASKS[model] = {}
    buffers_of(model)


def masks_of(model: nn.Module) -> list[bool]:
    """Returns for each of the model's buffers whether it is a mask; before `note_masks`, none is."""
    if (known := _MASKS.get(model)) is None:
        return []
    named = [*model.named_buffers()]
    known |= {name: is_huge(tensor) for name, tensor in named if name not in known}
    return [known[name] for name, _ in named]


def is_measured(tensor: Tensor) -> bool:
    """Returns whether a buffer has floating-point or complex values, of at least 16 bits, that can be written."""
    wide = (tensor.is_floating_point() and tensor.element_size() > 1) or (tensor.is_complex() and not tensor.is_conj())
    return wide and not tensor.is_meta and can_be_written(tensor)


def is_huge(tensor: Tensor) -> bool:
    """Returns whether a buffer is measured, and holds a value that is not finite or above `MASK_THRESHOLD`."""
    return is_measured(tensor) and not bool((tensor.abs() < MASK_THRESHOLD).all())


def buffers_of(model: nn.Module, found: ModelTensors | None = None) -> Buffers:
    """Returns the model's buffers. Their views are made once, and again after a buffer was replaced.

    Args:
        found: the model's tensors, if they were just found.
    """
    tensors = (found or tensors_of(model)).buffers
    known = _BUFFERS.get(model)
    if known is None or not known.are(tensors):
        places = [(module, {**module._buffers}) for module in model.modules() if module._buffers]
        known = _BUFFERS[model] = Buffers(tensors, places, masks_of(model))
    return known


def memory_of(tensors: Sequence[Tensor]) -> list[int]:
    """Identifies the memory of each tensor; unlike `data_ptr`, also for tensors without values."""
    try:
        return [tensor.untyped_storage()._cdata for tensor in tensors]
    except (NotImplementedError, ValueError):  # a sparse or uninitialised one has no storage
        return [id(tensor) for tensor in tensors]


def can_be_written(tensor: Tensor) -> bool:
    """Returns whether a forward pass can overwrite a buffer in place: no sparse, quantized or expanded one."""
    if is_lazy(tensor) or tensor.layout != torch.strided or tensor.is_quantized:
        return False
    return all(stride or size <= 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def as_bytes(tensor: Tensor) -> UInt8[Tensor, " bytes"]:
    """Returns a contiguous tensor's memory; writing to it changes the tensor."""
    return tensor.detach().view(-1).view(torch.uint8)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Returns whether two tensors have the same shape and bits; waits for the device."""
    return a.shape == b.shape and torch.equal(as_bytes(a.contiguous()), as_bytes(b.contiguous()))
