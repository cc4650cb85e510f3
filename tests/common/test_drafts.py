"""How models and drafts are named."""

from pathlib import Path

import pytest

from hf_specx.common.drafts import NamedDraft, check_model_name, read_draft, split_revision


@pytest.mark.parametrize(
    ("name", "draft"),
    [
        ("suffix", NamedDraft()),
        ("exit:4", NamedDraft(layers=4)),
        ("layers:4", NamedDraft(layers=4)),
        ("head:org/head", NamedDraft(model="org/head")),
        ("org/model@v1", NamedDraft(model="org/model@v1")),
    ],
)
def test_a_folder_wins_over_a_word_of_its_name(name: str, draft: NamedDraft, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert read_draft(name) == draft
    Path(name).mkdir(parents=True)
    assert read_draft(name) == NamedDraft(model=name)
    assert split_revision(name) == (name, None)


def test_words_of_a_command_are_its_own(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert read_draft("eagle3", "eagle3") == NamedDraft()
    with pytest.raises(ValueError, match="specx distill"):
        read_draft("eagle3")
    Path("eagle3").mkdir()
    assert read_draft("eagle3", "eagle3") == NamedDraft()
    assert read_draft("eagle3") == NamedDraft(model="eagle3")


@pytest.mark.parametrize("name", ["", "exit:0", "exit4", "sufix", "a:b"])
def test_what_names_no_draft_is_refused(name: str):
    with pytest.raises(ValueError, match="draft"):
        read_draft(name)


def test_a_model_is_a_folder_or_an_id(tmp_path: Path):
    check_model_name("org/model", "v1")
    check_model_name(str(tmp_path), None)
    for name, revision in (("/nowhere", None), ("", None), (str(tmp_path), "v1")):
        with pytest.raises(ValueError, match="name one|leave"):
            check_model_name(name, revision)
