"""data/completions.py: LAMBADA and HellaSwag as the published evaluations prepare them."""

import gzip
import json

import pytest

from data.completions import Completion, encode, read_hellaswag, read_lambada
from data.rows import field
from data.tokenizer import load_tokenizer


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_lambada_scores_the_last_word_with_its_space(tmp_path):
    rows = ({"text": 'He said, "No.\n" She asked Tom'}, {"text": "one  two "})
    first, second = read_lambada(write(tmp_path / "a.jsonl", *rows))
    assert first == Completion('He said, "No.\n" She asked', (" Tom",), 0)
    assert second == Completion("one ", (" two",), 0)


ROW = {
    "activity_label": "Baking",
    "ctx_a": "[header] How to bake [title] Mix the flour. [step] Stir.",
    "ctx_b": "then you",
    "endings": ["wait [substeps] two hours.", " eat  it.", "run.", "sing."],
    "label": "1",
}


def test_hellaswag_is_cleaned_as_in_the_evaluation_harness(tmp_path):
    """strip; " [title]" to ". "; brackets out; two spaces to one; ctx_b capitalized."""
    (row,) = read_hellaswag(write(tmp_path / "a.jsonl", ROW))
    assert row.context == "Baking: How to bake. Mix the flour. Stir. Then you"
    assert row.endings == (" wait two hours.", " eat it.", " run.", " sing.")
    assert row.label == 1
    (row,) = read_hellaswag(write(tmp_path / "b.jsonl", {**ROW, "ctx_b": "", "label": 3}))
    assert row.context.endswith("Stir.") and row.label == 3


def test_rows_may_be_compressed(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "a b"}\n'))
    assert [row.endings for row in read_lambada(str(path))] == [(" b",)]


def test_what_follows_the_contexts_tokens_is_scored():
    tokenizer = load_tokenizer()
    completion = Completion("The cat sat on the ", (" mat", " windowsill."), 0)
    for ending, encoded in zip(completion.endings, encode(tokenizer, completion), strict=True):
        assert tokenizer.decode(encoded.ids) == completion.context + ending
        given, scored = encoded.ids[: -encoded.num_scored], encoded.ids[-encoded.num_scored :]
        assert tokenizer.decode(given) == "The cat sat on the"
        assert tokenizer.decode(scored) == " " + ending, "the context's last space is scored"


@pytest.mark.parametrize(
    "read, row, message",
    [
        (read_lambada, {"text": "word"}, "line 1 must hold a passage of two words or more"),
        (read_lambada, {"passage": "a b"}, r"must have the field 'text', got \['passage'\]"),
        (read_lambada, {"text": 3}, "must hold str in 'text', got 3"),
        (read_hellaswag, {**ROW, "label": ""}, "got '': take the validation set"),
        (read_hellaswag, {**ROW, "label": 4}, "the index of one of 4 endings as label, got '4'"),
        (read_hellaswag, {**ROW, "endings": "a"}, "must hold list in 'endings'"),
    ],
)
def test_a_wrong_row_is_named(read, row, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        list(read(write(tmp_path / "a.jsonl", row)))


def test_a_wrong_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="source must be hf or a .jsonl or .parquet file"):
        list(read_lambada(str(tmp_path / "none.jsonl")))
    (tmp_path / "a.jsonl").write_text('{"text": "a b"}\n[1]\n{"text": "c d"}\n')
    with pytest.raises(ValueError, match="must be a JSON object, got .*a.jsonl, line 2"):
        list(read_lambada(str(tmp_path / "a.jsonl")))
    (tmp_path / "a.csv").write_text("a,b\n")
    with pytest.raises(ValueError, match="must end in .jsonl"):
        list(read_lambada(str(tmp_path / "a.csv")))


def test_no_network_says_what_to_do(monkeypatch):
    import datasets

    def refuse(*arguments, **options):
        assert arguments == ("EleutherAI/lambada_openai", "default") and options["split"] == "test"
        raise ConnectionError("offline")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(ConnectionError, match="cannot be loaded .offline.*or give source=FILE"):
        list(read_lambada())


def test_a_truth_value_is_no_number():
    with pytest.raises(ValueError, match="must hold int in 'n', got True"):
        field(("here", {"n": True}), "n", int)
