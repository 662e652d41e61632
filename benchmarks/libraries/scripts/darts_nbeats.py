"""Darts' N-BEATS: ``fit``, ``save`` and ``predict`` of several series, as its documentation shows."""

from __future__ import annotations

import numpy as np
import pytorch_lightning as pl
from harness import Run, rows
from series import AHEAD, BACK, waves


def main() -> None:
    run = Run(pl, lambda batch: rows(batch.past_target), "darts")
    from darts import TimeSeries
    from darts.models import NBEATSModel

    known, truth = waves()
    series = [TimeSeries.from_values(row) for row in known]
    model = NBEATSModel(
        input_chunk_length=BACK,
        output_chunk_length=AHEAD,
        num_stacks=2,
        num_blocks=1,
        layer_widths=32,
        n_epochs=2,
        batch_size=16,
        random_state=run.seed,
        pl_trainer_kwargs=run.trainer_options(),
    )
    model.fit(series)
    model.save("model.pt")
    model.predict(AHEAD, series=series)  # by all workers: a part of the series each
    alone = pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False)
    predicted = np.stack([one.values()[:, 0] for one in model.predict(AHEAD, series=series, trainer=alone)])
    run.finish(error=float(np.abs(predicted - truth).mean()), trivial=float(np.abs(truth).mean()))


if __name__ == "__main__":
    main()
