"""An iterable dataset that divides itself by ``torch.distributed``."""

from self_sharding import AsTorchSays, main

if __name__ == "__main__":
    main(AsTorchSays)
