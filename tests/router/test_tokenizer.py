"""Encodings by cached pieces are those of the whole text, chats are rendered as the model's template says."""

from __future__ import annotations

import asyncio
import json
import random

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from warmfront_pb.v1 import inference_pb2, worker_pb2

from router.chat import ChatTemplate
from router.errors import InvalidRequestError, UnsupportedError
from router.segments import SegmentedEncoder, unpack_ids
from router.tokenizer import ModelProfile
from router.words import WORD_PATTERNS, WordCache, are_words_exact, words_of
from tests.fakes.simulated_worker import TEMPLATE

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|im_end|>x", "<s>")
TEXT = ["the quick brown fox jumps over the lazy dog", "der schnelle Fuchs", "naïve café 123", "def f(x): return x"]


def trained(**flags: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(TEXT * 10, trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True, **flags) for token in SPECIAL])
    return tokenizer


def spaced(prepend_scheme: str) -> Tokenizer:
    """As SentencePiece does: words begin with a mark, and so may the first."""
    letters = {letter: index for index, letter in enumerate("▁abcdefghijklmnopqrstuvwxyz <|_>?\n0123")}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[], unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    return tokenizer


@pytest.mark.parametrize(
    "tokenizer",
    [trained(), trained(lstrip=True), trained(single_word=True), *map(spaced, ("first", "always", "never"))],
    ids=["bytes", "strips", "words", "first", "always", "never"],
)
async def test_pieces_joined_are_the_encoding_of_the_whole(tokenizer: Tokenizer) -> None:
    rng = random.Random(1)
    encoder = SegmentedEncoder(tokenizer.to_str(), max_cached_bytes=20_000)
    alphabet = [*SPECIAL, *TEXT, " ", "  ", "\n", "a", "7", "<|im_", "end|>", "é", "日本", ""]
    for _ in range(500):
        text = "".join(rng.choice(alphabet) for _ in range(rng.randrange(12)))
        assert unpack_ids(await encoder.encode(text)) == tokenizer.encode(text, add_special_tokens=False).ids, text
    encoder.close()


async def test_a_text_that_is_long_enough_for_the_thread_has_the_same_ids() -> None:
    tokenizer = trained()
    text = "the quick brown fox <|im_end|> jumps over 17 lazy dogs\n" * 100
    packed = await SegmentedEncoder(tokenizer.to_str()).encode(text)
    assert unpack_ids(packed) == tokenizer.encode(text, add_special_tokens=False).ids


# What the known expressions tell apart: cases, digits, contractions, marks, white space of all kinds, line ends.
PIECES = (
    *(
        " ",
        "  ",
        " ",
        "\n",
        "\r\n",
        "\t",
        "\u00a0",
        "\u2028",
        "\u0085",
        "\x1c",
        "a",
        "B",
        "the",
        "The",
        "DON'T",
        "it's",
        "é",
        "e\u0301",
    ),
    *(
        "\u0301",
        "ß",
        "ǅ",
        "日本",
        "ا",
        "1",
        "234",
        "½",
        "٣",
        "'",
        "'s",
        "'LL",
        "'re",
        ".",
        ",",
        "...",
        "!?",
        "/",
        "_",
        "-",
        "<",
        "🙂",
        "\x7f",
        "\0",
    ),
)


def cut_by(pattern: str, digits: str = "", nfc: bool = False) -> Tokenizer:
    tokenizer = trained()
    steps = [pre_tokenizers.Split(Regex(one), "isolated") for one in (digits, pattern) if one]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, byte_level])
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


@pytest.mark.parametrize("pattern", WORD_PATTERNS, ids=["gpt2", "llama3", "qwen2", "tekken"])
async def test_words_joined_are_the_encoding_of_any_text(pattern: str) -> None:
    rng = random.Random(2)
    for tokenizer in (cut_by(pattern), cut_by(pattern, r"\p{N}{1,3}", nfc=True)):
        assert are_words_exact(json.loads(tokenizer.to_str()))
        encoder = SegmentedEncoder(tokenizer.to_str())
        for _ in range(1500):
            text = "".join(rng.choice(PIECES) for _ in range(rng.randrange(1, 16)))
            assert unpack_ids(await encoder.encode(text)) == tokenizer.encode(text, add_special_tokens=False).ids, text
        encoder.close()


