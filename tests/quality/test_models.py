"""Real models under real budgets: the allocator's peak, the prediction, the gradients."""

import pytest

from bench.accuracy import MODELS, rows


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_model_keeps_its_budget(name):
    for row in rows(name, "tiny"):
        assert row["under_budget"], row
        assert abs(row["error_pct"]) <= 1, row
        assert row["same_gradients"], row
        assert row["eager_error"] <= 1e-5, row
        assert row["bound_pct"] <= row["extra_pct"] + 1e-6, row
