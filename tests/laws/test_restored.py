"""Law 12: restored means equal. An object whose state was loaded behaves as a fresh one that was fed the same history.

The objects are found by walking built runs and guards. A class of the package that has a state, and that the walk does
not reach or `FEEDERS` does not know, fails a test.
"""

import ast
import copy
import functools
import itertools
import json
import math
import random
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from stabletrain.checkpoint.capture import capture
from stabletrain.checkpoint.tree import map_tensors
from stabletrain.extension import NoForecast
from stabletrain.guard.checks.comparing import Compared
from stabletrain.guard.checks.recheck import NoRecheck, Recheck
from stabletrain.guard.guard import Guard
from stabletrain.guard.loop_guard import LoopGuard
from stabletrain.guard.own_loop import OwnLoop
from stabletrain.guard.policy import NoGuard, RollbackGuard
from stabletrain.guard.policy.limits import Limit, Limits
from stabletrain.guard.policy.retained import RetainedStates
from stabletrain.guard.policy.slow import NoDivergence, NoSlowSpikes
from stabletrain.monitors.change_point import ChangePoint
from stabletrain.monitors.monitors import NoMonitors
from stabletrain.monitors.rolling import RollingStats, Spikes
from stabletrain.records import GradNorms, Verdict
from stabletrain.stability.clipping.adaptive import AdaGC, ZClip
from stabletrain.stability.clipping.fixed import NoClip
from stabletrain.stability.clipping.update_norm import UpdateNormClip
from stabletrain.stability.precision.autocast import Unscaled
from stabletrain.trainer.build import build
from stabletrain.trainer.history import History
from stabletrain.trainer.loop import train
from tests.conftest import HAS_BESIDE
from tests.guard.given import Loop, batches, bits
from tests.runs import ROOT, TINY_GPT, composed
from tests.trainer.given import batch, reading

FIXED = settings(derandomize=True, deadline=None, database=None, suppress_health_check=[*HealthCheck])

QUICK = [
    "guard=rollback",
    "guard.window=20",
    "guard.patience=3",
    "guard.snapshot_every=5",
    "guard.healthy_after=4",
    "guard.skip_batches=2",
    "schedule=constant",
    "warmup=none",
    "precision=fp32",
    "forensics=off",
]
RUNS = {
    "off": ["guard=off", "clipping=none", "precision=fp32", "monitors=none", "forecast=off"],
    "adagc": [*QUICK, "clipping=adagc", "clipping.warmup_steps=3", "optimizer=spam", "optimizer.reset_interval=3",
              "optimizer.warmup_steps=1", "guard.recheck_every=4", "guard.slow=rollback"],
    "update_norm": [*QUICK, "clipping=update_norm", "clipping.warmup_steps=3", "optimizer.cautious_decay=true"],
    "value": ["guard=skip", "guard.slow=off", "guard.recheck_every=0", "clipping=value", "precision=bf16"],
    "zclip": [*QUICK, "clipping=zclip", "clipping.warmup_steps=3", "optimizer=stable_adamw", "guard.escalate=whatif"],
    "fp16": ["precision=fp16", "precision.growth_interval=3", "optimizer=muon", "monitors=full", "guard=skip"],
}  # fmt: skip
"""Configurations that build every class of a run that has a state."""


# ---- what has a state


def stateful_classes():
    """The names of the classes with a `load_state_dict` of their own or an optimizer's, from the package's source."""
    found = set()
    for path in sorted((ROOT / "stabletrain").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ClassDef):
                continue
            bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
            own = any(isinstance(each, ast.FunctionDef) and each.name == "load_state_dict" for each in node.body)
            if "Protocol" not in bases and (own or bases & {"Optimizer", "GatedOptimizer"}):
                found.add(f"{module}.{node.name}")
    return found


