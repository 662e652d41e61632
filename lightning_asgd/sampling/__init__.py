"""SG-MCMC samplers as optimizers, and predictions averaged over samples."""
