"""Encodings by cached pieces are those of the whole text, chats are rendered as the model's template says."""

from __future__ import annotations

import json
import random

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from warmfront_pb.v1 import inference_pb2, worker_pb2

from router.chat import ChatTemplate
from router.errors import InvalidRequestError, UnsupportedError
from router.segments import SegmentedEncoder, unpack_ids
from router.tokenizer import ModelProfile
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
