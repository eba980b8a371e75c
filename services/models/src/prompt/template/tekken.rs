//! The conversation of Mistral's `tekken.json`, which has no template of its own.
//!
//! After `InstructTokenizerV7` of
//! <https://github.com/mistralai/mistral-common/blob/v1.8.0/src/mistral_common/tokens/tokenizers/instruct.py>. Texts that follow each
//! other in a message are joined by an empty line. Messages of one author that follow each other are refused, where the
//! original joins them.

/// Name of the file of such directories.
pub(super) const FILE: &str = "tekken.json";

/// The template.
pub(super) const TEMPLATE: &str = "<s>{% for message in messages %}\
    {% if not loop.first and loop.previtem.role == message.role %}\
    {{ raise_exception('messages of one role follow each other') }}{% endif %}\
    {% if message.role == 'system' %}{% if not loop.first %}\
    {{ raise_exception('a system message may only be the first') }}{% endif %}[SYSTEM_PROMPT]\
    {% elif message.role == 'user' %}[INST]{% endif %}\
    {% for part in message.content %}{% if part.type == 'text' %}\
    {% if not loop.first and loop.previtem.type == 'text' %}{{ '\n\n' }}{% endif %}{{ part.text }}\
    {% else %}[BEGIN_AUDIO][AUDIO]{% endif %}{% endfor %}\
    {% if message.role == 'system' %}[/SYSTEM_PROMPT]{% elif message.role == 'user' %}[/INST]\
    {% else %}</s>{% endif %}{% endfor %}";