async def test_words_of_long_texts_are_encoded_as_their_texts_are_whether_they_come_again_or_not() -> None:
    rng = random.Random(3)
    tokenizer = cut_by(WORD_PATTERNS[0])
    encoder = SegmentedEncoder(tokenizer.to_str(), max_cached_bytes=0)
    rare = [f"{rng.randbytes(4).hex()}{rng.choice('.,;')}" for _ in range(4_000)]
    common = [*TEXT[0].split(), "den,", "it's", "17", "(a)"]
    for words in (common * 300, rare, common * 200 + rare + common * 200, ["x" * 40_000], ["日本" * 20_000, *common]):
        text = " ".join(words)
        assert unpack_ids(await encoder.encode(text)) == tokenizer.encode(text, add_special_tokens=False).ids
    encoder.close()


async def test_texts_that_are_encoded_at_once_do_not_disturb_each_other() -> None:
    tokenizer = cut_by(WORD_PATTERNS[0])
    encoder = SegmentedEncoder(tokenizer.to_str(), max_cached_bytes=0, max_words=50)
    texts = [" ".join(f"w{number % span}x" for number in range(400)) for span in (3, 30, 70, 400)] * 3
    found = await asyncio.gather(*map(encoder.encode, texts))
    assert [unpack_ids(ids) for ids in found] == [tokenizer.encode(text).ids for text in texts]
    encoder.close()


@pytest.mark.parametrize(
    "text", ["<s>what was never seen {} before" * 3_000, "word {} " * 30_000], ids=["pieces", "words"]
)
async def test_others_have_their_turn_while_much_is_encoded(text: str) -> None:
    encoder = SegmentedEncoder(cut_by(WORD_PATTERNS[0]).to_str())
    encoding = asyncio.create_task(encoder.encode(text.format(*range(30_000))))
    turns = 0
    while not encoding.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns >= 10
    encoder.close()


def test_the_word_cache_starts_afresh_when_it_is_full() -> None:
    cache = WordCache(max_words=64)
    for start in range(0, 1000, 10):
        words = [f"w{number}" for number in range(start, start + 10)]
        cache.learn(words, [b"1234"] * len(words))
        assert cache.look_up(words) == [b"1234"] * len(words)
        assert len(cache._ids) <= 64
    cache.learn(["x" * 1000], [b"1234"])
    assert cache.look_up(["x" * 1000]) == [None]


def test_a_text_is_cut_before_single_spaces_between_words() -> None:
    assert list(words_of("The cat, who  sat\n on 4 é mats")) == [[" The", "cat,", "who  sat\n on", "4", "é", "mats"]]
    parts = list(words_of("word " * 10_000))
    assert len(parts) == 4
    assert [word for part in parts for word in part] == [" word", *["word"] * 9998, "word "]


def test_tokenizers_under_which_words_may_depend_on_their_neighbours_encode_whole_texts() -> None:
    assert are_words_exact(json.loads(trained().to_str()))
    unknown = cut_by(r"\n+")
    digits_alone = cut_by(r"\p{N}")
    prefixed = trained()
    prefixed.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    folded = cut_by(WORD_PATTERNS[0])
    folded.normalizer = normalizers.NFKC()
    uncertain = trained()
    uncertain.model.dropout = 0.1
    for tokenizer in (unknown, digits_alone, prefixed, folded, uncertain, spaced("never")):
        assert not are_words_exact(json.loads(tokenizer.to_str()))


