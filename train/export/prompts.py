"""Checks that a pipeline encodes prompts as stage 1 encoded captions, and the call arguments that this requires."""

import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from shards.base.errors import RequestError
from shards.format.towers import TextTower
from train.export.components import LENGTH, OWN_PIPELINE, call_parameters, is_clip, pipeline_class
from train.model.backbone import BackboneConfig, PipelineConfig

CLIP_LAYERS = {"StableDiffusionXLPipeline": -2, "StableDiffusion3Pipeline": -2}
"""Layer of CLIP's hidden states that a pipeline uses, for pipelines that do not use the last."""
INSTRUCTION = "complex_human_instruction"
"""Argument of a pipeline's call with lines that it puts before the prompt, but not before the negative prompt."""


def prompt_arguments(pipeline: PipelineConfig, texts: Iterable[TextTower]) -> dict[str, Any]:
    """Return the arguments of the pipeline's call that encode prompts like captions, where its defaults do not.

    Args:
        texts: the pipeline's text towers.
    """
    accepted = call_parameters(pipeline)
    found: dict[str, Any] = {}
    for text in texts:
        if is_clip(text):
            continue  # its tokenizer determines the length, see `tokenizer_lengths`
        if LENGTH in accepted and text.length != accepted[LENGTH].default:
            found[LENGTH] = text.length
        instruction = text.template.removesuffix("{}")
        if INSTRUCTION in accepted and instruction != "\n".join(accepted[INSTRUCTION].default or []):
            found[INSTRUCTION] = [instruction] if instruction else []
    return found


def check_prompts(backbone: BackboneConfig, texts: Mapping[str, TextTower], caption_dropout: float) -> None:
    """Check that the pipeline encodes prompts, and the empty negative prompt, as stage 1 encoded captions.

    Args:
        backbone: config with its text towers named.

    Raises:
        RequestError: they differ in the text, the tokens or the layer.
    """
    pipeline = backbone.pipeline
    for name in backbone.text_towers:
        differences = list(_text_differences(pipeline, texts[name]))
        if name in backbone.states.names:
            differences += _state_differences(pipeline, texts[name])
        if differences:
            does, was_encoded, field, value = differences[0]
            raise RequestError(
                f"{pipeline.class_name} {does}, but captions for {name} were encoded {was_encoded}, so the pipeline's "
                f"inputs would differ from those in training. Set {field} of texts.{name} to {value}, and encode the "
                f"captions again. If the network is trained: {OWN_PIPELINE}"
            )
        empty = texts[name].prompt("")
        if caption_dropout > 0 and backbone.dropped == "empty" and empty:
            raise RequestError(
                f"{pipeline.class_name} uses the empty prompt as its unconditional input, but dropped captions for "
                f"{name} were encoded as {_shortened(empty)}, so guidance would rely on an input that the network has "
                f'never seen. Set `empty` of texts.{name} to "", and encode the captions again. If the network is '
                f"trained: {OWN_PIPELINE}"
            )


def _text_differences(pipeline: PipelineConfig, tower: TextTower) -> Iterator[tuple[str, str, str, str]]:
    """Yield the differences in the text: (what the pipeline does, how captions were encoded, stage-1 field, value)."""
    takes_instruction = INSTRUCTION in call_parameters(pipeline)
    if tower.template != "{}" and not (takes_instruction and tower.template.endswith("{}")):
        does = "adds text only before the prompt" if takes_instruction else "adds no text to the prompt"
        yield does, f"with the template {_shortened(tower.template)}", "`template`", '"{}"'
    lowers = ".lower()" in _module_source(pipeline)
    if tower.lower != lowers and not is_clip(tower):  # CLIP's tokenizer ignores case
        does = f"{'converts' if lowers else 'does not convert'} prompts to lower case"
        yield does, f"{'without' if lowers else 'with'} `lower`", "`lower`", str(lowers).lower()


def _state_differences(pipeline: PipelineConfig, tower: TextTower) -> Iterator[tuple[str, str, str, str]]:
    """Yield the differences in the hidden states, like `_text_differences`."""
    accepted = call_parameters(pipeline)
    masks = "prompt_attention_mask" in accepted
    if tower.hides_padding != masks:
        does = f"{'hides padding from' if masks else 'shows padding to'} the network"
        field, value = ("`masked`", "true") if masks else ("`masked` and `trim`", "false")
        yield does, f"{'without' if masks else 'with'} `masked` or `trim`", field, value
    layer = CLIP_LAYERS.get(pipeline.class_name, "last") if is_clip(tower) else "last"
    if tower.layer != layer:
        yield f"uses layer {layer}", f"with layer {tower.layer}", "`layer`", str(layer)
    limit = re.search(rf"{LENGTH} > (\d+)", _module_source(pipeline))
    if limit and not is_clip(tower) and tower.length > int(limit[1]):
        yield f"accepts at most {limit[1]} tokens", f"with {tower.length} tokens", "`max_tokens`", limit[1]
    # after an instruction, pipelines use the first token and the last ones
    ends = [0, *range(tower.max_tokens - tower.length + 1, tower.max_tokens)]
    if tower.kept != ends or (INSTRUCTION not in accepted and tower.length != tower.max_tokens):
        does, value = "uses all tokens", "[[null, null]]"
        if INSTRUCTION in accepted:
            does, value = "uses the first token and the last ones", "[[0, 1], [-N, null]]"
        yield does, f"with keep {[list(bounds) for bounds in tower.keep]}", "`keep`", value


def _module_source(pipeline: PipelineConfig) -> str:
    """Return the source code of the pipeline's module."""
    return inspect.getsource(sys.modules[pipeline_class(pipeline).__module__])


def _shortened(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:60]}…")
