import csv

import pytest

from model.loggers import CsvLogger


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_csv_has_one_row_a_step_and_merges_its_metrics(tmp_path):
    logger = CsvLogger(save_dir=str(tmp_path))
    logger.log_metrics({"train/loss": 2.5}, step=1)
    logger.log_metrics({"val/loss": 3.0}, step=1)
    logger.log_metrics({"train/loss": 2.25}, step=2)
    logger.save()
    logger.log_metrics({"val/loss": 4.0}, step=2)  # validation ends after its step was written
    logger.save()
    rows = read(tmp_path / "metrics.csv")
    assert [row["step"] for row in rows] == ["1", "2"]
    assert rows[0]["train/loss"] == "2.5" and rows[0]["val/loss"] == "3"
    assert rows[1]["train/loss"] == "2.25" and rows[1]["val/loss"] == "4"


def test_csv_goes_on_below_the_resumed_step(tmp_path):
    first = CsvLogger(save_dir=str(tmp_path))
    for step in (1, 2, 3):
        first.log_metrics({"train/loss": float(step)}, step=step)
    first.finalize("killed")
    resumed = CsvLogger(save_dir=str(tmp_path))
    resumed.forget_after(2)
    resumed.log_metrics({"train/loss": 30.0}, step=3)
    resumed.save()
    assert [row["train/loss"] for row in read(tmp_path / "metrics.csv")] == ["1", "2", "30"]


@pytest.mark.parametrize("fails_at", [0, 1, 2])
def test_csv_keeps_rows_that_a_full_disk_did_not_take(tmp_path, monkeypatch, fails_at):
    logger = CsvLogger(save_dir=str(tmp_path))
    logger.log_metrics({"train/loss": 1.0}, 1)
    logger.save()
    logger.log_metrics({"val/loss": 2.0}, 1)
    logger.log_metrics({"train/loss": 3.0}, 2)
    written = []

    def full(writer, row):
        if len(written) == fails_at:
            raise OSError(28, "No space left on device")
        written.append(row)
        writer.writer.writerow([row.get(key, "") for key in writer.fieldnames])

    with monkeypatch.context() as patch:
        patch.setattr(csv.DictWriter, "writerow", full)
        logger.log_metrics({"train/loss": 4.0}, 3)
        with pytest.warns(UserWarning, match="metrics.csv cannot be written.*No space left"):
            logger.save()
    logger.log_metrics({"train/loss": 5.0}, 4)
    logger.finalize("success")
    with (tmp_path / "metrics.csv").open(newline="") as file:
        rows = [(r["step"], r["train/loss"], r["val/loss"]) for r in csv.DictReader(file)]
    assert rows == [("1", "1", "2"), ("2", "3", ""), ("3", "4", ""), ("4", "5", "")]


def test_csv_refuses_a_metric_without_a_column(tmp_path):
    with pytest.raises(ValueError, match="no column for .*train/los'"):
        CsvLogger(save_dir=str(tmp_path)).log_metrics({"train/los": 1.0}, step=1)
