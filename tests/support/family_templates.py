"""Chat templates in the manner of model families, each short but with what makes its family hard to render.

They are our own: what they share with published ones is the markup around messages, calls and thoughts.
"""

HERMES = """\
{%- if tools %}
<|im_start|>system
{%- if messages[0].role == 'system' %}

{{ messages[0].content }}
{%- endif %}

You may call these functions:
<tools>
{%- for tool in tools %}

{{ tool | tojson }}
{%- endfor %}

</tools>
Call one like this: <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}
{%- for message in messages if not (tools and message.role == 'system') %}
<|im_start|>{{ 'user' if message.role == 'tool' else message.role }}
{%- if message.role == 'tool' %}

<tool_response>
{{ message.content }}
</tool_response>
{%- else %}

{{ message.content }}
{%- endif %}
{%- for call in message.tool_calls or [] %}

<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}
<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}
<|im_start|>assistant
{% endif %}"""
"""Calls between tags; answers of tools from the user."""

THINKING = """\
{% macro turn(role, text) %}<|im_start|>{{ role }}
{{ text }}<|im_end|>
{% endmacro %}
{%- if tools %}
{{- turn('system', '<tool_call> these: ' ~ (tools | map(attribute='function') | list | tojson)) }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- set text = message.content.split('</think>')[-1].lstrip('\\n') if message.content else '' %}
{%- if message.role == 'assistant' and loop.index0 > ns.last and message.reasoning_content is defined %}
{{- turn('assistant', '<think>\\n' + message.reasoning_content.strip() + '\\n</think>\\n\\n' + text) }}
{%- else %}
{{- turn(message.role, text) }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if reasoning_effort is defined %}{{ '# ' ~ reasoning_effort ~ '\\n' }}{% endif %}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}
{%- elif open_thinking is not defined %}{{ '<think>\\n' }}
{%- endif %}
{%- endif %}"""
"""Opens the thoughts itself, unless it is told not to think; thoughts of earlier turns are left out."""

LLAMA = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday is ' + date_string + '.\\n' }}
{%- if tools is not none %}
    {{- 'Answer with {"name": function, "parameters": object}.\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) }}
        {{- '\\n' }}
    {%- endfor %}
{%- endif %}
{{- '<|eot_id|>' }}
{%- for message in messages %}
    {%- if message.role in ['tool', 'ipython'] %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (message.content | tojson) + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message and message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('one call at a time') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}{{ '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""
"""Bare objects as calls; the date; one call per turn."""

MISTRAL = """\
{%- set told = namespace(tools=false) %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools is not none and loop.last %}
            {{- '[AVAILABLE_TOOLS]' }}[
            {%- for tool in tools %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, value in tool.function.items() if key != 'return' %}
                    {{- '"' + key + '": ' + (value | tojson) }}{{ ', ' if not loop.last }}
                {%- endfor %}
                {{- '}}' }}{{ ', ' if not loop.last }}
            {%- endfor %}
            {{- '][/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.role == 'assistant' and message.tool_calls is defined and message.tool_calls | length > 0 %}
        {{- '[TOOL_CALLS][' }}
        {%- for call in message.tool_calls %}
            {{- call.function | tojson }}{{ ', ' if not loop.last }}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content + eos_token }}
    {%- elif message.role == 'tool' %}
        {%- if message.tool_call_id is not defined or message.tool_call_id | length != 9 %}
            {{- raise_exception('ids of calls have nine characters') }}
        {%- endif %}
        {{- '[TOOL_RESULTS]' + ({'content': message.content, 'call_id': message.tool_call_id} | tojson) }}
        {{- '[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception('no role ' + message.role) }}
    {%- endif %}
{%- endfor %}"""
"""Lists of calls behind a special token; ids of nine characters."""


CODER = """\
{%- if tools %}
<|im_start|>system
You may call these functions:
<tools>
{%- for tool in tools %}

<function><name>{{ tool.function.name }}</name>{{ tool.function.parameters | tojson }}</function>
{%- endfor %}

</tools>
Call one like this:
<tool_call>
<function=NAME>
<parameter=KEY>
VALUE
</parameter>
</function>
</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}
<|im_start|>{{ 'user' if message.role == 'tool' else message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}

<tool_call>
<function={{ call.function.name }}>
{%- for key, value in call.function.arguments | items %}

<parameter={{ key }}>
{{ value if value is string else value | tojson }}
</parameter>
{%- endfor %}

</function>
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}
<|im_start|>assistant
{% endif %}"""
"""Calls as XML, one element per argument."""
