"""What tokens stand for, and texts as tokens, for tokenizers of every kind."""

import pytest
from other_tokens import KINDS, PROMPTS, TEXTS, tokenizer_of

from hf_specx.drafting.token_bytes import TokenBytes


EXACT = [kind for kind in KINDS if "word pieces" not in kind]
BROKEN = [b"\xf0\x9f", b"caf\xc3", b"\xff the cat", "日本".encode()[1:], b"a\x80\x80b"]


@pytest.mark.parametrize("kind", EXACT)
def test_the_bytes_of_tokens_are_the_text(kind: str):
    tokenizer, tokens = tokenizer_of(kind), TokenBytes(tokenizer_of(kind))
    for text in [*TEXTS, *PROMPTS]:
        if kind == "unigram" and "\n" in text:
            continue  # it does not know the end of a line
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokens.joined(ids) == (" " * tokens.opens_with_space + text).encode()
        assert tokens.encode(text.encode(), opens=True) == ids


@pytest.mark.parametrize("kind", KINDS)
def test_a_piece_in_the_middle_keeps_its_bytes(kind: str):
    """With and without a space before, though the tokenizer may put one before every text."""
    tokens = TokenBytes(tokenizer_of(kind))
    lower = "lower" in kind
    for piece in ["cat", " cat", "ats", " there", "the", "s", " a", ".", "there. "[:6]]:
        text = piece.lower() if lower else piece
        assert tokens.joined(tokens.encode(text.encode())) == text.encode(), piece


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_that_are_no_text_are_kept_and_what_it_cannot_write_is_a_token(kind: str):
    tokens = TokenBytes(tokenizer_of(kind))
    for text in [*BROKEN, b"\n\n", "Ж".encode(), b"\x00", b"CAT"]:
        written = tokens.encode(text)
        assert written
        if text in BROKEN and kind in EXACT and kind != "unigram":
            assert tokens.joined(written) == text


def test_special_tokens_in_a_text_are_text():
    """A user may write the end token; it ends nothing."""
    tokens = TokenBytes(tokenizer_of("byte-level"))
    ids = tokens.encode(b"a<end>")
    assert tokens.special["<end>"] not in ids
    assert tokens.joined(ids) == b"a<end>"


def test_the_tokenizer_is_left_as_it_is():
    """Also what its last call has left in it, which changes nothing here."""
    tokenizer = KINDS["byte-level"]()
    tokenizer(["the cat", "a dog sat there"], padding=True, truncation=True, max_length=3)
    before = tokenizer.backend_tokenizer.to_str()
    both = TokenBytes(tokenizer), TokenBytes(tokenizer_of("byte-level"))
    ids, expected = (tokens.encode(b"the cat sat on the mat", opens=True) for tokens in both)
    assert ids == expected
    assert tokenizer.backend_tokenizer.to_str() == before


def test_roles_and_what_comes_before_a_text():
    """Before word pieces that begin a word, a space as well."""
    tokens = TokenBytes(tokenizer_of("unigram"))
    assert (tokens.unknown, tokens.start, tokens.end) == (0, 1, 2)
    assert tokens.before == [1]
    pieces = TokenBytes(tokenizer_of("word pieces"))
    assert pieces.before == [2]
    assert pieces.joined(pieces.encode(b"The cats, there.", opens=True)) == b" The cats, there."


def test_a_tokenizer_without_a_backend_is_refused():
    with pytest.raises(ValueError, match="object does not say which bytes its tokens stand for; load the fast one"):
        TokenBytes(object())
