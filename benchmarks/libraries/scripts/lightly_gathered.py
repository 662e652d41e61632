"""Lightly's SimCLR as its multi-GPU page shows: the loss gathers the images of all workers."""

from lightly_simclr import main

if __name__ == "__main__":
    main(gather=True)