def walk(root):
    """The objects of the package, with a `load_state_dict`, that `root` holds, however deep."""
    seen, found, waiting = set(), [], [root]
    while waiting:
        each = waiting.pop()
        if id(each) in seen or isinstance(each, type | Tensor | str | int | float | None):
            continue
        seen.add(id(each))
        if isinstance(each, Mapping):
            waiting += each.values()
        elif isinstance(each, list | tuple | set):
            waiting += each
        elif isinstance(each, functools.partial):
            waiting += [each.func, *each.args, *each.keywords.values()]
        elif type(each).__module__.startswith("stabletrain."):
            waiting += [*vars(each).values(), *(vars(type(each)).values() if is_dataclass(each) else ())]
            if hasattr(each, "load_state_dict") and not isinstance(each, nn.Module):
                found.append(each)
    return found


@functools.cache
def built(name):
    """The stateful objects of a built run that has not trained, one of each class, and the run's model."""
    with composed(*TINY_GPT, *RUNS[name]) as cfg, tempfile.TemporaryDirectory() as folder:
        run = build(cfg, Path(folder))
        run.data.batches.close()
        return {type(each): each for each in walk(run)}


GUARDS = {
    "rollback": {"policy": lambda: RollbackGuard(snapshot_every=5, healthy_after=2), "checksum_every": 1},
    "fp16": {"precision": "fp16", "recheck_every": 2, "forecast_every": 3},
    "scaler": {"scaler": torch.amp.GradScaler("cpu", enabled=False)},
    "attached": {"attach": True},
    "several": {
        "several": True,
        "policy": lambda: RollbackGuard(snapshot_every=5, healthy_after=2),
        "checksum_every": 1,
    },
}


def loop_of(name):
    """A loop with a guard."""
    options = {**GUARDS[name], "max_incidents": 0}
    attach, policy = options.pop("attach", False), options.pop("policy", lambda: None)()
    several = options.pop("several", False)
    loop = Loop("nowhere", seed=0, policy=policy, **({} if attach else options))
    if several:
        first, second = [*loop.model.parameters()][:3], [*loop.model.parameters()][3:]
        optimizers = [torch.optim.AdamW(first, lr=1e-2), torch.optim.SGD(second, lr=1e-2, momentum=0.9)]
        loop.guard = Guard(loop.model, optimizers, folder="nowhere", policy=policy, **options)
        loop.optimizer, loop.bits = loop.guard._loop.optimizer, lambda: bits(loop.model, *optimizers)
    if attach:
        loop.guard = Guard.attach(loop.model, loop.optimizer, folder="nowhere", max_incidents=0)
    return loop


def found():
    """All stateful objects by where they were found and their class."""
    objects = {(name, kind): each for name in RUNS for kind, each in built(name).items()}
    for name in GUARDS:
        objects |= {(f"guard {name}", type(each)): each for each in walk(loop_of(name).guard)}
    return objects


# ---- feeding


def numbers(rng):
    """A value as steps have them: mostly near 2, sometimes far off."""
    return rng.gauss(2, 0.1) * rng.choice([1] * 12 + [1e3, 1e-3])


def any_reading(rng, step, **more):
    """The reading of a step, applied or skipped for any reason."""
    fault = rng.choice(["", "", "", "", "", "", "spike", "nonfinite", "overflow", "bad_data", "state_changed"])
    values = {
        "loss": abs(rng.gauss(2, 0.1)), "grad_norm": abs(rng.gauss(1, 0.1)), "inputs": rng.uniform(1, 2),
        "lr": rng.choice([0.1, 0.1, 0.1, 0.02]), "update": rng.uniform(0.01, 0.02), "weights": rng.uniform(1, 1.1),
        "clip_active": float(rng.random() < 0.97), "applied": not fault,
    }  # fmt: skip
    if fault in ("overflow", "bad_data", "state_changed"):
        values[fault] = True
    elif fault:
        values["loss"] = 1e4 if fault == "spike" else math.nan
    return reading(step, **(values | more))


