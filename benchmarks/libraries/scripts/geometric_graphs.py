"""PyTorch Geometric's GIN on graphs in a ``LightningDataset``, as its Lightning example shows."""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as pl
import torch
from harness import Run
from torch.nn import functional

GRAPHS = 384


def graphs() -> list[Any]:
    """Rings and stars, of several sizes, with random features."""
    from torch_geometric.data import Data

    generator = torch.Generator().manual_seed(0)
    made = []
    for number in range(GRAPHS):
        size, label = 5 + number % 7, number // 7 % 2
        ends = torch.arange(size)
        other = torch.zeros(size, dtype=torch.long) if label else (ends + 1) % size
        edges = torch.stack([torch.cat([ends, other]), torch.cat([other, ends])])
        features = torch.randn(size, 4, generator=generator)
        made.append(Data(x=features, edge_index=edges, y=torch.tensor([label]), number=torch.tensor([number])))
    return made


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        from torch_geometric.nn import GIN, MLP

        self.gnn = GIN(4, 32, 3, dropout=0.1, jk="cat")
        self.classifier = MLP([32, 32, 2], norm=None, dropout=0.1)

    def forward(self, data: Any) -> torch.Tensor:
        from torch_geometric.nn import global_add_pool

        return self.classifier(global_add_pool(self.gnn(data.x, data.edge_index), data.batch))

    def training_step(self, data: Any, batch_idx: int) -> torch.Tensor:
        loss = functional.cross_entropy(self(data), data.y)
        self.log("train_loss", loss, batch_size=data.num_graphs)
        return loss

    def validation_step(self, data: Any, batch_idx: int) -> None:
        loss = functional.cross_entropy(self(data), data.y)
        self.log("val_loss", loss, batch_size=data.num_graphs, on_epoch=True, sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main() -> None:
    run = Run(pl, lambda batch: batch.number.tolist(), "torch-geometric")
    from torch_geometric.data import Batch
    from torch_geometric.data.lightning import LightningDataset

    data = graphs()
    train, val = data[: GRAPHS * 5 // 6], data[GRAPHS * 5 // 6 :]
    module = Model()
    best = pl.callbacks.ModelCheckpoint(monitor="val_loss", save_top_k=1)
    options = run.trainer_options()
    options["callbacks"].append(best)
    trainer = pl.Trainer(max_epochs=10, log_every_n_steps=5, **options)
    trainer.fit(module, LightningDataset(train, val, batch_size=16, num_workers=2))
    module.eval()
    whole = Batch.from_data_list(data)
    with torch.no_grad():
        loss = functional.cross_entropy(module(whole), whole.y)
    run.finish(error=float(loss), trivial=math.log(2))


if __name__ == "__main__":
    main()
