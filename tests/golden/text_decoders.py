"""Golden files of decoders of text alone: Llama, Mistral, Qwen2, Qwen3, Qwen3.5 and Gemma, with chat templates of their families' forms."""

import copy
import dataclasses
import math

import torch
from tokenizers import processors
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from common import (
    MIN_GAP,
    STEPS,
    byte_bpe,
    case_dir,
    experts_state,
    first_good_seed,
    plain_experts,
    randomise,
    round_weights,
    smallest_gap,
    write_compact,
    write_json,
    write_tensors,
)
from qwen import MIN_VARIED, TEXTS, set_delta_rule, stable_beams

N_MERGES = 60
VOCAB = 336
CLASSES = {
    "gemma2": (Gemma2Config, Gemma2ForCausalLM),
    "gemma3_text": (Gemma3TextConfig, Gemma3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_5_text": (Qwen3_5TextConfig, Qwen3_5ForCausalLM),
}

# A system part with a date, texts trimmed, the start token from the template.
LLAMA_TEMPLATE = (
    "{{- bos_token }}\n{%- if not date_string is defined %}{%- set date_string = '26 Jul 2024' %}{%- endif %}\n"
    "{%- if messages[0]['role'] == 'system' %}\n    {%- set told = messages[0]['content'] | trim %}\n"
    "    {%- set messages = messages[1:] %}\n{%- else %}\n    {%- set told = '' %}\n{%- endif %}\n"
    "{{- '<|start_header_id|>system<|end_header_id|>\n\nToday: ' + date_string + '\n\n' + told + '<|eot_id|>' }}\n"
    "{%- if tools is not none and tools %}{{- raise_exception('no tools here') }}{%- endif %}\n"
    "{%- for message in messages %}\n    {%- if message.content is not string %}{{- raise_exception('not a string') }}{%- endif %}\n"
    "    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}\n"
    "{%- endfor %}\n{%- if add_generation_prompt %}\n    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}\n{%- endif %}\n"
)
# The system text stands in the last user turn; roles must alternate.
MISTRAL_TEMPLATE = (
    "{%- if messages[0]['role'] == 'system' %}\n    {%- set told = messages[0]['content'] %}\n"
    "    {%- set turns = messages[1:] %}\n{%- else %}\n    {%- set turns = messages %}\n{%- endif %}\n"
    "{%- set asked = turns | selectattr('role', 'equalto', 'user') | list %}\n"
    "{%- set ns = namespace(idx=0) %}\n{%- for turn in turns %}\n"
    "    {%- if not (turn.tool_calls is defined and turn.tool_calls is not none) %}\n"
    "        {%- if (turn['role'] == 'user') != (ns.idx % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}\n"
    "        {%- set ns.idx = ns.idx + 1 %}\n    {%- endif %}\n{%- endfor %}\n{{- bos_token }}\n"
    "{%- for turn in turns %}\n    {%- if turn['role'] == 'user' %}\n"
    "        {%- if loop.last and told is defined %}\n            {{- '[INST] ' + told + '\n\n' + turn['content'] + '[/INST]' }}\n"
    "        {%- else %}\n            {{- '[INST] ' + turn['content'] + '[/INST]' }}\n        {%- endif %}\n"
    "    {%- elif turn['role'] == 'assistant' %}\n        {{- ' ' + turn['content'] | trim + eos_token }}\n    {%- endif %}\n{%- endfor %}\n"
)
# A system text of its own where a conversation has none.
QWEN2_TEMPLATE = (
    "{%- if messages[0]['role'] == 'system' %}\n    {{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}\n"
    "{%- else %}\n    {{- '<|im_start|>system\nHelp.<|im_end|>\n' }}\n{%- endif %}\n{%- for message in messages %}\n"
    "    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) or (message.role == 'assistant' and not message.tool_calls) %}\n"
    "        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}\n    {%- endif %}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\n' }}\n{%- endif %}\n"
)
# The last question is looked for from the end; earlier answers lose their thoughts.
QWEN3_TEMPLATE = (
    "{%- set ns = namespace(searching=true, last=messages|length - 1) %}\n{%- for message in messages[::-1] %}\n"
    "    {%- set index = (messages|length - 1) - loop.index0 %}\n"
    "    {%- if ns.searching and message.role == 'user' and message.content is string and not (message.content.startswith('<tool>') and message.content.endswith('</tool>')) %}\n"
    "        {%- set ns.searching = false %}\n        {%- set ns.last = index %}\n    {%- endif %}\n{%- endfor %}\n"
    "{%- for message in messages %}\n    {%- set content = message.content if message.content is string else '' %}\n"
    "    {%- if message.role == 'assistant' and loop.index0 < ns.last %}\n"
    "        {%- set content = content.split('==>')[-1].lstrip('\n') %}\n    {%- endif %}\n"
    "    {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\n' }}\n"
    "    {%- if enable_thinking is defined and enable_thinking is false %}\n        {{- '<think>\n\n</think>\n\n' }}\n    {%- endif %}\n{%- endif %}"
)

# No system texts; the assistant is `model`.
GEMMA2_TEMPLATE = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system texts') }}{% endif %}"
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% if message['role'] == 'assistant' %}{% set role = 'model' %}"
    "{% else %}{% set role = message['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
