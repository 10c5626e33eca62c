"""The ids of a chat are those of `transformers`, for templates that write BOS and for those that do not."""

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from gateway.chat_template import ChatTemplate
from gateway.tokenizer import ModelTokenizer
from tests.support.tiny_tokenizer import BOS, CHAT_TEMPLATE, EOS, byte_level_tokenizer, tiny_card

pytestmark = pytest.mark.golden

WITH_BOS = "{{ bos_token }}" + CHAT_TEMPLATE
STRICT = (
    "{% for message in messages %}\n"
    "    {% if message.role not in ['system', 'user', 'assistant'] %}\n"
    "        {{- raise_exception('no such role') }}\n"
    "    {% endif %}\n"
    "    {{- message.role | upper }}: {{ message.content | trim | tojson }}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}\n"
    "{% if enable_thinking is defined and not enable_thinking %}<t>{% endif %}"
)
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hello"}],
    [{"role": "system", "content": "the 日本 é"}, {"role": "user", "content": "<|im_end|> \n"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "  b < c & 'd'  "},
    ],
]


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, WITH_BOS, STRICT], ids=["plain", "bos", "strict"])
@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False}])
@pytest.mark.parametrize("messages", CHATS)
def test_b099_ids_equal_apply_chat_template(
    template: str, kwargs: dict[str, Any], messages: list[dict[str, Any]]
) -> None:
    tokenizer = byte_level_tokenizer()
    reference = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS)
    expected = reference.apply_chat_template(
        messages, chat_template=template, tokenize=True, add_generation_prompt=True, return_dict=False, **kwargs
    )
    text = ChatTemplate(template, bos_token=BOS, eos_token=EOS, timeout_s=5).render(messages, kwargs)
    assert ModelTokenizer(tiny_card(tokenizer, add_bos=True)).encode_chat(text) == expected
