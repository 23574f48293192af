"""StableDiffusionPipeline that masks padding tokens, for a U-Net that was trained on captions without padding.

DiffusionPipeline.from_pretrained(FOLDER, trust_remote_code=True)
"""

from typing import Any

import torch
from diffusers import StableDiffusionPipeline


class TrimmedStableDiffusionPipeline(StableDiffusionPipeline):
    """The stock pipeline, extended to pass a cross-attention mask to the U-Net."""

    def encode_prompt(self, prompt: Any, device: Any, num_images_per_prompt: int, *args: Any, **kwargs: Any) -> Any:
        """Encode prompts like the stock pipeline, and remember which tokens are not padding."""
        if prompt is None:
            raise ValueError(
                "This pipeline needs the prompt as text, because embeddings do not show which tokens are padding."
            )
        negative = args[1] if len(args) > 1 else kwargs.get("negative_prompt")
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        negatives = [negative or ""] * len(prompts) if not isinstance(negative, list) else negative
        self._mask = self._real_tokens(prompts, device).repeat_interleave(num_images_per_prompt, dim=0)
        self._negative_mask = self._real_tokens(negatives, device).repeat_interleave(num_images_per_prompt, dim=0)
        return super().encode_prompt(prompt, device, num_images_per_prompt, *args, **kwargs)

    def _real_tokens(self, prompts: list[str], device: Any) -> torch.Tensor:
        """Return a mask (prompts, tokens), 1 for tokens and 0 for padding."""
        length = self.tokenizer.model_max_length
        counts = torch.tensor([min(len(ids), length) for ids in self.tokenizer(prompts).input_ids], device=device)
        return (torch.arange(length, device=device) < counts[:, None]).float()

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Sample like the stock pipeline, passing `encoder_attention_mask` to the U-Net at each step."""

        def add_mask(module: Any, inputs: Any, keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            guided = len(inputs[0]) == 2 * len(self._mask)
            mask = torch.cat([self._negative_mask, self._mask]) if guided else self._mask
            return inputs, keywords | {"encoder_attention_mask": mask}

        handle = self.unet.register_forward_pre_hook(add_mask, with_kwargs=True)
        try:
            return super().__call__(*args, **kwargs)
        finally:
            handle.remove()
