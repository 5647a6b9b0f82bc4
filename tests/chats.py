"""Chat templates and chats for tests: what templates of published models use, in small."""

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
PLAIN = (
    "{% for message in messages %}\n"
    "    {{- '<|' + message['role'] + '|>' + message.content | trim + eos_token }}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEMPLATES = {
    "plain": PLAIN,
    "bos and namespace": (
        "{{ bos_token }}{% set ns = namespace(system='none', count=0) %}\n"
        "{% for m in messages if m.role == 'system' %}{% set ns.system = m.content %}{% endfor %}\n"
        "[{{ ns.system }}]{% for m in messages %}{% set ns.count = ns.count + 1 %}"
        "{{ ns.count }}{{ m.role }}: {{ m['content'] }}\n{% endfor %}\n"
    ),
    "generation, break and continue": (
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}\n"
        "{% generation %}\n  <{{ m.content }}>\n{% endgeneration %}\n"
        "{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}"
    ),
    "json": (
        "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}"
        "{{ dict(a=1, b='é<') | tojson(ensure_ascii=True, sort_keys=True) }}"
    ),
    "macro": (
        "{%- macro tag(name, text) -%}<{{ name }}>{{ text }}</{{ name }}>{%- endmacro -%}\n"
        "{% for m in messages %}{{ tag(m.role, m.content.split('a')[-1]) }}{% endfor %}\n"
    ),
    "absent": (
        "{{ tools is none }}{{ documents is none }}{{ unk_token is defined }}{{ unk_token }}"
        "{{ messages[0].nothing }}{{ messages[-1]['content'][:2] }}"
    ),
    "year": "{{ strftime_now('%Y') }}",
}
CHATS = {
    "one": [{"role": "user", "content": 'Hi "you" <b>é</b>\n'}],
    "several": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " banana \n"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "and?"},
    ],
}
