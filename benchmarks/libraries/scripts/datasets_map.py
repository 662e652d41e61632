"""Hugging Face datasets: a map-style dataset in torch's format, which Lightning divides as it does torch's own."""

from __future__ import annotations

from typing import Any

from harness import DataRun


def main() -> None:
    run = DataRun("datasets")
    from datasets import Dataset
    from torch.utils.data import DataLoader, default_collate

    dataset = Dataset.from_dict({"index": list(range(run.samples))}).with_format("torch")

    def collate(items: list[dict[str, Any]]) -> Any:
        return default_collate(items)["index"]

    run.fit(DataLoader(dataset, batch_size=run.BATCH, num_workers=run.processes, shuffle=True, collate_fn=collate))


if __name__ == "__main__":
    main()
