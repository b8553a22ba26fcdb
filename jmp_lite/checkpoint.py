"""Checkpoints: resume bitwise, restore across dtypes, convert from jmp and flax."""

from jmp_lite._src import extras as _extras

with _extras.needed("checkpoint"):
    from jmp_lite._src.checkpoint.leaves import Cast, Casts
    from jmp_lite._src.checkpoint.loss_scales import convert_loss_scale
    from jmp_lite._src.checkpoint.save_restore import (
        Restored,
        latest_step,
        restore,
        save,
    )

__all__ = [
    "Cast",
    "Casts",
    "Restored",
    "convert_loss_scale",
    "latest_step",
    "restore",
    "save",
]
