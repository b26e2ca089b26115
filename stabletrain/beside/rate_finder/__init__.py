"""`stabletrain lr`: proposes a peak learning rate from short runs at several rates.

    configuration -> trials -> rates a factor of 4 apart -> rates a factor of 2 apart, several seeds -> peak -> table

The usual range test (Smith, arXiv 1506.01186) raises the rate within one run. The loss at a rate then still shows the
steps at lower rates before it, so the test proposes too high a rate, and it does not know its noise. Here each rate has
short runs of its own, from the same weights on the same batches.
"""
