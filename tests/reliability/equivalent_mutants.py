"""Mutants that survive because they change nothing that a test can see, with the reason.

`mutation.py` leaves them out of the score. The keys are the file, and the line without and with the mutation, without
indentation.
"""

NEVER_SET = "nothing assigns to its fields or hashes it: `frozen` guards against mistakes in code yet to be written"

EQUIVALENT: dict[tuple[str, str, str], str] = {
    (
        "stabletrain/in_flight.py",
        "numbers = self._known | dict(zip(self._names, self._values.tolist(), strict=True))",
        "numbers = self._known | dict(zip(self._names, self._values.tolist(), strict=False))",
    ): "names and values come from one dict, so they are equally many",
    (
        "stabletrain/step.py",
        "earlier[number] = torch.full((), number, device=batches[0].targets.device)",
        "earlier[number] = torch.full((), number, device=batches[ -1].targets.device)",
    ): "all micro-batches are on one device",
    (
        "stabletrain/step.py",
        "largest = (torch.stack(tensors).amax() if len(tensors) > 1 else tensors[0]).float()",
        "largest = (torch.stack(tensors).amax() if len(tensors) >= 1 else tensors[0]).float()",
    ): "the maximum of one tensor is that tensor",
    (
        "stabletrain/step.py",
        "largest = (torch.stack(tensors).amax() if len(tensors) > 1 else tensors[0]).float()",
        "largest = (torch.stack(tensors).amax() if len(tensors) > 0 else tensors[0]).float()",
    ): "the maximum of one tensor is that tensor",
    (
        "stabletrain/step.py",
        "largest = (torch.stack(tensors).amax() if len(tensors) > 1 else tensors[0]).float()",
        "largest = (torch.stack(tensors).amax() if len(tensors) > 1 else tensors[ -1]).float()",
    ): "there is one tensor here",
    (
        "stabletrain/step.py",
        "known = batches[0].known_count() if len(batches) == 1 else batches[0].counted",
        "known = batches[0].known_count() if len(batches) == 1 else batches[ -1].counted",
    ): "each micro-batch of a step carries the count of the whole step",
    (
        "stabletrain/step.py",
        "return n_valid, torch.ones_like(n_valid, dtype=torch.bool) if known == 0 else False",
        "return n_valid, torch.ones_like(n_valid, dtype=torch.bool) if known <= 0 else False",
    ): "a count is not negative",
    (
        "stabletrain/step.py",
        "counts = [(batch.targets != IGNORE_INDEX).sum() for batch in batches]",
        "counts = [(batch.targets > IGNORE_INDEX).sum() for batch in batches]",
    ): "a target below IGNORE_INDEX is a bad label, and the step is withheld",
    (
        "stabletrain/step.py",
        "return ForwardBackward(loss.detach(), bad_inputs | bad_targets, magnitude, classes)",
        "return ForwardBackward(loss.detach(), bad_inputs + bad_targets, magnitude, classes)",
    ): "the sum of two bool tensors is true where one of them is",
    (
        "stabletrain/step.py",
        "with tools.parallel.gradient_sync(state.model, number == len(full)):",
        "with tools.parallel.gradient_sync(state.model, number >= len(full)):",
    ): "the number of a micro-batch is at most how many there are",
    (
        "stabletrain/step.py",
        "with tools.parallel.gradient_sync(state.model, number == len(full)):",
        "with tools.parallel.gradient_sync(state.model, number is len(full)):",
    ): "Python has one object for each number up to 256",
    (
        "stabletrain/step.py",
        "@dataclass(frozen=True)",
        "@dataclass(frozen=False)",
    ): NEVER_SET,
    (
        "stabletrain/checkpoint/reader.py",
        'return names[0] if names == [WHOLE[part]] else f"{part}/"',
        'return names[ -1] if names == [WHOLE[part]] else f"{part}/"',
    ): "there is one name here",
    (
        "stabletrain/checkpoint/reader.py",
        "ours = all(map(PIECE.fullmatch, named)) if form == PARTED else named == {MODEL, TRAINING}",
        "ours = all(map(PIECE.fullmatch, named)) if form >= PARTED else named == {MODEL, TRAINING}",
    ): "PARTED is the larger of the two formats",
    (
        "stabletrain/checkpoint/reader.py",
        "if rank == 0:",
        "if rank <= 0:",
    ): "ranks count from 0",
    (
        "stabletrain/checkpoint/folder.py",
        "healthy = self.newest(healthy_only=True, at_most=newest.step - 1)",
        "healthy = self.newest(healthy_only=True, at_most=newest.step | 1)",
    ): "none is newer than the newest, which is not healthy",
    (
        "stabletrain/guard/policy/off.py",
        "faulty_rank: int = -1",
        "faulty_rank: int = +1",
    ): "read only after `machine_faults` has risen, which stays 0 without a guard",
    (
        "stabletrain/guard/checks/written.py",
        "usable = tensor.layout == torch.strided and tensor.is_floating_point() and not tensor.is_meta",
        "usable = tensor.layout is torch.strided and tensor.is_floating_point() and not tensor.is_meta",
    ): "PyTorch has one object for each layout",
    (
        "stabletrain/guard/policy/slow_loop.py",
        "return {kind: SustainedRise(factor * limit) for kind, factor in THRESHOLDS.items() "
        'if kind != "weight_growth"}',
        'return {kind: SustainedRise(factor * limit) for kind, factor in THRESHOLDS.items() if kind < "weight_growth"}',
    ): "the other kinds come before it in the alphabet",
    (
        "stabletrain/guard/checks/update_check.py",
        "return gate & (self.bad == 0)",
        "return gate * (self.bad == 0)",
    ): "the product of two bool tensors is true where both are",
    (
        "stabletrain/guard/checks/repeats.py",
        "return torch.where(failed[0] > 0, OUT_OF_MEMORY, judge(compared, everywhere))",
        "return torch.where(failed[ -1] > 0, OUT_OF_MEMORY, judge(compared, everywhere))",
    ): "`failed` has one element",
    (
        "stabletrain/guard/policy/off.py",
        "faulty_rank: int = -1",
        "faulty_rank: int = 1",
    ): "read only after `machine_faults` has risen, which stays 0 without a guard",
    (
        "stabletrain/guard/checks/comparing.py",
        "@dataclass(frozen=True)",
        "@dataclass(frozen=False)",
    ): NEVER_SET,
    (
        "stabletrain/guard/samples.py",
        'label = name.rpartition(".")[2].lower() in LABEL_NAMES or (len(tensors) > 1 and name == tensors[-1][0])',
        'label = name.rpartition(".")[2].lower() in LABEL_NAMES or (len(tensors) != 1 and name == tensors[-1][0])',
    ): "`name` is of one of the tensors",
    (
        "stabletrain/guard/policy/kept.py",
        "_alarmed: bool = field(init=False, repr=False, default=False)",
        "_alarmed: bool = field(init=False, repr=True, default=False)",
    ): "nothing shows a guard's fields as text",
    (
        "stabletrain/guard/loop_states.py",
        "self._passed, self._first = 0, -1",
        "self._passed, self._first = 0, ~1",
    ): "no step has a negative number",
    (
        "stabletrain/guard/generators.py",
        "if source is not self._source:",
        "if source != self._source:",
    ): "NumPy's bit generators are equal only to themselves",
    (
        "stabletrain/checkpoint/snapshots.py",
        "for copy, tensor in zip(copies, live, strict=True):",
        "for copy, tensor in zip(copies, live, strict=False):",
    ): "there is one copy for each tensor",
    (
        "stabletrain/checkpoint/snapshots.py",
        "self._device = device = live[0].device",
        "self._device = device = live[ -1].device",
    ): "a model's tensors on a card are on one card",
    (
        "stabletrain/checkpoint/reader.py",
        'named = manifest["files"].keys() - {SKELETON}',
        'named = manifest["files"].keys() ^ {SKELETON}',
    ): "a manifest without the skeleton is refused in either case, with the same message",
    (
        "stabletrain/checkpoint/folder.py",
        "return {checkpoint.path for checkpoint in after} - {checkpoint.path for checkpoint in spared}",
        "return {checkpoint.path for checkpoint in after} ^ {checkpoint.path for checkpoint in spared}",
    ): "what is spared is one of those after",
    (
        "stabletrain/checkpoint/dcp.py",
        "writer.fs, writer.sync_files, writer.per_thread_copy_ahead = files, False, 0  # `write_file` synchronises",
        "writer.fs, writer.sync_files, writer.per_thread_copy_ahead = files, False, 1  # `write_file` synchronises",
    ): "the number of bytes that are copied ahead: no tensor has fewer",
    (
        "stabletrain/guard/checks/written.py",
        "largest = 0.0",
        "largest = 1.0",
    ): "the largest weight is compared only with 1e17",
    (
        "stabletrain/guard/checks/recheck.py",
        "turn = (state.step + 1) // self.every if self.due(state.step) else None",
        "turn = (state.step + 2) // self.every if self.due(state.step) else None",
    ): "every tensor has its turn, in the same order",
    (
        "stabletrain/guard/engine.py",
        'incident = explain(step, "nonfinite" if guard.kind == "bad_data" and not finite else guard.kind)',
        'incident = explain(step, "nonfinite" if guard.kind <= "bad_data" and not finite else guard.kind)',
    ): "no kind of a held step comes before it in the alphabet",
    (
        "stabletrain/guard/policy/rollback.py",
        "if verdict is not Verdict.SKIP or self.trouble < PATIENCE_AT_END:",
        "if verdict != Verdict.SKIP or self.trouble < PATIENCE_AT_END:",
    ): "there is one object for each verdict",
    (
        "stabletrain/guard/policy/slow.py",
        'if kind == "update_length" or (self._suspected("update_length") and self._tests["update_length"].shift > 0):',
        'if kind > "update_length" or (self._suspected("update_length") and self._tests["update_length"].shift > 0):',
    ): "if this kind has just passed, it is suspected, and its shift is above 0, because its test finds rises only",
    (
        "stabletrain/guard/policy/slow.py",
        "return any(test.statistic > 0.5 for test in self._tests.values())",
        "return any(test.statistic >= 0.5 for test in self._tests.values())",
    ): "a sum of measured values is not exactly half of a threshold",
    (
        "stabletrain/guard/own_loop.py",
        "if after is not None and self._model is not None and loaded is self._model():",
        "if after is not None and self._model is not None and loaded == self._model():",
    ): "modules are equal only to themselves",
    (
        "stabletrain/guard/policy/slow.py",
        "if reading.update > 0 and reading.lr > 0:",
        "if reading.update > 0 and reading.lr != 0:",
    ): "a learning rate is not negative",
    (
        "stabletrain/guard/judge.py",
        "self.unproven = False",
        "self.unproven = True",
    ): "before the first step it costs one copy that nothing reads",
    (
        "stabletrain/guard/policy/kept.py",
        "_retaken: tuple[int, int, int] = field(init=False, repr=False, default=(0, 0, 0))",
        "_retaken: tuple[int, int, int] = field(init=False, repr=True, default=(0, 0, 0))",
    ): "nothing shows a guard's fields as text",
    (
        "stabletrain/guard/policy/skip.py",
        "_alarms: list[Alarm] = field(init=False, repr=False, default_factory=list)",
        "_alarms: list[Alarm] = field(init=True, repr=False, default_factory=list)",
    ): "nothing gives it when a guard is made",
    (
        "stabletrain/guard/checks/state_check.py",
        "if held != self._held:",
        "if held is not self._held:",
    ): "of equal numbers that are two objects, the names are looked up once more",
    (
        "stabletrain/guard/checks/recheck.py",
        "return lambda compared, everywhere: torch.zeros_like(everywhere[0])",
        "return lambda compared, everywhere: torch.zeros_like(everywhere[ 1])",
    ): "both are numbers of one dtype on one device",
    (
        "stabletrain/guard/policy/skip.py",
        "if self.bad_updates < MOST_BAD_UPDATES:",
        "if self.bad_updates is not MOST_BAD_UPDATES:",
    ): "they are counted one by one, and it halts at this number",
    (
        "stabletrain/guard/checks/state_check.py",
        "if kept is None or kept.at != at(state):  # the first step, or an older state was restored",
        "if kept is None or kept.at > at(state):  # the first step, or an older state was restored",
    ): "no state is newer than the one after the last update",
    ("stabletrain/guard/read_step.py", "@abstractmethod", ""): "no class lacks the method",
    (
        "stabletrain/guard/saved_step.py",
        "outer = closures[0][1]",
        "outer = closures[ -1][1]",
    ): "all closures of a step are of one model",
    (
        "stabletrain/guard/checks/written.py",
        "if tensor.layout == torch.sparse_coo:",
        "if tensor.layout is torch.sparse_coo:",
    ): "PyTorch has one object for each layout",
    ("stabletrain/guard/rerun.py", "@dataclass(frozen=True)", "@dataclass(frozen=False)"): NEVER_SET,
    (
        "stabletrain/checkpoint/sharded.py",
        "if now - since > min(PATIENCE, self.writers.patience) or (ending is not None and now - ending > GRACE):",
        "if now - since >= min(PATIENCE, self.writers.patience) or (ending is not None and now - ending > GRACE):",
    ): "a measured time is not exactly that",
    (
        "stabletrain/checkpoint/sharded.py",
        "if now - since > min(PATIENCE, self.writers.patience) or (ending is not None and now - ending > GRACE):",
        "if now - since > min(PATIENCE, self.writers.patience) or (ending is not None and now % ending > GRACE):",
    ): "the clock does not show twice the time meanwhile, so the remainder is the difference",
    (
        "stabletrain/checkpoint/snapshots.py",
        'moments = 2 if "betas" in group else int(group.get("momentum", 1) != 0)',
        'moments = 2 if "betas" in group else int(group.get("momentum", 1) > 0)',
    ): "momentum is not negative",
    (
        "stabletrain/checkpoint/reader.py",
        "content = checked(path, names[0], files)",
        "content = checked(path, names[ -1], files)",
    ): "there is one name here",
    (
        "stabletrain/checkpoint/tree.py",
        "local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride",
        "local, self.mesh, self.placements, run_check=True, shape=self.shape, stride=self.stride",
    ): "the shards fit together, and the check finds nothing",
    (
        "stabletrain/checkpoint/reader.py",
        "CHUNK = 1 << 20",
        "CHUNK = 1 << 21",
    ): "how much is read at a time changes no result",
}
