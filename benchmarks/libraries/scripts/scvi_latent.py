"""scVI on counts of three cell types, trained on several devices as its guide does; the model is saved after."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import numpy as np
from harness import Run, rows

CELLS, GENES, KINDS = 640, 60, 4


def counts() -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    kinds = random.integers(KINDS, size=CELLS)
    rates = random.gamma(5.0, 0.2, size=(KINDS, GENES))
    depth = random.gamma(8.0, 0.2, size=(CELLS, 1))
    return random.poisson(rates[kinds] * depth), kinds


def error(latent: Any, kinds: Any) -> float:
    """Share of cells whose five nearest neighbours are mostly of another kind."""
    from sklearn.model_selection import cross_val_predict
    from sklearn.neighbors import KNeighborsClassifier

    return float(np.mean(cross_val_predict(KNeighborsClassifier(5), latent, kinds) != kinds))


def main() -> None:
    run = Run(pl, lambda batch: rows(batch["X"]), "scvi-tools")
    import scvi
    from anndata import AnnData

    scvi.settings.seed = run.seed
    values, kinds = counts()
    adata = AnnData(values.astype("float32"), obs={"kind": [str(kind) for kind in kinds]})
    scvi.model.SCVI.setup_anndata(adata)
    model = scvi.model.SCVI(adata, n_latent=5)
    options = run.trainer_options("ddp_find_unused_parameters_true")
    model.train(
        max_epochs=10, batch_size=32, train_size=1.0, datasplitter_kwargs={"drop_dataset_tail": True}, **options
    )
    model.save("model", overwrite=True)
    run.finish(error=error(model.get_latent_representation(), kinds), trivial=1 - 1 / KINDS)


if __name__ == "__main__":
    main()
