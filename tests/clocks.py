"""A fake clock, so that a slow or stalled machine cannot fail tests of the measurements."""


class ToldClock:
    """Replaces the benchmarks' `Clock`: each reading advances it by a millisecond, and `slow` adds time to a call."""

    def __init__(self):
        self.time = 0.0

    def now(self):
        self.time += 1e-3
        return self.time

    def seconds(self, work):
        start = self.now()
        work()
        return self.now() - start

    def slow(self, call, seconds):
        """Returns `call`, made `seconds` slower by this clock."""

        def slowly(*args, **named):
            self.time += seconds
            return call(*args, **named)

        return slowly
