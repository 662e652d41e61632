"""Several training dataloaders, whose batches are leased together."""
