"""The campaign of finite faults: damage that makes no NaN and no Inf, in memory, in arithmetic and in training.

python -m tests.reliability.finite record --part all        # runs what has no recording yet
python -m tests.reliability.finite score                    # tables from the committed recordings, in seconds
"""
