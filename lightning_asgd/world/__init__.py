"""The rank and world that libraries ask torch.distributed for."""
