"""Tests for the resume audit: what is not restored is named, and what need not be restored is not."""

import random
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

from stabletrain.beside.preflight.checks import check_loop

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))


class Small:
    """A loop with dropout, BatchNorm, noise from its own generator, a scheduler, a scaler and an average."""

    epoch, dropout = 4, 0.25

    def __init__(self):
        layers = [nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(self.dropout), nn.Linear(6, 1)]
        self.model = nn.Sequential(*layers)
        self.noise = torch.Generator().manual_seed(7)
        self.position = 0
        self.make_optimizers()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=3)
        self.others = {"ema": AveragedModel(self.model)}

    def make_optimizers(self):
        groups = [{"params": [self.model[0].weight, self.model[3].weight]}, {"params": [self.model[0].bias]}]
        groups[1]["weight_decay"] = 0.0
        self.optimizers = [torch.optim.AdamW(groups, lr=0.1, weight_decay=0.1)]
        self.schedulers = [torch.optim.lr_scheduler.ExponentialLR(self.optimizers[0], 0.5)]

    def batch(self, step, rank=0):
        epoch, place = divmod(step, 4)
        return X[torch.randperm(24, generator=torch.Generator().manual_seed(epoch))][6 * place :][:6]

    def next_batch(self):
        self.position += 1
        return self.batch(self.position - 1)

    def loss(self, batch):
        return self.model(batch + 0.1 * torch.randn(batch.shape, generator=self.noise)).square().mean()

    def step(self, batch):
        self.optimizers[0].zero_grad()
        loss = self.loss(batch)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizers[0])
        self.scaler.update()
        self.schedulers[0].step()
        for average in self.others.values():
            average.update_parameters(self.model)
        return loss

    def parts(self):
        parts = {"model": self.model, "optimizer": self.optimizers[0], "scheduler": self.schedulers[0]}
        return {**parts, "scaler": self.scaler, **self.others}

    def save(self):
        state = {name: each.state_dict() for name, each in self.parts().items()}
        return {**state, "position": self.position, "torch": torch.get_rng_state(), "noise": self.noise.get_state()}

    def load(self, state):
        for name, each in self.parts().items():
            if name in state:
                each.load_state_dict(state[name])
        self.position = state["position"]
        torch.set_rng_state(state["torch"])
        self.noise.set_state(state["noise"])


def without(*names):
    """Returns a loop whose load leaves out parts of the state."""

    class Forgetful(Small):
        def load(self, state):
            super().load({name: each for name, each in state.items() if name not in names})

    return Forgetful


def audit(make):
    return check_loop(make, ["resume"])


def faults(make):
    return [each for each in audit(make) if each.verdict == "fault"]


def only_fault(make):
    [found] = faults(make)
    return found


def test_a_resume_that_restores_everything_passes():
    [found] = audit(Small)
    assert found.verdict == "passed"
    assert re.fullmatch(
        r"a fresh loop that loads the state of step 5 takes the next step bit for bit: \d+ tensors and \d+ other .*",
        found.text,
    )


def test_optimizer_state_that_is_not_restored():
    first, second = faults(without("optimizer", "torchx"))
    assert first.text.startswith("optimizers.0: optimizer state empty after load: 9 tensors saved, 0 restored")
    assert "optimizers.0.state[0.weight].exp_avg" in first.places
    assert first.line == f"{__file__}:{without('optimizer').load.__code__.co_firstlineno}"
    assert first.fix.startswith("save optimizer.state_dict()")
    assert second.places == tuple(f"optimizers.0.param_groups[{number}].lr" for number in (0, 1))


def with_moments(change):
    """Returns a loop whose load changes the optimizer's state, of two parameters by number."""

    class Changes(Small):
        def make_optimizers(self):
            super().make_optimizers()
            self.optimizers = [torch.optim.AdamW([self.model[1].weight, self.model[1].bias])]
            self.schedulers = [torch.optim.lr_scheduler.ExponentialLR(self.optimizers[0], 0.5)]

        def load(self, state):
            change(state["optimizer"]["state"])
            super().load(state)

    return Changes


def test_moments_that_are_exchanged_or_changed_do_not_begin_anew():
    found = only_fault(with_moments(lambda state: state.update({0: state[1], 1: state[0]})))
    assert found.text.endswith("moments are exchanged between 1.weight, 1.bias")
    assert "its state dict knows them by number" in found.fix
    found = only_fault(with_moments(lambda state: state[0]["exp_avg"].mul_(2)))
    assert found.text.endswith("moments or step counts are not those that were saved")
    assert found.places == ("optimizers.0.state[1.weight].exp_avg",)
    found = only_fault(with_moments(lambda state: state[0]["exp_avg"].zero_()))
    assert found.text.endswith("moments and step counts begin anew")


