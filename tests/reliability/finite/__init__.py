"""The campaign of finite faults: damage that makes no NaN and no Inf, in memory, in arithmetic and in training.

python -m tests.reliability.finite record --part all        # runs what has no recording yet; all: 2.2 h of CPU time
python -m tests.reliability.finite score                    # tables from the committed recordings, in seconds
python -m tests.reliability.finite score --from outputs/finite    # from new ones, judged again by the present code
python -m tests.reliability.finite pack                     # what the tables need of new ones, to be committed
"""