# The system text stands before that of the first turn.
GEMMA3_TEMPLATE = (
    "{{ bos_token }}\n{%- if messages[0]['role'] == 'system' -%}\n    {%- if messages[0]['content'] is string -%}\n"
    "        {%- set told = messages[0]['content'] + '\n\n' -%}\n    {%- else -%}\n"
    "        {%- set told = messages[0]['content'][0]['text'] + '\n\n' -%}\n    {%- endif -%}\n"
    "    {%- set turns = messages[1:] -%}\n{%- else -%}\n    {%- set told = '' -%}\n    {%- set turns = messages -%}\n{%- endif -%}\n"
    "{%- for message in turns -%}\n    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}\n"
    "        {{ raise_exception('roles must alternate') }}\n    {%- endif -%}\n"
    "    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}\n"
    "    {{ '<start_of_turn>' + role + '\n' + (told if loop.first else '') }}\n"
    "    {%- if message['content'] is string -%}\n        {{ message['content'] | trim }}\n"
    "    {%- else -%}\n        {{ raise_exception('not a string') }}\n    {%- endif -%}\n    {{ '<end_of_turn>\n' }}\n"
    "{%- endfor -%}\n{%- if add_generation_prompt -%}\n    {{ '<start_of_turn>model\n' }}\n{%- endif -%}\n"
)


@dataclasses.dataclass(frozen=True)
class Words:
    """Special tokens of a family, and its template."""

    specials: tuple
    start: str | None
    ends: tuple
    template: str
    qwen: bool
    system: bool = True
    """System texts are allowed."""


