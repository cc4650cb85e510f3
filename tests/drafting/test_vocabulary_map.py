"""What tokens of tokenizers of every kind stand for, and texts as tokens; which tokens of two mean the same, and the
draft's text while the target's grows and is taken back.
"""

from itertools import permutations

import pytest
import torch
from defaults import defaults
from other_tokens import KINDS, PROMPTS, TEXTS, tokenizer_of, vocabularies_of

from hf_specx.drafting.other_tokenizer import Translation
from hf_specx.drafting.token_bytes import TokenBytes
from hf_specx.drafting.vocabulary_map import VocabularyMap, vocabulary_map


EXACT = [kind for kind in KINDS if "word pieces" not in kind]
PAIRS = list(permutations(KINDS, 2))
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
def test_pieces_keep_their_bytes_and_what_it_cannot_write_is_a_token(kind: str):
    """With and without a space before, though the tokenizer may put one before every text; also what is no text."""
    tokens = TokenBytes(tokenizer_of(kind))
    for piece in ["cat", " cat", "ats", " there", "the", "s", " a", ".", "there."]:
        text = piece.lower().encode() if "lower" in kind else piece.encode()
        assert tokens.joined(tokens.encode(text)) == text
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
    text = b"the cat sat on the mat"
    ids = TokenBytes(tokenizer).encode(text, opens=True)
    expected = TokenBytes(tokenizer_of("byte-level")).encode(text, opens=True)
    assert ids == expected
    assert tokenizer.backend_tokenizer.to_str() == before


def test_what_comes_before_a_text():
    """Before word pieces that begin a word, a space as well."""
    assert TokenBytes(tokenizer_of("unigram")).prefix_ids == [1]
    pieces = TokenBytes(tokenizer_of("word pieces"))
    assert pieces.prefix_ids == [2]
    assert pieces.joined(pieces.encode(b"The cats, there.", opens=True)) == b" The cats, there."


def test_a_tokenizer_without_a_backend_is_refused():
    with pytest.raises(ValueError, match="which bytes"):
        TokenBytes(object())


@pytest.mark.parametrize(("kind", "draft_kind"), PAIRS)
def test_common_tokens_have_the_same_bytes(kind: str, draft_kind: str):
    vocabularies = vocabularies_of(kind, draft_kind)
    special = set(vocabularies.draft.special.values())
    pairs = [(number, meant) for number, meant in enumerate(vocabularies.to_target) if meant >= 0]
    for number, meant in pairs:
        assert number in special or vocabularies.draft.contents[number] == vocabularies.target.contents[meant]
    assert len(pairs) > 40
    assert 0 < vocabularies.overlap <= 1


def test_special_tokens_by_their_role():
    vocabularies = vocabularies_of("byte-level", "unigram")
    end, unknown = vocabularies.target.special["<end>"], vocabularies.draft.unknown
    assert vocabularies.to_target[vocabularies.draft.special["</s>"]] == end
    assert vocabularies.to_draft[end] == vocabularies.draft.special["</s>"]
    assert vocabularies.to_target[unknown] == -1  # the target has none
    pieces = vocabularies_of("word pieces", "unigram")
    assert pieces.to_draft[2] == pieces.draft.special["<s>"]


def test_what_several_tokens_have_is_added():
    """`<0x61>` and "a" both mean the target's "a"; and so for every distribution over the common tokens."""
    vocabularies = vocabularies_of("byte-level", "byte fallback")
    logits = torch.randn(3, vocabularies.sizes[1], generator=torch.Generator().manual_seed(0)) * 3
    probs = vocabularies.logits(logits).softmax(-1)
    expected = torch.zeros(3, vocabularies.sizes[0])
    twice = 0
    for number, other in enumerate(vocabularies.to_target):
        if other >= 0:
            twice += bool(expected[0, other])
            expected[:, other] += logits[:, number].exp()
    assert twice > 20
    torch.testing.assert_close(probs, expected / expected.sum(-1, keepdim=True))


