"""A second, smaller set of held-out programs, by another author who had read neither a check nor its tests.

loops.py   four loops: preferences (DPO), an actor and a critic (PPO), speech (CTC), and a byte-level RNN that carries
           its state over truncated windows
faults.py  most kinds of the proof set, each planted in another way than there and in the first held-out set
clean.py   programs that look wrong and are right
"""

from tests.reliability.preflight.held_out.second import clean, faults  # noqa: F401  (registers the programs)