def test_an_optimizer_that_is_made_anew_after_the_load():
    class Anew(Small):
        def load(self, state):
            super().load(state)
            self.make_optimizers()
            self.schedulers[0].load_state_dict(state["scheduler"])

    assert "18 tensors" not in faults(Anew)[0].text
    assert "9 tensors saved, 0 restored" in faults(Anew)[0].text


def test_an_optimizer_that_is_made_anew_where_no_attribute_shows_it():
    def make():
        loop = Small()
        shown = {name: getattr(loop, name) for name in ("model", "scaler", "loss", "batch", "step", "next_batch")}

        def load(state):
            loop.load(state)
            loop.make_optimizers()
            loop.optimizers[0].param_groups[0]["lr"] = loop.optimizers[0].param_groups[1]["lr"] = 0.1

        return {**shown, "optimizers": loop.optimizers, "save": loop.save, "load": load}

    found = only_fault(make)
    assert found.text == (
        "after the load steps an optimizer (AdamW) that is none of the loop's: it lacks the loaded state"
    )
    assert found.places == ("optimizers.0",)


def test_a_scheduler_that_is_not_restored():
    found = only_fault(without("scheduler"))
    assert "schedulers.0.last_epoch is 5 when saved and 0 after load" in found.text
    assert "schedulers.0.last_epoch" in found.places
    assert found.fix.startswith("save scheduler.state_dict()")


def test_a_scheduler_that_is_made_with_the_last_epoch_counts_on():
    class Rebuilt(Small):
        def load(self, state):
            super().load(state)
            last = state["scheduler"]["last_epoch"] - 1  # its constructor steps once
            self.schedulers = [torch.optim.lr_scheduler.LambdaLR(self.optimizers[0], lambda step: 0.5**step, last)]

        def make_optimizers(self):
            super().make_optimizers()
            self.schedulers = [torch.optim.lr_scheduler.LambdaLR(self.optimizers[0], lambda step: 0.5**step)]

    assert [each.verdict for each in audit(Rebuilt)] == ["passed"]


def test_a_loss_scale_that_is_not_restored():
    found = only_fault(without("scaler"))
    assert "scaler.scale is 32 when saved and 16 after load" in found.text
    assert found.places == ("scaler.scale", "scaler._growth_tracker")
    assert "scaler.state_dict()" in found.fix


def test_what_is_at_its_first_value_at_one_moment_is_seen_at_the_other():
    class Grows(Small):
        """Every fifth step the loss scale grows, and the count that is lost begins anew: so at the second save."""

        def __init__(self):
            super().__init__()
            self.scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=5)

        def load(self, state):
            super().load({**state, "scaler": {**state["scaler"], "_growth_tracker": 0}})

    found = only_fault(Grows)
    assert found.text.startswith("scaler._growth_tracker is 4 when saved and 0 after load")
    assert not any(each.verdict == "passed" for each in audit(Grows))


def test_data_that_begin_from_the_start():
    class FromTheStart(Small):
        def load(self, state):
            super().load({**state, "position": 0})

    found = only_fault(FromTheStart)
    assert found.text.startswith("the first batch after the load is that of step 1, not of step 6: ")
    assert found.places == ("position", "data")
    assert found.fix.startswith("save how many batches the training has taken")


def test_an_epoch_that_is_not_restored_shows_in_the_batches_after_the_first():
    class SameFirst(Small):
        """The order of an epoch is another one from its third batch on."""

        def batch(self, step, rank=0):
            return super().batch(step if step % 4 > 1 else step % 4)

        def load(self, state):
            super().load({**state, "position": state["position"] % 4})

    assert "the right one, and that of step 7 is not" in only_fault(SameFirst).text


