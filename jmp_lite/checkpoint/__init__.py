"""Checkpoints: resume bit for bit, restore across dtypes, come from jmp and flax."""

from jmp_lite import extras

with extras.needed("checkpoint"):
    from jmp_lite.checkpoint.leaves import Cast, Casts
    from jmp_lite.checkpoint.loss_scales import convert_loss_scale
    from jmp_lite.checkpoint.save_restore import Restored, latest_step, restore, save

__all__ = [
    "Cast",
    "Casts",
    "Restored",
    "convert_loss_scale",
    "latest_step",
    "restore",
    "save",
]