GEMMA_WORDS = ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>")
QWEN_WORDS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
WORDS = {
    "gemma2": Words(GEMMA_WORDS, "<bos>", ("<eos>", "<end_of_turn>"), GEMMA2_TEMPLATE, False, False),
    "gemma3_text": Words(GEMMA_WORDS, "<bos>", ("<eos>", "<end_of_turn>"), GEMMA3_TEMPLATE, False),
    "llama": Words(("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
                   "<|begin_of_text|>", ("<|end_of_text|>", "<|eot_id|>"), LLAMA_TEMPLATE, True),
    "mistral": Words(("<unk>", "<s>", "</s>", "[INST]", "[/INST]"), "<s>", ("</s>",), MISTRAL_TEMPLATE, False),
    "qwen2": Words(QWEN_WORDS, None, ("<|im_end|>", "<|endoftext|>"), QWEN2_TEMPLATE, True),
    "qwen3": Words(QWEN_WORDS + ("<think>", "</think>"), None, ("<|im_end|>", "<|endoftext|>"), QWEN3_TEMPLATE, True),
    "qwen3_5_text": Words(QWEN_WORDS + ("<think>", "</think>"), None, ("<|im_end|>", "<|endoftext|>"), QWEN3_TEMPLATE, True),
}


@dataclasses.dataclass(frozen=True)
class Shape:
    case: str
    kind: str
    config: dict
    disk: torch.dtype
    seed: int
    left_out: tuple = ()
    """Keys that the file leaves out, since they are the class's defaults."""
    gains: tuple = ()


def sizes(hidden, heads, kv_heads, layers, ffn, **more):
    return dict(hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=kv_heads, num_hidden_layers=layers,
                intermediate_size=ffn, vocab_size=VOCAB, max_position_embeddings=2048, hidden_act="silu", **more)


def gemma(hidden, heads, kv_heads, layers, ffn, head_dim, window, scalar, **more):
    return dict(hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=kv_heads, num_hidden_layers=layers,
                intermediate_size=ffn, head_dim=head_dim, sliding_window=window, query_pre_attn_scalar=scalar, vocab_size=VOCAB,
                max_position_embeddings=2048, hidden_activation="gelu_pytorch_tanh", **more)


def recurrent(key_heads, value_heads, key_dim, value_dim, taps, rotated, section, **more):
    """Keys of layers with a gated delta rule, and of a rotation of a part of each head. What a head gives is normalised, which
    makes much of little; the large epsilon keeps that within what narrow precisions can be held to."""
    return dict(linear_num_key_heads=key_heads, linear_num_value_heads=value_heads, linear_key_head_dim=key_dim,
                linear_value_head_dim=value_dim, linear_conv_kernel_dim=taps, rms_norm_eps=0.01, rope_parameters={
                    "mrope_interleaved": True, "mrope_section": section, "partial_rotary_factor": rotated,
                    "rope_theta": 1e7, "rope_type": "default"}, **more)


GEMMA3_ROPES = {"full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e4}}
SHAPES = [
    # As published: the older keys.
    Shape("gemma3_text_old_keys", "gemma3_text", gemma(48, 4, 2, 4, 72, 16, 20, 16, attn_logit_softcapping=None,
          final_logit_softcapping=None, sliding_window_pattern=2, rope_theta=1e6, rope_local_base_freq=1e4, rope_scaling=None,
          tie_word_embeddings=True), torch.float32, 5600, ("tie_word_embeddings",)),
    Shape("gemma3_text_two_ropes", "gemma3_text", gemma(60, 3, 1, 3, 88, 24, 12, 40, rope_parameters=GEMMA3_ROPES, layer_types=[
          "full_attention", "sliding_attention", "sliding_attention"], tie_word_embeddings=False), torch.bfloat16, 5700),
    Shape("gemma3_text_capped_logits", "gemma3_text", gemma(48, 2, 2, 2, 64, 20, 16, 20, attn_logit_softcapping=None, layer_types=[
          "sliding_attention", "full_attention"], final_logit_softcapping=20.0, tie_word_embeddings=False), torch.float16, 5800),
    # Both caps as the class has them.
    Shape("gemma2_class_caps", "gemma2", gemma(48, 4, 2, 4, 72, 16, 20, 16, attn_logit_softcapping=50.0,
          final_logit_softcapping=30.0, rope_theta=1e4, tie_word_embeddings=True), torch.float32, 5900,
          ("attn_logit_softcapping", "final_logit_softcapping", "tie_word_embeddings")),
    Shape("gemma2_low_caps", "gemma2", gemma(60, 3, 1, 3, 88, 24, 12, 40, attn_logit_softcapping=2.5,
          final_logit_softcapping=12.0, layer_types=["full_attention", "sliding_attention", "sliding_attention"],
          rope_theta=1e4, tie_word_embeddings=False), torch.bfloat16, 6000),
    Shape("gemma2_uncapped_scores", "gemma2", gemma(48, 2, 2, 2, 64, 20, 24, 20, attn_logit_softcapping=None,
          final_logit_softcapping=15.0, rope_theta=2e4, tie_word_embeddings=False), torch.float16, 6100),
    Shape("llama_tied", "llama", sizes(48, 4, 2, 2, 72, head_dim=16, rms_norm_eps=1e-5, rope_theta=5e5, tie_word_embeddings=True,
          attention_bias=False, mlp_bias=False, rope_scaling={
              "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 256,
              "rope_type": "llama3"}), torch.float32, 5000),
    Shape("llama_biased", "llama", sizes(60, 3, 3, 2, 88, attention_bias=True, tie_word_embeddings=False), torch.bfloat16,
          5100, ("num_key_value_heads", "max_position_embeddings")),
    Shape("mistral_windowed", "mistral", sizes(48, 2, 1, 3, 64, head_dim=16, sliding_window=24, rope_theta=1e4,
          rms_norm_eps=1e-5, tie_word_embeddings=False), torch.float16, 5200),
    Shape("mistral_unwindowed", "mistral", sizes(48, 4, 2, 2, 72, sliding_window=None, rope_theta=1e6, rms_norm_eps=1e-5,
          tie_word_embeddings=False), torch.bfloat16, 5300),
    Shape("qwen2_tied", "qwen2", sizes(60, 3, 1, 2, 88, rope_theta=1e6, rms_norm_eps=1e-6, tie_word_embeddings=True,
          use_sliding_window=False, sliding_window=32, max_window_layers=1), torch.bfloat16, 5400),
    Shape("qwen3_windowed_layers", "qwen3", sizes(60, 3, 1, 3, 80, head_dim=16, rope_theta=1e6, rms_norm_eps=1e-6,
          tie_word_embeddings=False, use_sliding_window=True, sliding_window=24, max_window_layers=1, attention_bias=False),
          torch.float32, 5500),
    # As published: every fourth layer attends to all tokens, which the file need not say.
    Shape("qwen3_5_text_tied", "qwen3_5_text", sizes(48, 4, 2, 4, 72, head_dim=24, **recurrent(2, 4, 8, 12, 4, 0.5, [2, 2, 2]),
          full_attention_interval=4, tie_word_embeddings=True, attention_bias=False), torch.float32, 6200,
          ("full_attention_interval",)),
    Shape("qwen3_5_text_listed_layers", "qwen3_5_text", sizes(60, 3, 1, 3, 88, head_dim=16, **recurrent(
          3, 3, 16, 16, 3, 0.25, [1, 1, 0]), layer_types=["linear_attention", "full_attention", "linear_attention"],
          tie_word_embeddings=False, attention_bias=False), torch.bfloat16, 6300),
    Shape("qwen3_5_text_biased", "qwen3_5_text", sizes(48, 2, 2, 4, 64, head_dim=20, **recurrent(2, 6, 12, 4, 5, 0.4, [2, 1, 1]),
          full_attention_interval=2, tie_word_embeddings=False, attention_bias=True), torch.float16, 6400),
]


def user(text):
    return {"role": "user", "content": text}


LONG = "The quick brown fox jumps over the lazy dog; the red one is sleeping near the wall. "
# A conversation or a plain prompt; `{}` is a text that may be another one.
PROMPTS = (
    [user("{}")],
    [{"role": "system", "content": " Say what is there. "}, user("{}")],
    [user("Hi there "), {"role": "assistant", "content": "well ==>\nGood day. "}, user("{}")],
    "{}",
    LONG + "{}",
    [user(LONG + LONG + "{}")],
)


def tokenizer(words):
    tok = byte_bpe(N_MERGES, [(t, not t.endswith("think>")) for t in words.specials], qwen=words.qwen)
    tok.post_processor = processors.ByteLevel(trim_offsets=False)
    if words.start:
        start = [(words.start, tok.token_to_id(words.start))]
        tok.post_processor = processors.Sequence([tok.post_processor, processors.TemplateProcessing(
            single=f"{words.start} $A", pair=f"{words.start} $A $B", special_tokens=start)])
    return tok


def is_gemma(shape):
    return shape.kind.startswith("gemma")


def is_recurrent(shape):
    return shape.kind == "qwen3_5_text"


def how(shape):
    """Attention that caps scores is written out."""
    return {"attn_implementation": "eager"} if is_gemma(shape) else {}


def lower_norms(model, more):
    """Gemma stores a norm's factors less 1."""
    for name, p in model.named_parameters():
        if "norm" in name:
            p.data -= 1
    model.model.norm.weight.data += more


@torch.no_grad()
def assert_caps_count(shape, model, run):
    """Without either cap there are other logits."""
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if shape.config.get(key) is None:
            continue
        other = copy.deepcopy(model)
        setattr(other.config, key, None)
        for layer in other.model.layers:
            layer.self_attn.attn_logit_softcapping = other.config.attn_logit_softcapping
        moved = (other(**run["inputs"]).logits[0] - run["logits"]).abs().max()
        assert moved > 0.02, f"{key}: {moved}"


@torch.no_grad()
def assert_states_count(shape, model, run):
    """Without what the recurrent layers keep of earlier tokens, or without the gates, there are other logits."""
    def moved(change):
        other = copy.deepcopy(model)
        for layer in other.model.layers:
            change(layer)
        return (other(**run["inputs"]).logits[0] - run["logits"])[-1].abs().max()

    def forget(layer):
        if hasattr(layer, "linear_attn"):
            layer.linear_attn.A_log.data += 20

    def last_tap(layer):
        if hasattr(layer, "linear_attn"):
            layer.linear_attn.conv1d.weight.data[:, :, :-1] = 0

    def open_gates(layer):
        if hasattr(layer, "self_attn"):
            heads = layer.self_attn.q_proj.weight.data.view(-1, 2, shape.config["head_dim"], shape.config["hidden_size"])
            heads[:, 1] = 0

    for change in (forget, last_tap, open_gates):
        assert moved(change) > 0.3, f"{change.__name__}: {moved(change)}"


def build(shape, seed, tok):
    words, i = WORDS[shape.kind], tok.token_to_id
    config = {
        "architectures": [CLASSES[shape.kind][1].__name__], "model_type": shape.kind,
        "bos_token_id": i(words.start or words.specials[0]), "eos_token_id": i(words.ends[0]), **shape.config,
        "torch_dtype": str(shape.disk).removeprefix("torch."), "transformers_version": "4.45.0",
    }
    read = copy.deepcopy(config)
    # The type of the file is not that of the run.
    del read["torch_dtype"]
    torch.manual_seed(seed)
    kinds = CLASSES[shape.kind]
    model = kinds[1](kinds[0](**read, **how(shape)))
    scaled = math.sqrt(shape.config["hidden_size"]) if is_gemma(shape) else 1
    # Nothing normalises queries and keys of Gemma 2, whose scores are far apart with less.
    sharp = 1.2 if shape.kind == "gemma2" else 1.8
    randomise(model, seed, gain=1.4, embed_std=0.6 / scaled, quiet_rows=range(256 + N_MERGES, VOCAB),
              gains=[("q_proj", sharp), ("k_proj", sharp), ("v_proj", 1.5), ("o_proj", 2.0), *shape.gains])
    if is_gemma(shape):
        lower_norms(model, 9 if shape.config["tie_word_embeddings"] else 2)
    elif is_recurrent(shape):
        set_delta_rule(model)
        model.model.norm.weight.data += 2
    else:
        model.model.norm.weight.data *= 3
    round_weights(model, shape.disk)
    if shape.gains:
        plain_experts(model)
    for key in shape.left_out:
        del config[key]
    return config, model


def lay_out(fast, form, words):
    """The messages or the text of a prompt, the text that its tokens are of, and these."""
    if isinstance(form, str):
        text = form.format(words)
        return {"prompt": text}, text, fast(text).input_ids
    messages = [{**m, "content": m["content"].format(words)} for m in form]
    rendered = fast.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = fast.apply_chat_template(messages, tokenize=True, return_dict=False, add_generation_prompt=True)
    return {"messages": messages}, rendered, ids


@torch.no_grad()
def run_prompt(model, fast, form, words):
    asked, rendered, ids = lay_out(fast, form, words)
    inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
    logits = model(**inputs).logits[0]
    made = model.generate(**inputs, do_sample=False, max_new_tokens=STEPS, output_logits=True, return_dict_in_generate=True)
    return dict(names=[], asked=asked, rendered=rendered, inputs=inputs, ids=torch.tensor(ids), logits=logits,
                tokens=made.sequences[0, len(ids):], gap=smallest_gap(torch.cat(made.logits)))


def attempt(shape, seed, tok, fast):
    config, model = build(shape, seed, tok)
    ends = [tok.token_to_id(t) for t in WORDS[shape.kind].ends]
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = ends, ends[0]
    runs, texts = [], list(TEXTS)
    for form in PROMPTS:
        if not WORDS[shape.kind].system and isinstance(form, list) and form[0]["role"] == "system":
            continue
        for words in list(texts):
            run = run_prompt(model, fast, form, words)
            varied = len(set(run["tokens"].tolist()))
            plain = int(run["tokens"].max()) < 256 + N_MERGES and len(run["tokens"]) == STEPS
            if run["gap"] >= 5 * MIN_GAP and varied >= MIN_VARIED and plain:
                runs.append(run)
                texts.remove(words)
                break
        else:
            return f"no text works for {form}"
    return seed, config, model, runs


def write_model(shape, tok, config, model, folder):
    words, i = WORDS[shape.kind], tok.token_to_id
    ends = [i(t) for t in words.ends]
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {
        "_from_model_config": True, "bos_token_id": config["bos_token_id"], "eos_token_id": ends if len(ends) > 1 else ends[0],
        "transformers_version": "4.45.0"})
    tok.save(str(folder / "tokenizer.json"), pretty=False)
    named = {"bos_token": words.start, "eos_token": words.ends[0]}
    write_json(folder / "tokenizer_config.json", {
        **named, "chat_template": words.template, "model_max_length": 2048, "tokenizer_class": "PreTrainedTokenizerFast",
    })
    state = {k: v.to(shape.disk) for k, v in (experts_state(model) if shape.gains else model.state_dict()).items()}
    if shape.config["tie_word_embeddings"] and "lm_head.weight" in state:
        del state["lm_head.weight"]
    write_tensors(folder / "model.safetensors", state)


@torch.no_grad()
def write_matrix(folder, tok, model, runs, ends):
    exact = copy.deepcopy(model).double()
    requests = [{
        "rows": None, "prompt": r["ids"].tolist(), "end_tokens": ends, "max_new_tokens": 32,
        "greedy": r["tokens"][:32].tolist(), "beam4": stable_beams(model, exact, r, ends),
        "next_logits": f"prompt.{k}.logits_last",
    } for k, r in enumerate(runs)]
    write_compact(folder / "matrix.json", {"rows": [], "requests": requests})


@torch.no_grad()
def make_case(shape):
    print(shape.case, flush=True)
    words = WORDS[shape.kind]
    tok = tokenizer(words)
    fast = PreTrainedTokenizerFast(tokenizer_object=tok, bos_token=words.start, eos_token=words.ends[0])
    fast.chat_template = words.template
    seed, config, model, runs = first_good_seed(
        lambda s: attempt(shape, s, tok, fast), range(shape.seed, shape.seed + 60))
    out = case_dir(shape.case)
    write_model(shape, tok, config, model, out / "model")
    longest = max(range(len(runs)), key=lambda k: len(runs[k]["ids"]))
    narrow = copy.deepcopy(model).to(torch.bfloat16)
    tensors, prompts = {}, []
    for k, r in enumerate(runs):
        tensors[f"prompt.{k}.logits_last"] = r["logits"][-1]
        prompts.append({
            **r["asked"], "rendered": r["rendered"], "smallest_top2_gap": r["gap"], "input_ids": r["ids"].tolist(),
            "greedy_tokens": r["tokens"].tolist(),
            "greedy_text": tok.decode(r["tokens"].tolist(), skip_special_tokens=True),
        })
    n = len(runs[longest]["ids"])
    rows = torch.tensor(sorted({*range(0, n, 6), n - 1}))
    tensors[f"prompt.{longest}.logit_rows"] = rows
    tensors[f"prompt.{longest}.logits"] = runs[longest]["logits"][rows]
    tensors[f"prompt.{longest}.logits_bf16"] = narrow(**runs[longest]["inputs"]).logits[0].float()[rows]
    tensors["greedy_tokens"] = torch.stack([r["tokens"] for r in runs])
    write_matrix(out, tok, model, runs, [tok.token_to_id(t) for t in words.ends])
    write_tensors(out / "expected.safetensors", tensors)
    write_compact(out / "expected.json", {"seed": seed, "longest_prompt": longest, "prompts": prompts})
    if is_gemma(shape):
        assert_caps_count(shape, model, runs[longest])
    if is_recurrent(shape):
        assert_states_count(shape, model, runs[longest])
    again = type(model).from_pretrained(out / "model", dtype=torch.float32, **how(shape))
    assert (again(**runs[longest]["inputs"]).logits[0] - runs[longest]["logits"]).abs().max() < 1e-5


def make(kinds=tuple(CLASSES)):
    for shape in SHAPES:
        if shape.kind in kinds:
            make_case(shape)
