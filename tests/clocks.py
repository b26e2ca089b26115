"""A clock for tests of what is measured: a machine that stands still for half a second must not fail them."""


class ToldClock:
    """Stands in for the benchmarks' `Clock`: a millisecond passes at each look, and what `slow` adds to a call."""

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
        """`call`, that takes `seconds` longer by this clock."""

        def slowly(*args, **named):
            self.time += seconds
            return call(*args, **named)

        return slowly
