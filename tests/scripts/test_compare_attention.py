import pytest

from scripts.compare_attention import compare
from scripts.trained_tables import loss_verdict


def curve(*losses):
    return [{"train/loss": str(loss)} for loss in losses]


def test_the_distance_to_sdpa_is_held_against_that_between_sdpa_runs():
    sdpa = [curve(2.0, 1.0), curve(2.1, 1.2), curve(2.0, 1.1)]  # 0.15, 0.05 and 0.1 apart
    near = compare("gpt2_1k", {"flash": [curve(2.0, 1.1), curve(2.0, 1.0)], "sdpa": sdpa})
    assert sorted(near["sdpa_to_sdpa"]["mean_abs"]) == pytest.approx([0.05, 0.1, 0.15])
    assert sorted(near["flash_to_sdpa"]["mean_abs"]) == pytest.approx([0, 0, 0.05, 0.05, 0.1, 0.15])
    assert near["flash_to_sdpa"]["max_abs"] == pytest.approx(0.2)
    assert near["flash_minus_sdpa"] == pytest.approx(-0.5 / 12)
    assert near["flash_within_noise"]
    assert loss_verdict(near).endswith("within rounding. The mean of flash - SDPA is -0.0417.")

    far = compare("gpt2_1k", {"flash": [curve(2.0, 1.4), curve(2.4, 1.0)], "sdpa": sdpa})
    assert not far["flash_within_noise"]
    assert "not within rounding." in loss_verdict(far)
