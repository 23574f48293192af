"""The demo's VAE: a standard `AutoencoderKL` with 8x downsampling and 4 latent channels, small enough to commit."""

import numpy as np
import torch
from diffusers import AutoencoderKL
from diffusers.models.resnet import ResnetBlock2D
from torch import nn
from torch.nn import functional as F

from examples.shapes.scenes import draw_scene, sample_scene

# standard deviation of unscaled latents: far from 1, as in Stable Diffusion's VAE, so that a forgotten scaling_factor
# is noticed
RAW_STD = 5.0
KL_WEIGHT = 3e-4
CONFIG = {
    "in_channels": 3,
    "out_channels": 3,
    "latent_channels": 4,
    "block_out_channels": (8, 16, 32, 64),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 1,
    "norm_num_groups": 1,
    # with attention over all positions, the VAE would work only at the image sizes it was trained on
    "mid_block_add_attention": False,
    "sample_size": 64,
}


def draw_pictures(num_pictures: int, side: int, seed: int) -> torch.Tensor:
    """Draw square training images: (num_pictures, 3, side, side) in [-1, 1]."""
    rng = np.random.default_rng([seed, side])
    pictures = np.stack([np.asarray(draw_scene(sample_scene(rng), side, side, rng)) for _ in range(num_pictures)])
    return torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 127.5 - 1


def train_vae(seed: int, num_steps: int, peak_lr: float = 1.2e-3) -> AutoencoderKL:
    """Train a VAE on images of 64 and 128 px, centre its latents and set its scaling_factor."""
    torch.manual_seed(seed)
    pictures = {64: draw_pictures(6000, 64, seed), 128: draw_pictures(1500, 128, seed)}
    vae = AutoencoderKL(**CONFIG)
    _initialise(vae)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=peak_lr, betas=(0.9, 0.95), weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, peak_lr, total_steps=num_steps, pct_start=0.05)
    for step in range(num_steps):
        loss = _loss(vae, _draw_batch(pictures, whole=step > 0.8 * num_steps))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"vae step {step}: loss {loss.item():.4f}", flush=True)
    vae.eval()
    _standardise(vae, list(pictures.values()))
    return vae


def _initialise(vae: AutoencoderKL) -> None:
    """Initialise `vae` as variance-preserving convolutions, with zero residual branches and narrow posteriors.

    With the default initialisation, a VAE this small and deep would need many times as many training steps.
    """
    for module in vae.modules():
        if isinstance(module, nn.Conv2d) and module.bias is not None:
            nn.init.kaiming_normal_(module.weight, nonlinearity="linear")
            nn.init.zeros_(module.bias)
    for module in vae.modules():
        if isinstance(module, ResnetBlock2D):
            nn.init.zeros_(module.conv2.weight)
    num_channels = vae.config.latent_channels
    with torch.no_grad():
        vae.quant_conv.weight[num_channels:] *= 0.1  # log-variances
        vae.quant_conv.bias[num_channels:] = -5.0


def _draw_batch(pictures: dict[int, torch.Tensor], whole: bool) -> torch.Tensor:
    """Draw whole images, or 24 patches of 32 px, which train the VAE almost as well at a fraction of the cost."""
    side = 64 if torch.rand(()) < 0.8 else 128
    num_pictures = (16 if side == 64 else 4) if whole else 24
    batch = pictures[side][torch.randint(len(pictures[side]), (num_pictures,))]
    if whole:
        return batch
    top, left = torch.randint(side - 32 + 1, (2,)).tolist()
    return batch[:, :, top : top + 32, left : left + 32]


def _loss(vae: AutoencoderKL, pictures: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        posterior = vae.encode(pictures).latent_dist
        reconstruction = vae.decode(posterior.sample()).sample.float()
    kl = 0.5 * (posterior.mean**2 + posterior.var - 1 - posterior.logvar).mean()
    return F.l1_loss(reconstruction, pictures) + F.mse_loss(reconstruction, pictures) + KL_WEIGHT * kl


@torch.no_grad()
def _standardise(vae: AutoencoderKL, picture_sets: list[torch.Tensor]) -> None:
    """Give all latent channels mean 0 and the same standard deviation, and set scaling_factor to 1 / that deviation.

    The change is folded into the 1x1 convolutions on both sides of the latents, so reconstructions stay the same.
    """
    mean, std = _channel_statistics(vae, picture_sets)
    scale = RAW_STD / std
    num_channels = len(mean)
    vae.quant_conv.weight[:num_channels] *= scale[:, None, None, None]
    vae.quant_conv.bias[:num_channels] = (vae.quant_conv.bias[:num_channels] - mean) * scale
    vae.quant_conv.bias[num_channels:] += 2 * scale.log()  # log-variances
    vae.post_quant_conv.bias += vae.post_quant_conv.weight[:, :, 0, 0] @ mean
    vae.post_quant_conv.weight /= scale[None, :, None, None]
    _, std = _channel_statistics(vae, picture_sets)
    vae.register_to_config(scaling_factor=round(float(1 / std.square().mean().sqrt()), 5))


def _channel_statistics(vae: AutoencoderKL, picture_sets: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean and standard deviation, each (channels,), of latents sampled for up to 512 images per set."""
    posteriors = [vae.encode(batch).latent_dist for pictures in picture_sets for batch in pictures[:512].split(64)]
    latents = torch.cat([posterior.sample().movedim(1, -1).flatten(0, -2) for posterior in posteriors])
    return latents.mean(0), latents.std(0)
