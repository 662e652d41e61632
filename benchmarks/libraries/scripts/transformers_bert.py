"""A BERT of transformers in a LightningModule: from which half of the vocabulary are most words of a sentence?"""

from __future__ import annotations

import math
from typing import Any

import pytorch_lightning as pl
import torch
from harness import Run, rows
from torch.utils.data import DataLoader, Dataset

WORDS, LENGTH, SENTENCES = 64, 12, 960


class Sentences(Dataset[dict[str, torch.Tensor]]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.words = torch.randint(WORDS, (SENTENCES, LENGTH), generator=generator)
        self.labels = ((self.words < WORDS // 2).sum(1) > LENGTH // 2).long()

    def __len__(self) -> int:
        return SENTENCES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = self.words[index]
        return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": self.labels[index]}


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertForSequenceClassification

        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        self.model = BertForSequenceClassification(
            BertConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, **sizes)
        )

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self.model(**batch).loss
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        from transformers import get_linear_schedule_with_warmup

        optimizer = torch.optim.AdamW(self.parameters(), lr=2e-3)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=10, num_training_steps=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def main() -> None:
    run = Run(pl, lambda batch: rows(batch["input_ids"]), "transformers")
    data, module = Sentences(), Classifier()
    trainer = pl.Trainer(max_epochs=10, **run.trainer_options())
    trainer.fit(module, DataLoader(data, batch_size=16, shuffle=True, num_workers=2))
    if trainer.is_global_zero:
        module.model.save_pretrained("bert")
    module.eval()
    with torch.no_grad():
        words = data.words
        output = module.model(input_ids=words, attention_mask=torch.ones_like(words), labels=data.labels)
    run.finish(error=float(output.loss), trivial=math.log(2))


if __name__ == "__main__":
    main()
