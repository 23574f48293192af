"""Global batches, assembled from the loaders of all ranks of simulated machines."""

from train.data.draws import global_slots
from train.data.loader import Loader
from train.data.spec import DataConfig, DataSpec


def keys_per_step(
    config: DataConfig, spec: DataSpec, first: int, steps: int, world: int = 1, ranks_per_node: int | None = None
) -> list[list[str]]:
    """Return the keys of global batches of 8, assembled from what every rank's own loader yields."""
    whole = [[""] * 8 for _ in range(steps)]
    for rank in range(world):
        slots = global_slots(8 // world, rank, world, ranks_per_node or world)
        batches = iter(Loader(config, spec, 8, 3, first, slots))
        for step in range(steps):
            batch = next(batches)
            for slot, key in zip(batch.slots.tolist(), batch.keys, strict=True):
                whole[step][slot] = f"{key} {tuple(batch.columns['image_latents'].shape[2:])}"
        batches.close()
    return whole
