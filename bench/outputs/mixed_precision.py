"""Measure what bfloat16 autocast costs FLUX and SANA: `python -m bench.outputs.mixed_precision`.

The tables are in docs/evidence/families.txt. Each network has its family's real heads, but fewer of them, fewer blocks,
and random weights, because no trained weights were available. "Error" is ‖x − x₃₂‖ / ‖x₃₂‖ against the same pass in
float32. x is the prediction, or the gradient of its mean square over all weights.

Two suspects are examined separately. FLUX takes t / 1000 and casts it to the type of its activations, so autocast
rounds a timestep to 8 significant bits. SANA's linear attention sums over all tokens; its reference code does so in
float32, and autocast does it in bfloat16.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from diffusers import FluxTransformer2DModel, SanaTransformer2DModel
from torch import Tensor, nn

from bench.kit.common import machine, table

CONFIGS = Path("configs")
TIMESTEPS = (47.0, 501.0, 981.0)
"""Divided by 1000, none of these is exact in bfloat16."""
CAPTION_TOKENS = 32
TOKENS_PER_SIDE = 16
"""A 512 px image of SANA, or a 256 px image of FLUX."""


def flux(blocks: int) -> tuple[nn.Module, Callable[[Tensor], dict[str, Any]]]:
    """Build FLUX with `blocks` blocks of both kinds, and a function that makes its arguments at given timesteps."""
    fields = json.loads((CONFIGS / "flux1/backbone.json").read_text())
    model = FluxTransformer2DModel.from_config(
        fields | {"num_layers": blocks, "num_single_layers": blocks, "num_attention_heads": 8}
    )
    side = TOKENS_PER_SIDE
    ids = torch.zeros(side, side, 3)
    ids[..., 1], ids[..., 2] = torch.arange(side)[:, None], torch.arange(side)[None]

    def arguments(timesteps: Tensor) -> dict[str, Any]:
        n = len(timesteps)
        return {
            "hidden_states": torch.randn(n, side * side, fields["in_channels"]),
            "encoder_hidden_states": torch.randn(n, CAPTION_TOKENS, fields["joint_attention_dim"]),
            "pooled_projections": torch.randn(n, fields["pooled_projection_dim"]),
            "img_ids": ids.view(-1, 3),
            "txt_ids": torch.zeros(CAPTION_TOKENS, 3),
            "guidance": torch.full((n,), 3.5),
            "timestep": timesteps / 1000,
        }

    return model, arguments


def sana(blocks: int) -> tuple[nn.Module, Callable[[Tensor], dict[str, Any]]]:
    """Build SANA with `blocks` blocks, and a function that makes its arguments at given timesteps."""
    fields = json.loads((CONFIGS / "sana/backbone.json").read_text())
    model = SanaTransformer2DModel.from_config(
        fields
        | {
            "num_layers": blocks,
            "num_attention_heads": 35,
            "num_cross_attention_heads": 10,
            "cross_attention_dim": 1120,
        }
    )
    side = TOKENS_PER_SIDE

    def arguments(timesteps: Tensor) -> dict[str, Any]:
        n = len(timesteps)
        return {
            "hidden_states": torch.randn(n, fields["in_channels"], side, side),
            "encoder_hidden_states": torch.randn(n, CAPTION_TOKENS, fields["caption_channels"]),
            "timestep": timesteps,
        }

    return model, arguments


@contextmanager
def exact_timestep(model: nn.Module, arguments: dict[str, Any]) -> Iterator[None]:
    """Pass the float32 timestep to FLUX's timestep embedding, instead of the one that autocast rounded."""
    exact = arguments["timestep"] * 1000
    embed: Any = model.time_text_embed
    handle = embed.register_forward_pre_hook(lambda _, inputs: (exact, *inputs[1:]))
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def float32_attention(model: nn.Module, arguments: dict[str, Any]) -> Iterator[None]:
    """Run SANA's linear attention without autocast."""
    attentions: list[Any] = [module for name, module in model.named_modules() if name.endswith("attn1")]

    def in_float32(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(hidden_states: Tensor, *rest: Any, **named: Any) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                return forward(hidden_states.float(), *rest, **named)

        return run

    for attention in attentions:
        attention.forward = in_float32(attention.forward)
    try:
        yield
    finally:
        for attention in attentions:
            del attention.forward


def run(model: nn.Module, arguments: dict[str, Any], autocast: bool) -> tuple[Tensor, Tensor]:
    """Return the prediction, and the gradient of its mean square over all weights, both flat and in float32."""
    model.zero_grad(set_to_none=True)
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        (prediction,) = model(**arguments, return_dict=False)
    prediction.float().pow(2).mean().backward()
    gradients = [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    return prediction.detach().float().flatten(), torch.cat(gradients)


def error(found: Tensor, expected: Tensor) -> float:
    """Compute ‖found − expected‖ / ‖expected‖."""
    return float((found - expected).norm() / expected.norm())


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=3, help="blocks of each kind")
    options = parser.parse_args()
    rows = []
    for name, build, repair, what in (
        ("FLUX", flux, exact_timestep, "bfloat16, exact timestep"),
        ("SANA", sana, float32_attention, "bfloat16, attention in float32"),
    ):
        torch.manual_seed(0)
        model, make_arguments = build(options.blocks)
        arguments = make_arguments(torch.tensor(TIMESTEPS))
        expected = run(model, arguments, autocast=False)
        cases: list[tuple[str, tuple[Tensor, Tensor]]] = [("bfloat16", run(model, arguments, autocast=True))]
        with repair(model, arguments):
            cases.append((what, run(model, arguments, autocast=True)))
        if name == "FLUX":
            rounded = arguments | {"timestep": arguments["timestep"].bfloat16().float()}
            cases.append(("float32, rounded timestep", run(model, rounded, autocast=False)))
        rows += [
            [name, case, *(f"{error(*pair):.2e}" for pair in zip(found, expected, strict=True))]
            for case, found in cases
        ]
    print(f"{machine()}\n{options.blocks} blocks of each kind\n")
    print(table(["network", "arithmetic", "error of the prediction", "error of the gradient"], rows))


if __name__ == "__main__":
    main()
