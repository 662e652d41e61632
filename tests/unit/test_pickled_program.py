from __future__ import annotations

import pytest
import torch

from lightning_asgd.engines.pickled_program import _process_state

MATMUL = torch.backends.cuda.matmul


@pytest.mark.skipif(not hasattr(MATMUL, "fp32_precision"), reason="this version of torch has no newer function")
def test_the_precision_of_matrix_products_is_known_however_it_was_set() -> None:
    assert _process_state()["precision"] == ("highest", False)
    before = MATMUL.fp32_precision
    MATMUL.fp32_precision = "tf32"  # torch's older function fails from now on
    try:
        assert _process_state()["precision"] == ("tf32", True)
    finally:
        MATMUL.fp32_precision = before
