"""Small trainings, healthy as they are, and what can be planted in each to make it break.

    in_torch, in_jax: name -> Training        plant: name -> what spoils it

A training knows nothing of faults, and what is under test is handed a training and nothing else.
Which op a fault sits in stands in the table of `tests/shared/test_planted_faults.py` alone.
"""