def feed_guard(guard, rng, step):
    each = any_reading(rng, step)
    if each.applied and step > 50:  # the run diverges
        each = each._replace(loss=each.loss + 2)
    verdicts = [guard.judge(each)]
    alarms = [*guard.new_alarms()]
    if rng.random() < 0.1:
        verdicts.append(guard.judge_validation(step, numbers(rng)))
        alarms += guard.new_alarms()
    where = guard.rollback_before
    detour = guard.begin_rollback(step, max(step - 9, 0)) if Verdict.ROLLBACK in verdicts else None
    if guard.states.due(step):
        guard.states.retain(step, guard.healthy)
    more = guard.lr_multiplier(step), guard.healthy, guard.trouble_at_end(), guard.at_end(Verdict.APPLY)
    told = guard.kind, guard.reason, guard.since, guard.bounds, guard.states.steps, guard.states.target
    return verdicts, alarms, where, detour, more, told


def feed_limit(limit, rng, step):
    limit.add(numbers(rng))
    return limit.value, limit.size, limit.signed, limit.warm


def feed_limits(limits, rng, step):
    each = any_reading(rng, step)
    told = limits.exceeded(each)
    limits.add(each._replace(loss=numbers(rng), applied=True))
    return told, limits.loss.value, limits.norm.value, limits.inputs.value


def feed_recheck(recheck, rng, step):
    differs = {}
    if isinstance(recheck, Recheck) and recheck.due(step - 1):  # as its repetition of a step does
        recheck.exact, recheck.compared, recheck._allowed = rng.random() < 0.5, {}, {}
        for part, tensors, number in (("gradient", 3, "recheck"), ("update", 1, "recheck_update")):
            ratios = torch.tensor([rng.choice([0.0, 1e-6, 1.0]) for _ in range(tensors)])
            sums = torch.zeros(tensors, dtype=torch.int64)
            compared = Compared(["it"] * tensors, ratios, sums, sums)
            differs[number] = float(recheck.judge_of(step - 1, part, 1e-7)(compared, ratios))
    each = reading(step, **differs)
    wrong = recheck.differing_part(each)
    recheck.learn(each)
    if rng.random() < 0.05:
        recheck.learn_limit("update")
    if rng.random() < 0.03:
        recheck.stopped = True
    knows = [(recheck.agreed(part), recheck.has_repeated(part)) for part in ("gradient", "update")]
    return wrong, differs, recheck.due(step), recheck.varies, knows


def feed_slow(slow, rng, step):
    loss = 5 / (1 + step) + rng.gauss(0, 0.01) + (rng.random() < 0.3)
    alarms = slow.add(any_reading(rng, step, loss=loss, applied=True))
    return alarms, slow.suspects, slow.add_validation(step, numbers(rng)) if rng.random() < 0.3 else None


def feed_retained(states, rng, step):
    due = states.due(step)
    if due:
        states.retain(step, rng.random() < 0.7)
    promoted = states.promote(step)
    if rng.random() < 0.03:
        states.forget()
    return due, promoted, states.steps, states.target


def feed_change(test, rng, step):
    if rng.random() < 0.01:
        test.reset()
    return test.add(step, rng.gauss(0, 1) + (step > 90)), test.since, test.shift, test.level, test.falling


def feed_spikes(spikes, rng, step):
    if rng.random() < 0.1:
        spikes.count_skipped()
    return spikes.add(numbers(rng)), spikes.limit, spikes.window.normal(), spikes.score


def feed_rolling(recent, rng, step):
    return recent.add(any_reading(rng, step), rng.random() < 0.5), recent.metrics()


def feed_forecast(forecast, rng, step):
    forecast.add_loss(numbers(rng))
    told = forecast.look(step * 25, looked(rng, step))
    if told and forecast.keeps:
        forecast.keep(step)
    return told, getattr(forecast, "kept", ())


def feed_series(series, rng, step):
    series.add_loss(numbers(rng))
    return series.add(step * 25, looked(rng, step))


def looked(rng, step):
    """The metrics of a look: attention logits that grow, other signals that do not."""
    return {
        "monitors/attn_logit_max/blocks.0": 2.0 ** (step % 30) * rng.uniform(1, 1.1),
        "monitors/activation_rms/blocks.0": rng.uniform(1, 2),
        "grad/norm": numbers(rng),
        "lr": rng.choice([0.1, 0.1, 0.1, 0.2]),
    }


