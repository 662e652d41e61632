"""Neuralforecast's NHITS: ``fit``, ``save`` and ``predict``, as its documentation shows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytorch_lightning as pl
from harness import Run, rows
from series import AHEAD, BACK, waves


def main() -> None:
    run = Run(pl, lambda batch: rows(batch["temporal"]), "neuralforecast")
    from neuralforecast import NeuralForecast
    from neuralforecast.models import NHITS

    known, truth = waves()
    days = pd.date_range("2026-01-01", periods=known.shape[1], freq="D")
    frames = [pd.DataFrame({"unique_id": f"{n:02d}", "ds": days, "y": row}) for n, row in enumerate(known)]
    options: dict[str, Any] = run.trainer_options()
    model = NHITS(
        h=AHEAD, input_size=BACK, max_steps=80, batch_size=4, windows_batch_size=64, random_seed=run.seed, **options
    )
    forecast = NeuralForecast(models=[model], freq="D")
    forecast.fit(pd.concat(frames))
    forecast.save("saved")
    forecast.predict()  # by all workers: a part of the series each
    # As the library does by itself on GPUs.
    forecast.models[0].trainer_kwargs |= {"devices": 1, "strategy": "auto"}
    predicted = forecast.predict()["NHITS"].to_numpy().reshape(truth.shape)
    run.finish(error=float(np.abs(predicted - truth).mean()), trivial=float(np.abs(truth).mean()))


if __name__ == "__main__":
    main()
