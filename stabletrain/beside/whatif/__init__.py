"""`stabletrain whatif`: tries fixes from the state before a trouble on the same batches, and ranks them.

    target -> trouble -> start state -> arms -> two rounds -> ranking -> table, whatif.json, whatif.html

An arm is a resume with changed overrides, in a run folder of its own. Nothing below this room imports it.
"""
