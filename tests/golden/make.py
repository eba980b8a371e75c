"""Makes the golden files of this folder: small random models and the reference's outputs.

Run `python make.py` for everything, or `python make.py whisper qwen2_vl` for some groups. The
output is a function of this folder's code and the versions in requirements.txt; nothing is
downloaded. README.md says what each file holds.
"""

import os
import sys

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", TOKENIZERS_PARALLELISM="false")

import torch

sys.dont_write_bytecode = True


def make_voxtral():
    # Needs mistral-common, which no other group does.
    import voxtral

    voxtral.make()


def main(groups):
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    import audio_chat
    import bert
    import chat_tools
    import cogagent
    import deepseek_ocr
    import experts
    import generation
    import gemma
    import glm
    import idefics
    import internvl
    import internvl_original
    import llava
    import lora
    import lora_encoders
    import logits
    import mllama
    import moonshine
    import names
    import names_vision
    import pickled
    import pixtral
    import preprocess
    import quantized
    import qwen
    import qwen3_asr
    import real_widths
    import rotary
    import saved
    import step3
    import text
    import text_decoders
    import tokenizers_golden
    import video
    import vision
    import vision_more
    import whisper
    import whisper_long

    makers = {
        "whisper": lambda: (whisper.make(), whisper_long.make()),
        "whisper_long": whisper_long.make,
        "mllama": mllama.make,
        "cogagent": cogagent.make,
        "moonshine": moonshine.make,
        "qwen2_vl": qwen.make_qwen2_vl,
        "qwen2_5_vl": qwen.make_qwen2_5_vl,
        "qwen3_vl": qwen.make_qwen3_vl,
        "qwen3_5": qwen.make_qwen3_5,
        "qwen3_5_moe": qwen.make_qwen3_5_moe,
        "qwen3_vl_moe": qwen.make_qwen3_vl_moe,
        "qwen2_audio": audio_chat.make_qwen2_audio,
        "qwen3_asr": qwen3_asr.make,
        "voxtral": make_voxtral,
        "llava": llava.make,
        "lora": lora.make,
        "lora_encoders": lora_encoders.make,
        "gemma": gemma.make,
        "idefics": idefics.make,
        "internvl": lambda: (internvl.make(), internvl_original.make()),
        "internvl_chat": internvl_original.make,
        "text_decoders": text_decoders.make,
        "experts": experts.make,
        "chat_tools": chat_tools.make,
        "qwen3_5_text": lambda: text_decoders.make(("qwen3_5_text",)),
        "gemma_text": lambda: text_decoders.make(("gemma2", "gemma3_text")),
        "pixtral": pixtral.make,
        "deepseek_ocr2": deepseek_ocr.make,
        "glm_ocr": glm.make,
        "step3": step3.make,
        "bart": text.make_bart,
        "m2m_100": text.make_m2m_100,
        "t5": text.make_t5,
        "trocr": vision.make_trocr,
        "vit_gpt2": vision_more.make_gpt2,
        "nougat": vision_more.make_nougat,
        "swinv2": vision_more.make_swinv2,
        "vision_towers": vision_more.make_towers,
        "vision_resized": vision_more.make_resized,
        "vision_bert": vision_more.make_bert,
        "bert2bert": bert.make,
        "donut": vision.make_donut,
        "florence2": vision.make_florence,
        "florence2_original": vision_more.make_florence_original,
        "video": video.make,
        "real_widths": real_widths.make,
        "rotary": rotary.make,
        "preprocess": preprocess.make,
        "generation": generation.make,
        "logits": logits.make,
        "names": names.make,
        "names_experts": experts.make_names,
        "names_deepseek_ocr2": deepseek_ocr.make_names,
        "names_qwen3_asr": qwen3_asr.make_names,
        "names_vision": names_vision.make,
        "tokenizers": tokenizers_golden.make,
        "saved": saved.make,
        "pickled": pickled.make,
        "quantized": quantized.make,
    }
    for group in groups or [g for g in makers if g not in ("whisper_long", "m2m_100", "gemma_text", "internvl_chat")]:
        makers[group]()


if __name__ == "__main__":
    main(sys.argv[1:])