async def test_the_next_turn_encodes_its_own_messages_alone() -> None:
    encoder = SegmentedEncoder(trained().to_str())
    template = ChatTemplate(TEMPLATE, {})
    messages = [inference_pb2.ChatMessage(role="user", content=f"{TEXT[n % 4]} {n} " * 500) for n in range(8)]
    first = await encoder.encode(template.render(messages))
    assert encoder.num_hits < 100
    second = await encoder.encode(template.render([*messages, inference_pb2.ChatMessage(role="user", content="news")]))
    assert len(second) > len(first)
    assert encoder.num_hits > len(first) // 4 * 0.9 - len(SPECIAL) * 20
    encoder.close()


async def test_the_cache_stays_within_its_bytes() -> None:
    encoder = SegmentedEncoder(trained().to_str(), max_cached_bytes=50_000)
    for number in range(500):
        await encoder.encode(f"<s>{number} " + "words " * 40)
    assert encoder._cached_bytes <= 50_000
    assert encoder._cached_bytes == sum(len(ids) + len(piece) + 349 for piece, ids in encoder._cache.items())
    encoder.close()


def model(**fields: object) -> ModelProfile:
    given = {"served_model_name": "m", "tokenizer_json": trained().to_str(), "max_model_len": 100, **fields}
    return ModelProfile(worker_pb2.GetModelResponse(**given))  # type: ignore[arg-type]


async def test_a_plain_prompt_gets_the_bos_token_where_the_model_wants_it() -> None:
    bos = trained().token_to_id("<s>")
    with_bos = unpack_ids(await model(bos_token="<s>", adds_bos=True).text_ids("the fox"))
    assert with_bos[0] == bos
    assert with_bos[1:] == unpack_ids(await model(bos_token="<s>").text_ids("the fox"))


async def test_a_model_without_a_template_refuses_chats() -> None:
    chat = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content="x")])
    with pytest.raises(InvalidRequestError, match="no chat template"):
        await model().chat_ids(chat)


def test_a_broken_tokenizer_and_a_broken_template_are_named() -> None:
    with pytest.raises(UnsupportedError, match="tokenizer of 'm'"):
        model(tokenizer_json="{}")
    with pytest.raises(UnsupportedError, match="does not compile"):
        ChatTemplate("{% for %}", {})


def render(template: str, *messages: tuple[str, str], continues: bool = False, **special: str) -> str:
    chat = [inference_pb2.ChatMessage(role=role, content=content) for role, content in messages]
    return ChatTemplate(template, special).render(chat, continues)


def test_a_template_sees_special_tokens_the_generation_prompt_and_json() -> None:
    assert render("{{ bos_token }}{{ messages[0].content }}", ("user", "hi"), bos_token="<s>") == "<s>hi"
    assert render("{{ eos_token is defined }}", ("user", "hi")) == "False"
    assert render(TEMPLATE, ("user", "hi")).endswith("<|im_start|>assistant\n")
    assert json.loads(render("{{ messages | tojson }}", ("user", "<é>")))[0]["content"] == "<é>"
    assert "<é>" in render("{{ messages | tojson }}", ("user", "<é>"))
    assert len(render("{{ strftime_now('%Y') }}", ("user", "hi"))) == 4


def test_continuing_ends_the_text_right_after_the_last_message() -> None:
    text = render(TEMPLATE, ("user", "hi"), ("assistant", "I am "), continues=True)
    assert text.endswith("<|im_start|>assistant\nI am ")


def test_a_developer_is_the_system_to_a_template_that_knows_none() -> None:
    chat = [("developer", "be brief"), ("user", "hi")]
    assert render(TEMPLATE, *chat) == render(TEMPLATE, ("system", "be brief"), ("user", "hi"))
    knowing = "{% for m in messages %}{% if m.role == 'developer' %}[{{ m.content }}]{% endif %}{% endfor %}"
    assert render(knowing, *chat) == "[be brief]"


def test_what_a_template_refuses_is_the_client_s_error() -> None:
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}", ("user", "hi"))


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__ }}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_a_hostile_template_gets_nothing(template: str) -> None:
    try:
        assert render(template, ("user", "hi")) == ""
    except InvalidRequestError as error:
        assert "cannot render" in str(error)
