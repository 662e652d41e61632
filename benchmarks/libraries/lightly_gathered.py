"""Lightly's SimCLR as its multi-GPU page shows: the loss gathers all workers' images; batch norm is synchronized."""

from lightly_simclr import main

if __name__ == "__main__":
    main(gather=True)
