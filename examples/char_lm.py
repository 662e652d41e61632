"""Train a small transformer on a text character by character, and generate text with it.

    python examples/char_lm.py                     # the language reference that Python's help() shows; some minutes
    python examples/char_lm.py --text FILE         # your own text
    python examples/char_lm.py --strategy auto     # the same with one process; or --strategy ddp
    python examples/char_lm.py --fast              # a few seconds

It shows A-SGD with a transformer and AdamW: every worker keeps its own optimizer state, and only weights are shared. It
ends with the loss on a held-out tenth of the text, and a generated page: words of the reference, in a new order. Expect
a loss slightly above DDP's. DDP's is above that of one process, which takes twice as many steps.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import lightning_asgd  # noqa: F401 - Trainers know strategy="asgd" from here on


class CharacterModel(LightningModule):
    """A decoder of two layers, 0.2 million parameters, that sees ``context`` characters and guesses each one's next."""

    def __init__(self, characters: str, context: int = 64, width: int = 96, lr: float = 2e-3) -> None:
        super().__init__()
        self.characters = characters
        self.context = context
        self.lr = lr
        self.embed = nn.Embedding(len(characters), width)
        self.place = nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, nn.LayerNorm(width), enable_nested_tensor=False)
        self.guess = nn.Linear(width, len(characters))

    def forward(self, codes: Tensor) -> Tensor:
        length = codes.shape[1]
        past = nn.Transformer.generate_square_subsequent_mask(length, device=codes.device)
        x = self.embed(codes) + self.place(torch.arange(length, device=codes.device))
        return self.guess(self.layers(x, mask=past, is_causal=True))

    def loss(self, codes: Tensor) -> Tensor:
        """Nats per character."""
        return functional.cross_entropy(self(codes[:, :-1]).transpose(1, 2), codes[:, 1:])

    def training_step(self, codes: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(codes)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, codes: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(codes), prog_bar=True, sync_dist=True, batch_size=len(codes))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)

    @torch.no_grad()
    def write(self, beginning: str, length: int, temperature: float = 0.7) -> str:
        """Go on from a beginning, character by character."""
        codes = [self.characters.index(character) for character in beginning]
        for _ in range(length):
            seen = torch.tensor([codes[-self.context :]], device=self.device)
            odds = functional.softmax(self(seen)[0, -1] / temperature, dim=0)
            codes.append(int(torch.multinomial(odds, 1)))
        return "".join(self.characters[code] for code in codes)


class Pieces(Dataset[Tensor]):
    """A text cut into pieces of ``length`` characters; each begins with the last character of the one before."""

    def __init__(self, codes: Tensor, length: int) -> None:
        self.pieces = codes.unfold(0, length + 1, length)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> Tensor:
        return self.pieces[index]


def python_reference() -> str:
    """A text of half a million characters that comes with Python."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics.values())


def main() -> None:
    parser = argparse.ArgumentParser(description="A character language model.")
    parser.add_argument("--text", type=Path, help="a file of UTF-8 text")
    parser.add_argument("--strategy", default="asgd", help='the Trainer\'s: "asgd", "ddp", or "auto" for one process')
    parser.add_argument("--fast", action="store_true", help="1 epoch of a twentieth of the text")
    args = parser.parse_args()
    seed_everything(1)
    text = args.text.read_text(encoding="utf-8") if args.text else python_reference()
    text = text[: len(text) // 20] if args.fast else text
    characters = "".join(sorted(set(text)))
    code_of = {character: code for code, character in enumerate(characters)}
    codes = torch.tensor([code_of[character] for character in text])
    model = CharacterModel(characters)
    train, val = (Pieces(part, model.context) for part in codes.split([math.ceil(0.9 * len(codes)), len(codes) // 10]))
    trainer = Trainer(
        accelerator="cpu",
        devices=1 if args.strategy == "auto" else 2,
        strategy=args.strategy,
        max_epochs=1 if args.fast else 5,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(train, 16, shuffle=True), DataLoader(val, 64))
    if trainer.is_global_zero:
        nats: Any = trainer.callback_metrics["val_loss"]
        print(f"held-out loss {nats:.3f} nats, {nats / math.log(2):.2f} bits per character\n")
        print(model.eval().write(text[: model.context], 600))


if __name__ == "__main__":
    main()