def test_a_map_serves_logits_of_several_devices_in_turn():
    """As threads with targets on other devices do; the map is made once for all."""
    target, draft = (TokenBytes(tokenizer_of(kind)) for kind in ("byte-level", "unigram"))
    sizes = vocabularies_of("byte-level", "unigram").sizes
    with defaults():
        vocabularies = VocabularyMap(target, draft, sizes)
    logits = torch.randn(2, sizes[1], generator=torch.Generator().manual_seed(0))
    expected = vocabularies_of("byte-level", "unigram").logits(logits)
    for device in ("cpu", "meta", "cpu"):
        mapped = vocabularies.logits(logits.to(device))
        assert mapped.device.type == device
    assert torch.equal(mapped, expected)


def test_a_token_that_only_the_draft_has_may_be_far_likelier():
    """What both have keeps its distribution, however little is left for it."""
    vocabularies = vocabularies_of("byte-level", "unigram")
    logits = torch.randn(2, vocabularies.sizes[1], generator=torch.Generator().manual_seed(0))
    expected = vocabularies.logits(logits).softmax(-1)
    logits[:, vocabularies.to_target.index(-1)] = 200.0
    torch.testing.assert_close(vocabularies.logits(logits).softmax(-1), expected)


def test_ids_beyond_the_models_are_left_out():
    tokenizer, draft_tokenizer = tokenizer_of("byte-level"), tokenizer_of("byte-level, other merges")
    vocabularies = vocabulary_map(tokenizer, draft_tokenizer, (300, 310))
    assert len(vocabularies.to_target) == 310
    assert max(vocabularies.to_target) < 300
    assert max(vocabularies.to_draft) < 310
    assert vocabularies.logits(torch.zeros(1, 310)).shape == (1, 300)


def test_a_prompt_is_what_the_drafts_tokenizer_makes_of_its_text():
    text = "The cat sat there. 🙂 Then"
    for kind, draft_kind in PAIRS:
        if "word pieces" in kind or "word pieces" in draft_kind:
            continue
        ids = tokenizer_of(kind)(text)["input_ids"]
        assert vocabularies_of(kind, draft_kind).prompt(ids) == tokenizer_of(draft_kind)(text)["input_ids"]


def test_special_tokens_of_a_chat_are_kept():
    """As the draft's own where it has them, else as they are written."""
    ids = tokenizer_of("byte-level")("<user>the cat<end>")["input_ids"]
    same = vocabularies_of("byte-level", "byte-level, other merges")
    assert same.prompt(ids) == tokenizer_of("byte-level, other merges")("<user>the cat<end>")["input_ids"]
    other = vocabularies_of("byte-level", "byte fallback")
    assert other.draft.joined(other.prompt(ids)) == b"<s> <user>the cat</s>"


@pytest.mark.parametrize(("kind", "draft_kind"), PAIRS)
def test_a_text_that_grows_and_is_taken_back(kind: str, draft_kind: str):
    """However it came about, it is the translation of the whole; nothing before the last boundary is written again."""
    vocabularies = vocabularies_of(kind, draft_kind)
    generator = torch.Generator().manual_seed(3)
    translation, text = Translation(vocabularies), list[int]()
    for _ in range(60):
        count = max(0, len(text) - int(torch.randint(0, 6, (), generator=generator)))
        num_added = int(torch.randint(0, 7, (), generator=generator))
        added = torch.randint(0, vocabularies.sizes[0], (num_added,), generator=generator)
        text = [*text[:count], *added.tolist()]
        translation.crop(count)
        boundary = translation.boundaries[-1][0]
        assert translation.extend(text[count:]) >= boundary
        whole = Translation(vocabularies)
        whole.extend(text)
        assert translation.ids == whole.ids
        assert len(translation.boundaries) == len(text) + 1
        assert len(whole.ids) >= bool(text)
