"""pytorch-forecasting's temporal fusion transformer, as its tutorial trains one."""

from __future__ import annotations

import lightning.pytorch as pl
import numpy as np
import pandas as pd
from harness import Run, rows
from series import AHEAD, BACK, waves


def main() -> None:
    run = Run(pl, lambda batch: rows(batch[0]["encoder_target"]), "pytorch-forecasting")
    from pytorch_forecasting import TemporalFusionTransformer, TimeSeriesDataSet
    from pytorch_forecasting.metrics import QuantileLoss

    known, truth = waves()
    values = np.concatenate([known, truth], axis=1)[:16, 40:]
    frames = [pd.DataFrame({"time_idx": range(len(v)), "value": v, "series": f"{n:02d}"}) for n, v in enumerate(values)]
    frame = pd.concat(frames, ignore_index=True)
    cut = values.shape[1] - AHEAD
    training = TimeSeriesDataSet(
        frame[frame.time_idx < cut],
        time_idx="time_idx",
        target="value",
        group_ids=["series"],
        max_encoder_length=BACK,
        min_encoder_length=BACK,
        max_prediction_length=AHEAD,
        static_categoricals=["series"],
        time_varying_known_reals=["time_idx"],
        time_varying_unknown_reals=["value"],
    )
    validation = TimeSeriesDataSet.from_dataset(training, frame, predict=True, stop_randomization=True)
    train = training.to_dataloader(train=True, batch_size=32, num_workers=0)
    val = validation.to_dataloader(train=False, batch_size=32, num_workers=0)
    sizes = {"hidden_size": 8, "attention_head_size": 1, "hidden_continuous_size": 4, "dropout": 0.1}
    module = TemporalFusionTransformer.from_dataset(training, learning_rate=0.03, loss=QuantileLoss(), **sizes)
    trainer = pl.Trainer(max_epochs=5, gradient_clip_val=0.1, **run.trainer_options())
    trainer.fit(module, train_dataloaders=train, val_dataloaders=val)
    predicted = module.predict(val, trainer_kwargs={"accelerator": "cpu", "logger": False})
    truth = truth[:16]
    run.finish(error=float(np.abs(np.asarray(predicted) - truth).mean()), trivial=float(np.abs(truth).mean()))


if __name__ == "__main__":
    main()
