"""What starts, restarts and places workers for us: torchrun, SLURM, tasks of Ray.

In a task of Ray's ``sys.argv`` names Ray's program, so a Trainer with several devices cannot run its script again. Its
other workers unpickle the Trainer (``engines/pickled_program.py``).
"""
