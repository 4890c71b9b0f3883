from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from worker.detokenizer import Detokenizer, TokenTable

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
LONGER = ["he", "llo", "Ġw", "or", "ld", "ðŁ", "ĺĢ", "Ãł"]  # some of them halves of characters


def byte_level() -> Tokenizer:
    vocabulary = {token: index for index, token in enumerate([*ALPHABET, *LONGER])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken("<tool>", special=False), AddedToken("tool ｜ é", special=False)])
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return tokenizer


TOKENIZER = byte_level()
TABLE = TokenTable.from_tokenizer_json(TOKENIZER.to_str())
WORDS = TokenTable([b"", "🙂".encode()[:2], "🙂".encode()[2:], b"hello", b" wor", b"ld", b"STOP", b"ST", b"O", b"P"])


def pieces(table: TokenTable, token_ids: list[int], stop: tuple[str, ...] = ()) -> list[str]:
    text = Detokenizer(table, stop)
    return [*(text.push(token_id) for token_id in token_ids), text.finish()]


@given(st.lists(st.integers(0, TOKENIZER.get_vocab_size() - 1), max_size=60))
def test_any_tokens_one_by_one_give_what_decoding_them_at_once_gives(token_ids: list[int]) -> None:
    whole = TOKENIZER.decode(token_ids)
    text = "".join(pieces(TABLE, token_ids))
    # Bytes that may still become a character are left out at the end; a decoder that sees no more replaces them.
    assert whole in (text, text + "�")


@given(st.text(max_size=40))
def test_text_goes_through_a_byte_level_vocabulary_unharmed(text: str) -> None:
    token_ids = TOKENIZER.encode(text).ids
    if TOKENIZER.decode(token_ids, skip_special_tokens=True) == text:
        assert "".join(pieces(TABLE, token_ids)) == text


def test_a_character_appears_when_its_last_byte_has_come() -> None:
    assert pieces(WORDS, [1, 2, 3]) == ["", "🙂", "hello", ""]


def test_an_unfinished_character_is_left_out_at_the_end() -> None:
    assert pieces(WORDS, [3, 1]) == ["hello", "", ""]


def test_a_byte_that_belongs_to_no_character_is_replaced() -> None:
    assert "".join(pieces(WORDS, [2, 3])) == "��hello"


def test_special_tokens_and_unknown_ids_have_no_text() -> None:
    end = TOKENIZER.token_to_id("<|end|>")
    assert pieces(TABLE, [end, 10**6]) == ["", "", ""]
    assert TABLE.text_of(end) == "<|end|>"


def test_what_may_begin_a_stop_string_is_held_back_until_it_is_known() -> None:
    assert pieces(WORDS, [3, 7, 5, 3], ("STOP",)) == ["hello", "", "STld", "hello", ""]
    assert pieces(WORDS, [3, 7], ("STOP",)) == ["hello", "", "ST"]


def test_the_text_ends_before_a_stop_string_that_is_cut_over_tokens() -> None:
    text = Detokenizer(WORDS, ["STOP", "never"])
    assert [text.push(token_id) for token_id in (3, 7, 8, 9)] == ["hello", "", "", ""]
    assert text.stop_string == "STOP"
    assert text.finish() == ""


def test_of_two_stop_strings_the_first_that_is_complete_counts() -> None:
    text = Detokenizer(WORDS, ["hello world", "lo w"])
    assert [text.push(3), text.push(4)] == ["", "hel"]
    assert text.stop_string == "lo w"


def test_of_two_stop_strings_that_end_together_the_longer_counts() -> None:
    text = Detokenizer(WORDS, ["OP", "STOP"])
    assert text.push(3) + text.push(6) == "hello"
    assert text.stop_string == "STOP"


def test_a_stop_string_before_its_time_is_ordinary_text() -> None:
    text = Detokenizer(WORDS, ["STOP"])
    assert text.push(6, may_stop=False) == "STOP"
    assert text.push(6) == ""
    assert text.stop_string == "STOP"


@given(st.text(alphabet="ab", max_size=40), st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=3))
def test_where_the_text_stops_does_not_depend_on_how_it_is_cut(text: str, stop: list[str]) -> None:
    table = TokenTable([chunk.encode() for chunk in ("a", "b", "aa", "ab", "ba", "bb")])
    rng = random.Random(text)

    def cut() -> list[int]:
        token_ids, at = [], 0
        while at < len(text):
            size = rng.randint(1, 2) if at + 1 < len(text) else 1
            token_ids.append(table.token_bytes.index(text[at : at + size].encode()))
            at += size
        return token_ids

    def run(token_ids: list[int]) -> tuple[str, str | None]:
        detokenizer, out = Detokenizer(table, stop), ""
        for token_id in token_ids:
            out += detokenizer.push(token_id)
            if detokenizer.stop_string is not None:
                return out, detokenizer.stop_string
        return out + detokenizer.finish(), None

    answer = run(cut())
    assert answer == run(cut())
    ends = [text.find(one) + len(one) for one in stop if one in text]
    if ends:
        assert answer[0] == text[: min(ends) - len(answer[1] or "")]
    else:
        assert answer == (text, None)


def test_sentencepiece_vocabularies_decode_spaces_and_bytes() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"<unk>": 0, "▁Hello": 1, "▁w": 2, "<0xC3>": 3, "<0xA9>": 4}, merges=[]))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    table = TokenTable.from_tokenizer_json(tokenizer.to_str())
    assert pieces(table, [1, 2, 3, 4]) == [" Hello", " w", "", "é", ""]


def test_a_decoder_that_is_not_understood_is_refused_by_name() -> None:
    tokenizer = Tokenizer(models.WordPiece(vocab={"a": 0}))
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match="WordPiece"):
        TokenTable.from_tokenizer_json(tokenizer.to_str())


def test_a_token_costs_the_same_however_long_the_answer_is_and_whatever_its_bytes() -> None:
    """Counted, not timed: nothing that is certain is kept, so nothing is looked at twice."""
    text = Detokenizer(WORDS, ["hello world"])
    for _ in range(1000):
        text.push(1)  # a first half of a character, for ever
        text.push(3)
    assert len(text.finish()) <= len("hello world")
