"""Chemprop's message passing network on small molecules, trained as in its notebook."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from harness import Run, rows
from lightning import pytorch as pl

PARTS = ("C", "CC", "CCC", "O", "N", "CO", "C(C)", "C(F)", "C(=O)", "C(Cl)")


def molecules() -> tuple[list[str], Any]:
    """SMILES, and for each a number that depends on its atoms."""
    random = np.random.default_rng(0)
    smiles = ["C" + "".join(parts) + "C" for parts in itertools.product(PARTS, repeat=3)][::2][:448]
    values = [0.3 * s.count("C") - 1.2 * s.count("O") + 0.8 * s.count("N") - 0.5 * s.count("F") for s in smiles]
    values = np.asarray(values) + random.normal(0, 0.01, len(values))  # each its own, to know it by
    return smiles, (values - values.mean()) / values.std()


def main() -> None:
    run = Run(pl, lambda batch: rows(batch.Y), "chemprop")
    from chemprop import data, models, nn

    smiles, values = molecules()
    points = [data.MoleculeDatapoint.from_smi(s, np.array([y])) for s, y in zip(smiles, values, strict=True)]
    order = np.random.default_rng(1).permutation(len(points))
    train, test = ([points[i] for i in part] for part in (order[:384], order[384:]))
    loader = data.build_dataloader(data.MoleculeDataset(train), batch_size=16, num_workers=0, seed=run.seed)
    val = data.build_dataloader(data.MoleculeDataset(test), batch_size=16, num_workers=0, shuffle=False)
    module = models.MPNN(nn.BondMessagePassing(d_h=64), nn.MeanAggregation(), nn.RegressionFFN(input_dim=64), True)
    best = pl.callbacks.ModelCheckpoint("checkpoints", "best-{epoch}-{val_loss:.2f}", "val_loss", save_last=True)
    options = run.trainer_options()
    options["callbacks"].append(best)
    trainer = pl.Trainer(logger=False, max_epochs=6, **options)
    trainer.fit(module, loader, val)
    found = trainer.test(module, val, verbose=False)
    run.finish(error=found[0]["test/mse"] ** 0.5, trivial=float(np.std(values[order[384:]])))


if __name__ == "__main__":
    main()
