"""The trainer's predictions equal those of a pipeline outside the eight families."""

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, Lumina2Pipeline, Lumina2Transformer2DModel

from tests.families.small import stir
from tests.families.steps import STEPS, Scheduled
from tests.tiny import kl
from train.model.backbone import BackboneConfig
from train.model.inputs import Conditioning, States, TextConditioning


def test_time_reversed_and_the_output_negated_are_lumina_2s_pipeline() -> None:
    """No shipped family uses these options. Lumina 2's scheduler receives the trainer's prediction."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "num_kv_heads": 1, "axes_dim_rope": (4, 4, 4), "axes_lens": (32, 16, 16)}
    sizes = {"in_channels": 4, "hidden_size": 24, "num_layers": 1, "num_refiner_layers": 1, "cap_feat_dim": 12}
    network = Lumina2Transformer2DModel(**sizes, **heads, multiple_of=8).eval()
    stir(network)
    scheduler, taken = FlowMatchEulerDiscreteScheduler(), Scheduled()
    taken.attach(scheduler)
    pipeline = Lumina2Pipeline(network, scheduler, kl(), text_encoder=None, tokenizer=None)
    states, mask = torch.randn(2, 6, 12), torch.tensor([[1] * 6, [1] * 3 + [0] * 3])
    given = {"prompt_embeds": states, "prompt_attention_mask": mask, "guidance_scale": 1.0}
    pipeline(**given, height=64, width=64, num_inference_steps=STEPS, output_type="latent")
    inputs = {"encoder_hidden_states": States(towers=[["gemma"]], mask="encoder_attention_mask")}
    backbone = BackboneConfig(inputs=inputs, time_divisor=1000, time_reversed=True, output_negated=True)
    told = Conditioning({"gemma": TextConditioning(states, mask, None)}, torch.zeros(2, 4), (64, 64))
    assert len(taken.calls) == STEPS
    for output, time, sample in taken.calls:
        with torch.no_grad():
            found = backbone.predict(network, sample, torch.full((2,), time), told)
        torch.testing.assert_close(found, output, rtol=1e-5, atol=1e-6)
