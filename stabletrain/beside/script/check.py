"""`stabletrain run --check`: the first updates of a script are recorded and checked, then the script is ended.

Nothing is watched before the script has imported torch, as in `start`.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from stabletrain.beside.script.start import AfterTorch

if TYPE_CHECKING:
    from stabletrain.beside.preflight.report import Report
    from stabletrain.beside.script.recorder import ScriptRecorder


class Ended(BaseException):
    """Ends a script of which enough has been recorded. No error: `except Exception` does not catch it."""


class Check:
    """Watches this process until the report is made.

    Args:
        show: prints a report, and returns the exit code.
    """

    def __init__(self, show: "Callable[[Report], int]") -> None:
        self._show = show
        self._undo: list[Callable[[], None]] = []
        self._recorder: ScriptRecorder | None = None
        self._compiles = False

    def begin(self) -> None:
        """Begins to watch, as soon as the script has imported torch."""
        if "torch" in sys.modules:
            self._after_torch()
            return
        found = AfterTorch(self._after_torch)
        sys.meta_path.insert(0, found)
        self._undo.append(lambda: sys.meta_path.remove(found) if found in sys.meta_path else None)

    def end(self) -> int:
        """Ends the watch, shows the report, and returns the exit code."""
        if self._recorder is None:
            self.remove()  # what is loaded now makes an optimizer
            from stabletrain.beside.preflight.script import nothing_trained

            return self._show(nothing_trained())
        code = self._recorder.show()
        self.remove()
        return code

    def remove(self) -> None:
        """Leaves everything as it was."""
        if self._recorder is not None:
            self._recorder.remove()
        while self._undo:
            self._undo.pop()()

    def _after_torch(self) -> None:
        """Notices optimizers, and whether anything is compiled."""
        import torch
        from torch.optim import Optimizer

        prepare, compile_ = vars(Optimizer)["_patch_step_function"], vars(torch)["compile"]

        def noticed(optimizer: Optimizer) -> None:
            prepare(optimizer)
            if self._recorder is None:
                # Loaded with the first optimizer: a script that trains nothing does not wait for it. What is loaded
                # makes an optimizer too, which is not the script's.
                Optimizer._patch_step_function = prepare
                from stabletrain.beside.script.recorder import ScriptRecorder

                self._recorder = ScriptRecorder(self._show, compiles=self._compiles)
                self._recorder.install()
                Optimizer._patch_step_function = noticed  # ty: ignore[invalid-assignment]
            self._recorder.notice(optimizer)

        def compiling(*args: object, **kwargs: object) -> object:
            self._compiles = True
            if self._recorder is not None:
                self._recorder.notice_compiler()
            return compile_(*args, **kwargs)

        Optimizer._patch_step_function = noticed  # ty: ignore[invalid-assignment]
        vars(torch)["compile"] = compiling
        self._undo += [
            partial(setattr, Optimizer, "_patch_step_function", prepare),
            partial(setattr, torch, "compile", compile_),
        ]