def feed_history(history, rng, step):
    history.count_update(numbers(rng))
    history.seconds, history.units = history.seconds + 1, history.units + 8
    if rng.random() < 0.3:
        history.val, history.val_step = {"val/loss": numbers(rng)}, step
        history.val_losses = [*history.val_losses, history.val["val/loss"]]
        history.best_loss = min(history.best_loss, history.val["val/loss"])
    return asdict(history)


def network_with_gradients(rng):
    """A small model whose gradients have any size."""
    torch.default_generator.manual_seed(rng.randrange(10**6))
    model = nn.Linear(2, 2)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) * abs(numbers(rng))
    return model


def feed_clipping(clipping, rng, step):
    model = network_with_gradients(rng)
    each = torch.stack([parameter.grad.norm() for parameter in model.parameters()])
    gate = torch.tensor(rng.random() < 0.8)
    clipped = clipping(model, GradNorms(each.norm(), each), gate)
    scaled = None if clipped.scale_update is None else clipped.scale_update(each.norm, gate)
    return (clipped.coef, clipped.active, scaled), [p.grad for p in model.parameters()]


def feed_precision(precision, rng, step):
    overflow = rng.random() < 0.2
    precision.update(torch.tensor(overflow), torch.tensor(not overflow))
    return precision.loss_scale(), precision.scale(torch.tensor(2.0))


def feed_monitors(monitors, rng, step):
    torch.default_generator.manual_seed(rng.randrange(10**6))
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if monitors.due(step, 10**6) or rng.random() < 0.3:
        read = batch(step)
        size = rng.choice([1.0, 1e-12, math.nan])
        (F.cross_entropy(model(read.inputs), read.targets) * size).backward()
        monitors.before(model, optimizer, read, built("off")[Unscaled], built_objective())
        optimizer.step()
        metrics, alarms = monitors.after(model, optimizer, applied=rng.random() < 0.9)
        return sorted(metrics.items()), alarms
    return None


@functools.cache
def built_objective():
    from stabletrain.stability.objective.cross_entropy import CrossEntropy

    return CrossEntropy()


FEEDERS: dict[type, Callable[[Any, random.Random, int], Any]] = {
    NoGuard: feed_guard,
    Limit: feed_limit,
    Limits: feed_limits,
    NoRecheck: feed_recheck,
    NoSlowSpikes: feed_slow,
    NoDivergence: lambda divergence, rng, step: divergence.add(step, numbers(rng) + (step > 60)),
    RetainedStates: feed_retained,
    ChangePoint: feed_change,
    Spikes: feed_spikes,
    RollingStats: feed_rolling,
    NoMonitors: feed_monitors,
    NoForecast: feed_forecast,
    History: feed_history,
    NoClip: feed_clipping,
    AdaGC: feed_clipping,
    ZClip: feed_clipping,
    UpdateNormClip: feed_clipping,
    Unscaled: feed_precision,
}
"""Gives one step to an object of the class, or of one derived from it; returns everything that it answers."""


COSTLY = (NoMonitors, NoForecast, NoClip, AdaGC, ZClip, torch.optim.Optimizer)

if HAS_BESIDE:
    from stabletrain.beside.forecast.series import Series

    FEEDERS[Series] = feed_series
    COSTLY = (*COSTLY, Series)


def feeder_of(kind):
    """The feeder of a class, from its nearest base that has one; None without one."""
    return next((FEEDERS[base] for base in kind.__mro__ if base in FEEDERS), None)


@dataclass
class Part:
    """An object that is fed by itself."""

    it: Any

    def feed(self, seed: int, step: int) -> Any:
        return feeder_of(type(self.it))(self.it, random.Random(seed), step)

    def save(self) -> Any:
        return self.it.state_dict()

    def load(self, state: Any) -> None:
        self.it.load_state_dict(state)


