"""An iterable dataset that takes its part as ``torch.distributed`` says."""

from self_sharding import AsTorchSays, main

if __name__ == "__main__":
    main(AsTorchSays)
