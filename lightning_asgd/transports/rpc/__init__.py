"""Messages over torch.distributed.rpc."""