class Optimized(Part):
    """An optimizer with the weights that it changes."""

    def feed(self, seed, step):
        torch.default_generator.manual_seed(seed)
        rng = random.Random(seed)
        self.it.found_inf = torch.tensor(float(rng.random() < 0.2))
        for weight in self.weights():
            weight.grad = torch.randn_like(weight) * abs(numbers(rng)) if rng.random() < 0.9 else None
        self.it.step()
        return [weight.detach().clone() for weight in self.weights()]

    def weights(self):
        return [weight for group in self.it.param_groups for weight in group["params"]]

    def save(self):
        return copy.deepcopy([self.it.state_dict(), [weight.detach() for weight in self.weights()]])

    def load(self, state):
        self.it.load_state_dict(copy.deepcopy(state[0]))
        for weight, saved in zip(self.weights(), state[1], strict=True):
            weight.data.copy_(saved)


class Guarded(Part):
    """A loop with a guard; model and optimizer are saved and loaded with it, as a user does."""

    def feed(self, seed, step):
        rng, loop = random.Random(seed), self.it
        torch.default_generator.manual_seed(seed)
        (x, y), factor = batches(1, seed=seed)[0], rng.choice([1.0] * 9 + [math.nan])
        if loop.guard.updates:
            loop.guard.step(lambda x, y: loop.loss(x, y) * factor, batch=(x, y))
        else:
            loop.optimizer.zero_grad()
            (loop.loss(x, y) * factor).backward()
            loop.optimizer.step()
        guard = loop.guard
        return guard.last, guard.skips, guard.rolled_back, guard._loop.best_loss, loop.bits()

    def save(self):
        parts = self.it.model, self.it.optimizer, self.it.guard
        return copy.deepcopy([part.state_dict() for part in parts])

    def load(self, state):
        for part, saved in zip((self.it.model, self.it.optimizer, self.it.guard), copy.deepcopy(state), strict=True):
            part.load_state_dict(saved)


