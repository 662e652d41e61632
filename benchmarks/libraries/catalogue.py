"""The list of libraries. Each has a script."""

from __future__ import annotations

from .runner import Cell, Row

__all__ = ["ROWS"]

_SAMPLES = 240  # 1, 2, 3 workers with 0, 2 loader processes have equal parts of it, in whole batches and shards
_DATA = (
    *(Cell("one", 1, processes) for processes in (0, 2)),
    *(Cell("ddp", workers, processes) for workers in (2, 3) for processes in (0, 2)),
    *(Cell("asgd", workers, processes) for workers in (1, 2, 3) for processes in (0, 2)),
)

ROWS = {
    row.name: row
    for row in (
        Row("scvi-tools", "scvi_latent.py", ("scvi-tools>=1.3",)),
        Row("neuralforecast", "neural_forecast.py", ("neuralforecast>=3",)),
        Row("darts", "darts_nbeats.py", ("darts>=0.35",)),
        Row("pytorch-forecasting", "forecasting_tft.py", ("pytorch-forecasting>=1.4",)),
        Row("lightly", "lightly_simclr.py", ("lightly>=1.5",)),
        Row("lightly-gathered", "lightly_gathered.py", ("lightly>=1.5",), refused="CollectiveUnavailableError"),
        Row("torch-geometric", "geometric_graphs.py", ("torch-geometric>=2.6",)),
        Row("segmentation-models-pytorch", "segmentation_unet.py", ("segmentation-models-pytorch>=0.5",)),
        Row("chemprop", "chemprop_mpnn.py", ("chemprop>=2.1",)),
        Row("transformers", "transformers_bert.py", ("transformers>=4.50",)),
        Row("litdata", "litdata_stream.py", ("litdata>=0.2.60",), _DATA, samples=_SAMPLES),
        Row("datasets", "datasets_map.py", ("datasets>=4",), _DATA, samples=_SAMPLES),
        Row("datasets-iterable", "datasets_iterable.py", ("datasets>=4",), _DATA, samples=_SAMPLES),
        Row("webdataset", "webdataset_tars.py", ("webdataset>=1",), _DATA, samples=_SAMPLES),
        Row("mosaicml-streaming", "mosaic_streaming.py", ("mosaicml-streaming>=0.11",), _DATA, samples=_SAMPLES),
        Row("sharded-by-torch", "sharded_by_torch.py", (), _DATA, samples=_SAMPLES),
        Row("sharded-by-variables", "sharded_by_variables.py", (), _DATA, samples=_SAMPLES),
    )
}
