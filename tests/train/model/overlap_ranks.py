"""One rank of data-parallel training that records the order in which gradients become ready and are all-reduced."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.runs import UNET
from train.model.network import build_network

BUCKET_MB = 0.05


def record(arguments: list[str]) -> None:
    """Run two steps of two microbatches each, and print the events of the second step as JSON."""
    dist.init_process_group("gloo")
    unet, events = build_network(UNET, 0), list[tuple[str, float]]()
    for parameter in unet.parameters():
        size = parameter.numel() * parameter.element_size()
        parameter.register_post_accumulate_grad_hook(lambda _, size=size: events.append(("ready", size)))

    def travel(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer().div_(dist.get_world_size())
        events.append(("sent", buffer.numel() * buffer.element_size()))
        work: Any = dist.all_reduce(buffer, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    model = DistributedDataParallel(unet, bucket_cap_mb=BUCKET_MB)
    model.register_comm_hook(None, travel)
    inputs = torch.randn(2, 4, 16, 16), torch.zeros(2), torch.randn(2, 8, unet.config.cross_attention_dim)
    for _ in range(2):  # DDP rebuilds its buckets in the first step, in the order of the gradients
        events.clear()
        with model.no_sync():
            model(*inputs).sample.square().mean().backward()
        events.append(("last microbatch", 0))
        model(*inputs).sample.square().mean().backward()
    Path(arguments[0], f"{dist.get_rank()}.json").write_text(json.dumps(events))
    dist.destroy_process_group()
