"""More towers at published widths (`wide.py`): images as tiles with rows at the ends of lines, an image with a text, and InternVL by
its authors' names, which have several tensors of transformers in one."""

import torch
from transformers import (
    BartConfig,
    Florence2Config,
    Florence2ForConditionalGeneration,
    InternVLConfig,
    InternVLForConditionalGeneration,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
)

import internvl_original
from internvl import Shape, tower
from internvl import published_name as internvl_name
from llava import published_name as llava_name
from names import LLAVA_CLIP, bart_line
from real_widths import SIGLIP, planes
from real_widths_more import Written, cross_attended
from wide import ITEM_TOKEN, TWO, VOCAB, Wide, decoder, features, ids, weight, with_items


def tiles(model):
    """An image of two tiles side by side, and the whole of it before them."""
    side = model.config.vision_config.image_size
    shape = (3, 3, side, side)
    inputs = {"pixel_values": features(shape)[None].to(model.dtype), "image_sizes": torch.tensor([[side, 2 * side]])}
    rows = model.model.get_image_features(**inputs).pooler_output[0]
    return with_items(model, rows, {"input": {"tiles": shape, "grid": [1, 2]}}, **inputs)


def captioned(model):
    """An image, and a text behind it."""
    shape, text, decoded = (1, 3, 768, 768), ids(11, 5), ids(12, 9)
    pixels = features(shape).to(model.dtype)
    n = model.model.get_image_features(pixels).pooler_output.shape[1]
    tokens = torch.cat([torch.full((1, n), ITEM_TOKEN), text], dim=1)
    seen = model(input_ids=tokens, pixel_values=pixels, decoder_input_ids=decoded)
    given = {"input": {"captioned": shape, "text": text[0].tolist()}, "prompt": decoded[0].tolist()}
    return cross_attended(seen.encoder_last_hidden_state[0], seen.logits[0], given)


def internvl2_5_2b():
    words = dict(model_type="llama", max_position_embeddings=32768, rms_norm_eps=1e-5, rope_parameters={
        "rope_type": "default", "rope_theta": 1e6}, **decoder(2048, 8192, 16, 8))
    shape = Shape("internvl2_5_2b", words, tower(1024, 16, 4096, 2, 448, 14), 12, False, torch.bfloat16, 0, True)
    keys = internvl_original.original_config(shape, {"text_config": words})
    keys["llm_config"] |= {"rms_norm_eps": 1e-5, "rope_theta": 1e6}
    del keys["llm_config"]["rope_parameters"]
    config = InternVLConfig(image_token_id=ITEM_TOKEN, tie_word_embeddings=False, text_config=words, vision_config=shape.vision)

    def fill(model):
        state = {internvl_name(name): value for name, value in model.state_dict().items()}
        n_grouped = words["num_key_value_heads"]
        shapes = internvl_original.original_shapes(state, n_grouped)
        for name, sources in internvl_original.sources_of(state, n_grouped).items():
            parts = internvl_original.parts_of(name, weight(name, shapes[name]), [state[source] for source in sources], n_grouped)
            for source, part in zip(sources, parts, strict=True):
                state[source].copy_(part)
        return shapes

    return Wide(shape.case, lambda _: InternVLForConditionalGeneration(config), Written(keys), planes, fill=fill)


def florence_2_base():
    text = BartConfig(**bart_line(768, (2, 2), 12, 3072, VOCAB), **TWO).to_dict()
    config = Florence2Config(image_token_id=ITEM_TOKEN, vision_config=dict(projection_dim=768, depths=[1, 1, 2, 1]), text_config=text)
    left_out = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")
    return Wide("florence_2_base", Florence2ForConditionalGeneration, config, captioned, by_file=True, left_out=left_out)


def cases():
    yield Wide("llava_1_6_mistral_7b", LlavaNextForConditionalGeneration, LlavaNextConfig(
        image_token_index=ITEM_TOKEN, tie_word_embeddings=False, vision_feature_layer=-2, text_config=dict(
            model_type="mistral", sliding_window=None, rms_norm_eps=1e-5, max_position_embeddings=32768, rope_parameters={
                "rope_type": "default", "rope_theta": 1e6}, **decoder(4096, 14336, 32, 8)),
        # The last layer is never run.
        vision_config={**LLAVA_CLIP, "num_hidden_layers": 3}), tiles, llava_name)
    yield Wide("llava_onevision_qwen2_0_5b", LlavaOnevisionForConditionalGeneration, LlavaOnevisionConfig(
        image_token_index=ITEM_TOKEN, video_token_index=2001, tie_word_embeddings=True, text_config=dict(
            model_type="qwen2", tie_word_embeddings=True, max_position_embeddings=32768, rope_parameters={
                "rope_type": "default", "rope_theta": 1e6}, **decoder(896, 4864, 14, 2)),
        vision_config=dict(image_size=384, **SIGLIP)), tiles, llava_name, ("lm_head.weight",))
    yield internvl2_5_2b()
    yield florence_2_base()
