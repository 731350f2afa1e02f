"""Loss scaling that all ranks agree on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ringcomm.data_parallel.model.sharded_model import ShardedModel
from ringcomm.data_parallel.optim.optimizer import sharded_optimizer_of
from ringcomm.errors import InvalidArgumentError, UnsupportedError
from ringcomm.modules.shard_spec import refuse_parts
from ringcomm.validation import expects, that


class GradScaler(torch.amp.GradScaler):
    """torch's loss scaler with agreement between ranks: if a gradient overflows on one rank, every rank skips the step.

    torch's own scaler checks only this rank's gradients, which are a shard from stage 1 on; an optimizer of
    `ringcomm.shard` refuses it there.

    If only a pipeline's last stage calls `scale`, in its loss, the ranks of the other stages start with the same
    initial scale.
    """

    _guessed = False  # whether this rank, without a call of scale(), has assumed the initial scale
    _agreed = False  # whether it is known that a rank of the pipeline has called scale()

    @expects("GradScaler", device=that("a kind of device, such as 'cpu'", lambda kind: torch.device(kind).type == kind))
    def __init__(self, device: str = "cpu", *args: Any, **kwargs: Any) -> None:
        super().__init__(device, *args, **kwargs)

    def scale(self, outputs: Any) -> Any:
        """Same as torch's."""
        self._guessed = False
        return super().scale(outputs)

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[torch.Tensor, torch.Tensor]:
        if self._scale is None:
            self._guessed = True
            self._lazy_init_scale_growth_tracker(torch.device(self._device))
        found: tuple[torch.Tensor, torch.Tensor] = super()._check_scale_growth_tracker(funcname)
        return found

    def _refuse_unscaled(self, flats: Sequence[ShardedModel]) -> None:
        """Raises if scale() was called neither on this rank nor, in a pipeline, on any other rank."""
        pipelined = next((flat for flat in flats if _has_stages(flat)), None)
        scaled = not self._guessed
        if pipelined is not None and not self._agreed:
            flag = torch.tensor([float(scaled)], device=pipelined.device)
            pipelined.ranks.reduce_over_all(flag, "max", everywhere=True)
            scaled = self._agreed = bool(flag)
        if not scaled and not self._agreed:
            raise InvalidArgumentError(
                "GradScaler: got gradients to unscale before any call of scale(), expected one; call "
                "scaler.scale(loss).backward(), or pass scaler= to a pipeline's step()"
            )

    def _unscale_grads_(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> dict[Any, torch.Tensor]:
        sharded = sharded_optimizer_of(optimizer, "GradScaler")
        self._refuse_unscaled([] if sharded is None else sharded.flats)
        if sharded is None:
            refuse_parts((p for group in optimizer.param_groups for p in group["params"]), "GradScaler", "an overflow")
            return super()._unscale_grads_(optimizer, *args, **kwargs)
        for flat in sharded.flats:
            if flat.ranks.mesh is None:
                refuse_parts(flat.module.parameters(), "GradScaler", "an overflow")
            if flat.ranks.joining is not None:
                raise UnsupportedError(
                    f"GradScaler: rank {flat.ranks.rank} is inside join, where ranks that have joined do not know the "
                    "loss scale, expected no GradScaler; train in bfloat16 there"
                )
        with sharded.in_step():
            found = super()._unscale_grads_(optimizer, *args, **kwargs)
            sharded.host.copy_back()
        if not found:
            found[sharded.flat.device] = torch.zeros((), dtype=torch.float32, device=sharded.flat.device)
        for flag in found.values():
            for flat in sharded.flats:
                flat.ranks.reduce_over_all(flag.view(1), "max", everywhere=True)
        return found


def _has_stages(flat: ShardedModel) -> bool:
    """Whether the ranks run stages of a pipeline."""
    mesh = flat.ranks.mesh
    return mesh is not None and any(n > 1 for name, n in zip(mesh.names, mesh.shape, strict=True) if name == "pp")
