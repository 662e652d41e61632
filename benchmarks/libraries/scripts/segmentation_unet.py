"""segmentation-models-pytorch: a U-Net that finds discs, as its tutorial trains one."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import torch
from harness import Run
from torch.utils.data import DataLoader, TensorDataset

IMAGES, SIZE = 384, 32


def discs() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    place = torch.rand(IMAGES, 3, 1, 1, generator=generator)
    across = torch.arange(SIZE)[None, :] / SIZE
    distance = ((across - place[:, 0]) ** 2 + (across.T - place[:, 1]) ** 2).sqrt()
    masks = (distance < 0.15 + 0.25 * place[:, 2]).float()[:, None]
    images = masks * 0.5 + 0.5 * torch.randn(IMAGES, 3, SIZE, SIZE, generator=generator)
    return TensorDataset(images, masks, torch.arange(IMAGES))


class Segmenter(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        import segmentation_models_pytorch as smp

        sizes: dict[str, Any] = {"encoder_depth": 3, "decoder_channels": (32, 16, 8)}
        self.model = smp.create_model("Unet", "resnet18", encoder_weights=None, in_channels=3, classes=1, **sizes)
        self.loss_fn = smp.losses.DiceLoss(smp.losses.BINARY_MODE, from_logits=True)
        self.outputs: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        images, masks, _ = batch
        return self.loss_fn(self.model(images), masks)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        import segmentation_models_pytorch as smp

        images, masks, _ = batch
        found = (self.model(images).sigmoid() > 0.5).long()
        self.outputs.append(smp.metrics.get_stats(found, masks.long(), mode="binary"))

    def on_validation_epoch_end(self) -> None:
        import segmentation_models_pytorch as smp

        counts = [torch.cat(parts) for parts in zip(*self.outputs, strict=True)]
        self.log("valid_iou", smp.metrics.iou_score(*counts, reduction="micro"), sync_dist=True)
        self.outputs.clear()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60, eta_min=1e-5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main() -> None:
    run = Run(pl, lambda batch: batch[2].tolist(), "segmentation-models-pytorch")
    data, module = discs(), Segmenter()
    train, val = torch.utils.data.random_split(data, [320, 64], torch.Generator().manual_seed(0))
    options = run.trainer_options("ddp_find_unused_parameters_true")  # the encoder is cut short
    trainer = pl.Trainer(max_epochs=3, log_every_n_steps=1, **options)
    trainer.fit(module, DataLoader(train, batch_size=16, shuffle=True), DataLoader(val, batch_size=16))
    found = trainer.validate(module, DataLoader(val, batch_size=16), verbose=False)
    share = float(data.tensors[1][val.indices].mean())
    run.finish(error=1 - found[0]["valid_iou"], trivial=1 - share)  # of a model that finds a disc everywhere


if __name__ == "__main__":
    main()