def shown(value):
    """Everything in a value as nested plain objects, to compare: bits of tensors; tuples and lists alike."""
    if isinstance(value, Tensor):
        return (str(value.dtype), list(value.shape), value.detach().flatten().view(torch.uint8).numpy().tobytes().hex())
    if isinstance(value, Mapping):
        return {str(key): shown(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [shown(each) for each in value]
    return repr(value)


def through_json(state):
    """A saved state from `json`, in which tuples became lists; tensors are beside it."""
    if isinstance(state, Tensor):
        return state.clone()
    if isinstance(state, Mapping):
        return {key: through_json(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [through_json(value) for value in state]
    return json.loads(json.dumps(state))


COPIES = {
    "the state itself": lambda state: state,
    "json": through_json,
    "a snapshot": lambda state: map_tensors(torch.clone, state),
}
MOST = 40
"""Most steps that are fed at once."""


def actions_of(most):
    """What is done with an object before it is restored a last time: how much it is fed, what is saved and loaded."""
    return st.lists(st.tuples(st.sampled_from(["feed", "feed", "save", "load"]), st.integers(0, most)), max_size=5)


def restored_means_equal(make, most, examples, known):
    """Feeds, saves and loads in any order; then compares with a fresh object that was fed the history that is left.

    Args:
        make: makes a fresh object.
        most: most steps that are fed at once.
        examples: how many histories are drawn.
        known: how many of the histories are also tried that once showed a mistake.
    """
    histories = [
        ([("feed", most), ("save", 0), ("feed", 3), ("load", 1), ("feed", most)], 1, "the state itself"),
        ([("feed", most)], 0, "the state itself"),  # back to step 0
        ([("feed", most), ("save", 0), ("feed", most)], 1, "json"),
    ]

    def holds(actions, last, how):
        seeds = itertools.count()
        live, history = make(), []
        saves = [(COPIES[how](live.save()), shown(live.save()), [])]
        for action, number in [*actions, ("load", last)]:
            if action == "feed":
                for seed in itertools.islice(seeds, number):
                    history.append(seed)
                    live.feed(seed, len(history))
            elif action == "save":
                saves.append((COPIES[how](live.save()), shown(live.save()), [*history]))
            else:
                state, before, history = saves[number % len(saves)]
                history = [*history]
                live.load(state)
                assert shown(state) == before, "loading a state, and what came after it was saved, left it as it was"
        same_from_here(live, fed(make, history), history, itertools.islice(seeds, most))
        same_from_here(loaded(make, state), fed(make, history), history, itertools.islice(seeds, most))
        assert shown(state) == before

    for actions, last, how in histories[:known]:
        holds(actions, last, how)
    drawn = given(actions_of(most), st.integers(0, most), st.sampled_from([*COPIES]))
    if examples:
        settings(FIXED, max_examples=examples)(drawn(holds))()


def fed(make, history):
    """A fresh object that was fed a history."""
    fresh = make()
    for step, seed in enumerate(history, 1):
        fresh.feed(seed, step)
    return fresh


def loaded(make, state):
    """A fresh object that loaded a state."""
    fresh = make()
    fresh.load(state)
    return fresh


def without_snapshots(state):
    """A state without the steps of the snapshots that a guard's own loop keeps in memory."""
    if isinstance(state, Mapping):
        return {key: without_snapshots(value) for key, value in state.items() if key not in ("known", "waiting")}
    return [without_snapshots(each) for each in state] if isinstance(state, list) else state


def same_from_here(one, other, history, seeds):
    """Asserts that two objects have the same state, and go on alike."""
    kept = without_snapshots if isinstance(one, Guarded) else lambda state: state
    assert shown(kept(one.save())) == shown(kept(other.save()))
    for step, seed in enumerate(seeds, len(history) + 1):
        assert shown(one.feed(seed, step)) == shown(other.feed(seed, step)), f"{step - len(history)} steps later"
    assert shown(kept(one.save())) == shown(kept(other.save()))


# ---- the law


def test_the_walk_reaches_every_class_with_a_state_and_each_has_a_feeder():
    kinds = {kind for _, kind in found()}
    reached = {base for kind in kinds for base in kind.__mro__}
    # The callback has only the state of its guard; its test is in tests/beside/adapters/test_lightning.py. The other
    # has only that of its precision, and is made for a check.
    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in reached}
    alone = {"stabletrain.beside.adapters.lightning.GuardCallback", "stabletrain.beside.preflight.own_run.LossScale"}
    assert stateful_classes() - names == (alone if HAS_BESIDE else set())
    apart = (torch.optim.Optimizer, LoopGuard, OwnLoop)  # `Guarded` feeds both
    assert {kind.__qualname__ for kind in kinds if not feeder_of(kind) and not issubclass(kind, apart)} == set()


@pytest.mark.slow(unless=lambda examples: examples == 1)
@pytest.mark.parametrize("examples", [1, 12])
def test_a_part_of_a_run_that_is_restored_is_as_a_fresh_one_with_the_same_history(examples):
    kinds = {}
    for name in RUNS:
        for kind, it in built(name).items():
            kinds.setdefault((kind, name if issubclass(kind, RollbackGuard) else ""), it)
    for it in kinds.values():
        wrapper = Optimized if isinstance(it, torch.optim.Optimizer) else Part
        costly = isinstance(it, COSTLY)
        make = lambda it=it, wrapper=wrapper: wrapper(copy.deepcopy(it))  # noqa: E731
        restored_means_equal(make, 4 if costly else MOST, examples, 3 if examples > 1 or not costly else 1)


@pytest.mark.parametrize("steps", [0, MOST])
def test_what_a_rollback_does_not_undo_is_all_that_is_left_of_the_steps_since(steps):
    for it in built("adagc").values():
        if not hasattr(it, "cumulative_state"):
            continue
        live, fresh = (fed(lambda it=it: Part(copy.deepcopy(it)), range(steps)) for _ in "12")
        saved = copy.deepcopy(live.save())
        for step in range(steps + 1, steps + 9):
            live.feed(step, step)
        kept = live.it.cumulative_state()
        before = shown(kept)
        live.load(saved)
        live.it.load_cumulative_state(kept)
        fresh.it.load_cumulative_state(copy.deepcopy(kept))
        same_from_here(live, fresh, range(steps), range(500, 500 + MOST))
        assert shown(kept) == before


@pytest.mark.slow(unless=lambda name, examples: examples == 0)
@pytest.mark.parametrize(("name", "examples"), [("rollback", 0), *((name, 5) for name in GUARDS)])
def test_a_guard_that_is_restored_is_as_a_fresh_one_with_the_same_history(name, examples):
    restored_means_equal(lambda: Guarded(loop_of(name)), 5, examples, 3 if examples else 1)


# ---- a rollback


def everything(run):
    """The state of a run as a snapshot holds it, without what a rollback does not undo."""
    tree = capture(run.state, run.saved.parts)
    parts = {}
    for name, part in run.saved.parts.items():
        kept = part.cumulative_state() if hasattr(part, "cumulative_state") else {}
        parts[name] = {key: value for key, value in tree["parts"][name].items() if key not in kept}
        if "counts" in kept:  # of spikes; their windows are put back
            parts[name]["spikes"] = {each: spikes["values"] for each, spikes in parts[name]["spikes"].items()}
    return shown([tree["model"], tree["optimizer"]["state"], tree["step"], parts, run.tools.guard.bounds])


def wreck(run, tick):
    """Makes all weights huge just before the forward pass of a step."""

    def before(module, inputs):
        if run.state.executed_steps == tick and module.training:
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.mul_(1e4)

    run.state.model.register_forward_pre_hook(before)


@pytest.mark.slow(unless=lambda every: every == 5)
@pytest.mark.parametrize(("every", "tick", "target"), [(1000, 40, 0), (5, 22, 15)])
def test_a_rollback_puts_back_every_part_of_a_run(tmp_path, every, tick, target):
    more = ["steps=50", "optimizer.lr=0.02", f"guard.snapshot_every={every}", "clipping=zclip", "eval_every=100"]
    with composed(*TINY_GPT, *QUICK, *more) as cfg:
        run = build(cfg, tmp_path)
        wreck(run, tick)
        saved, rollback, taken, back = run.saved, run.rollback, {}, []
        take, go_back = saved.take_snapshot, rollback.roll_back

        def taking():
            take()
            taken[run.state.step] = everything(run)

        def going_back(*arguments):
            go_back(*arguments)
            back.append(run.state.step)
            assert everything(run) == taken[run.state.step]

        saved.take_snapshot, rollback.roll_back = taking, going_back
        train(run)
    assert back == [target]
    skips = run.tools.guard.skips
    assert sum(skips.values()) == 3, "no step after the rollback is taken for a spike"


@pytest.mark.parametrize("steps", [0, 4])
def test_a_rollback_of_a_loop_is_as_if_the_bad_steps_had_not_been(steps):
    """To step 0, before which no limit was known, and to a later step."""
    policies = [RollbackGuard(patience=2, snapshot_every=4, healthy_after=0, lr_factor=1, skip_batches=0) for _ in "12"]
    one, other = (Loop("nowhere", policy=policy, max_incidents=0, checksum_every=1) for policy in policies)
    data = batches(20)

    def run(loop, chosen, factor=1.0):
        for number in chosen:
            torch.default_generator.manual_seed(number)
            loop.guard.step(lambda x, y: loop.loss(x, y) * factor, batch=data[number])
            yield loop.guard.last._replace(step=0)

    for loop in (one, other):
        assert all(each.applied for each in run(loop, range(steps)))
    # Steps that are given up. With losses as small as before step 0, their limits would forbid all later ones.
    assert all(each.applied for each in run(one, range(3), 1.0 if steps else 1e-4))
    assert not any(each.applied for each in run(one, range(4, 6), math.nan))
    assert one.guard._loop.policy.rollbacks == 1
    after = [[*run(loop, range(6, 14))] for loop in (one, other)]
    assert after[0] == after[1]
    assert all(each.applied for each in after[0])
    assert bits_of(one) == bits_of(other)


def bits_of(loop):
    return shown(loop.bits())


# ---- further doors


def test_weights_that_were_loaded_are_no_memory_fault():
    loop = loop_of("rollback")
    subject = Guarded(loop)
    for step in range(1, 4):
        subject.feed(step, step)
    saved = subject.save()
    subject.feed(4, 4)
    subject.load(saved)
    subject.feed(5, 4)
    assert loop.guard.skips["state"] == 0
