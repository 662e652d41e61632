"""Lightly's SimCLR on digits; with ``gather=True`` each image is compared with those of all workers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from harness import Run
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

IMAGES, LABELLED = 512, 256


class Digits(Dataset[Any]):
    def __init__(self, transform: Any) -> None:
        from sklearn.datasets import load_digits

        data = load_digits()
        self.images = (data.images * 15.9).astype("uint8")
        self.labels = data.target
        self.transform = transform

    def __len__(self) -> int:
        return IMAGES

    def __getitem__(self, index: int) -> tuple[Any, int, int]:
        image = Image.fromarray(self.images[index]).resize((32, 32)).convert("RGB")
        return self.transform(image), int(self.labels[index]), index


class SimCLR(pl.LightningModule):
    def __init__(self, gather: bool) -> None:
        super().__init__()
        from lightly.loss import NTXentLoss
        from lightly.models.modules import SimCLRProjectionHead

        self.backbone = nn.Sequential(
            *(nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
            *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 64)),
        )
        self.projection_head = SimCLRProjectionHead(64, 64, 32)
        self.criterion = NTXentLoss(gather_distributed=gather)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.projection_head(self.backbone(x))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        first, second = batch[0]
        return self.criterion(self(first), self(second))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.06)


def error(backbone: Any, data: Digits) -> float:
    """Share of digits that a linear classifier of their embeddings gets wrong."""
    from sklearn.linear_model import LogisticRegression

    images = torch.tensor(np.stack([np.asarray(Image.fromarray(i).resize((32, 32))) for i in data.images]))
    with torch.no_grad():
        embedded = backbone(images[:, None].expand(-1, 3, -1, -1).float() / 255).numpy()
    known, unknown = slice(0, LABELLED), slice(IMAGES, None)
    classifier = LogisticRegression(max_iter=500).fit(embedded[known], data.labels[known])
    return 1 - float(classifier.score(embedded[unknown], data.labels[unknown]))


def main(*, gather: bool) -> None:
    run = Run(pl, lambda batch: batch[2].tolist(), "lightly")
    from lightly.transforms.simclr_transform import SimCLRTransform

    transform = SimCLRTransform(input_size=32, gaussian_blur=0.0, hf_prob=0.0, min_scale=0.5)
    data, module = Digits(transform), SimCLR(gather)
    loader = DataLoader(data, batch_size=32, shuffle=True, drop_last=True, num_workers=2)
    trainer = pl.Trainer(max_epochs=3, **run.trainer_options())
    trainer.fit(module, loader)
    run.finish(error=error(module.backbone.eval(), data), trivial=0.9)


if __name__ == "__main__":
    main(gather=False)
