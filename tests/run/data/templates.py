"""Chat templates of the shape of five families, in our own words: headers, ends of turns, tools and thoughts stand where theirs do.

Each has the special tokens of its family; `<think>`, `<tool_call>` and their like are added and not special, as they are there.
"""

from __future__ import annotations

from typing import Any

# Qwen2.5: results of tools come as a user, calls as JSON after the answer.
QWEN2 = """
{%- if tools -%}
{{ '<|im_start|>system\\n' + (messages[0].content if messages[0].role == 'system' else 'You are a helpful assistant.') + '\\n\\n# Tools\\n' }}
{%- for tool in tools -%}{{ tool | tojson + '\\n' }}{%- endfor -%}{{ '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' -%}{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) -%}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' -%}
{{ '<|im_start|>assistant' + ('\\n' + m.content if m.content else '') }}
{%- for call in m.tool_calls or [] -%}
{{ '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson + '}\\n</tool_call>' }}
{%- endfor -%}{{ '<|im_end|>\\n' }}
{%- elif m.role == 'tool' -%}
{{ ('<|im_start|>user' if messages[loop.index0 - 1].role != 'tool' else '') + '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{{- '<|im_end|>\\n' if loop.last or messages[loop.index0 + 1].role != 'tool' else '' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""

# Qwen3: thoughts are shown after the last question only; the last turn shows them even where there are none.
QWEN3 = """
{%- if tools -%}{{ '<|im_start|>system\\n# Tools\\n' }}
{%- for tool in tools -%}{{ tool | tojson + '\\n' }}{%- endfor -%}{{ '<|im_end|>\\n' }}{%- endif -%}
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{%- if m.role in ('user', 'system') -%}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' -%}
{{ '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last and (loop.last or m.reasoning_content) -%}
{{ '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' }}{%- endif -%}
{{ m.content }}
{%- for call in m.tool_calls or [] -%}
{{ ('\\n' if m.content or not loop.first else '') + '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments if call.function.arguments is string else call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor -%}{{ '<|im_end|>\\n' }}
{%- elif m.role == 'tool' -%}
{{ ('<|im_start|>user' if messages[loop.index0 - 1].role != 'tool' else '') + '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{{- '<|im_end|>\\n' if loop.last or messages[loop.index0 + 1].role != 'tool' else '' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""

# Llama 3.1: tools stand in the first question, one call a turn, which hides its content; results come as `ipython`.
LLAMA3 = """{{- bos_token -}}
{%- if messages[0].role == 'system' -%}
{%- set told = messages[0].content | trim -%}{%- set messages = messages[1:] -%}{%- else -%}{%- set told = '' -%}
{%- endif -%}
{{ '<|start_header_id|>system<|end_header_id|>\\n\\n' + told + '<|eot_id|>' }}
{%- if tools -%}
{{ '<|start_header_id|>user<|end_header_id|>\\n\\n' }}
{%- for tool in tools -%}{{ tool | tojson + '\\n\\n' }}{%- endfor -%}
{{ messages[0].content | trim + '<|eot_id|>' }}{%- set messages = messages[1:] -%}
{%- endif -%}
{%- for m in messages -%}
{%- if m.tool_calls -%}
{%- if m.tool_calls | length != 1 -%}{{ raise_exception('only one call a turn') }}{%- endif -%}
{%- set call = m.tool_calls[0].function -%}
{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}<|eot_id|>' }}
{%- elif m.role == 'tool' -%}{{ '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + m.content | tojson + '<|eot_id|>' }}
{%- else -%}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif -%}"""

# Mistral v3: no generation prompt; tools stand before the last question, so that what came before is shown otherwise alone.
MISTRAL = """{{- bos_token -}}
{%- set ns = namespace(last=-1, turn=0) -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- if m.role == 'user' or (m.role == 'assistant' and m.tool_calls is not defined) -%}
{%- if (m.role == 'user') != (ns.turn % 2 == 0) -%}{{ raise_exception('roles must alternate: user, assistant') }}{%- endif -%}
{%- set ns.turn = ns.turn + 1 -%}
{%- endif -%}
{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}
{%- if tools and loop.index0 == ns.last -%}
{{ '[AVAILABLE_TOOLS] [' }}{%- for tool in tools -%}{{ tool.function | tojson }}{%- endfor -%}{{ '][/AVAILABLE_TOOLS]' }}
{%- endif -%}
{{ '[INST] ' + m.content + '[/INST]' }}
{%- elif m.tool_calls is defined -%}
{{ '[TOOL_CALLS] [' }}
{%- for call in m.tool_calls -%}
{%- if call.id is not defined or call.id | length != 9 -%}{{ raise_exception('ids of calls have nine characters') }}{%- endif -%}
{{ '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson + ', "id": "' + call.id + '"}' }}
{%- endfor -%}{{ ']' + eos_token }}
{%- elif m.role == 'assistant' -%}{{ ' ' + m.content | trim + eos_token }}
{%- elif m.role == 'tool' -%}{{ '[TOOL_RESULTS] {"content": ' + m.content | tojson + '}[/TOOL_RESULTS]' }}
{%- endif -%}
{%- endfor -%}"""

# Gemma: the assistant is the model, and there is no system turn.
GEMMA = """{{- bos_token -}}
{%- if messages[0].role == 'system' -%}{{ raise_exception('system turns are not supported') }}{%- endif -%}
{%- for m in messages -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('roles must alternate: user, assistant') }}{%- endif -%}
{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + m.content | trim + '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}"""

# GLM-4.5: no token ends a turn but the next role's; earlier turns show an empty thought, and calls are tags.
GLM = """[gMASK]<sop>
{%- if tools -%}{{ '<|system|>\\n# Tools\\n' }}{%- for tool in tools -%}{{ tool | tojson + '\\n' }}{%- endfor -%}{%- endif -%}
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}{{ '<|user|>\\n' + m.content }}
{%- elif m.role == 'system' -%}{{ '<|system|>\\n' + m.content }}
{%- elif m.role == 'assistant' -%}
{{ '<|assistant|>\\n<think>' + (m.reasoning_content if loop.index0 > ns.last and m.reasoning_content else '') + '</think>' }}
{{- '\\n' + m.content if m.content else '' }}
{%- for call in m.tool_calls or [] -%}
{{ '\\n<tool_call>' + call.function.name }}
{%- for key, value in call.function.arguments.items() -%}
{{ '\\n<arg_key>' + key + '</arg_key>\\n<arg_value>' + value | string + '</arg_value>' }}{%- endfor -%}
{{ '\\n</tool_call>' }}
{%- endfor -%}
{%- elif m.role == 'tool' -%}
{{ ('<|observation|>' if messages[loop.index0 - 1].role != 'tool' else '') + '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"""

THOUGHTS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
FAMILIES: dict[str, dict[str, Any]] = {
    # As they publish it: the padding token of Qwen2.5 Base chats, Gemma and many a fine-tune is the end-of-turn token.
    "qwen2": {"template": QWEN2, "special": ["<|im_start|>", "<|im_end|>"], "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"},
    "qwen3": {"template": QWEN3, "special": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"},
    "llama31": {
        "template": LLAMA3,
        "special": ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|eot_id|>",
        "pad_token": "<|eot_id|>",
    },
    "mistral3": {
        "template": MISTRAL,
        "special": [
            "<s>",
            "</s>",
            "[INST]",
            "[/INST]",
            "[AVAILABLE_TOOLS]",
            "[/AVAILABLE_TOOLS]",
            "[TOOL_CALLS]",
            "[TOOL_RESULTS]",
            "[/TOOL_RESULTS]",
        ],
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "</s>",
    },
    "gemma": {
        "template": GEMMA,
        "special": ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"],
        "bos_token": "<bos>",
        "eos_token": "<end_of_turn>",
        "pad_token": "<end_of_turn>",
    },
    "glm": {
        "template": GLM,
        "special": ["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"],
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
    },
}