class ByEpochs(Small):
    def load(self, state):
        super().load({**state, "position": state["position"] // 4 * 4})


def test_a_position_that_is_right_at_the_end_of_an_epoch_only_is_a_note():
    [found] = audit(ByEpochs)
    assert found.verdict == "note"
    assert found.text == (
        "the first batch after the load is that of step 5, not of step 6: the position in the data is not restored "
        "within an epoch: it begins anew, and the batches before the save come twice. At the end of an epoch it is "
        "restored, and nothing in the state shows that save() is called within one"
    )


def test_a_place_in_the_epoch_that_is_saved_and_not_loaded_is_a_fault():
    class KeepsPlace(ByEpochs):
        def save(self):
            return {**super().save(), "data": {"place": self.position % 4}}

    found = only_fault(KeepsPlace)
    assert found.text.startswith("the first batch after the load is that of step 5, not of step 6: ")
    assert found.text.endswith("save() keeps the place in the epoch (data.place), and load() does not go on from there")
    assert found.places == ("position", "data", "data.place")


class Long(Small):
    """An epoch of twelve batches."""

    epoch = 12

    def batch(self, step, rank=0):
        epoch, place = divmod(step, 12)
        return X[torch.randperm(24, generator=torch.Generator().manual_seed(epoch))][2 * place :][:2]


@pytest.mark.parametrize("keeps_place", [False, True])
def test_in_a_long_epoch_too_only_a_place_that_is_saved_shows_that_a_save_within_it_is_meant(keeps_place):
    class ByLongEpochs(Long):
        def save(self):
            return {**super().save(), **({"place": self.position % 12} if keeps_place else {})}

        def load(self, state):
            super().load({**state, "position": state["position"] // 12 * 12})

    [found] = audit(ByLongEpochs)
    assert found.verdict == ("fault" if keeps_place else "note")
    assert found.text.startswith("the first batch after the load is that of step 1, not of step 4: ")
    assert ("place" in found.places) == keeps_place


def test_in_a_long_epoch_a_position_that_is_not_restored_at_its_end_either_is_a_fault():
    class FromTheStart(Long):
        def load(self, state):
            super().load({**state, "position": 0})

    assert only_fault(FromTheStart).text.endswith("the position in the data is not restored")


def test_a_count_of_a_scheduler_that_begins_anew_with_each_epoch_is_no_place_in_it():
    class Restarts(ByEpochs):
        def make_optimizers(self):
            super().make_optimizers()
            schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts
            self.schedulers = [schedule(self.optimizers[0], 4)]

    [found] = audit(Restarts)
    assert found.verdict == "note"


def test_an_option_of_a_group_that_is_another_one():
    class Decays(Small):
        def load(self, state):
            super().load(state)
            self.optimizers[0].param_groups[1]["weight_decay"] = 0.1

    found = only_fault(Decays)
    assert found.text.startswith("optimizers.0.param_groups[1].weight_decay is 0 when saved and 0.1 after load")
    assert found.places == ("optimizers.0.param_groups[1].weight_decay",)


def test_running_statistics_that_are_not_restored():
    class Filtered(Small):
        def load(self, state):
            kept = {name: each for name, each in state["model"].items() if "running" not in name}
            super().load({**state, "model": {**self.model.state_dict(), **kept}})

    found = only_fault(Filtered)
    assert found.places == ("1.running_mean", "1.running_var")
    assert found.fix.startswith("save model.state_dict() whole")


def test_running_statistics_that_are_in_no_state_dict():
    class NotPersistent(Small):
        def __init__(self):
            super().__init__()
            self.model[1]._non_persistent_buffers_set |= {"running_mean", "running_var"}

    found = only_fault(NotPersistent)
    assert found.places == ("1.running_mean", "1.running_var")
    assert found.fix == "register them with persistent=True: state_dict() leaves them out"


def test_a_buffer_that_each_step_writes_anew_need_not_be_restored():
    class Scratch(Small):
        def __init__(self):
            super().__init__()
            self.others = {}

        def loss(self, batch):
            self.model[3].register_buffer("largest", batch.abs().max(), persistent=False)
            return super().loss(batch)

    assert [each.verdict for each in audit(Scratch)] == ["passed"]


def test_random_states_that_are_not_restored():
    class Torch(Small):
        def step(self, batch):
            random.random()  # for nothing
            return super().step(batch)

        def load(self, state):
            super().load({**state, "torch": torch.get_rng_state()})

    class Own(Small):
        def load(self, state):
            super().load({**state, "noise": self.noise.get_state()})

    class Python(Small):
        def loss(self, batch):
            return super().loss(batch.roll(random.randrange(3), 1))

    class NumPy(Small):
        def loss(self, batch):
            return super().loss(batch + float(np.random.rand()))

    names = ["the random state of PyTorch", "the random generator 'noise'"]
    names += ["the random state of Python", "the random state of NumPy"]
    for kind, name in zip((Torch, Own, Python, NumPy), names, strict=True):
        [found] = audit(kind)
        assert found.verdict == "fault"
        assert found.places == (name,)
        assert found.text.startswith(f"{name} is not restored, and the next steps draw from it")
    assert only_fault(Torch).fix == "in save() and load(): torch.get_rng_state() and torch.set_rng_state(...)"
    assert "noise.get_state() and noise.set_state(...)" in only_fault(Own).fix


def test_a_random_state_that_no_step_depends_on_need_not_be_restored():
    class Draws(Small):
        dropout = 0.0

        def step(self, batch):
            for _ in DataLoader(TensorDataset(batch)):  # draws a seed for its workers, of which there are none
                break
            return super().step(batch)

        def load(self, state):
            super().load({**state, "torch": torch.get_rng_state()})

    assert [each.verdict for each in audit(Draws)] == ["passed"]


def test_an_average_that_is_not_restored():
    found = only_fault(without("ema"))
    assert {"ema.module.0.weight", "ema.n_averaged"} <= {*found.places}
    assert found.fix == "save ema.state_dict(), and load it"


def test_something_that_no_part_of_the_state_shows():
    class Counts(Small):
        taken = 0

        def loss(self, batch):
            return super().loss(batch) / (1 + self.taken)

        def step(self, batch):
            self.taken += 1
            return super().step(batch)

    found = only_fault(Counts)
    assert "although all parts of the state were the same; taken differ after the load" in found.text
    assert found.places[0] == "taken"


def test_a_mode_that_the_load_does_not_restore_is_named():
    class Evaluates(Small):
        def step(self, batch):
            loss = super().step(batch)
            self.model.eval()
            return loss

    found = only_fault(Evaluates)
    assert "training, 0.training, 1.training, 2.training and 1 more differ after the load" in found.text


def test_a_step_that_only_rounds_otherwise_is_a_note():
    class Rounds(Small):
        scale = 1.0

        def make_optimizers(self):
            self.optimizers = [torch.optim.SGD(self.model.parameters(), lr=0.1)]
            self.schedulers = [torch.optim.lr_scheduler.ExponentialLR(self.optimizers[0], 0.5)]

        def loss(self, batch):
            return super().loss(batch) * self.scale

        def load(self, state):
            super().load(state)
            self.scale = 1.0 + 1e-6

    [found] = audit(Rounds)
    assert found.verdict == "note"


def test_gradients_that_are_added_up_over_steps_are_a_note():
    class Adds(Small):
        def step(self, batch):
            loss = self.loss(batch)
            loss.backward()
            if self.position % 2 == 0:
                self.optimizers[0].step()
                self.optimizers[0].zero_grad()
            return loss

    [found] = audit(Adds)
    assert found.verdict == "note"
    assert found.fix == "save only after a step that zeroes the gradients"


def test_loops_that_differ_by_themselves_cannot_be_compared():
    class Unseeded(Small):
        def loss(self, batch):
            machine = torch.Generator()
            machine.seed()
            return super().loss(batch + torch.rand(batch.shape, generator=machine))

    [found] = audit(Unseeded)
    assert found.verdict == "not checked"
    assert found.text.startswith("two fresh loops differ after 6 steps (")


def test_a_save_that_changes_the_training():
    class Swaps(Small):
        def save(self):
            self.model.load_state_dict(self.others["ema"].module.state_dict())
            return super().save()

    assert faults(Swaps)[0].text.startswith("save() itself changes the training: 0.weight")


def test_a_load_that_fails():
    class Fails(Small):
        def load(self, state):
            super().load(state["checkpoint"])

    found = only_fault(Fails)
    assert found.text == "load() failed with what save() returned: KeyError: 'checkpoint'"
    assert found.line == f"{__file__}:{Fails.load.__code__.co_firstlineno + 1}"


def test_a_state_that_no_file_can_hold_is_a_note():
    class Unwritable(Small):
        def save(self):
            return {**super().save(), "function": lambda: 0}

    note, passed = audit(Unwritable)
    assert (note.verdict, passed.verdict) == ("note", "passed")
    assert note.text.startswith("torch.save cannot write what save() returns")


@pytest.mark.parametrize("missing", ["save", "load", "step"])
def test_a_loop_without_a_part_is_not_checked(missing):
    class Without(Small):
        def __init__(self):
            super().__init__()
            setattr(self, missing, None)

    [found] = audit(Without)
    assert found.verdict == "not checked"
    assert found.text.startswith(f"make() returned no {missing}; to have a resume checked, return an object with step(")


def test_without_next_batch_the_rest_is_checked():
    class NoPosition(Small):
        next_batch = None

    passed, position = audit(NoPosition)
    assert (passed.verdict, position.verdict) == ("passed", "not checked")
    assert position.text == "whether the data go on at the same place: make() returned no next_batch()"
    assert len([each for each in audit(without("ema")) if each.verdict == "fault"]) == 1


def test_random_states_of_the_process_are_as_before():
    class Draws(Small):
        def loss(self, batch):
            return super().loss(batch + float(np.random.rand()))

    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    audit(Draws)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == np.random.get_state()[1].tolist()
